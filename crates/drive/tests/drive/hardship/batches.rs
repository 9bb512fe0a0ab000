//! GPU-driven jobs that take several launches.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_drive::{Buffer, Drive, Error, GpuJob, GpuQueues, GpuSetup, Op, Options, Placement};
use onehop_gpu::{Emulated, Gpu, Place, Region};
use onehop_sim::Sim;

use super::options;

/// Two batches: the first has 256 commands.
const BYTES: usize = 40 << 20;
const JOB: [GpuJob; 1] = [GpuJob { lba: 0, blocks: BYTES as u64 / 512, offset: 0 }];

struct Bench {
    sim: Sim,
    drive: Drive,
    queues: GpuQueues,
    region: Region,
    buffer: Buffer,
    data: Vec<u8>,
}

impl Bench {
    fn new(spec: &str, stall: Duration) -> Self {
        let sim = onehop_sim::open(&format!("mem:48M?{spec}")).unwrap();
        let data: Vec<u8> =
            (0..BYTES as u32 / 4).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        sim.write_media(1, 0, &data).unwrap();
        let options = Options { max_transfer: 65536, ..options() };
        let drive = Drive::open(sim.port(), options).unwrap();
        let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
        let setup = GpuSetup { stall, ..GpuSetup::new(Placement::TIER1) };
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        let (region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, BYTES).unwrap();
        Self { sim, drive, queues, region, buffer, data }
    }

    fn read(&self, progress: &mut dyn FnMut(u64) -> bool) -> Result<onehop_drive::Moved, Error> {
        let ns = self.drive.namespace(1).unwrap();
        self.queues.transfer(Op::Read, ns, &JOB, &self.buffer, progress)
    }

    fn is_right(&self) -> bool {
        let mut got = vec![0; BYTES];
        self.region.read(0, &mut got).unwrap();
        got == self.data
    }
}

#[test]
fn two_batches_of_memory_serve_any_number() {
    let bench = Bench::new("", Duration::from_secs(5));
    let mut moved = 0;
    let report = bench.read(&mut |bytes| {
        moved += bytes;
        true
    });
    let report = report.unwrap();
    assert!(report.launches > 1 && moved == BYTES as u64, "{report:?}, {moved}");
    assert_eq!((report.bytes, report.commands, report.retries), (moved, moved >> 16, 0));
    assert_eq!(report.allocations, 4, "lists and a launch for each of two");
    assert!(bench.is_right());
    assert_eq!(bench.read(&mut |_| true).unwrap().allocations, 0);
    assert_eq!(bench.sim.violations(), []);
}

#[test]
fn a_job_is_cancelled_within_a_launch() {
    // The first launch alone would take two seconds.
    let bench = Bench::new("bandwidth=8M", Duration::from_secs(5));
    let start = Instant::now();
    let Err(Error::Cancelled { done, count }) = bench.read(&mut |_| false) else { panic!("not cancelled") };
    assert!(done < 256 && count == BYTES as u64 >> 16, "{done} of {count}");
    assert!(start.elapsed() < Duration::from_millis(1500), "{:?}", start.elapsed());
    // The controller no longer uses the memory.
    bench.region.fill(0, BYTES, 0xa5).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let mut got = vec![0; BYTES];
    bench.region.read(0, &mut got).unwrap();
    assert!(got.iter().all(|byte| *byte == 0xa5));
    let (ns, few) = (bench.drive.namespace(1).unwrap(), [GpuJob { lba: 0, blocks: 64, offset: 0 }]);
    bench.queues.read(ns, &few, &bench.buffer).unwrap();
    assert_eq!(bench.sim.violations(), []);
}

#[test]
fn progress_is_reported_within_a_launch() {
    let bench = Bench::new("bandwidth=64M", Duration::from_secs(5));
    let (mut reports, mut moved) = (0, 0);
    let report = bench.read(&mut |bytes| {
        reports += u64::from(bytes > 0);
        moved += bytes;
        true
    });
    let report = report.unwrap();
    assert!(report.launches == 2 && reports >= 6, "{report:?}, {reports} reports");
    assert_eq!(moved, BYTES as u64);
    assert!(bench.is_right());
}

/// The data of a command of the first batch, of a later one and of the last is late, a little or for as long as the drive
/// is not reset.
#[test]
fn late_data_of_one_batch_is_waited_for_while_the_next_runs() {
    for n in [9, 300, 640] {
        let bench =
            Bench::new(&format!("fault=torn@n={n},delay=150ms,order=last-first"), Duration::from_secs(5));
        let report = bench.read(&mut |_| true).unwrap();
        assert!(bench.is_right(), "{n}");
        assert_eq!(report.retries, 0, "{n}");
        assert!(bench.drive.incidents().is_empty(), "{n}");
    }
    for n in [9, 300, 640] {
        let bench = Bench::new(&format!("fault=torn@n={n},delay=20s"), Duration::from_millis(400));
        let report = bench.read(&mut |_| true).unwrap();
        assert!(bench.is_right(), "{n}");
        assert!(report.retries >= 1 && report.late_data >= 1, "{n}: {report:?}");
        assert_eq!(bench.drive.incidents().len(), 1, "{n}");
        // Repeated commands are not counted twice.
        assert_eq!(report.commands, BYTES as u64 >> 16, "{n}");
    }
}

/// A command of any batch fails for good, is lost, or ends with the controller.
#[test]
fn a_fault_in_any_batch_ends_as_in_one() {
    for n in [9, 300, 640] {
        let bench = Bench::new(&format!("fault=fail@n={n}"), Duration::from_secs(5));
        assert!(matches!(bench.read(&mut |_| true), Err(Error::Command { .. })), "{n}");
        bench.read(&mut |_| true).unwrap();
        assert!(bench.is_right(), "{n}");
        for fault in ["lost", "cfs", "wrong-cid"] {
            let bench = Bench::new(&format!("fault={fault}@n={n},count=1"), Duration::from_millis(300));
            bench.read(&mut |_| true).unwrap();
            assert!(bench.is_right(), "{fault} at {n}");
            assert_eq!(bench.sim.violations(), [], "{fault} at {n}");
        }
    }
}
