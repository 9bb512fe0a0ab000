//! Reads that are completed before their data arrives, and memory that cannot be checked for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, GpuJob, GpuMode, GpuSetup, Options, Placement, Recovery};
use onehop_gpu::{Emulated, Gpu, Place};
use onehop_os::{DmaMemory, HostMem, Marks};
use onehop_sim::Sim;

use super::{open, options};

const BLOCK: usize = 512;

/// What executes a simulated drive's commands.
#[derive(Clone, Copy, PartialEq, Debug)]
enum By {
    CpuThreads,
    GpuWarps,
}

fn opened(by: By, spec: &str, options: Options) -> (Sim, Drive) {
    let (sim, port) = match by {
        By::CpuThreads => {
            let sim = onehop_sim::open(spec).unwrap();
            (sim.clone(), sim.port())
        }
        By::GpuWarps => {
            let resident = onehop_resident::open(spec, Arc::new(Emulated::new())).unwrap();
            (resident.sim().clone(), resident.port())
        }
    };
    (sim, Drive::open(port, options).unwrap())
}

/// Without a reset, a drive may write data after it has completed the read and its queue was deleted. A drive that does
/// not would hide hosts that free memory too early.
#[test]
fn late_data_outlives_its_queue_and_not_a_reset() {
    for by in [By::CpuThreads, By::GpuWarps] {
        for reset in [false, true] {
            let spec = "mem:1M?to=1&fault=torn@op=read,n=1,delay=400ms";
            let (sim, drive) = opened(by, spec, Options { canary: false, ..options() });
            sim.write_media(1, 0, &[7; BLOCK]).unwrap();
            let (queue, buffer) = (drive.queue().unwrap(), drive.buffer(BLOCK).unwrap());
            queue.read(drive.namespace(1).unwrap(), 0, 1, &buffer, 0).unwrap();
            drop(queue);
            // Another pair of the same number begins meanwhile, or the controller does.
            if reset {
                drive.reset().unwrap();
            }
            let queue = drive.queue().unwrap();
            let other = drive.buffer(BLOCK).unwrap();
            queue.read(drive.namespace(1).unwrap(), 0, 1, &other, 0).unwrap();
            drop(queue);
            buffer.host().unwrap().fill(0, BLOCK, 0xa5).unwrap();
            std::thread::sleep(Duration::from_millis(900));
            let expected = if reset { 0xa5 } else { 7 };
            let got = buffer.host().unwrap().to_vec(0, BLOCK).unwrap();
            assert!(got.iter().all(|byte| *byte == expected), "{by:?}, reset {reset}: {:x?}", &got[..8]);
            assert_eq!(sim.violations(), [], "{by:?}, reset {reset}");
        }
    }
}

/// Data of one read is late while another is lost each time: the queues are deleted before the data is checked.
fn late_data_beside_a_lost_command(by: By, mode: GpuMode) {
    // On a machine that is very busy the data comes before the last try has ended.
    let in_time = (0..5).any(|_| late_data_comes_after_the_end(by, mode));
    assert!(in_time, "{by:?}, {mode:?}: the tries took as long as the data, five times");
}

/// Returns false if the data came before the end, so that the test shows nothing.
fn late_data_comes_after_the_end(by: By, mode: GpuMode) -> bool {
    const BLOCKS: usize = 64;
    const LATE: Duration = Duration::from_secs(3);
    let spec =
        format!("mem:1M?mdts=1&to=1&fault=torn@lba=5-5,n=1,delay={}s&fault=lost@lba=9-9", LATE.as_secs());
    let (sim, drive) = opened(by, &spec, options());
    let data: Vec<u8> =
        (0..(BLOCKS * BLOCK) as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    sim.write_media(1, 0, &data).unwrap();
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    // Long enough for the kernel to see the completion whose data is late.
    let stall = Duration::from_millis(40);
    let setup = GpuSetup { mode, queues: 1, depth: 15, stall, ..GpuSetup::new(Placement::TIER1) };
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    let (region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, BLOCKS * BLOCK).unwrap();
    let job = |lba: usize| GpuJob { lba: lba as u64, blocks: 1, offset: (lba * BLOCK) as u64 };
    let start = Instant::now();
    let end = queues.read(drive.namespace(1).unwrap(), &(0..BLOCKS).map(job).collect::<Vec<_>>(), &buffer);
    if start.elapsed() > LATE {
        return false;
    }
    assert!(matches!(end, Err(Error::TimedOut { .. })), "{mode:?}: {end:?}");
    // It is the last recovery, unless the kernel was stopped before it saw the completion.
    let incidents = drive.incidents();
    let stopped = incidents.iter().any(|incident| incident.recovery == Recovery::ControllerReset);
    assert!(stopped, "{mode:?}: only a reset stops data that is still to come: {incidents:?}");
    // The caller owns its memory again, and reuses it.
    region.fill(0, BLOCKS * BLOCK, 0xa5).unwrap();
    std::thread::sleep(LATE + Duration::from_millis(500));
    let mut got = vec![0; BLOCKS * BLOCK];
    region.read(0, &mut got).unwrap();
    let wrong = got.chunks(BLOCK).position(|block| block.iter().any(|byte| *byte != 0xa5));
    assert_eq!(wrong, None, "{mode:?}: a block was overwritten after the error");
    true
}

#[test]
fn a_failed_job_does_not_give_memory_back_before_late_data_was_stopped() {
    late_data_beside_a_lost_command(By::CpuThreads, GpuMode::Owner);
    late_data_beside_a_lost_command(By::GpuWarps, GpuMode::Owner);
}

#[test]
fn neither_does_one_of_a_shared_queue() {
    late_data_beside_a_lost_command(By::CpuThreads, GpuMode::Shared { threads: 8 });
    late_data_beside_a_lost_command(By::GpuWarps, GpuMode::Shared { threads: 8 });
}

/// Memory that can be marked, and then cannot be read: as GPU memory beside a kernel that fills the GPU.
struct Unreadable {
    mem: HostMem,
    asked: Arc<AtomicU32>,
}

impl DmaMemory for Unreadable {
    fn bytes(&self) -> usize {
        self.mem.len()
    }
    fn host(&self) -> Option<&HostMem> {
        Some(&self.mem)
    }
    fn marks_left(&self, _: &Marks, _: Duration) -> onehop_os::Result<u64> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        Err(onehop_os::Error::CannotMap { mapper: "the test".into(), why: "no room for a kernel".into() })
    }
}

