//! Queues that are created again after a reset, by a controller that loses admin commands.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use onehop_drive::{Drive, Error, GpuJob, GpuMode, GpuSetup, Io, Op, Options, Placement, Recovery};
use onehop_gpu::{Emulated, EmulatedThread, Gpu, Place};
use onehop_os::{ControllerBackend, Registers};
use onehop_proto::kernel::{Answer, DeviceOp, DeviceQueue};
use onehop_proto::regs::offset;
use onehop_sim::Sim;

use super::{inject, open, options};

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

/// Tries at creating queues, and creations that are slow, are a part of the time that a job may take.
#[test]
fn the_limit_of_a_job_counts_the_creation_of_its_queues() {
    for (fault, incidents) in [("lost@op=create-cq,count=2", 1), ("late@op=create-cq,n=1,delay=350ms", 0)] {
        let (sim, drive) = open("mem:1M?to=1");
        let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
        let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
        let limit = Duration::from_millis(300);
        let setup = GpuSetup { limit, ..GpuSetup::new(Placement::TIER1) };
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        inject(&sim, fault);
        let end = queues.read(drive.namespace(1).unwrap(), &JOB, &buffer);
        match (&end, incidents) {
            // The creation's answer is waited for longer than the job may take, and it is not tried again.
            (Err(Error::NoAnswer { .. }), 1) | (Err(Error::Launch { done: 0, count: 1, .. }), 0) => {}
            _ => panic!("{fault}: {end:?}"),
        }
        assert_eq!(drive.incidents().len(), incidents, "{fault}: {:?}", drive.incidents());
        assert_eq!(sim.violations(), [], "{fault}");
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
        // The drive is alive, and has none of them.
        queues.read(ns, &JOB, &buffer).unwrap();
    }
    drive.queue().unwrap();
    assert_eq!(sim.violations(), []);
}

#[test]
fn one_lost_creation_does_not_cost_a_cpu_queue() {
    for lost in ["lost@op=create-cq,n=1", "lost@op=create-sq,n=1"] {
        let (sim, drive) = open("mem:1M?to=1");
        let (ns, buffer) = (drive.namespace(1).unwrap(), drive.buffer(4096).unwrap());
        let other = drive.queue().unwrap();
        inject(&sim, lost);
        let queue = drive.queue().unwrap_or_else(|error| panic!("{lost}: {error}"));
        for queue in [&queue, &other] {
            queue.read(ns, 0, 8, &buffer, 0).unwrap();
        }
        assert_eq!(drive.incidents().len(), 1, "{lost}: {:?}", drive.incidents());
        assert_eq!(sim.violations(), [], "{lost}");
    }
}

/// Creations that were not answered are aborted, which does not disturb the other queues. Only a controller that does
/// not abort them is reset.
#[test]
fn a_lost_creation_costs_other_queues_no_reset() {
    for (lost, recovery) in [
        ("lost@op=create-cq,n=1", Recovery::Abort),
        ("lost@op=create-sq,n=1", Recovery::Abort),
        ("late@op=create-cq,n=1,delay=600s", Recovery::Abort),
        ("lost@op=create-cq,n=1&fault=abort-ignored", Recovery::ControllerReset),
    ] {
        let (sim, drive) = patient();
        let (ns, buffer) = (drive.namespace(1).unwrap(), drive.buffer(4096).unwrap());
        let other = drive.queue().unwrap();
        // In flight all the time.
        inject(&sim, "late@op=read,n=1,delay=2s");
        let token = other.submit(ns, &Io::new(Op::Read, 0, 8, &buffer, 0)).unwrap();
        lost.split("&fault=").for_each(|fault| inject(&sim, fault));
        let queue = drive.queue().unwrap_or_else(|error| panic!("{lost}: {error}"));
        assert_eq!(recoveries(&drive), [recovery], "{lost}");
        let finished = other.wait(token).unwrap();
        assert!(finished.retries == 0 || recovery != Recovery::Abort, "{lost}: {finished:?}");
        queue.read(ns, 0, 8, &buffer, 0).unwrap();
        assert_eq!(sim.violations(), [], "{lost}");
    }
}

/// A drive whose Aborts have enough time on a busy machine, too.
fn patient() -> (Sim, Drive) {
    let sim = onehop_sim::open("mem:1M?to=1").unwrap();
    let limits =
        Options { abort_wait: Duration::from_secs(2), timeout: Duration::from_secs(600), ..options() };
    let drive = Drive::open(sim.port(), limits).unwrap();
    (sim, drive)
}

fn recoveries(drive: &Drive) -> Vec<Recovery> {
    drive.incidents().iter().map(|incident| incident.recovery).collect()
}

