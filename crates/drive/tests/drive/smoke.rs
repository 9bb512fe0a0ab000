//! A smoke test of the whole driver.

use std::sync::Arc;
use std::time::Duration;

use onehop_drive::{Drive, GpuJob, GpuMode, GpuSetup, Op, Options, Placement};
use onehop_gpu::{Emulated, Gpu, Place};

fn open(spec: &str) -> (onehop_sim::Sim, Drive) {
    let sim = onehop_sim::open(spec).unwrap();
    let options = Options { writable: true, ..Options::default() };
    let drive = Drive::open(sim.port(), options).unwrap();
    (sim, drive)
}

#[test]
fn cpu_writes_and_reads_back() {
    for spec in ["mem:16M?workers=0", "mem:16M?lba=4096", "mem:16M?scatter=1&mdts=3&workers=0"] {
        let (sim, drive) = open(spec);
        let ns = drive.namespace(1).unwrap();
        let queue = drive.queue().unwrap();
        let bytes = 1 << 20;
        let data: Vec<u8> = (0..bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let from = drive.buffer(bytes).unwrap();
        from.host().unwrap().write(0, &data).unwrap();
        let blocks = bytes as u64 / ns.format.lba_bytes();
        let moved = queue.write(ns, 8, blocks, &from, 0).unwrap();
        assert_eq!(moved.bytes, bytes as u64);
        queue.flush(ns).unwrap();
        let to = drive.buffer(bytes).unwrap();
        queue.read(ns, 8, blocks, &to, 0).unwrap();
        assert!(to.host().unwrap().to_vec(0, bytes).unwrap() == data, "{spec}");
        drop(queue);
        drop(drive);
        assert!(sim.violations().is_empty(), "{spec}: {:?}", sim.violations());
    }
}

/// Jobs of one command and of many, on queues of one command and of more: each has a time, which includes the drive's
/// own.
#[test]
fn jobs_of_a_gpu_have_their_times() {
    let latency = Duration::from_micros(300);
    let (sim, drive) = open("mem:16M?mdts=3&latency=300us");
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let metered = gpu.instruments().unwrap().metered().unwrap();
    let ns = drive.namespace(1).unwrap();
    for (depth, blocks) in [(1, 8), (8, 8), (8, 256)] {
        let setup = GpuSetup { depth, queues: 2, ..GpuSetup::new(Placement::TIER3) };
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        let bytes = blocks * ns.format.lba_bytes();
        let (_, buffer) = drive.gpu_buffer(&*gpu, Place::Vram, 20 * bytes as usize).unwrap();
        let jobs: Vec<_> = (0..20).map(|i| GpuJob { lba: i * blocks, blocks, offset: i * bytes }).collect();
        for op in [Op::Read, Op::Write] {
            let (report, times) = queues.timed(&*metered, op, ns, &jobs, &buffer).unwrap();
            assert_eq!((report.bytes, times.len()), (20 * bytes, 20));
            assert!(
                times.iter().all(|time| *time >= latency && *time <= report.took),
                "{times:?} {report:?}"
            );
        }
    }
    let setup = GpuSetup { mode: GpuMode::Shared { threads: 32 }, ..GpuSetup::new(Placement::TIER3) };
    let shared = drive.gpu_queues(gpu.clone(), setup).unwrap();
    let (_, buffer) = drive.gpu_buffer(&*gpu, Place::Vram, 4096).unwrap();
    assert!(shared.timed(&*metered, Op::Read, ns, &[], &buffer).is_err());
    drop((shared, drive));
    assert!(sim.violations().is_empty(), "{:?}", sim.violations());
}

#[test]
fn gpu_reads_in_every_placement_and_mode() {
    let (sim, drive) = open("mem:16M?cmb=1M");
    let data: Vec<u8> = (0..4u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    sim.write_media(1, 0, &data).unwrap();
    let ns = drive.namespace(1).unwrap();
    let blocks = data.len() as u64 / ns.format.lba_bytes();
    for mode in [GpuMode::Owner, GpuMode::Shared { threads: 16 }] {
        for placement in
            [Placement::TIER1, Placement::TIER2, Placement::TIER3, Placement::POSTED, Placement::POSTED_CMB]
        {
            let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
            let setup = GpuSetup { mode, ..GpuSetup::new(placement) };
            let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
            let (region, buffer) = drive.gpu_buffer(&*gpu, Place::Vram, data.len()).unwrap();
            for _ in 0..2 {
                let report = queues.read(ns, &[GpuJob { lba: 0, blocks, offset: 0 }], &buffer).unwrap();
                assert_eq!(report.bytes, data.len() as u64);
            }
            let mut got = vec![0; data.len()];
            region.read(0, &mut got).unwrap();
            assert!(got == data, "{mode:?} {placement:?}");
        }
    }
    drop(drive);
    assert!(sim.violations().is_empty(), "{:?}", sim.violations());
}
