//! Requests to stop while the drive leaves commands unanswered. No wait here ends within the test by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use onehop_drive::{Buffer, Drive, Error, GpuJob, GpuMode, GpuSetup, Io, Op, Options, Placement};
use onehop_gpu::{Emulated, Gpu};
use onehop_os::{DmaMemory, HostMem, StopSignal};
use onehop_sim::Sim;

use super::{inject, within};

const LONG: Duration = Duration::from_secs(3600);
/// For operations that end in less than two seconds, on any machine.
const END_TIMEOUT: Duration = Duration::from_secs(120);
const BYTES: usize = 4096;
/// The controller can then neither abort a command nor delete its queue.
const DEAF: &str = "fault=abort-ignored&fault=lost@op=delete-sq";

/// Memory that records when it is freed.
struct Watched(HostMem, Arc<AtomicBool>);

impl DmaMemory for Watched {
    fn bytes(&self) -> usize {
        self.0.bytes()
    }
    fn host(&self) -> Option<&HostMem> {
        Some(&self.0)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

struct Bench {
    sim: Sim,
    drive: Drive,
    stop: StopSignal,
    buffer: Buffer,
    is_freed: Arc<AtomicBool>,
    /// Resets of the controller until the drive was open.
    resets: u64,
}

impl Bench {
    fn new(spec: &str) -> Self {
        let sim = onehop_sim::open(&format!("mem:1M?{spec}")).unwrap();
        let stop = StopSignal::default();
        let options = Options {
            writable: true,
            timeout: LONG,
            admin_timeout: LONG,
            abort_wait: LONG,
            stop: stop.clone(),
            ..Options::default()
        };
        let drive = Drive::open(sim.port(), options).unwrap();
        let is_freed = Arc::<AtomicBool>::default();
        let memory = Watched(drive.host_memory(BYTES).unwrap(), is_freed.clone());
        let buffer = drive.map(memory).unwrap();
        let resets = sim.stats().resets;
        Self { sim, drive, stop, buffer, is_freed, resets }
    }

    /// Runs `work`, and requests a stop once a fault has struck.
    fn stopped<T: Send>(&self, work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
        std::thread::scope(|scope| {
            let work = scope.spawn(work);
            while self.sim.stats().faults == 0 && !work.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.stop.set();
            work.join().unwrap()
        })
    }

    fn is_freed(&self) -> bool {
        self.is_freed.load(Ordering::SeqCst)
    }

    /// The caller has dropped its memory. A drive that may still write it keeps it until it is disabled, and is used
    /// for nothing else. Returns whether it is such a drive, which it may also be on a machine where an answer takes a
    /// second.
    fn ends(self, what: &str, must_keep: bool) -> bool {
        let Self { sim, drive, buffer, is_freed, resets, .. } = self;
        drop(buffer);
        let after = drive.events().map(drop);
        let keeps = matches!(after, Err(Error::Interrupted { .. }));
        assert!(keeps || (after.is_ok() && !must_keep), "{what}: {after:?}");
        // A controller that was disabled before the driver saw the stop no longer has it either.
        let freed = is_freed.load(Ordering::SeqCst);
        assert!(
            freed != keeps || freed && sim.stats().resets > resets,
            "{what}: kept {keeps}, freed {freed}"
        );
        within(END_TIMEOUT, move || drop(drive));
        assert!(is_freed.load(Ordering::SeqCst), "{what}");
        assert_eq!(sim.violations(), [], "{what}");
        keeps
    }
}

#[track_caller]
fn assert_interrupted<T: std::fmt::Debug>(what: &str, end: Result<T, Error>) {
    assert!(matches!(end, Err(Error::Interrupted { .. })), "{what}: {end:?}");
}

#[test]
fn a_request_to_stop_ends_commands_of_a_cpu_queue() {
    let mut kept = 0;
    let all = [
        ("fault=lost@op=read".to_owned(), false),
        ("fault=late@op=read,delay=3600s".to_owned(), false),
        (format!("fault=lost@op=read&{DEAF}"), true),
        // Only a reset stops the data of a completed read.
        ("fault=torn@op=read,delay=3600s".to_owned(), true),
        // Only the driver has the command: it waits for the retry delay that the controller asked for.
        ("crdt=100,100,100&fault=fail-once@op=read,every=1,crd=1".to_owned(), false),
    ];
    for (fault, must_keep) in &all {
        let bench = Bench::new(fault);
        let queue = bench.drive.queue().unwrap();
        let ns = bench.drive.namespace(1).unwrap();
        assert_interrupted(fault, bench.stopped(|| queue.read(ns, 0, 8, &bench.buffer, 0)));
        assert!(!bench.is_freed());
        drop(queue);
        kept += usize::from(bench.ends(fault, *must_keep));
    }
    assert!(kept < all.len(), "every drive was given up");
}

#[test]
fn and_single_commands_and_flushes() {
    for deaf in [false, true] {
        let spec =
            |op| format!("fault=lost@op={op}{}{}", if deaf { "&" } else { "" }, if deaf { DEAF } else { "" });
        let bench = Bench::new(&spec("flush"));
        let queue = bench.drive.queue().unwrap();
        let ns = bench.drive.namespace(1).unwrap();
        queue.write(ns, 0, 8, &bench.buffer, 0).unwrap();
        assert_interrupted("flush", bench.stopped(|| queue.flush(ns)));
        drop(queue);
        drop(bench);

        let bench = Bench::new(&spec("write"));
        let queue = bench.drive.queue().unwrap();
        let ns = bench.drive.namespace(1).unwrap();
        let write = Io::new(Op::Write, 0, 8, &bench.buffer, 0);
        assert_interrupted("write", bench.stopped(|| queue.wait(queue.submit(ns, &write)?)));
        drop(queue);
        bench.ends("write", deaf);
    }
}

/// A flush that was completed beside a command waits for that command, which does not end.
#[test]
fn and_flushes_that_wait_for_other_commands() {
    let bench = Bench::new("fault=lost@op=read");
    let queue = bench.drive.queue().unwrap();
    let ns = bench.drive.namespace(1).unwrap();
    queue.submit(ns, &Io::new(Op::Read, 0, 8, &bench.buffer, 0)).unwrap();
    let flush = queue.submit(ns, &Io::flush()).unwrap();
    while queue.poll().unwrap() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    bench.stop.set();
    assert_interrupted("flush", queue.wait(flush));
    assert!(!bench.is_freed());
    drop(queue);
    bench.ends("flush", false);
}

/// A command that ended reports its own result, even after a request to stop.
#[test]
fn a_command_that_has_ended_is_not_interrupted() {
    let bench = Bench::new("");
    let queue = bench.drive.queue().unwrap();
    let ns = bench.drive.namespace(1).unwrap();
    let token = queue.submit(ns, &Io::new(Op::Read, 0, 8, &bench.buffer, 0)).unwrap();
    while queue.poll().unwrap() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    bench.stop.set();
    queue.wait(token).unwrap();
    assert_interrupted("asked", queue.check_stop());
    drop(queue);
    bench.ends("read", false);
}

#[test]
fn a_request_to_stop_ends_jobs_of_a_gpu() {
    for mode in [GpuMode::Owner, GpuMode::Shared { threads: 32 }] {
        let mut kept = 0;
        let all = [
            (Op::Read, "fault=lost@op=read".to_owned(), false),
            (Op::Write, "fault=late@op=write,delay=3600s".to_owned(), false),
            (Op::Read, format!("fault=lost@op=read&{DEAF}"), true),
            (Op::Read, "fault=torn@op=read,delay=3600s".to_owned(), true),
            // Reads are tried again by the host, which marks their memory; writes by the kernel.
            (Op::Read, "crdt=100,100,100&fault=fail-once@op=read,every=1,crd=1".to_owned(), false),
            (Op::Write, "crdt=100,100,100&fault=fail-once@op=write,every=1,crd=1".to_owned(), false),
        ];
        for (op, fault, must_keep) in &all {
            let what = format!("{mode:?}, {op:?}, {fault}");
            let bench = Bench::new(fault);
            let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
            let setup = GpuSetup { mode, stall: LONG, ..GpuSetup::new(Placement::TIER1) };
            let queues = bench.drive.gpu_queues(gpu, setup).unwrap();
            let ns = bench.drive.namespace(1).unwrap();
            let job = [GpuJob { lba: 0, blocks: 8, offset: 0 }];
            let run = || match op {
                Op::Write => queues.write(ns, &job, &bench.buffer),
                _ => queues.read(ns, &job, &bench.buffer),
            };
            assert_interrupted(&what, bench.stopped(run));
            assert!(!bench.is_freed());
            drop(queues);
            kept += usize::from(bench.ends(&what, *must_keep));
        }
        assert!(kept < all.len(), "{mode:?}: every drive was given up");
    }
}

/// A creation or deletion that is not answered takes a second then; its queue goes with the controller.
#[test]
fn queues_do_not_hold_up_an_orderly_end() {
    let bench = Bench::new("fault=lost@op=create-sq");
    assert_interrupted("creation", bench.stopped(|| bench.drive.queue().map(drop)));
    let after = bench.drive.events().map(drop);
    assert_interrupted("a drive that may have the queue", after);
    within(END_TIMEOUT, move || drop(bench));

    let bench = Bench::new("");
    let (queue, other) = (bench.drive.queue().unwrap(), bench.drive.queue().unwrap());
    let ns = bench.drive.namespace(1).unwrap();
    inject(&bench.sim, "lost@op=read");
    queue.submit(ns, &Io::new(Op::Read, 0, 8, &bench.buffer, 0)).unwrap();
    inject(&bench.sim, "lost@op=delete-sq");
    bench.stop.set();
    within(END_TIMEOUT, move || drop((queue, other)));
    assert!(!bench.is_freed());
    bench.ends("deletion", true);
}
