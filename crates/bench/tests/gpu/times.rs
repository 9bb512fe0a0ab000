//! Rows with times in every mode and every place of the rings.

use std::time::Duration;

use onehop_bench::{Controller, GpuBench, QueueMode, QueueRun, RingsAt};

use super::{Rig, number};

/// One launch of every kernel, and of those that take the times, beside the null controller, also under compute-sanitizer,
/// which needs a controller that soon ends by itself: `ONEHOP_GPU_SECONDS=5`.
#[test]
fn every_kernel_once() {
    let Some(rig) = Rig::open("every_kernel_once") else { return };
    let limit = Duration::from_secs(number("ONEHOP_GPU_SECONDS", 60));
    let bench = GpuBench::new(rig.gpu.clone()).unwrap().within(limit);
    // A controller reads rings in host memory by a kernel of its own.
    let plans = [
        (QueueMode::Owner, 1, RingsAt::Vram),
        (QueueMode::Owner, 32, RingsAt::Vram),
        (QueueMode::Shared(64), 63, RingsAt::Vram),
        (QueueMode::Owner, 32, RingsAt::Host),
    ];
    for (mode, depth, rings) in plans {
        let plan = QueueRun {
            mode,
            queues: 1,
            depth,
            commands: 1000,
            rings,
            reverse: false,
            controller: Controller::Gpu,
        };
        // The measured run is checked: every entry, every outcome.
        bench.rates(&plan, 0).unwrap();
        bench.times_once(&plan).unwrap();
    }
}

#[test]
fn times_make_sense_in_every_mode_and_place() {
    let Some(rig) = Rig::open("times_make_sense_in_every_mode_and_place") else { return };
    let bench = GpuBench::new(rig.gpu.clone()).unwrap();
    for (mode, depth) in [(QueueMode::Owner, 1), (QueueMode::Owner, 64), (QueueMode::Shared(64), 64)] {
        for rings in [RingsAt::Vram, RingsAt::Host, RingsAt::Posted] {
            let plan = QueueRun {
                mode,
                queues: 1,
                depth,
                commands: 20_000,
                rings,
                reverse: false,
                controller: Controller::Gpu,
            };
            let row = bench.row(&plan).unwrap();
            let text = format!("{mode:?} {depth} {rings:?}: {row:?}");
            println!("{text}");
            let (p50, p99) = (row.p50_ns.unwrap(), row.p99_ns.unwrap());
            assert_eq!((row.latency_samples, row.latency_of), (20_000, "command"), "{text}");
            // A round trip through memory at least. A command stays no longer than those before it in the queue take.
            assert!(p50 > 300.0 && p50 <= p99, "{text}");
            let by_the_rate = 1e9 / row.timed_iops.unwrap() * f64::from(depth);
            assert!(p50 < by_the_rate * 4.0, "{text}: {by_the_rate} ns by the rate");
            assert!(row.cycles_submit.unwrap() > 1.0 && row.cycles_complete.unwrap() > 1.0, "{text}");
        }
    }
}
