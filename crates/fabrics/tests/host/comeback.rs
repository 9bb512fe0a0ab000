//! Targets that come back after a lost connection: slowly, unusable for a while, or with another image.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, Options};
use onehop_proto::admin::{Identify, cns, opcode};
use onehop_proto::{Sqe, Status};

use crate::target::{Act, BLOCK, Config, Outgoing, Target, pattern};
use crate::{open, open_with, quick};

/// Long enough for many retries on a busy machine.
const LONG: Duration = Duration::from_secs(30);

/// Reads 8 blocks from block 9 on.
fn read(drive: &Drive) -> Result<(), Error> {
    let (ns, queue) = (drive.namespace(1)?, drive.queue()?);
    let buffer = drive.buffer(8 * BLOCK)?;
    queue.read(ns, 9, 8, &buffer, 0)?;
    assert!(buffer.host()?.to_vec(0, 8 * BLOCK)? == pattern(17 * BLOCK)[9 * BLOCK..]);
    Ok(())
}

fn identifies(what: u8, qid: u16, sqe: &Sqe) -> bool {
    qid == 0 && sqe.opcode() == opcode::IDENTIFY && Identify::from(sqe).cns == what
}

#[test]
fn a_namespace_that_cannot_be_identified_for_a_moment_is_still_the_same() {
    // More failures than a command has retries, too.
    for times in [1, 9] {
        for what in [cns::NAMESPACE, cns::NAMESPACE_DESCRIPTORS] {
            for status in [Status::INTERNAL_ERROR, Status::NAMESPACE_NOT_READY, Status::ANA_TRANSITION] {
                let target = Target::start(Config::default());
                let drive = open_with(&target, Options { admin_timeout: LONG, ..quick() });
                let mut left = times;
                target.refuse(move |qid, sqe| {
                    let fails = left > 0 && identifies(what, qid, sqe);
                    left -= u32::from(fails);
                    if fails { status } else { Status::SUCCESS }
                });
                target.disconnect();
                drive.reset().unwrap();
                read(&drive).unwrap_or_else(|error| panic!("{what:#x} {status} {times}: {error}"));
            }
        }
    }
}

#[test]
fn a_queue_is_connected_whether_or_not_the_size_of_capsules_is_known() {
    for failing in 1..4 {
        let target = Target::start(Config::default());
        let mut count = 0;
        target.refuse(move |qid, sqe| {
            let counts = identifies(cns::CONTROLLER, qid, sqe);
            count += u32::from(counts);
            if counts && count == failing { Status::INTERNAL_ERROR } else { Status::SUCCESS }
        });
        let drive = open_with(&target, Options { writable: true, ..quick() });
        read(&drive).unwrap();
        let (ns, buffer) = (drive.namespace(1).unwrap(), drive.buffer(4 * BLOCK).unwrap());
        drive.queue().unwrap().write(ns, 40, 4, &buffer, 0).unwrap();
        assert_eq!(target.shared.seen.lock().unwrap().writes, [(40, 4)]);
    }
}

/// The second namespace is lost, and the first keeps working.
fn only_the_second_is_lost(drive: &Drive) {
    read(drive).unwrap();
    let (second, queue) = (drive.namespace(2).unwrap(), drive.queue().unwrap());
    let error = queue.read(second, 0, 1, &drive.buffer(BLOCK).unwrap(), 0).unwrap_err();
    assert!(matches!(error, Error::NamespaceChanged { nsid: 2, .. }), "{error}");
}

fn identifies_second(sqe: &Sqe) -> bool {
    identifies(cns::NAMESPACE, 0, sqe) && sqe.nsid() == 2
}

#[test]
fn a_namespace_that_cannot_be_identified_costs_no_other() {
    let refusal =
        |_, sqe: &Sqe| if identifies_second(sqe) { Status::INTERNAL_ERROR } else { Status::SUCCESS };
    let target = Target::start(Config { namespaces: 2, ..Config::default() });
    let drive = open(&target, "?reconnect=5");
    target.refuse(refusal);
    drive.reset().unwrap();
    only_the_second_is_lost(&drive);
    // Nor does it cost the drive when it is opened.
    let drive = open(&target, "");
    read(&drive).unwrap();
    assert!(matches!(drive.namespace(2), Err(Error::Command { .. })));
}

