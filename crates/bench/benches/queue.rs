//! Submit and complete on one core, against the null controller: the figure that the driver is held to.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::VecDeque;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use onehop_bench::{CpuQueue, NULL_DRIVE};

fn submit_and_complete(c: &mut Criterion) {
    let mut group = c.benchmark_group("submit and complete");
    for depth in [1, 8, 64, 256] {
        let sim = onehop_sim::open(NULL_DRIVE).unwrap();
        let queue = CpuQueue::open(sim.port(), depth, 4096).unwrap();
        let mut tokens = VecDeque::new();
        group.throughput(Throughput::Elements(depth.into()));
        group.bench_function(BenchmarkId::new("depth", depth), |b| {
            b.iter(|| queue.batch(&mut tokens).unwrap())
        });
    }
    group.finish();
}

criterion_group!(benches, submit_and_complete);
criterion_main!(benches);
