//! Blocks of a simulated drive by every route, and the progress that a caller gets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use onehop_drive::{Drive, GpuJob, Op};
use onehop_gpu::Emulated;
use onehop_os::{HostMem, StopSignal};
use onehop_transfer::{
    Chosen, Engine, Error, ErrorKind, Progress, RouteOptions, TransferSetup, bytes_of, controllers, copy,
    read_blocks, verify_blocks,
};

const ROUTES: [&str; 6] = ["gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1", "cpu/direct", "cpu/pinned"];
const BLOCKS: u64 = 20_000;

#[derive(Default)]
struct Watch {
    moved: AtomicU64,
    stop: AtomicBool,
}

impl Progress for Watch {
    fn moved(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

fn open(spec: &str) -> Drive {
    let found = controllers::find(spec, &StopSignal::default()).unwrap();
    assert!(found.warnings.is_empty() && found.files.is_empty());
    Drive::open(found.backend, RouteOptions::default().drive_options(true)).unwrap()
}

fn emulated() -> Chosen {
    Chosen { gpu: Arc::new(Emulated::new()), why: "a test".into() }
}

fn only(route: &str) -> RouteOptions {
    RouteOptions { route: route.parse().unwrap(), ..RouteOptions::default() }
}

#[test]
fn what_one_route_writes_every_route_reads() {
    let (drive, gpu) = (open("sim:mem:16M"), emulated());
    let ns = drive.namespace(1).unwrap();
    let data: Vec<u8> =
        (0..BLOCKS * 512).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 29) as u8).collect();
    for (i, writer) in ROUTES.iter().enumerate() {
        let options = only(writer);
        let setup = TransferSetup { drive: &drive, ns, gpu: &gpu, options: &options };
        let job = GpuJob { lba: 3 + i as u64, blocks: BLOCKS, offset: 0 };
        let bytes = bytes_of(ns, job.lba, BLOCKS).unwrap();
        let (engine, memory) = Engine::open(&setup, bytes).unwrap();
        memory.region.write(0, &data).unwrap();
        let watch = Watch::default();
        let moved = engine.transfer(Op::Write, ns, &[job], &memory, &watch).unwrap();
        assert_eq!((moved.bytes, watch.moved.into_inner()), (bytes, bytes), "{writer}");
        let mut outcome = onehop_transfer::TransferOutcome::new(&drive, &gpu, &engine, &moved, None);
        let wrong = verify_blocks(Op::Write, (&drive, ns), &job, &memory.region, &mut outcome, &()).unwrap();
        assert!(wrong.is_none() && outcome.verified == Some(true), "{writer}: {wrong:?}");
        drop(engine);

        let options = only(ROUTES[(i + 3) % ROUTES.len()]);
        let setup = TransferSetup { options: &options, ..setup };
        let mut read = read_blocks(&setup, job.lba, BLOCKS, &()).unwrap();
        let mut got = vec![0; data.len()];
        read.data.read(0, &mut got).unwrap();
        assert!(got == data, "{writer}, {}", read.outcome.route);
        assert_eq!(copy::crc32c(&read.data, 0, got.len()).unwrap(), crc32c::crc32c(&data));
        assert_eq!(read.outcome.simulated, ["drive", "gpu"]);
        // A byte changed in GPU memory is found and reported.
        read.data.write(70_000, &[!got[70_000]]).unwrap();
        let wrong = read.verify(&drive, ns, &()).unwrap().unwrap();
        assert!(wrong.to_string().contains("byte 70000"), "{wrong}");
        assert_eq!((wrong.kind(), read.outcome.verified), (ErrorKind::Mismatch, Some(false)));
    }
}

#[test]
fn a_caller_cancels_on_every_route() {
    let (drive, gpu) = (open("sim:mem:16M"), emulated());
    let ns = drive.namespace(1).unwrap();
    for route in ROUTES {
        let options = only(route);
        let setup = TransferSetup { drive: &drive, ns, gpu: &gpu, options: &options };
        let watch = Watch { stop: AtomicBool::new(true), ..Watch::default() };
        let refused = read_blocks(&setup, 0, BLOCKS, &watch).err().unwrap();
        assert!(matches!(refused, Error::Cancelled), "{route}: {refused}");
        assert_eq!((refused.kind(), watch.moved.into_inner()), (ErrorKind::Cancelled, 0), "{route}");
    }
}

/// Ranges of many lengths, in another order on the drive than in memory.
fn scattered() -> Vec<GpuJob> {
    let (mut jobs, mut offset, mut lba) = (Vec::new(), 0, 30_000);
    for i in 0..300u64 {
        let blocks = [1, 9, 64, 1, 300, 7][i as usize % 6];
        lba -= blocks;
        jobs.push(GpuJob { lba, blocks, offset });
        offset += blocks * 512;
    }
    jobs.push(GpuJob { lba: 0, blocks: 5000, offset });
    jobs
}