#[test]
fn a_namespace_that_is_never_answered_for_costs_no_other() {
    let drops = Arc::new(AtomicBool::new(false));
    let is_dropped = drops.clone();
    let hook = move |out: Outgoing| match (out.qid, out.kind) {
        (Some(0), 7) if is_dropped.load(Ordering::Acquire) => Act::Drop,
        (Some(0), 5) if is_dropped.swap(false, Ordering::AcqRel) => Act::Drop,
        _ => Act::Send(out.bytes),
    };
    let config = Config { namespaces: 2, hook: Arc::new(hook), ..Config::default() };
    let target = Target::start(config);
    let drive = open(&target, "?reconnect=20");
    target.refuse(move |_, sqe| {
        drops.fetch_or(identifies_second(sqe), Ordering::AcqRel);
        Status::SUCCESS
    });
    drive.reset().unwrap();
    only_the_second_is_lost(&drive);
}

#[test]
fn bringing_many_namespaces_back_may_take_longer_than_a_command() {
    let slow = Arc::new(AtomicBool::new(false));
    let is_slow = slow.clone();
    let hook = move |out: Outgoing| {
        let is_late = (out.qid, out.kind) == (Some(0), 5) && is_slow.load(Ordering::Acquire);
        if is_late { Act::Late(Duration::from_millis(15), out.bytes) } else { Act::Send(out.bytes) }
    };
    let config = Config { namespaces: 100, hook: Arc::new(hook), ..Config::default() };
    let target = Target::start(config);
    let drive = open(&target, "?reconnect=20");
    slow.store(true, Ordering::Release);
    let start = Instant::now();
    drive.reset().unwrap();
    assert!(start.elapsed() > quick().admin_timeout, "{:?}", start.elapsed());
    read(&drive).unwrap();
}

#[test]
fn a_namespace_that_is_gone_is_not_waited_for() {
    for status in [Status::INVALID_NAMESPACE, Status::INTERNAL_ERROR.with_dnr()] {
        let target = Target::start(Config::default());
        let drive = open(&target, "");
        target.refuse(
            move |qid, sqe| {
                if identifies(cns::NAMESPACE, qid, sqe) { status } else { Status::SUCCESS }
            },
        );
        drive.reset().unwrap();
        assert!(matches!(read(&drive), Err(Error::NamespaceChanged { .. })));
    }
}

#[test]
fn identifiers_that_cannot_be_read_are_not_taken_for_none() {
    let target = Target::start(Config::default());
    // Every first read of them fails: when the drive is opened, and after each reset.
    let mut fails = false;
    target.refuse(move |qid, sqe| {
        fails ^= identifies(cns::NAMESPACE_DESCRIPTORS, qid, sqe);
        let refused = fails && identifies(cns::NAMESPACE_DESCRIPTORS, qid, sqe);
        if refused { Status::INTERNAL_ERROR } else { Status::SUCCESS }
    });
    let drive = open(&target, "");
    drive.reset().unwrap();
    read(&drive).unwrap();
    target.shared.uuid.store(9, Ordering::Release);
    drive.reset().unwrap();
    assert!(matches!(read(&drive), Err(Error::NamespaceChanged { .. })));
}

#[test]
fn every_identifier_is_compared() {
    // UUID and NGUID when the drive is opened, and after each reset; 0 is none.
    let cases: [(&[[u8; 2]], bool); 15] = [
        (&[[1, 5], [1, 5]], true),
        (&[[1, 5], [2, 5]], false),
        (&[[1, 5], [1, 6]], false),
        (&[[1, 5], [0, 5]], false),
        (&[[1, 5], [1, 0]], false),
        (&[[1, 5], [0, 0]], false),
        (&[[1, 0], [1, 5]], true),
        (&[[0, 5], [1, 5]], true),
        (&[[0, 0], [0, 0]], true),
        (&[[0, 0], [1, 0]], false),
        (&[[0, 5], [1, 0]], false),
        // What the first reset shows counts at the second.
        (&[[0, 5], [1, 5], [1, 5]], true),
        (&[[0, 5], [1, 5], [2, 5]], false),
        (&[[0, 5], [1, 5], [0, 5]], false),
        (&[[1, 0], [1, 5], [1, 6]], false),
    ];
    for (ids, is_same) in cases {
        let target = Target::start(Config::default());
        let name = |[uuid, nguid]: [u8; 2]| {
            target.shared.uuid.store(uuid, Ordering::Release);
            target.shared.nguid.store(nguid, Ordering::Release);
        };
        name(ids[0]);
        let drive = open(&target, "");
        for now in &ids[1..] {
            name(*now);
            drive.reset().unwrap();
        }
        match read(&drive) {
            Ok(()) => assert!(is_same, "{ids:?}"),
            Err(error @ Error::NamespaceChanged { .. }) => assert!(!is_same, "{ids:?}: {error}"),
            Err(error) => panic!("{ids:?}: {error}"),
        }
    }
}

