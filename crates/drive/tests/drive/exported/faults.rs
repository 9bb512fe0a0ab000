//! A faulty drive: lost and late commands, failures, resets, the end of the drive.

use std::time::{Duration, Instant};

use onehop_drive::{Error, ExportedQueue, GpuSetup, Recovery};
use onehop_gpu::EmulatedThread;
use onehop_proto::kernel::{Answer, Command, DeviceOp, DeviceQueue};

use super::{BLOCK, Bed, DATA, bed, bed_waiting, bed_with, done, patient_bed, setup, until};

/// Reads that every thread makes, of blocks of its own.
const ROUNDS: u64 = 30;

fn hammer(mem: &EmulatedThread, queue: &DeviceQueue<EmulatedThread>, index: u32) -> Vec<Answer> {
    (0..ROUNDS)
        .map(|round| {
            let at = (u64::from(index) * ROUNDS + round) * 2;
            queue.run(mem, DeviceOp::Read, at, 2, at * BLOCK)
        })
        .collect()
}

fn survives(fault: &str, threads: u32, stall: Duration) -> Bed {
    let bed = bed_with("", GpuSetup { stall, ..setup() });
    let exported = bed.export(false);
    bed.inject(fault);
    let answers = bed.run(&exported, threads, hammer).concat();
    assert!(done(&answers), "{fault}: {answers:?}");
    assert!(bed.holds(0, u64::from(threads) * ROUNDS * 2, 0), "{fault}");
    exported.check().unwrap();
    exported.revoke().unwrap();
    bed
}

