//! Queues that are created again after a reset, by a controller that loses admin commands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use onehop_drive::{Drive, Error, GpuJob, GpuSetup, Io, Op, Options, Placement, Recovery};
use onehop_gpu::{Emulated, Gpu, Place};

use crate::{inject, open, options};

const JOB: [GpuJob; 1] = [GpuJob { lba: 0, blocks: 8, offset: 0 }];

#[test]
fn one_lost_creation_does_not_end_a_gpu_job() {
    for lost in ["lost@op=create-cq,n=2", "lost@op=create-sq,n=1"] {
        let (sim, drive) = open("mem:1M?to=1");
        let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
        let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
        let queues = drive.gpu_queues(gpu.clone(), GpuSetup::new(Placement::TIER1)).unwrap();
        // The first creation, then the one that follows the reset of a failed controller.
        for failure in ["", "cfs@op=read,n=1"] {
            inject(&sim, lost);
            if !failure.is_empty() {
                inject(&sim, failure);
            }
            let end = queues.read(drive.namespace(1).unwrap(), &JOB, &buffer);
            assert!(end.is_ok(), "{lost} {failure}: {end:?}");
        }
        assert!(drive.incidents().len() >= 3, "{lost}: {:?}", drive.incidents());
        assert_eq!(sim.violations(), [], "{lost}");
    }
}

#[test]
fn queues_created_in_part_four_times_are_taken_back() {
    let (sim, drive) = open("mem:1M?to=1");
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
    // The second queue of each try.
    inject(&sim, "lost@op=create-cq,every=2,count=4");
    {
        let queues = drive.gpu_queues(gpu.clone(), GpuSetup::new(Placement::TIER1)).unwrap();
        let ns = drive.namespace(1).unwrap();
        let end = queues.read(ns, &JOB, &buffer);
        assert!(matches!(end, Err(Error::NoAnswer { .. })), "{end:?}");
        assert!(drive.incidents().len() >= 4, "{:?}", drive.incidents());
        // The drive lives, and has none of them.
        queues.read(ns, &JOB, &buffer).unwrap();
    }
    drive.queue().unwrap();
    assert_eq!(sim.violations(), []);
}

/// The second of two queues is not created at first. Threads that use the first one meanwhile would ring it while the next
/// try resets the function.
#[test]
fn no_queue_is_open_between_two_tries_of_a_reset() {
    // Some commands are in flight when the reset begins: their threads do not wait for its end.
    let sim = onehop_sim::open("mem:1M?to=1&latency=100us").unwrap();
    let patient = Options { timeout: Duration::from_secs(60), ..options() };
    let drive = Drive::open(sim.port(), patient).unwrap();
    let (ns, first, _second) = (drive.namespace(1).unwrap(), drive.queue().unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(4096).unwrap();
    let (begun, over) = (AtomicU32::new(0), AtomicBool::new(false));
    inject(&sim, "lost@op=create-cq,n=2");
    let reads = || {
        let mut retries = 0;
        while !over.load(Ordering::Relaxed) {
            let token = first.submit(ns, &Io::new(Op::Read, 0, 1, &buffer, 0)).unwrap();
            begun.fetch_add(1, Ordering::Relaxed);
            retries += loop {
                if let Some(end) = first.test(token) {
                    break end.unwrap().retries;
                }
            };
        }
        retries
    };
    let retries: Vec<u32> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(reads)).collect();
        while begun.load(Ordering::Relaxed) < 100 {
            std::thread::yield_now();
        }
        drive.reset().unwrap();
        over.store(true, Ordering::Relaxed);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(drive.incidents().last().unwrap().recovery, Recovery::FunctionReset);
    assert_eq!(sim.violations(), []);
    // A command that was in flight when the reset began is tried again, once, and no other.
    assert!(retries.iter().all(|retries| *retries <= 1), "{retries:?}");
}
