//! Delays that a controller asks for before a retry.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_drive::{Error, GpuJob, GpuMode, GpuSetup, Placement};
use onehop_gpu::{Emulated, Gpu, Place};

use super::{inject, open};

/// A kernel waits to retry a write when another command stalls its launch. The simulator reports a retry that comes too soon.
#[test]
fn a_write_keeps_its_delay_when_its_launch_is_given_up() {
    for mode in [GpuMode::Owner, GpuMode::Shared { threads: 64 }] {
        let (sim, drive) = open("mem:1M?mdts=1&to=1&crdt=15");
        let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
        let (region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 64 << 10).unwrap();
        let data: Vec<u8> = (0..64u32 << 10).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        region.write(0, &data).unwrap();
        let stall = Duration::from_millis(300);
        let setup = GpuSetup { mode, queues: 1, stall, ..GpuSetup::new(Placement::TIER1) };
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        inject(&sim, "fail-once@op=write,n=2,crd=1");
        inject(&sim, "lost@op=write,n=3");
        let job = GpuJob { lba: 0, blocks: 128, offset: 0 };
        let moved = queues.write(drive.namespace(1).unwrap(), &[job], &buffer).unwrap();
        assert!(moved.retries >= 2 && moved.launches >= 2, "{mode:?}: {moved:?}");
        let mut got = vec![0; data.len()];
        sim.read_media(1, 0, &mut got).unwrap();
        assert!(got == data, "{mode:?}");
        assert_eq!(sim.violations(), [], "{mode:?}");
    }
}

/// The delay could have been ten seconds: the kernel's knowledge of it is lost with its launch.
#[test]
fn a_delay_ends_with_the_limit_of_its_job() {
    let (sim, drive) = open("mem:1M?mdts=1&to=1&crdt=100");
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 64 << 10).unwrap();
    let (stall, limit) = (Duration::from_millis(300), Duration::from_secs(2));
    let setup = GpuSetup { queues: 1, stall, limit, ..GpuSetup::new(Placement::TIER1) };
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    inject(&sim, "fail-once@op=write,n=2,crd=1");
    inject(&sim, "lost@op=write,n=3");
    let start = Instant::now();
    let job = GpuJob { lba: 0, blocks: 128, offset: 0 };
    let ended = queues.write(drive.namespace(1).unwrap(), &[job], &buffer);
    assert!(matches!(&ended, Err(Error::Launch { why, .. }) if why.contains("were over")), "{ended:?}");
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
}