#[test]
fn commands_that_get_lost_are_handed_over_again() {
    let bed = survives("lost@op=read,n=50", 16, setup().stall);
    assert!(!bed.drive.incidents().is_empty());
    assert_eq!(bed.drive.incidents()[0].recovery, Recovery::QueueDelete);
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn late_reordered_and_failing_commands_end_well() {
    for fault in [
        "late@op=read,every=40,delay=20ms",
        "reorder@op=read,every=3,by=4",
        "fail-once@op=read,n=9",
        "fail-once@op=read,every=50,crd=1",
        "stale-phase@op=read,every=30",
        "sqhd-lag@op=read,every=5",
    ] {
        // Nothing is lost here, even on a slow machine.
        let bed = survives(fault, 12, Duration::from_secs(5));
        assert!(bed.drive.incidents().is_empty(), "{fault}: {:?}", bed.drive.incidents());
        assert_eq!(bed.sim.violations(), [], "{fault}");
    }
}

#[test]
fn a_controller_that_fails_is_reset_under_running_kernels() {
    for fault in ["cfs@op=read,n=70", "wrong-cid@op=read,n=70", "dup@op=read,n=70"] {
        let bed = survives(fault, 16, setup().stall);
        assert!(!bed.drive.incidents().is_empty(), "{fault}");
        assert_eq!(bed.drive.incidents()[0].recovery, Recovery::ControllerReset, "{fault}");
    }
}

/// Nothing but the exported queue is on the drive: the reset creates no queue, so the lost creation is that of the watcher.
#[test]
fn one_lost_creation_does_not_end_an_exported_queue() {
    for lost in ["lost@op=create-cq,count=1", "lost@op=create-sq,count=1"] {
        let bed = patient_bed("?to=1");
        let exported = bed.export(false);
        bed.inject("cfs@op=read,n=70");
        bed.inject(lost);
        let answers = bed.run(&exported, 16, hammer).concat();
        exported.check().unwrap();
        assert!(done(&answers), "{lost}: {answers:?}");
        assert!(bed.holds(0, 16 * ROUNDS * 2, 0), "{lost}");
        assert!(bed.drive.incidents().len() >= 2, "{lost}: {:?}", bed.drive.incidents());
        exported.revoke().unwrap();
        assert_eq!(bed.sim.violations(), [], "{lost}");
    }
}

#[test]
fn a_queue_whose_first_creation_is_lost_is_exported() {
    let bed = patient_bed("?to=1");
    bed.inject("lost@op=create-cq,count=1");
    let exported = bed.export(false);
    assert_eq!(
        bed.run(&exported, 1, |mem, queue, _| queue.run(mem, DeviceOp::Read, 7, 1, 0)),
        [Answer::Done]
    );
    exported.revoke().unwrap();
    assert!(!bed.drive.incidents().is_empty());
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn a_reset_by_somebody_else_is_waited_out() {
    let bed = bed("?latency=200us");
    let exported = bed.export(false);
    let drive = bed.drive.clone();
    let others = std::thread::spawn(move || {
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(15));
            drive.reset().unwrap();
        }
    });
    let answers = bed.run(&exported, 8, |mem, queue, index| {
        (0..4).flat_map(|_| hammer(mem, queue, index)).collect::<Vec<_>>()
    });
    others.join().unwrap();
    // Only commands that met three resets may be given up.
    let given_up = answers.concat().iter().filter(|answer| **answer == Answer::TimedOut).count();
    assert!(answers.concat().iter().all(|answer| matches!(answer, Answer::Done | Answer::TimedOut)));
    assert!(given_up <= 8, "{given_up}");
    assert!(exported.recoveries() >= 3);
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn a_persistent_status_is_reported() {
    let bed = bed("");
    let exported = bed.export(false);
    bed.inject("media@lba=100-103");
    let answers = bed.run(&exported, 1, |mem, queue, _| {
        [queue.run(mem, DeviceOp::Read, 100, 1, 0), queue.run(mem, DeviceOp::Read, 104, 1, 0)]
    });
    assert!(matches!(answers[0][0], Answer::Failed(status) if status.code() == 0x281), "{answers:?}");
    assert_eq!(answers[0][1], Answer::Done);
    exported.revoke().unwrap();
}

#[test]
fn a_command_that_is_lost_each_time_is_given_up_and_its_memory_is_free() {
    let bed = bed("");
    let exported = bed.export(false);
    bed.inject("lost@op=read,lba=7-7");
    let answers = bed.run(&exported, 4, |mem, queue, i| {
        queue.run(mem, DeviceOp::Read, if i == 0 { 7 } else { 1000 }, 1, u64::from(i) * BLOCK)
    });
    assert_eq!(answers, [Answer::TimedOut, Answer::Done, Answer::Done, Answer::Done]);
    assert!(exported.recoveries() >= 3);
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn a_retry_that_would_come_too_late_is_not_waited_for() {
    let bed = bed_with("", GpuSetup { limit: Duration::from_millis(30), ..setup() });
    let exported = bed.export(false);
    // The drive asks for 100 ms before each retry.
    bed.inject("fail-once@op=read,every=1,crd=1");
    let answers = bed.run(&exported, 1, |mem, queue, _| queue.run(mem, DeviceOp::Read, 7, 1, 0));
    assert_eq!(answers, [Answer::TimedOut]);
    assert_eq!(exported.recoveries(), 0);
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn no_wait_is_longer_than_the_limit() {
    let limit = Duration::from_millis(100);
    let bed = bed_with("", GpuSetup { limit, stall: Duration::from_secs(60), ..setup() });
    let exported = bed.export(false);
    bed.inject("lost@op=read,lba=7-7");
    let start = Instant::now();
    let answers = bed.run(&exported, 2, |mem, queue, _| queue.run(mem, DeviceOp::Read, 7, 1, 0));
    assert!(start.elapsed() >= limit && start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    // The outcome is unknown, unless the host was as quick as the thread.
    assert!(
        answers.iter().all(|end| matches!(end, Answer::OutcomeUnknown | Answer::TimedOut)),
        "{answers:?}"
    );
    // The host can revoke it all the same.
    until("no recovery", || exported.recoveries() > 0);
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn a_kernel_is_stopped_at_once() {
    let bed = patient_bed("?latency=100us");
    let exported = bed.export(false);
    let handle = exported.handle();
    let running = bed
        .gpu
        .start(16, move |mem, index| {
            let queue = DeviceQueue::open(mem, handle).unwrap();
            let mut command = Command::NONE;
            // A command that no thread will ever test.
            queue.submit(mem, DeviceOp::Read, 0, 1, 0, &mut command);
            loop {
                match queue.run(mem, DeviceOp::Read, u64::from(index), 1, u64::from(index) * BLOCK) {
                    Answer::Done => {}
                    Answer::Stopped => return,
                    other => panic!("{other}"),
                }
            }
        })
        .unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    exported.stop();
    running.join().unwrap();
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
    // The stop itself costs no recovery. Completions that come when all threads have left are another matter.
    let unseen = "a GPU-driven command whose completion no thread has seen";
    assert!(bed.drive.incidents().iter().all(|one| one.cause == unseen), "{:?}", bed.drive.incidents());
}

#[test]
fn commands_that_nobody_asks_after_go_with_the_queue() {
    let bed = bed("?latency=30ms");
    {
        let exported = bed.export(true);
        let answers = bed.run(&exported, 8, |mem, queue, i| {
            let mut command = Command::NONE;
            queue.submit(mem, DeviceOp::Read, u64::from(i), 1, u64::from(i) * BLOCK, &mut command)
        });
        assert_eq!(answers, [Answer::Pending; 8]);
    }
    bed.region.fill(0, 4096, 0x11).unwrap();
    std::thread::sleep(Duration::from_millis(60));
    assert!(bed.data(0, 4096).iter().all(|byte| *byte == 0x11), "the drive wrote memory that it had let go");
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn the_end_of_the_drive_ends_every_call() {
    let bed = bed("");
    let exported = bed.export(false);
    bed.inject("gone@op=read,n=40");
    let start = Instant::now();
    let answers = bed.run(&exported, 8, hammer).concat();
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(answers.iter().all(|answer| matches!(answer, Answer::Done | Answer::Stopped)), "{answers:?}");
    assert!(answers.contains(&Answer::Stopped));
    until("no error", || exported.check().is_err());
    assert!(exported.revoke().is_err());
}

#[test]
fn commands_in_flight_over_a_recovery_are_tried_again() {
    let bed = bed_with("", GpuSetup { depth: 31, ..setup() });
    let exported = bed.export(false);
    bed.inject("lost@op=read,lba=3-3,count=1");
    let answers = bed.run(&exported, 1, |mem, queue, _| {
        let mut commands = [Command::NONE; 16];
        for (i, command) in commands.iter_mut().enumerate() {
            queue.submit(mem, DeviceOp::Read, i as u64, 1, i as u64 * BLOCK, command);
        }
        commands.map(|mut command| queue.wait(mem, &mut command))
    });
    assert_eq!(answers, [[Answer::Done; 16]]);
    assert!(bed.holds(0, 16, 0));
    assert!(exported.recoveries() >= 1);
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

fn nothing_was_written_to_another_namespace(bed: &Bed, exported: ExportedQueue) {
    until("no error", || exported.check().is_err());
    let why = exported.check();
    assert!(matches!(why, Err(Error::NamespaceChanged { nsid: 1, .. })), "{why:?}");
    exported.revoke().unwrap();
    let mut blocks = vec![0xee; 64 * BLOCK as usize];
    bed.sim.read_media(1, 0, &mut blocks).unwrap();
    assert!(blocks.iter().all(|byte| *byte == 0), "written to another namespace");
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn the_gate_stays_shut_over_another_namespace() {
    let bed = bed("");
    let exported = bed.export(true);
    bed.region.fill(0, DATA, 0xa5).unwrap();
    bed.inject("cfs@op=write,n=1");
    bed.sim.recreate(1).unwrap();
    let answers = bed.run(&exported, 8, |mem, queue, i| {
        queue.run(mem, DeviceOp::Write, u64::from(i) * 8, 8, u64::from(i) * 8 * BLOCK)
    });
    assert!(answers.iter().all(|answer| *answer == Answer::Stopped), "{answers:?}");
    nothing_was_written_to_another_namespace(&bed, exported);
}

/// The namespace changes while the watcher waits for a lost creation: the reset that follows detects it.
#[test]
fn the_gate_stays_shut_over_a_namespace_that_changed_during_its_creation() {
    let bed = bed_waiting(Duration::from_secs(2));
    let exported = bed.export(true);
    bed.region.fill(0, DATA, 0xa5).unwrap();
    let handle = exported.handle();
    let running = bed.gpu.start(4, move |mem, index| {
        let queue = DeviceQueue::open(mem, handle).unwrap();
        let at = u64::from(index) * 8;
        while queue.run(mem, DeviceOp::Write, at, 8, at * BLOCK) == Answer::Done {}
    });
    bed.inject("lost@op=create-cq,count=1");
    bed.drive.reset().unwrap();
    bed.sim.recreate(1).unwrap();
    running.unwrap().join().unwrap();
    nothing_was_written_to_another_namespace(&bed, exported);
}
