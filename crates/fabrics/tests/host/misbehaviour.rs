//! Targets that violate the protocol: no panic, no endless wait, no wrong bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::target::{Act, BLOCK, Config, Outgoing, Target, pattern};
use crate::{open, try_open};

/// Changes a PDU.
type Change = fn(&mut Vec<u8>);

/// Reads and writes once with a target that changes one PDU, and returns how that was noticed.
fn noticed(kind: u8, options: &str, success: bool, change: Change) -> String {
    let hook = move |mut out: Outgoing| {
        if out.kind == kind && out.count == 2 {
            change(&mut out.bytes);
        }
        Act::Send(out.bytes)
    };
    let target = Target::start(Config { hook: Arc::new(hook), success, ..Config::default() });
    let drive = open(&target, options);
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(64 * BLOCK).unwrap();
    let host = buffer.host().unwrap();
    let start = Instant::now();
    // 64 blocks are two data PDUs, or two requests for data. Reads finally succeed or fail.
    let read = queue.read(ns, 3, 64, &buffer, 0);
    if read.is_ok() {
        let seen = host.to_vec(0, 64 * BLOCK).unwrap();
        assert!(seen == pattern(67 * BLOCK)[3 * BLOCK..], "wrong bytes, {kind} {options}");
    }
    let wrote = queue.write(ns, 3, 64, &buffer, 0);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    let mut said: Vec<String> = drive.incidents().into_iter().map(|incident| incident.cause).collect();
    match read {
        Ok(moved) if moved.retries > 0 => said.push(format!("{} retries", moved.retries)),
        Ok(_) => {}
        Err(error) => said.push(error.to_string()),
    }
    said.extend(wrote.err().map(|error| error.to_string()));
    said.join("; ")
}

