//! Faults of the drive.

use std::time::Duration;

use onehop_array::{ArrayError, ArrayOptions, ArrayRows, Error};
use onehop_proto::Status;
use onehop_proto::kernel::Answer;

use crate::{Random, bed, expected, media, options, within};

const ROWS: ArrayRows = ArrayRows { count: 4096, bytes: 4096, stride: 4096 };

fn ids(count: u64) -> Vec<u64> {
    let mut random = Random(count);
    (0..count).map(|_| random.below(1000)).collect()
}

#[test]
fn late_reordered_and_failing_completions_change_nothing() {
    let media = media();
    for fault in [
        "late@op=read,every=40,delay=20ms",
        "reorder@op=read,every=3,by=4",
        "fail-once@op=read,every=50",
        "stale-phase@op=read,every=30",
        "sqhd-lag@op=read,every=5",
    ] {
        let bed = bed("mem:16M");
        bed.inject(fault);
        let array = bed.array(options(4096, 64));
        let ids = ids(500);
        let (moved, got) = bed.gather(&array, ROWS, &ids);
        assert_eq!(moved.failed, [], "{fault}");
        assert!(got == expected(&media, ROWS, &ids), "{fault}");
        array.close().unwrap();
        assert_eq!(bed.sim.violations(), [], "{fault}");
    }
}

#[test]
fn commands_that_get_lost_are_read_again() {
    let (bed, media) = (bed("mem:16M"), media());
    bed.inject("lost@op=read,n=40");
    let array = bed.array(ArrayOptions { stall: Duration::from_millis(250), ..options(4096, 64) });
    let ids = ids(300);
    let (moved, got) = bed.gather(&array, ROWS, &ids);
    assert_eq!(moved.failed, []);
    assert!(got == expected(&media, ROWS, &ids));
    assert!(!bed.drive.incidents().is_empty());
    array.close().unwrap();
}

#[test]
fn a_failed_read_is_reported_and_frees_its_page() {
    let (bed, media) = (bed("mem:16M"), media());
    // One failure, in the page of row 5.
    bed.inject("fail@op=read,lba=43,status=2/81,count=1");
    let array = bed.array(options(4096, 8));
    let failed = ArrayError::Read(Answer::Failed(Status::UNRECOVERED_READ));
    let (moved, got) = bed.gather(&array, ROWS, &[4, 5, 6]);
    let [(1, ArrayError::Read(Answer::Failed(status)))] = moved.failed[..] else { panic!("{moved:?}") };
    assert_eq!(ArrayError::Read(Answer::Failed(Status(status.0 & Status::UNRECOVERED_READ.0))), failed);
    assert!(got[..4096] == expected(&media, ROWS, &[4]) && got[8192..] == expected(&media, ROWS, &[6]));
    let stats = array.stats().unwrap();
    assert_eq!((stats.failed_reads, stats.reads), (1, 3));
    // All eight pages can be pinned, the failed one included.
    let all: Vec<u64> = (0..8).collect();
    let (moved, got) = bed.gather(&array, ROWS, &all);
    assert_eq!(moved.failed, []);
    assert!(got == expected(&media, ROWS, &all));
    assert_eq!(array.stats().unwrap().reads, 9);
    array.close().unwrap();
}

#[test]
fn everyone_who_waits_for_a_failed_read_gets_the_error() {
    let bed = bed("mem:16M?latency=5ms");
    bed.inject("media@lba=0-7");
    let array = bed.array(options(4096, 8));
    let said = bed.run(&array, 64, |mem, array, index| array.pin(mem, u64::from(index) * 8).map(|_| ()));
    assert!(said.iter().all(|end| matches!(end, Err(ArrayError::Read(Answer::Failed(_))))), "{said:?}");
    let stats = array.stats().unwrap();
    assert!(stats.reads == stats.failed_reads && stats.reads < 64, "{stats:?}");
}

