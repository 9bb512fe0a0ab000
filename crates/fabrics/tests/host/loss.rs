//! Lost connections: reads are repeated, writes never, and every wait ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, Options, Recovery};
use onehop_os::StopSignal;
use onehop_proto::Status;

use crate::open;
use crate::target::{Act, BLOCK, Config, Outgoing, Target, pattern};

/// A target that applies `act` to the `nth` PDU of a kind on its I/O queues, once.
fn once(kind: u8, nth: u32, act: impl Fn(Vec<u8>) -> Act + Send + Sync + 'static) -> Config {
    let hook = move |out: Outgoing| {
        if out.kind == kind && out.count == nth { act(out.bytes) } else { Act::Send(out.bytes) }
    };
    Config { hook: Arc::new(hook), ..Config::default() }
}

#[test]
fn reads_are_repeated_when_a_connection_ends() {
    // The connection ends before, within and after the data.
    for keep in [0, 1, 24, 700, 5000] {
        let target =
            Target::start(once(7, 3, move |bytes| Act::Close(bytes[..keep.min(bytes.len())].to_vec())));
        let drive = open(&target, "");
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = drive.buffer(200 * BLOCK).unwrap();
        queue.read(ns, 5, 200, &buffer, 0).unwrap();
        let seen = buffer.host().unwrap().to_vec(0, 200 * BLOCK).unwrap();
        assert!(seen == pattern(205 * BLOCK)[5 * BLOCK..], "after {keep} bytes");
        let incidents = drive.incidents();
        assert_eq!(incidents.len(), 1, "{incidents:?}");
        assert!(incidents[0].cause.contains("closed the connection"), "{}", incidents[0].cause);
        // The drive keeps working.
        queue.write(ns, 0, 1, &buffer, 0).unwrap();
        assert_eq!(target.breaches(), Vec::<String>::new());
    }
}

#[test]
fn writes_are_never_repeated() {
    // The answer to the write is lost, or the request for its data.
    for (kind, blocks, carried_out) in [(5, 4, 1), (9, 100, 0)] {
        let target = Target::start(Config { success: true, ..once(kind, 1, |_| Act::Close(Vec::new())) });
        let drive = open(&target, "");
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = drive.buffer(100 * BLOCK).unwrap();
        let error = queue.write(ns, 8, blocks, &buffer, 0).unwrap_err();
        assert!(matches!(error, Error::OutcomeUnknown { .. }), "{error}");
        assert!(error.to_string().contains("blocks 8 to"), "{error}");
        queue.read(ns, 8, blocks, &buffer, 0).unwrap();
        let writes = target.shared.seen.lock().unwrap().writes.clone();
        assert_eq!(writes.len(), carried_out, "{writes:?}");
        // The next one is the caller's own, and is executed.
        queue.write(ns, 8, blocks, &buffer, 0).unwrap();
    }
}

