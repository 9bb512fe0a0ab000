//! When a namespace was replaced, the new one gets none of the commands for the old one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_drive::{Buffer, Drive, Error, GpuJob, GpuMode, GpuSetup, Io, Namespace, Op, Options, Placement};
use onehop_gpu::{Emulated, Gpu, Place};
use onehop_sim::Sim;

use super::{inject, open, options, within};

/// The time of a lost admin command, and enough on a busy machine for one of several that share it.
const PATIENCE: Duration = Duration::from_secs(3);

/// A drive whose answers and Aborts may take long.
fn patient() -> (Sim, Drive) {
    let sim = onehop_sim::open("mem:1M").unwrap();
    let limits = Options { admin_timeout: PATIENCE, abort_wait: PATIENCE, ..options() };
    let drive = Drive::open(sim.port(), limits).unwrap();
    (sim, drive)
}

fn full(drive: &Drive) -> Buffer {
    let buffer = drive.buffer(4096).unwrap();
    buffer.host().unwrap().write(0, &[0xa5; 4096]).unwrap();
    buffer
}

/// The command ended as it should, and the new namespace is untouched.
fn refused<T: std::fmt::Debug>(end: Result<T, Error>, sim: &Sim) {
    assert!(matches!(end, Err(Error::NamespaceChanged { nsid: 1, .. })), "{end:?}");
    let mut blocks = vec![0xee; 1 << 20];
    sim.read_media(1, 0, &mut blocks).unwrap();
    assert!(blocks.iter().all(|byte| *byte == 0), "written to another namespace");
    assert_eq!(sim.violations(), []);
}

#[test]
fn a_write_is_not_sent_again_after_a_reset() {
    within(Duration::from_secs(10), || {
        let (sim, drive) = open("mem:1M");
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = full(&drive);
        inject(&sim, "cfs@op=write,n=1");
        sim.recreate(1).unwrap();
        // The driver does not know of it before the controller is reset.
        refused(queue.write(ns, 5, 8, &buffer, 0), &sim);
        refused(queue.read(ns, 5, 8, &buffer, 0), &sim);
        assert_eq!(drive.incidents().len(), 1);
    });
}

#[test]
fn neither_is_one_that_found_no_room() {
    within(Duration::from_secs(10), || {
        let (sim, drive) = open("mem:1M?mqes=3&fault=sqhd-lag@every=1,by=100");
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = full(&drive);
        let write = |ns: &Namespace, lba| queue.submit(ns, &Io::new(Op::Write, lba, 1, &buffer, 0));
        let mut tokens: Vec<_> = (0..3).map(|lba| write(ns, lba).unwrap()).collect();
        queue.wait(tokens.remove(0)).unwrap();
        // The controller does not say that there is room again.
        tokens.push(write(ns, 3).unwrap());
        tokens.drain(..2).for_each(|token| _ = queue.wait(token).unwrap());
        sim.recreate(1).unwrap();
        drive.reset().unwrap();
        refused(queue.wait(tokens[0]), &sim);
    });
}

#[test]
fn neither_is_one_that_waits_for_its_retry_when_the_drive_reports_it() {
    within(Duration::from_secs(10), || {
        let (sim, drive) = open("mem:1M?fault=fail-once@op=write,n=1,crd=1");
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = full(&drive);
        let token = queue.submit(ns, &Io::new(Op::Write, 5, 1, &buffer, 0)).unwrap();
        while queue.poll().unwrap() == 0 {}
        // The drive has asked for 100 ms.
        sim.recreate(1).unwrap();
        while drive.events().unwrap().is_empty() {}
        refused(queue.wait(token), &sim);
        assert!(drive.incidents().is_empty());
    });
}

/// A drive reports an event once. If the answer to the command that it leads to is lost, the event is handled in the
/// next call.
#[test]
fn a_lost_answer_does_not_hide_that_a_namespace_was_replaced() {
    for lost in ["lost@op=get-log,n=1", "lost@op=identify,n=1"] {
        let (sim, drive) = open("mem:1M");
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = full(&drive);
        inject(&sim, lost);
        sim.recreate(1).unwrap();
        // None has come yet, or handling it has failed.
        let start = Instant::now();
        while drive.events().is_ok() {
            assert!(start.elapsed() < Duration::from_secs(60), "{lost}");
        }
        assert_eq!(drive.events().unwrap().len(), 1, "{lost}");
        refused(queue.write(ns, 5, 1, &buffer, 0), &sim);
    }
}

/// A namespace that the drive cannot identify is given up, and not the drive with it.
#[test]
fn a_namespace_that_cannot_be_identified_does_not_cost_the_drive() {
    let (sim, drive) = patient();
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = full(&drive);
    // The first is Identify Controller.
    (2..100).for_each(|n| inject(&sim, &format!("fail-once@op=identify,n={n}")));
    drive.reset().unwrap();
    refused(queue.write(ns, 5, 8, &buffer, 0), &sim);
    drive.events().unwrap();
    drive.queue().unwrap();
}