/// The second or third of three pairs is lost: it is aborted, and those before it are deleted and created again with it.
#[test]
fn a_lost_creation_among_queues_of_a_gpu_costs_other_queues_no_reset() {
    for (faults, expected) in [
        ("lost@op=create-cq,n=2", &[Recovery::Abort][..]),
        ("lost@op=create-sq,n=3", &[Recovery::Abort]),
        // As is the deletion of the one before it.
        ("lost@op=create-cq,n=2&lost@op=delete-sq,n=2", &[Recovery::Abort, Recovery::Abort]),
        // The controller keeps the one before it: only a reset takes it away.
        ("lost@op=create-cq,n=2&fail@op=delete-sq,n=2", &[Recovery::Abort, Recovery::ControllerReset]),
        ("lost@op=create-cq,n=2&fail@op=delete-cq,n=2", &[Recovery::Abort, Recovery::ControllerReset]),
        // It refuses the third, and to delete the half of it that it has.
        ("fail@op=create-sq,n=3&fail@op=delete-cq,n=1", &[Recovery::ControllerReset]),
    ] {
        let (sim, drive) = patient();
        let (ns, buffer) = (drive.namespace(1).unwrap(), drive.buffer(4096).unwrap());
        let other = drive.queue().unwrap();
        let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
        let (_region, data) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
        let setup = GpuSetup { queues: 3, ..GpuSetup::new(Placement::TIER1) };
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        // In flight all the time.
        let is_lost = faults.starts_with("lost");
        inject(&sim, "late@op=read,n=1,q=1,delay=3s");
        let token = other.submit(ns, &Io::new(Op::Read, 0, 8, &buffer, 0)).unwrap();
        faults.split('&').for_each(|fault| inject(&sim, fault));
        let first = queues.read(ns, &JOB, &data);
        assert_eq!(first.is_ok(), is_lost, "{faults}: {first:?}");
        assert_eq!(recoveries(&drive), expected, "{faults}");
        let finished = other.wait(token).unwrap();
        let is_reset = expected.contains(&Recovery::ControllerReset);
        assert!(finished.retries == 0 || is_reset, "{faults}: {finished:?}");
        queues.read(ns, &JOB, &data).unwrap_or_else(|error| panic!("{faults}: {error}"));
        assert_eq!(sim.violations(), [], "{faults}");
    }
}

/// The first creation of an exported queue is lost, then the one after a reset, which is its watcher's.
#[test]
fn nor_does_one_of_an_exported_queue() {
    for lost in ["lost@op=create-cq,n=1", "lost@op=create-sq,n=1"] {
        let (sim, drive) = patient();
        let (ns, buffer) = (drive.namespace(1).unwrap(), drive.buffer(4096).unwrap());
        let other = drive.queue().unwrap();
        let gpu = Emulated::new();
        let (_region, data) = drive.gpu_buffer(&gpu, Place::PinnedHost, 4096).unwrap();
        let setup = GpuSetup { mode: GpuMode::Shared { threads: 1 }, ..GpuSetup::new(Placement::TIER1) };
        let queues = drive.gpu_queues(Arc::new(gpu.clone()), setup).unwrap();
        inject(&sim, "late@op=read,n=1,q=1,delay=3s");
        let token = other.submit(ns, &Io::new(Op::Read, 0, 8, &buffer, 0)).unwrap();
        inject(&sim, lost);
        let exported = queues.export(ns, &data, false).unwrap_or_else(|error| panic!("{lost}: {error}"));
        assert_eq!(recoveries(&drive), [Recovery::Abort], "{lost}");
        assert_eq!(other.wait(token).unwrap().retries, 0, "{lost}");
        drop(other);
        let handle = exported.handle();
        let read = || {
            let kernel = move |thread: &EmulatedThread, _| {
                let queue = DeviceQueue::open(thread, handle).unwrap();
                assert_eq!(queue.run(thread, DeviceOp::Read, 0, 8, 0), Answer::Done);
            };
            gpu.start(1, kernel).unwrap().join().unwrap();
        };
        read();
        inject(&sim, lost);
        drive.reset().unwrap();
        read();
        let expected = [Recovery::Abort, Recovery::ControllerReset, Recovery::Abort];
        assert_eq!(recoveries(&drive), expected, "{lost}");
        exported.revoke().unwrap();
        assert_eq!(sim.violations(), [], "{lost}");
    }
}

/// A deletion that was not answered is aborted and tried again. Only a controller that answers neither is reset.
#[test]
fn a_lost_deletion_costs_other_queues_no_reset() {
    for (lost, recovery) in [
        ("lost@op=delete-sq,n=1", Recovery::Abort),
        ("lost@op=delete-cq,n=1", Recovery::Abort),
        ("late@op=delete-sq,n=1,delay=600s", Recovery::Abort),
        ("lost@op=delete-sq,count=2", Recovery::ControllerReset),
        ("lost@op=delete-sq,n=1&fault=abort-ignored", Recovery::ControllerReset),
    ] {
        std::thread::scope(|scope| {
            scope.spawn(|| a_lost_deletion(lost, recovery, false));
            scope.spawn(|| a_lost_deletion(lost, recovery, true));
        });
    }
}

