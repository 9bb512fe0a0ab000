//! Operations that once hung, or killed the drive.

use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, Io, Op, Options, Recovery};

use super::{inject, open, options, within};

#[test]
fn a_submission_head_that_sticks_is_noticed() {
    within(Duration::from_secs(15), || {
        let sim = onehop_sim::open("mem:1M?fault=sqhd-lag@every=1,by=100").unwrap();
        let drive = Drive::open(sim.port(), Options { depth: 3, ..options() }).unwrap();
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = drive.buffer(4096).unwrap();
        for lba in 0..8 {
            queue.read(ns, lba, 1, &buffer, 0).unwrap();
        }
        assert!(!drive.incidents().is_empty());
    });
}

#[test]
fn a_full_queue_is_said_to_be_full() {
    within(Duration::from_secs(5), || {
        let sim = onehop_sim::open("mem:1M").unwrap();
        let drive = Drive::open(sim.port(), Options { depth: 4, ..options() }).unwrap();
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = drive.buffer(4096).unwrap();
        let tokens: Vec<_> =
            (0..4).map(|lba| queue.submit(ns, &Io::new(Op::Write, lba, 1, &buffer, 0)).unwrap()).collect();
        assert!(matches!(queue.flush(ns), Err(Error::Full(4))));
        assert!(matches!(queue.read(ns, 0, 1, &buffer, 0), Err(Error::Full(4))));
        tokens.into_iter().for_each(|token| _ = queue.wait(token).unwrap());
        queue.flush(ns).unwrap();
    });
}

#[test]
fn testing_alone_finds_a_lost_command() {
    within(Duration::from_secs(5), || {
        let (_sim, drive) = open("mem:1M?fault=lost@n=1");
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = drive.buffer(512).unwrap();
        let token = queue.submit(ns, &Io::new(Op::Read, 0, 1, &buffer, 0)).unwrap();
        let end = loop {
            if let Some(end) = queue.test(token) {
                break end;
            }
            std::thread::yield_now();
        };
        assert_eq!(end.unwrap().retries, 1);
    });
}

#[test]
fn one_lost_command_during_a_reset_is_no_dead_drive() {
    for op in ["create-cq", "create-sq", "identify", "set-features"] {
        let (sim, drive) = open("mem:1M?to=1");
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = drive.buffer(4096).unwrap();
        inject(&sim, &format!("lost@op={op},n=1"));
        drive.reset().unwrap();
        assert_eq!(drive.incidents().last().unwrap().recovery, Recovery::FunctionReset);
        queue.read(ns, 0, 1, &buffer, 0).unwrap();
    }
}

#[test]
fn a_reset_is_tried_more_than_once() {
    for op in ["create-cq", "identify", "set-features"] {
        let (sim, drive) = open("mem:1M?to=1");
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = drive.buffer(4096).unwrap();
        inject(&sim, &format!("lost@op={op},count=3"));
        drive.reset().unwrap();
        queue.read(ns, 0, 1, &buffer, 0).unwrap();
    }
    let sim = onehop_sim::open("mem:1M?to=1&fault=lost@op=identify,count=3").unwrap();
    Drive::open(sim.port(), options()).unwrap();
}

#[test]
fn no_more_is_done_than_helps() {
    for (fault, recovery) in [
        ("lost@op=read,n=5", Recovery::Abort),
        ("lost@op=read,n=5&fault=abort-ignored", Recovery::QueueDelete),
        ("lost@op=read,n=5&fault=abort-ignored&fault=lost@op=delete-sq,n=1", Recovery::ControllerReset),
        ("cfs@op=read,n=5", Recovery::ControllerReset),
        ("wrong-cid@op=read,n=5", Recovery::ControllerReset),
    ] {
        // An answer that is only late on a busy machine is waited for.
        let wait = Duration::from_secs(2);
        let patient =
            Options { timeout: wait, abort_wait: wait, admin_timeout: wait, ready_limit: wait, ..options() };
        let sim = onehop_sim::open(&format!("mem:1M?to=1&fault={fault}")).unwrap();
        let drive = Drive::open(sim.port(), patient).unwrap();
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = drive.buffer(4096).unwrap();
        for lba in 0..8 {
            queue.read(ns, lba, 1, &buffer, 0).unwrap();
        }
        let done: Vec<_> = drive.incidents().iter().map(|incident| incident.recovery).collect();
        assert_eq!(done, [recovery], "{fault}: {:?}", drive.incidents());
    }
}