#[test]
fn memory_that_cannot_be_read_is_no_missing_data() {
    let (sim, drive) = open("mem:1M?mdts=1");
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let queues = drive.gpu_queues(gpu, GpuSetup::new(Placement::TIER1)).unwrap();
    let asked = Arc::<AtomicU32>::default();
    let mem = drive.host_memory(64 * BLOCK).unwrap();
    let buffer = drive.map(Unreadable { mem, asked: asked.clone() }).unwrap();
    let end = queues.read(drive.namespace(1).unwrap(), &[GpuJob { lba: 0, blocks: 64, offset: 0 }], &buffer);
    assert!(
        matches!(&end, Err(Error::Gpu(why)) if why.contains("no room") && why.contains("occupy")),
        "{end:?}"
    );
    // Each check may take long. The data may still come, so the memory is released only after a reset, but nothing is
    // retried.
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    assert_eq!(drive.incidents().len(), 1, "{:?}", drive.incidents());
    assert_eq!(sim.violations(), []);
}

#[test]
fn errors_report_the_time_that_a_command_was_given() {
    let patient = Options { retries: 0, timeout: Duration::from_secs(5), ..options() };
    for fault in ["torn@n=1,delay=5s", "lost@op=read"] {
        let sim = onehop_sim::open(&format!("mem:1M?to=1&fault={fault}")).unwrap();
        let drive = Drive::open(sim.port(), patient.clone()).unwrap();
        let (queue, buffer) = (drive.queue().unwrap(), drive.buffer(4096).unwrap());
        std::thread::scope(|scope| {
            let read = scope.spawn(|| queue.read(drive.namespace(1).unwrap(), 0, 8, &buffer, 0));
            std::thread::sleep(Duration::from_millis(200));
            drive.reset().unwrap();
            let waited = match read.join().unwrap() {
                Err(Error::DataMissing { waited, .. } | Error::TimedOut { waited, .. }) => waited,
                other => panic!("{fault}: {other:?}"),
            };
            assert!(waited >= Duration::from_millis(100) && waited < patient.timeout, "{fault}: {waited:?}");
        });
    }
}

/// The reset waits for two seconds for a controller that does not become ready. The command had none of that time.
#[test]
fn errors_report_no_time_of_the_recovery() {
    for failure in ["cfs@op=read,n=1", "torn@op=read,n=1,delay=30s"] {
        let sim = onehop_sim::open(&format!("mem:1M?to=4&fault={failure}&fault=stuck-rdy@on=enable,n=2"));
        let sim = sim.unwrap();
        let timeout = Duration::from_secs(if failure.starts_with("cfs") { 60 } else { 1 });
        let patient = Options { retries: 0, timeout, ready_limit: Duration::from_secs(2), ..options() };
        let drive = Drive::open(sim.port(), patient).unwrap();
        let (queue, buffer) = (drive.queue().unwrap(), drive.buffer(4096).unwrap());
        let start = Instant::now();
        let end = queue.read(drive.namespace(1).unwrap(), 0, 8, &buffer, 0);
        let all = start.elapsed();
        let waited = match end {
            Err(Error::DataMissing { waited, .. } | Error::TimedOut { waited, .. }) => waited,
            other => panic!("{failure}: {other:?}"),
        };
        let recovery = drive.incidents().last().unwrap().took;
        assert!(recovery >= Duration::from_secs(2), "{failure}: {recovery:?}");
        assert!(waited + recovery / 2 < all, "{failure}: {waited:?} and {recovery:?} of {all:?}");
    }
}

#[test]
fn so_do_errors_of_gpu_jobs() {
    let stall = Duration::from_millis(60);
    for fault in ["torn@delay=30s", "lost@op=read"] {
        let sim = onehop_sim::open(&format!("mem:1M?to=1&fault={fault}")).unwrap();
        let drive = Drive::open(sim.port(), Options { retries: 0, ..options() }).unwrap();
        let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
        let setup = GpuSetup { stall, ..GpuSetup::new(Placement::TIER1) };
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
        let end =
            queues.read(drive.namespace(1).unwrap(), &[GpuJob { lba: 0, blocks: 8, offset: 0 }], &buffer);
        let waited = match end {
            Err(Error::DataMissing { waited, .. } | Error::TimedOut { waited, .. }) => waited,
            other => panic!("{fault}: {other:?}"),
        };
        assert!(waited > stall && waited < Duration::from_secs(20), "{fault}: {waited:?}");
    }
}
