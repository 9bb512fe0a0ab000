//! Submit and complete on one core, against the null controller: the number that the driver must keep.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::VecDeque;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use onehop_bench::{CpuQueue, NULL_DRIVE};
use onehop_os::{DmaMemory, HostMem, Marks, StopSignal};

fn submit_and_complete(c: &mut Criterion) {
    let mut group = c.benchmark_group("submit and complete");
    for depth in [1, 8, 64, 256] {
        let sim = onehop_sim::open(NULL_DRIVE).unwrap();
        let queue = CpuQueue::open(sim.port(), depth, 4096, StopSignal::default()).unwrap();
        let mut tokens = VecDeque::new();
        group.throughput(Throughput::Elements(depth.into()));
        group.bench_function(BenchmarkId::new("depth", depth), |b| {
            b.iter(|| queue.batch(&mut tokens).unwrap())
        });
    }
    group.finish();
}

/// What guarding a read by marks costs on top: they are placed before and checked for after.
fn guard(c: &mut Criterion) {
    let mut group = c.benchmark_group("guard a read");
    for bytes in [512_u64, 4096, 131_072] {
        // As many reads as a queue holds: their memory is not all in the first cache.
        let reads = (8 << 20) / bytes.max(131_072 / 2);
        let mem = HostMem::touched((reads * bytes) as usize).unwrap();
        let mut at = 0;
        group.bench_function(BenchmarkId::new("bytes", bytes), |b| {
            b.iter(|| {
                let marks = Marks { first: at * bytes, count: bytes / Marks::BYTES, word: at + 1 };
                at = (at + 1) % reads;
                mem.mark(&marks, Duration::ZERO).unwrap();
                mem.marks_left(&marks, Duration::ZERO).unwrap()
            })
        });
    }
    group.finish();
}

criterion_group!(benches, submit_and_complete, guard);
criterion_main!(benches);