fn put(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn headers_that_cannot_be_end_the_connection() {
    let cases: [(u8, &str, Change, &str); 17] = [
        (7, "", |b| b[0] = 4, "type 0x04 came"),
        (7, "", |b| b[0] = 1, "type 0x01 came"),
        (7, "", |b| b[0] = 8, "type 0x08 came"),
        (7, "", |b| b[2] = 23, "has 23 bytes instead of 24"),
        (7, "", |b| b[3] = 20, "starts at byte 20"),
        (7, "", |b| put(b, 4, 25), "claims 25 bytes"),
        (7, "", |b| put(b, 4, u32::MAX), "its parts have"),
        (7, "", |b| b[1] |= 1, "flags"),
        (7, "", |b| b[1] = 8, "flags"),
        (7, "", |b| b[8] ^= 0x15, "not in flight"),
        (7, "", |b| b[9] ^= 0x80, "not in flight"),
        (7, "", |b| put(b, 12, 0), "came or were asked for"),
        (7, "", |b| put(b, 12, u32::MAX), "came or were asked for"),
        (9, "", |b| put(b, 12, 4), "came or were asked for"),
        (9, "", |b| put(b, 16, 1 << 20), "came or were asked for"),
        (9, "", |b| put(b, 16, 0), "came or were asked for"),
        (7, "?digests=header", |b| b[25] ^= 1, "header's digest"),
    ];
    for (kind, options, change, want) in cases {
        let said = noticed(kind, options, true, change);
        assert!(said.contains(want), "kind {kind}, want '{want}': {said}");
    }
}

#[test]
fn answers_that_do_not_fit_their_command_are_noticed() {
    // The second data PDU is the read's last: without it the read is short.
    let short: Change = |b| *b = Vec::new();
    assert!(noticed(7, "", false, short).contains("1 retries"));
    // The answer to the read.
    let respond = |change: Change| {
        let hook = move |mut out: Outgoing| {
            if out.kind == 5 && out.count == 1 {
                change(&mut out.bytes);
            }
            Act::Send(out.bytes)
        };
        let target = Target::start(Config { hook: Arc::new(hook), success: false, ..Config::default() });
        let drive = open(&target, "");
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = drive.buffer(64 * BLOCK).unwrap();
        queue.read(ns, 3, 64, &buffer, 0).unwrap();
        assert!(buffer.host().unwrap().to_vec(0, 64 * BLOCK).unwrap() == pattern(67 * BLOCK)[3 * BLOCK..]);
        // Data past the read's end is noticed by the next read.
        let start = Instant::now();
        while drive.incidents().is_empty() && start.elapsed() < Duration::from_secs(10) {
            queue.read(ns, 3, 64, &buffer, 0).unwrap();
        }
        drive.incidents().into_iter().map(|incident| incident.cause).collect::<String>()
    };
    assert!(respond(|b| b[20] ^= 1).contains("not in flight"));
    // The same twice.
    assert!(respond(|b| b.extend(b.clone())).contains("not in flight"));
    assert!(respond(|b| put(b, 4, 28)).contains("claims 28"));
}

#[test]
fn wrong_digests_of_data_fail_the_command_alone() {
    for success in [true, false] {
        let change: Change = |b| *b.last_mut().unwrap() ^= 1;
        assert_eq!(noticed(7, "?digests=data", success, change), "1 retries");
        let change: Change = |b| b[100] ^= 4;
        assert_eq!(noticed(7, "?digests=all", success, change), "1 retries");
    }
}

#[test]
fn the_targets_own_end_is_reported() {
    let hook = |out: Outgoing| {
        if out.kind != 7 || out.count != 2 {
            return Act::Send(out.bytes);
        }
        let mut term = vec![3, 0, 24, 0, 24, 0, 0, 0, 4, 0, 12, 0];
        term.resize(24, 0);
        Act::Close(term)
    };
    let target = Target::start(Config { hook: Arc::new(hook), ..Config::default() });
    let drive = open(&target, "?digests=header");
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(64 * BLOCK).unwrap();
    queue.read(ns, 3, 64, &buffer, 0).unwrap();
    let cause = &drive.incidents()[0].cause;
    assert!(cause.contains("data was out of range (code 4, information 0xc)"), "{cause}");
}

#[test]
fn a_bad_start_is_reported() {
    let cases: [(Change, &str); 7] = [
        (|b| b[8] = 1, "version 1"),
        (|b| b[10] = 32, "CPDA 32"),
        (|b| b[11] = 4, "were not asked for"),
        (|b| put(b, 12, 4095), "MAXH2CDATA 4095"),
        (|b| b[2] = 24, "instead of 128"),
        (|b| put(b, 4, 129), "claims 129"),
        (|b| b[0] = 5, "type 0x05"),
    ];
    for (change, want) in cases {
        let hook = move |mut out: Outgoing| {
            if out.kind == 1 {
                change(&mut out.bytes);
            }
            Act::Send(out.bytes)
        };
        let target = Target::start(Config { hook: Arc::new(hook), ..Config::default() });
        let said = try_open(&target, "").err().unwrap();
        assert!(said.contains(want), "want '{want}': {said}");
    }
}

#[test]
fn a_connection_that_ends_at_any_byte_ends_well() {
    // Every byte of a data PDU's header and digests, and of an answer; some bytes of the data.
    for (kind, len) in [(7u8, 28usize), (5, 28)] {
        for cut in (0..=len).chain([1000]) {
            let hook = move |out: Outgoing| {
                if out.kind == kind && out.count == 1 {
                    Act::Close(out.bytes[..cut.min(out.bytes.len() - 1)].to_vec())
                } else {
                    Act::Send(out.bytes)
                }
            };
            let config = Config { hook: Arc::new(hook), success: false, ..Config::default() };
            let target = Target::start(config);
            let drive = open(&target, "?digests=all");
            let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
            let buffer = drive.buffer(8 * BLOCK).unwrap();
            queue.read(ns, 3, 8, &buffer, 0).unwrap();
            let seen = buffer.host().unwrap().to_vec(0, 8 * BLOCK).unwrap();
            assert!(seen == pattern(11 * BLOCK)[3 * BLOCK..], "kind {kind}, cut at {cut}");
        }
    }
}

#[test]
fn slow_answers_are_waited_for() {
    let hook = |out: Outgoing| {
        if out.kind == 7 && out.count == 1 {
            Act::Late(Duration::from_millis(300), out.bytes)
        } else {
            Act::Send(out.bytes)
        }
    };
    let target = Target::start(Config { hook: Arc::new(hook), ..Config::default() });
    let drive = open(&target, "");
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    queue.read(ns, 3, 8, &buffer, 0).unwrap();
    assert!(drive.incidents().is_empty());
}

/// A target that changes the nth answer on its admin queue. The first are CAP, VS, the answer to the new CC, and CSTS.
fn starting(change: impl Fn(u32, Vec<u8>) -> Act + Send + Sync + 'static) -> Target {
    let count = AtomicU32::new(0);
    let hook = move |out: Outgoing| match (out.qid, out.kind) {
        (Some(0), 5) => change(count.fetch_add(1, Ordering::AcqRel) + 1, out.bytes),
        _ => Act::Send(out.bytes),
    };
    // It says that it is ready within 500 ms.
    Target::start(Config { hook: Arc::new(hook), to: 1, ..Config::default() })
}

/// The result of an answer, without digests.
const RESULT: usize = 8;

#[test]
fn the_time_to_become_ready_is_no_limit_of_an_answer() {
    const PAUSE: Duration = Duration::from_millis(700);
    let target = starting(|count, mut bytes| match count {
        3 => Act::Late(PAUSE, bytes),
        4 => {
            put(&mut bytes, RESULT, 0);
            Act::Late(PAUSE, bytes)
        }
        _ => Act::Send(bytes),
    });
    open(&target, "");
}

#[test]
fn a_controller_that_does_not_become_ready_is_not_waited_for() {
    let target = starting(|count, mut bytes| {
        if count >= 4 {
            put(&mut bytes, RESULT, 0);
        }
        Act::Send(bytes)
    });
    let said = try_open(&target, "").err().unwrap();
    assert!(said.contains("ready"), "{said}");
}
