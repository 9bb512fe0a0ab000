//! Path errors: the state of the only path may change, so commands are tried again for a limited time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use onehop_drive::Error;
use onehop_proto::Status;

use crate::target::{Act, BLOCK, Config, Outgoing, Target, pattern};
use crate::{open, open_with};

/// A target that fails its I/O commands with this status for a time, and the number of those that it has got.
fn failing(config: Config, status: Status, time: Duration) -> (Target, Arc<AtomicU32>) {
    let (target, count) = (Target::start(config), Arc::new(AtomicU32::new(0)));
    let (seen, mut since) = (count.clone(), None);
    target.refuse(move |qid, _| {
        if qid == 0 {
            return Status::SUCCESS;
        }
        seen.fetch_add(1, Ordering::AcqRel);
        let is_over = since.get_or_insert_with(Instant::now).elapsed() >= time;
        if is_over { Status::SUCCESS } else { status }
    });
    (target, count)
}

#[test]
fn commands_wait_for_a_path_that_is_about_to_change() {
    let time = Duration::from_secs(1);
    for status in [Status::ANA_TRANSITION, Status::ANA_INACCESSIBLE, Status::CONTROLLER_PATH_ERROR] {
        let (target, count) = failing(Config { anatt: 20, ..Config::default() }, status, time);
        let drive = open(&target, "");
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = drive.buffer(8 * BLOCK).unwrap();
        let start = Instant::now();
        let moved = queue.read(ns, 9, 8, &buffer, 0).unwrap();
        assert!(start.elapsed() >= time);
        assert!(buffer.host().unwrap().to_vec(0, 8 * BLOCK).unwrap() == pattern(17 * BLOCK)[9 * BLOCK..]);
        // Not at once, but with pauses; and each is reported.
        let tries = count.load(Ordering::Acquire);
        assert!((2..=12).contains(&tries) && moved.retries == u64::from(tries) - 1, "{tries} {moved:?}");
        assert_eq!(drive.incidents().len(), 0);
    }
}

#[test]
fn a_write_waits_as_well_and_is_carried_out_once() {
    let (target, _) =
        failing(Config { anatt: 20, ..Config::default() }, Status::ANA_TRANSITION, Duration::from_secs(1));
    let drive = open(&target, "");
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    queue.write(ns, 9, 8, &buffer, 0).unwrap();
    assert_eq!(target.shared.seen.lock().unwrap().writes, [(9, 8)]);
}

#[test]
fn the_time_of_a_change_of_paths_is_a_limit() {
    let forever = Duration::from_secs(1000);
    let (target, _) = failing(Config { anatt: 1, ..Config::default() }, Status::ANA_INACCESSIBLE, forever);
    let drive = open(&target, "");
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    let start = Instant::now();
    let error = queue.read(ns, 9, 8, &buffer, 0).unwrap_err();
    let is_status = matches!(&error, Error::Command { status, .. } if status.is(Status::ANA_INACCESSIBLE));
    assert!(is_status, "{error}");
    assert!(start.elapsed() >= Duration::from_secs(1));
}

#[test]
fn a_path_that_is_lost_for_ever_is_not_tried_again() {
    let forever = Duration::from_secs(1000);
    for status in [Status::ANA_PERSISTENT_LOSS, Status::INTERNAL_PATH_ERROR.with_dnr()] {
        let (target, count) = failing(Config { anatt: 20, ..Config::default() }, status, forever);
        let drive = open(&target, "");
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = drive.buffer(8 * BLOCK).unwrap();
        let error = queue.read(ns, 9, 8, &buffer, 0).unwrap_err();
        assert!(matches!(&error, Error::Command { status: seen, .. } if seen.is(status)), "{error}");
        assert_eq!(count.load(Ordering::Acquire), 1);
    }
}

#[test]
fn a_request_to_stop_ends_the_wait_for_a_path() {
    let forever = Duration::from_secs(1000);
    let (target, _) = failing(Config { anatt: 255, ..Config::default() }, Status::ANA_INACCESSIBLE, forever);
    let stop = onehop_os::StopSignal::default();
    let backend = onehop_fabrics::open(&target.name().parse().unwrap(), &stop).unwrap();
    let options = onehop_drive::Options { stop: stop.clone(), ..crate::quick() };
    let drive = onehop_drive::Drive::open(backend, options).unwrap();
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    let start = Instant::now();
    let error = std::thread::scope(|scope| {
        let read = scope.spawn(|| queue.read(ns, 0, 8, &buffer, 0));
        std::thread::sleep(Duration::from_millis(300));
        stop.set();
        read.join().unwrap().unwrap_err()
    });
    assert!(matches!(error, Error::Interrupted { .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

#[test]
fn other_statuses_are_tried_again_as_often_as_the_options_say() {
    let forever = Duration::from_secs(1000);
    let (target, count) = failing(Config::default(), Status::INTERNAL_ERROR, forever);
    let drive = open(&target, "");
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    assert!(matches!(queue.read(ns, 9, 8, &buffer, 0), Err(Error::Command { .. })));
    assert_eq!(count.load(Ordering::Acquire), 4);
}

/// The delay that a status may ask for (CRDT1), and a status that does.
const LONG_DELAY: Duration = Duration::from_secs(9);
const DELAYED: Status = Status(Status::ANA_INACCESSIBLE.0 | 1 << 11);

#[test]
fn the_last_try_is_not_later_than_the_limit() {
    let hook = |mut out: Outgoing| {
        // Identify Controller's data follows the header of the PDU.
        if let Some(at) = out.bytes.windows(10).position(|bytes| bytes == b"FABRIC0001") {
            let page = at - 4;
            out.bytes[page + 128..][..2]
                .copy_from_slice(&(LONG_DELAY.as_millis() as u16 / 100).to_le_bytes());
        }
        Act::Send(out.bytes)
    };
    let config = Config { anatt: 1, hook: Arc::new(hook), ..Config::default() };
    let (target, count) = failing(config, DELAYED, Duration::from_secs(1000));
    let drive = open(&target, "");
    assert_eq!(Duration::from_millis(drive.identity().controller().retry_delay_ms(1).into()), LONG_DELAY);
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    let start = Instant::now();
    let error = queue.read(ns, 9, 8, &buffer, 0).unwrap_err();
    assert!(matches!(&error, Error::Command { .. }), "{error}");
    assert_eq!(count.load(Ordering::Acquire), 2);
    let took = start.elapsed();
    assert!(took >= Duration::from_secs(1) && took < LONG_DELAY, "{took:?}");
}

#[test]
fn without_retries_no_path_error_is_tried_again() {
    let forever = Duration::from_secs(1000);
    let (target, count) =
        failing(Config { anatt: 20, ..Config::default() }, Status::ANA_INACCESSIBLE, forever);
    let drive = open_with(&target, onehop_drive::Options { retries: 0, ..crate::quick() });
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(8 * BLOCK).unwrap();
    assert!(matches!(queue.read(ns, 9, 8, &buffer, 0), Err(Error::Command { .. })));
    assert_eq!(count.load(Ordering::Acquire), 1);
}