#[test]
fn a_target_that_is_not_usable_yet_has_the_whole_time_for_reconnecting() {
    const UNUSABLE: Duration = Duration::from_secs(3);
    let target = Target::start(Config::default());
    let drive = open(&target, "?reconnect=60");
    let start = Instant::now();
    target.refuse(move |qid, _| {
        let is_unusable = qid == 0 && start.elapsed() < UNUSABLE;
        if is_unusable { Status::INTERNAL_ERROR } else { Status::SUCCESS }
    });
    target.disconnect();
    read(&drive).unwrap_or_else(|error| panic!("{error}"));
    assert!(start.elapsed() >= UNUSABLE);
    // The pauses grow: few connections were made.
    let connects = target.shared.seen.lock().unwrap().connects.iter().filter(|qid| **qid == 0).count();
    assert!(connects < 15, "{connects}");
}

/// A target whose controller has another serial number as often as this is set.
fn with_other_serials() -> (Target, Arc<AtomicU32>) {
    let left = Arc::new(AtomicU32::new(0));
    let others = left.clone();
    let hook = move |mut out: Outgoing| {
        let at = out.bytes.windows(10).position(|bytes| bytes == b"FABRIC0001");
        let is_other = |n: u32| n.checked_sub(1);
        if let Some(at) = at
            && others.fetch_update(Ordering::AcqRel, Ordering::Acquire, is_other).is_ok()
        {
            out.bytes[at..at + 10].copy_from_slice(b"ANOTHER001");
        }
        Act::Send(out.bytes)
    };
    (Target::start(Config { hook: Arc::new(hook), ..Config::default() }), left)
}

#[test]
fn another_controller_is_not_used_and_the_search_goes_on() {
    let (target, left) = with_other_serials();
    let drive = open(&target, "?reconnect=60");
    left.store(3, Ordering::Release);
    target.disconnect();
    read(&drive).unwrap();
    let drive = open(&target, "?reconnect=1");
    left.store(u32::MAX, Ordering::Release);
    let error = drive.reset().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Lost { .. }), "{error:?}");
    assert!(text.contains("ANOTHER001") && text.contains("FABRIC0001"), "{text}");
}

#[test]
fn a_controller_that_fails_a_command_once_can_be_opened() {
    for what in [cns::CONTROLLER, cns::ACTIVE_NAMESPACES, cns::NAMESPACE] {
        let target = Target::start(Config::default());
        let mut has_failed = false;
        target.refuse(move |qid, sqe| {
            let fails = !has_failed && identifies(what, qid, sqe);
            has_failed |= fails;
            if fails { Status::NAMESPACE_NOT_READY } else { Status::SUCCESS }
        });
        read(&open(&target, "")).unwrap();
    }
}

#[test]
fn a_target_that_never_becomes_usable_ends_every_call_with_the_reason() {
    let target = Target::start(Config::default());
    let drive = open(&target, "?reconnect=2");
    target.refuse(|qid, _| if qid == 0 { Status::INTERNAL_ERROR } else { Status::SUCCESS });
    let start = Instant::now();
    let error = drive.reset().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Lost { .. }), "{error:?}");
    assert!(text.contains("reconnecting") && text.contains("identify controller"), "{text}");
    assert!(start.elapsed() >= Duration::from_secs(2));
    // The time begins anew with each outage, but not for a drive that was given up.
    assert!(matches!(read(&drive), Err(Error::Lost { .. })));
}

#[test]
fn a_limit_beyond_what_the_clock_counts_is_none() {
    let target = Target::start(Config::default());
    let drive = open_with(&target, Options { admin_timeout: Duration::MAX, ..quick() });
    drive.reset().unwrap();
    read(&drive).unwrap();
}

#[test]
fn a_target_that_answers_slowly_has_a_limit_of_time_in_all() {
    // Each answer takes less than the limit for one command, and connecting takes six of them.
    const PAUSE: Duration = Duration::from_secs(4);
    let (slow, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let is_slow = slow.clone();
    let was_slow = seen.clone();
    let hook = move |out: Outgoing| {
        if !is_slow.load(Ordering::Acquire) {
            return Act::Send(out.bytes);
        }
        was_slow.store(true, Ordering::Release);
        Act::Late(PAUSE, out.bytes)
    };
    let target = Target::start(Config { hook: Arc::new(hook), ..Config::default() });
    let drive = open(&target, "?reconnect=1");
    slow.store(true, Ordering::Release);
    target.disconnect();
    let start = Instant::now();
    let error = drive.reset().unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error:?}");
    assert!(
        seen.load(Ordering::Acquire) && start.elapsed() < Duration::from_secs(31),
        "{:?}",
        start.elapsed()
    );
}