#[test]
fn nor_does_one_that_is_never_answered_for() {
    let (sim, drive) = patient();
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = full(&drive);
    // Every second is Identify Namespace.
    inject(&sim, "lost@op=identify,every=2");
    drive.reset().unwrap();
    refused(queue.write(ns, 5, 8, &buffer, 0), &sim);
    drive.queue().unwrap();
}

#[test]
fn nor_does_one_that_an_event_leads_to() {
    let (sim, drive) = patient();
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = full(&drive);
    (1..100).for_each(|n| inject(&sim, &format!("fail-once@op=identify,n={n}")));
    sim.recreate(1).unwrap();
    let start = Instant::now();
    while drive.events().unwrap().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(60), "no event");
    }
    refused(queue.write(ns, 5, 1, &buffer, 0), &sim);
    assert!(drive.incidents().is_empty());
}

/// An event whose log page does not come delays no other.
#[test]
fn nor_does_one_of_another_event() {
    let (sim, drive) = patient();
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = full(&drive);
    inject(&sim, "lost@op=get-log,n=1");
    sim.set_temperature(500);
    sim.recreate(1).unwrap();
    assert!(matches!(drive.events(), Err(Error::NoAnswer { .. })));
    refused(queue.write(ns, 5, 1, &buffer, 0), &sim);
    // The log page was aborted, and is read the next time.
    assert_eq!(drive.incidents().len(), 0);
    assert_eq!(drive.events().unwrap().len(), 2);
}

/// A controller that fails says nothing about the namespace that it was asked for.
#[test]
fn a_namespace_is_not_blamed_for_its_controller() {
    let (sim, drive) = patient();
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = full(&drive);
    // Identify Namespace in three tries.
    [2, 4, 6].iter().for_each(|n| inject(&sim, &format!("cfs@op=identify,n={n}")));
    drive.reset().unwrap();
    queue.write(ns, 5, 8, &buffer, 0).unwrap();
}

/// Several log pages that do not come are waited for as long as one, and read by a later call.
#[test]
fn lost_log_pages_share_the_time_of_one() {
    let (sim, drive) = patient();
    inject(&sim, "lost@op=get-log,count=2");
    sim.set_temperature(500);
    sim.recreate(1).unwrap();
    // Both are there by then, on all but the busiest machines.
    std::thread::sleep(Duration::from_millis(200));
    let (mut served, mut unanswered, mut longest) = (0, 0, Duration::ZERO);
    while served < 2 {
        let start = Instant::now();
        match drive.events() {
            Ok(events) => served += events.len(),
            Err(Error::NoAnswer { .. }) => unanswered += 1,
            Err(error) => panic!("{error}"),
        }
        longest = longest.max(start.elapsed());
    }
    assert!(unanswered > 0 && longest < PATIENCE * 3 / 2, "{unanswered}, {longest:?}");
    assert_eq!(drive.incidents().len(), 0);
}

/// A drive that fails the requests for events once gets them again.
#[test]
fn failed_requests_for_events_hide_no_namespace() {
    let (sim, drive) = open("mem:1M?fault=fail@op=async-event,count=4");
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = full(&drive);
    while sim.stats().faults < 4 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // The failures are there by then, and found when somebody asks for events.
    drive.feature(7).unwrap();
    drive.events().unwrap();
    sim.recreate(1).unwrap();
    let start = Instant::now();
    while drive.events().unwrap().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(20), "no event");
    }
    refused(queue.write(ns, 5, 1, &buffer, 0), &sim);
}

#[test]
fn neither_does_a_gpu_write_again_after_a_reset() {
    within(Duration::from_secs(20), || {
        for mode in [GpuMode::Owner, GpuMode::Shared { threads: 4 }] {
            let (sim, drive) = open("mem:1M");
            let (ns, gpu) = (drive.namespace(1).unwrap(), Arc::new(Emulated::new()));
            let setup =
                GpuSetup { mode, stall: Duration::from_millis(250), ..GpuSetup::new(Placement::TIER1) };
            let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
            let (region, buffer) = drive.gpu_buffer(&*gpu as &dyn Gpu, Place::PinnedHost, 4096).unwrap();
            region.fill(0, 4096, 0xa5).unwrap();
            inject(&sim, "cfs@op=write,n=1");
            sim.recreate(1).unwrap();
            refused(queues.write(ns, &[GpuJob { lba: 5, blocks: 8, offset: 0 }], &buffer), &sim);
            assert_eq!(drive.incidents().len(), 1);
        }
    });
}