#[test]
fn pages_that_cannot_be_written_stay_and_are_reported() {
    let bed = bed("mem:16M");
    let array = bed.array(options(4096, 64));
    let bytes: Vec<u8> = (0..3 * 4096).map(|i| i as u8).collect();
    bed.inject("fail@op=write,lba=80-87,count=2");
    bed.scatter(&array, ROWS, &[9, 10, 11], &bytes);
    for _ in 0..2 {
        let Err(Error::NotWritten { failed: 1, error }) = array.flush() else { panic!("it was flushed") };
        let ArrayError::WriteBack(Answer::Failed(_)) = error else { panic!("{error}") };
        assert_eq!(array.broken().unwrap(), [(10, error)]);
        // The dirty pages are kept.
        let (moved, got) = bed.gather(&array, ROWS, &[9, 10, 11]);
        assert!(moved.failed.is_empty() && got == bytes);
    }
    assert_eq!(array.flush().unwrap().written, 1);
    assert_eq!(array.broken().unwrap(), []);
    array.close().unwrap();
    let mut there = vec![0; bytes.len()];
    bed.sim.read_media(1, 9 * 4096, &mut there).unwrap();
    assert!(there == bytes);
}

#[test]
fn a_page_that_cannot_be_written_does_not_make_room() {
    let bed = bed("mem:16M");
    let array = bed.array(options(4096, 1));
    let bytes = vec![7; 4096];
    bed.inject("fail@op=write,lba=0-7,count=1");
    bed.scatter(&array, ROWS, &[0], &bytes);
    let (moved, _) = bed.gather(&array, ROWS, &[1]);
    assert!(matches!(moved.failed[..], [(0, ArrayError::WriteBack(Answer::Failed(_)))]), "{moved:?}");
    let (moved, got) = bed.gather(&array, ROWS, &[0]);
    assert!(moved.failed.is_empty() && got == bytes);
    // The next write-back succeeds and makes room.
    let (moved, _) = bed.gather(&array, ROWS, &[1]);
    assert_eq!(moved.failed, []);
    let (moved, got) = bed.gather(&array, ROWS, &[0]);
    assert!(moved.failed.is_empty() && got == bytes);
    array.close().unwrap();
}

#[test]
fn everything_ends_when_the_drive_is_gone() {
    let bed = bed("mem:16M");
    bed.inject("gone@op=read,n=30");
    let times = ArrayOptions {
        stall: Duration::from_millis(250),
        limit: Duration::from_secs(2),
        ..options(4096, 64)
    };
    let array = bed.array(ArrayOptions { patience: Duration::from_secs(1), ..times });
    let ids = ids(200);
    let (moved, _) = within(Duration::from_secs(60), || bed.gather(&array, ROWS, &ids));
    assert!(!moved.failed.is_empty());
    assert!(moved.failed.iter().all(|(_, error)| !matches!(error, ArrayError::Range)));
    let begun = std::time::Instant::now();
    while array.check().is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(10), "the host has not noticed");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_queue_that_is_stopped_ends_every_wait() {
    let bed = bed("mem:16M");
    bed.inject("lost@op=read");
    let array = bed.array(ArrayOptions { stall: Duration::from_secs(30), ..options(4096, 8) });
    let moved = within(Duration::from_secs(20), || {
        std::thread::scope(|scope| {
            let gather = scope.spawn(|| bed.gather(&array, ROWS, &[1, 2, 3]).0);
            std::thread::sleep(Duration::from_millis(100));
            array.stop();
            gather.join().unwrap()
        })
    });
    assert_eq!(moved.failed.len(), 3);
    assert!(moved.failed.iter().all(|(_, error)| *error == ArrayError::Read(Answer::Stopped)), "{moved:?}");
}

#[test]
fn a_queue_that_is_stopped_ends_waits_for_room() {
    let bed = bed("mem:16M");
    bed.inject("lost@op=read");
    let times = ArrayOptions {
        stall: Duration::from_secs(90),
        patience: Duration::from_secs(90),
        ..options(4096, 1)
    };
    let array = bed.array(times);
    let moved = within(Duration::from_secs(45), || {
        std::thread::scope(|scope| {
            let gather = scope.spawn(|| bed.gather(&array, ROWS, &[1, 2, 3]).0);
            let begun = std::time::Instant::now();
            while array.stats().unwrap().reads == 0 && begun.elapsed() < Duration::from_secs(30) {
                std::thread::sleep(Duration::from_millis(5));
            }
            // Until the command is in flight.
            std::thread::sleep(Duration::from_millis(200));
            array.stop();
            gather.join().unwrap()
        })
    });
    // The page of the read that was lost is the controller's for good.
    assert_eq!(moved.failed.len(), 3);
    assert!(moved.failed.iter().all(|(_, error)| *error == ArrayError::Read(Answer::Stopped)), "{moved:?}");
    let again = within(Duration::from_secs(45), || bed.gather(&array, ROWS, &[4]).0);
    assert_eq!(again.failed, [(0, ArrayError::Read(Answer::Stopped))]);
}
