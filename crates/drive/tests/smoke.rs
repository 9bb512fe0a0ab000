//! The shortest way through the whole driver.
#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Arc;

use onehop_drive::{Drive, GpuJob, GpuMode, GpuSetup, Options, Placement};
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