#[test]
fn a_target_that_comes_back_is_found_again() {
    let target = Target::start(Config::default());
    let drive = open(&target, "?reconnect=20");
    let (ns, queue) = (drive.namespace(1).unwrap().clone(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    queue.read(&ns, 0, 8, &buffer, 0).unwrap();
    target.shared.is_down.store(true, Ordering::Release);
    target.disconnect();
    std::thread::scope(|scope| {
        let read = scope.spawn(|| queue.read(&ns, 9, 8, &buffer, 0));
        std::thread::sleep(Duration::from_millis(800));
        target.shared.is_down.store(false, Ordering::Release);
        read.join().unwrap().unwrap();
    });
    assert!(buffer.host().unwrap().to_vec(0, 8 * BLOCK).unwrap() == pattern(17 * BLOCK)[9 * BLOCK..]);
    assert_eq!(drive.incidents().len(), 1);
}

#[test]
fn a_target_that_stays_away_ends_every_call_with_the_reason() {
    let target = Target::start(Config::default());
    let drive = open(&target, "?reconnect=1");
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    target.shared.is_down.store(true, Ordering::Release);
    target.disconnect();
    let start = Instant::now();
    let error = queue.read(ns, 0, 8, &buffer, 0).unwrap_err();
    assert!(matches!(&error, Error::Lost { why, .. } if why.contains("reconnecting")), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    // The next call does not retry.
    let start = Instant::now();
    assert!(queue.read(ns, 0, 8, &buffer, 0).is_err() && drive.log_page(2, u32::MAX, 512).is_err());
    assert!(start.elapsed() < Duration::from_secs(1));
    drop((queue, drive));
}

#[test]
fn a_queue_without_a_connection_is_reported_with_the_reason() {
    let reason = |target: &Target| match open(target, "?reconnect=1").queue().map(|_| ()) {
        Err(Error::NotConnected { why, .. }) => why,
        other => panic!("{other:?}"),
    };
    let refusing = Target::start(Config { io_connect: Status::new(1, 0x84).with_dnr(), ..Config::default() });
    let why = reason(&refusing);
    assert!(why.contains("refuses to connect queue 1") && why.contains("84h"), "{why}");
    // The target accepts no more connections.
    let target = Target::start(Config::default());
    let drive = open(&target, "?reconnect=1");
    target.shared.is_down.store(true, Ordering::Release);
    let error = drive.queue().map(|_| ()).unwrap_err().to_string();
    // It closes the connection, or resets it if the host's request has arrived by then.
    assert!(error.contains("queue 1") && (error.contains("closed") || error.contains("reset")), "{error}");
}

/// A request to stop also ends a long time limit for reconnecting.
#[test]
fn a_request_to_stop_ends_reconnecting() {
    let target = Target::start(Config::default());
    let (stop, name) = (StopSignal::default(), format!("{}?reconnect=3600", target.name()));
    let backend = onehop_fabrics::open(&name.parse().unwrap(), &stop).unwrap();
    let drive = Drive::open(backend, Options { stop: stop.clone(), ..crate::quick() }).unwrap();
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    target.shared.is_down.store(true, Ordering::Release);
    target.disconnect();
    let error = std::thread::scope(|scope| {
        let read = scope.spawn(|| queue.read(ns, 0, 8, &buffer, 0));
        std::thread::sleep(Duration::from_millis(500));
        stop.set();
        read.join().unwrap().unwrap_err()
    });
    assert!(matches!(error, Error::Interrupted { .. }), "{error}");
}

#[test]
fn a_request_to_stop_ends_connecting() {
    // The target stops answering from its first answer on, or from its answer to Connect on.
    for kind in [1, 5] {
        let (stop, asked) = (StopSignal::default(), Arc::new(AtomicBool::new(false)));
        let was_asked = asked.clone();
        let hook = move |out: Outgoing| {
            if out.kind != kind {
                return Act::Send(out.bytes);
            }
            was_asked.store(true, Ordering::Release);
            Act::Drop
        };
        let target = Target::start(Config { hook: Arc::new(hook), ..Config::default() });
        let name: onehop_fabrics::SubsystemAddress = target.name().parse().unwrap();
        let error = std::thread::scope(|scope| {
            let opening = scope.spawn(|| onehop_fabrics::open(&name, &stop).err());
            while !asked.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            stop.set();
            opening.join().unwrap()
        });
        assert!(matches!(error, Some(onehop_fabrics::Error::Interrupted)), "{kind}: {error:?}");
    }
}

#[test]
fn a_write_on_its_way_to_a_target_that_stays_away_has_an_unknown_outcome() {
    let target = Target::start(once(5, 1, |_| Act::Close(Vec::new())));
    let drive = open(&target, "?reconnect=1");
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    target.shared.is_down.store(true, Ordering::Release);
    let error = queue.write(ns, 8, 4, &buffer, 0).unwrap_err();
    assert!(matches!(error, Error::OutcomeUnknown { .. }), "{error}");
    assert_eq!(target.shared.seen.lock().unwrap().writes, [(8, 4)]);
    // The next one was never sent.
    let error = queue.write(ns, 8, 4, &buffer, 0).unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
}

#[test]
fn another_image_under_the_same_number_is_not_read_on() {
    let target = Target::start(Config::default());
    let drive = open(&target, "");
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    queue.read(ns, 0, 8, &buffer, 0).unwrap();
    // Size and format are the same, and it still has no NGUID.
    target.shared.uuid.store(9, Ordering::Release);
    target.disconnect();
    let error = queue.read(ns, 0, 8, &buffer, 0).unwrap_err();
    assert!(matches!(error, Error::NamespaceChanged { .. }), "{error:?}");
}

#[test]
fn an_abort_is_answered_under_its_own_identifier() {
    // More lost answers than the admin queue has entries.
    const LOST: usize = 30;
    let lose = |out: Outgoing| match (out.qid, out.kind, out.count % 2) {
        (Some(1), 7, 0) => Act::Drop,
        _ => Act::Send(out.bytes),
    };
    let target = Target::start(Config { hook: Arc::new(lose), ..Config::default() });
    let name: onehop_fabrics::SubsystemAddress = target.name().parse().unwrap();
    let options = Options { timeout: Duration::from_millis(50), ..crate::quick() };
    let drive = Drive::open(onehop_fabrics::open(&name, &StopSignal::default()).unwrap(), options).unwrap();
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    for _ in 0..LOST {
        queue.read(ns, 2, 8, &buffer, 0).unwrap();
    }
    let incidents = drive.incidents();
    let others: Vec<_> =
        incidents.iter().filter(|incident| incident.recovery != Recovery::QueueDelete).collect();
    assert!(incidents.len() >= LOST && others.is_empty(), "{others:?}");
    assert_eq!(target.breaches(), Vec::<String>::new());
}

#[test]
fn silence_is_noticed() {
    // The target withholds an answer to a read, data, a request for data, or everything on the admin queue.
    let silent = Arc::new(AtomicBool::new(false));
    let is_silent = silent.clone();
    let hook = move |out: Outgoing| {
        if is_silent.load(Ordering::Acquire) { Act::Drop } else { Act::Send(out.bytes) }
    };
    let target = Target::start(Config { hook: Arc::new(hook), ..Config::default() });
    let drive = open(&target, "?keepalive=1&reconnect=1");
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    silent.store(true, Ordering::Release);
    let start = Instant::now();
    let error = queue.read(ns, 0, 8, &buffer, 0).unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
}

#[test]
fn one_command_that_is_never_answered_is_tried_again() {
    let target = Target::start(once(7, 1, |_| Act::Drop));
    let drive = open(&target, "");
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    queue.read(ns, 2, 8, &buffer, 0).unwrap();
    assert!(buffer.host().unwrap().to_vec(0, 8 * BLOCK).unwrap() == pattern(10 * BLOCK)[2 * BLOCK..]);
    // Its queue was disconnected and reconnected.
    assert!(target.shared.seen.lock().unwrap().connects.iter().filter(|qid| **qid == 1).count() >= 2);
}

/// Random operations with connection losses, against a shadow copy.
#[test]
fn nothing_is_lost_and_nothing_written_twice() {
    let (count, cut) = (AtomicU32::new(0), 37);
    let hook = move |out: Outgoing| {
        let is_io = out.qid.is_some_and(|qid| qid > 0);
        if is_io && count.fetch_add(1, Ordering::Relaxed) % cut == cut - 1 {
            let keep = out.bytes.len() / 2;
            return Act::Close(out.bytes[..keep].to_vec());
        }
        Act::Send(out.bytes)
    };
    let target =
        Target::start(Config { hook: Arc::new(hook), blocks: 256, split: 2048, ..Config::default() });
    let drive = open(&target, "");
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(16 * BLOCK).unwrap();
    let host = buffer.host().unwrap();
    let mut shadow = pattern(256 * BLOCK);
    let mut random = 0x1234_5678_9abc_def1u64;
    let mut next = |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let (mut unknown, mut done) = (0, 0);
    for step in 0..600u32 {
        let blocks = 1 + next(16);
        let lba = next(256 - blocks);
        let (at, bytes) = (lba as usize * BLOCK, blocks as usize * BLOCK);
        if next(3) == 0 {
            let data: Vec<u8> = (0..bytes as u32).map(|i| ((i / 4) ^ step.wrapping_mul(77)) as u8).collect();
            host.write(0, &data).unwrap();
            let before = target.shared.seen.lock().unwrap().writes.len();
            match queue.write(ns, lba, blocks, &buffer, 0) {
                Ok(_) => done += 1,
                Err(Error::OutcomeUnknown { .. }) => unknown += 1,
                Err(error) => panic!("{error}"),
            }
            let after = target.shared.seen.lock().unwrap().writes.len();
            assert!(after - before <= 1, "written {} times", after - before);
            // The target shows what happened to it.
            if after > before {
                shadow[at..at + bytes].copy_from_slice(&data);
            }
        } else {
            queue.read(ns, lba, blocks, &buffer, 0).unwrap();
            assert!(host.to_vec(0, bytes).unwrap() == shadow[at..at + bytes], "step {step}");
        }
    }
    assert!(unknown > 0 && done > 0, "{unknown} unknown, {done} done");
    assert!(*target.shared.media.lock().unwrap() == shadow);
    assert_eq!(target.breaches(), Vec::<String>::new());
}