#[test]
fn lanes_put_every_range_where_it_belongs() {
    let drive = open("sim:mem:16M");
    let ns = drive.namespace(1).unwrap();
    let vram = HostMem::anonymous(32 << 20).unwrap();
    let own = Chosen { gpu: Arc::new(Emulated::with_vram(vram)), why: "a test".into() };
    let jobs = scattered();
    let bytes = jobs.iter().map(|job| job.blocks).sum::<u64>() * 512;
    let data: Vec<u8> = (0..bytes).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 31) as u8).collect();
    let options = only("cpu/pinned");
    for gpu in [&own, &emulated()] {
        let setup = TransferSetup { drive: &drive, ns, gpu, options: &options };
        let (engine, memory) = Engine::open(&setup, bytes).unwrap();
        assert_eq!(engine.count, 2);
        memory.region.write(0, &data).unwrap();
        let watch = Watch::default();
        let moved = engine.transfer(Op::Write, ns, &jobs, &memory, &watch).unwrap();
        assert_eq!((moved.bytes, watch.moved.into_inner()), (bytes, bytes));
        memory.region.write(0, &vec![0; bytes as usize]).unwrap();
        engine.transfer(Op::Read, ns, &jobs, &memory, &()).unwrap();
        let mut seen = vec![0; bytes as usize];
        memory.region.read(0, &mut seen).unwrap();
        assert!(seen == data);
        // The drive has each range at its own place.
        let mut block = vec![0; 512];
        for job in &jobs {
            read_blocks(&setup, job.lba, 1, &()).unwrap().data.read(0, &mut block).unwrap();
            assert!(block == data[job.offset as usize..][..512], "{job:?}");
        }
    }
}

#[test]
fn lanes_end_together() {
    let gpu = emulated();
    let options = only("cpu/pinned");
    // One lane fails: its error is what the caller gets, and the others do not go on for long.
    let drive = open("sim:mem:64M?fault=media@lba=40000");
    let ns = drive.namespace(1).unwrap();
    let setup = TransferSetup { drive: &drive, ns, gpu: &gpu, options: &options };
    let watch = Watch::default();
    let failed = read_blocks(&setup, 0, 131_072, &watch).err().unwrap();
    assert!(matches!(failed, Error::Drive(_)), "{failed}");
    assert!(watch.moved.into_inner() < 64 << 20);
    // The caller cancels in the middle.
    struct After(AtomicU64);
    impl Progress for After {
        fn moved(&self, bytes: u64) {
            self.0.fetch_add(bytes, Ordering::Relaxed);
        }

        fn is_cancelled(&self) -> bool {
            self.0.load(Ordering::Relaxed) > 4 << 20
        }
    }
    let drive = open("sim:mem:64M?latency=1ms");
    let ns = drive.namespace(1).unwrap();
    let setup = TransferSetup { drive: &drive, ns, ..setup };
    let after = After(AtomicU64::new(0));
    let cancelled = read_blocks(&setup, 0, 131_072, &after).err().unwrap();
    assert!(matches!(cancelled, Error::Cancelled), "{cancelled}");
    assert!(after.0.into_inner() < 32 << 20);
    // The drive is well.
    read_blocks(&setup, 0, 4096, &()).unwrap();
}

#[test]
fn routes_that_fail_are_reported_with_reasons() {
    let (drive, gpu) = (open("sim:mem:16M?queues=1"), emulated());
    let ns = drive.namespace(1).unwrap();
    let _all = drive.queue().unwrap();
    let options = RouteOptions::default();
    let setup = TransferSetup { drive: &drive, ns, gpu: &gpu, options: &options };
    let Err(Error::NoRoute(tried)) = read_blocks(&setup, 0, 1, &()) else { panic!("there was a queue left") };
    assert_eq!(tried.last().unwrap().route, "cpu/pinned");
    assert!(tried.iter().all(|no| no.reason.contains("queue") && !no.fix.is_empty()), "{tried:?}");
    let one = only("cpu/direct");
    let refused = read_blocks(&TransferSetup { options: &one, ..setup }, 0, 1, &()).err().unwrap();
    assert!(matches!(&refused, Error::NotPossible { what, .. } if what == "route cpu/direct"), "{refused}");
    assert_eq!(refused.kind(), ErrorKind::NotPossible);
    let beyond = read_blocks(&setup, ns.blocks, 1, &()).err().unwrap();
    assert_eq!(beyond.kind(), ErrorKind::Request, "{beyond}");
}

#[test]
fn data_for_a_gpu_with_memory_of_its_own_does_not_end_in_the_host_s() {
    let drive = open("sim:mem:16M");
    let ns = drive.namespace(1).unwrap();
    let wanted = RouteOptions { in_gpu_memory: true, ..only("gpu/tier1") };
    let vram = HostMem::anonymous(1 << 20).unwrap();
    let own = Chosen { gpu: Arc::new(Emulated::with_vram(vram)), why: "a test".into() };
    let setup = TransferSetup { drive: &drive, ns, gpu: &own, options: &wanted };
    let refused = read_blocks(&setup, 0, 8, &()).err().unwrap();
    assert!(refused.to_string().contains("host memory"), "{refused}");
    // An emulated GPU without memory of its own uses host memory.
    let read = read_blocks(&TransferSetup { gpu: &emulated(), ..setup }, 0, 8, &()).unwrap();
    assert_eq!(read.outcome.route, "gpu/tier1");
}