#[test]
fn a_late_command_does_not_make_closing_its_queue_a_reset() {
    let (sim, drive) = open("mem:1M?fault=late@op=flush,n=1,delay=300ms");
    let queue = drive.queue().unwrap();
    let _ = queue.submit(drive.namespace(1).unwrap(), &Io::flush()).unwrap();
    drop(queue);
    assert!(drive.incidents().is_empty() && sim.violations().is_empty());
}

#[test]
fn events_without_end_are_served_a_few_at_a_time() {
    within(Duration::from_secs(10), || {
        let sim = onehop_sim::open("mem:1M").unwrap();
        // Events share it.
        let admin_timeout = Duration::from_secs(60);
        let drive = Drive::open(sim.port(), Options { admin_timeout, ..options() }).unwrap();
        let ended = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (storm, end) = (sim.clone(), ended.clone());
        let thread = std::thread::spawn(move || {
            while !end.load(std::sync::atomic::Ordering::Relaxed) {
                storm.namespace_changed(1);
            }
        });
        for _ in 0..20 {
            assert!(drive.events().unwrap().len() <= 4);
        }
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
        thread.join().unwrap();
    });
}

#[test]
fn times_without_end_are_no_overflow() {
    let sim = onehop_sim::open("mem:1M").unwrap();
    let drive = Drive::open(sim.port(), Options { timeout: Duration::MAX, ..options() }).unwrap();
    let buffer = drive.buffer(4096).unwrap();
    drive.queue().unwrap().read(drive.namespace(1).unwrap(), 0, 1, &buffer, 0).unwrap();
}

#[test]
fn a_flush_tells_of_writes_that_were_lost() {
    let (sim, drive) = open("mem:1M?vwc=1");
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(512).unwrap();
    queue.write(ns, 5, 1, &buffer, 0).unwrap();
    sim.power_cycle();
    let flushed = queue.flush(ns);
    assert!(matches!(flushed, Err(Error::WritesLost { .. })), "{flushed:?}");
    queue.write(ns, 5, 1, &buffer, 0).unwrap();
    queue.flush(ns).unwrap();
    // A reset that we asked for loses nothing.
    queue.write(ns, 5, 1, &buffer, 0).unwrap();
    drive.reset().unwrap();
    queue.flush(ns).unwrap();
}

/// The controller keeps no command of a cancelled transfer, and the queue can be used again.
#[test]
fn a_cancelled_transfer_leaves_nothing_behind() {
    within(Duration::from_secs(20), || {
        for fault in [
            // Ended by an Abort, by deleting the queue, and by a reset.
            "fault=lost@every=3,count=8",
            "fault=lost@every=3,count=8&fault=abort-ignored",
            "fault=lost@every=3,count=8&fault=lost@op=abort&fault=lost@op=delete-sq,count=1",
            "latency=30s",
            // Waits for its retry.
            "crdt=100&fault=fail-once@n=3,crd=1,count=8",
        ] {
            let sim = onehop_sim::open(&format!("mem:1M?mdts=1&{fault}")).unwrap();
            let timeout = Duration::from_secs(60);
            let drive = Drive::open(sim.port(), Options { timeout, depth: 8, ..options() }).unwrap();
            let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
            let buffer = drive.buffer(1 << 20).unwrap();
            let start = Instant::now();
            let go_on = || start.elapsed() < Duration::from_millis(100);
            let end = queue.transfer_while(Op::Read, ns, 0, 2048, (&buffer, 0), &go_on);
            assert!(matches!(end, Err(Error::Cancelled { count: 128, .. })), "{fault}: {end:?}");
            assert!(start.elapsed() < Duration::from_secs(3), "{fault}: {:?}", start.elapsed());
            buffer.host().unwrap().fill(0, 1 << 20, 0xee).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            let mut bytes = vec![0; 1 << 20];
            buffer.host().unwrap().read(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0xee), "{fault}: the controller went on to write");
            if !fault.contains("latency") {
                queue.read(ns, 0, 16, &buffer, 0).unwrap();
            }
            assert_eq!(sim.violations(), [], "{fault}");
        }
    });
}