/// The deletion is under way: it cannot be aborted, and is answered soon after.
#[test]
fn nor_does_one_that_is_carried_out_late() {
    std::thread::scope(|scope| {
        for late in
            ["reorder@op=delete-sq,n=1,by=100,delay=1500ms", "reorder@op=delete-cq,n=1,by=100,delay=1500ms"]
        {
            scope.spawn(|| a_lost_deletion(late, Recovery::Abort, false));
        }
    });
}

fn a_lost_deletion(lost: &str, recovery: Recovery, of_gpu: bool) {
    let what = format!("{lost}, {}", if of_gpu { "GPU" } else { "CPU" });
    let (sim, drive) = patient();
    let (ns, buffer) = (drive.namespace(1).unwrap(), drive.buffer(4096).unwrap());
    let (other, free) = (drive.queue().unwrap(), drive.free_queues());
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let closed: Box<dyn Any> = if of_gpu {
        let (_region, data) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
        let queues = drive.gpu_queues(gpu.clone(), GpuSetup::new(Placement::TIER1)).unwrap();
        queues.read(ns, &JOB, &data).unwrap();
        Box::new(queues)
    } else {
        Box::new(drive.queue().unwrap())
    };
    // In flight all the time.
    inject(&sim, "late@op=read,n=1,delay=3s");
    let token = other.submit(ns, &Io::new(Op::Read, 0, 8, &buffer, 0)).unwrap();
    lost.split("&fault=").for_each(|fault| inject(&sim, fault));
    drop(closed);
    assert_eq!(recoveries(&drive), [recovery], "{what}");
    let finished = other.wait(token).unwrap();
    assert!(finished.retries == 0 || recovery != Recovery::Abort, "{what}: {finished:?}");
    // The controller has none of the deleted queues: their numbers are used again.
    let queues: Vec<_> = (0..free).map(|_| drive.queue().unwrap()).collect();
    queues.iter().for_each(|queue| _ = queue.read(ns, 0, 8, &buffer, 0).unwrap());
    assert_eq!(sim.violations(), [], "{what}");
}

#[test]
fn a_cpu_queue_that_cannot_be_created_is_given_up_after_four_tries() {
    let (sim, drive) = open("mem:1M?to=1");
    let free = drive.free_queues();
    inject(&sim, "lost@op=create-cq,count=4");
    let end = drive.queue().map(|_| ());
    assert!(matches!(end, Err(Error::NoAnswer { .. })), "{end:?}");
    assert_eq!((drive.incidents().len(), drive.free_queues()), (4, free));
    drive.queue().unwrap();
    assert_eq!(sim.violations(), []);
}

/// CSTS reads all ones until CC is read, which a reset begins with.
struct Away {
    inner: Arc<dyn Registers>,
    away: Arc<AtomicBool>,
}

impl Registers for Away {
    fn read32(&self, at: u32) -> u32 {
        if at == offset::CC {
            self.away.store(false, Ordering::Relaxed);
        }
        match at == offset::CSTS && self.away.load(Ordering::Relaxed) {
            true => u32::MAX,
            false => self.inner.read32(at),
        }
    }
    fn write32(&self, at: u32, value: u32) {
        self.inner.write32(at, value);
    }
    fn size(&self) -> u32 {
        self.inner.size()
    }
}

/// The link is down for a moment while a queue is created.
#[test]
fn a_controller_that_comes_back_gets_its_queues() {
    for of_gpu in [false, true] {
        let sim = onehop_sim::open("mem:1M?to=1").unwrap();
        let (port, away) = (sim.port(), Arc::new(AtomicBool::new(false)));
        let regs: Arc<dyn Registers> = Arc::new(Away { inner: port.regs.clone(), away: away.clone() });
        let drive = Drive::open(ControllerBackend { regs, ..port }, options()).unwrap();
        let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
        let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
        let queues = drive.gpu_queues(gpu.clone(), GpuSetup::new(Placement::TIER1)).unwrap();
        inject(&sim, "lost@op=create-cq,n=1");
        away.store(true, Ordering::Relaxed);
        let ns = drive.namespace(1).unwrap();
        match of_gpu {
            true => drop(queues.read(ns, &JOB, &buffer).unwrap()),
            false => drop(drive.queue().unwrap().read(ns, 0, 8, &buffer, 0).unwrap()),
        }
        assert!(!away.load(Ordering::Relaxed) && !drive.incidents().is_empty());
        assert_eq!(sim.violations(), []);
    }
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
