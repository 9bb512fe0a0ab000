//! Queues that are created again after a reset, by a controller that loses admin commands.

use std::sync::Arc;

use onehop_drive::{Error, GpuJob, GpuSetup, Placement};
use onehop_gpu::{Emulated, Gpu, Place};

use crate::{inject, open};

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
