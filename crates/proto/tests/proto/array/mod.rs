//! Arrays as device code, on threads of this machine and a backing that answers late, out of order, and with errors.

mod bed;

use std::collections::BTreeSet;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use bed::{Bed, Disk, LANES, Mem, PAGE, Random, word};
use onehop_proto::array::{
    ArrayError, GatherItem, GatherJob, HIT_WORDS, MISS_WORDS, MissList, PageRequest, PageStep, flush_slots,
    read_rows, run_hits, run_misses, write_rows,
};
use onehop_proto::kernel::{Answer, Lanes, share};
use onehop_proto::queue::Memory;
use onehop_proto::{GpuAddr, Status};

const UNREADABLE: Answer = Answer::Failed(Status(0x281));

/// Rows of these bytes, one every `stride` bytes.
#[derive(Clone, Copy)]
struct Rows(u32, u32);

impl Rows {
    fn count(self, bed: &Bed) -> u64 {
        (bed.bytes() - u64::from(self.0)) / u64::from(self.1) + 1
    }
}

fn job(bed: &Bed, rows: Rows, ids: &[u64]) -> GatherJob {
    GatherJob {
        items: GpuAddr(bed::ITEMS),
        out: GpuAddr(bed::OUT),
        answers: GpuAddr(bed::ANSWERS),
        rows: rows.count(bed),
        limit: bed::LIMIT,
        count: ids.len() as u32,
        row_bytes: rows.0,
        stride: rows.1,
        pad: 0,
    }
}

fn answers(bed: &Bed, ids: &[u64]) -> Vec<i32> {
    bed.get(bed::ANSWERS, ids.len()).into_iter().map(|word| word as i32).collect()
}

/// Has threads move rows; returns the result of each.
fn move_rows(
    bed: &Bed,
    rows: Rows,
    ids: &[u64],
    threads: u32,
    kernel: impl Fn(&Mem, &GatherJob, u32, u32) + Sync,
) -> Vec<i32> {
    let items = ids.iter().zip(0..).flat_map(|(row, to)| GatherItem { row: *row, to, pad: 0 }.words());
    bed.put(bed::ITEMS, items);
    bed.put(bed::ANSWERS, ids.iter().map(|_| u32::MAX));
    let job = job(bed, rows, ids);
    bed.run(threads, |mem, index| kernel(mem, &job, index, threads));
    answers(bed, ids)
}

fn gather(bed: &Bed, rows: Rows, ids: &[u64], warps: u32) -> Vec<i32> {
    let list = MissList(GpuAddr(bed::MISSES));
    bed.put(bed::MISSES, [0; MissList::ZEROED / 4]);
    move_rows(bed, rows, ids, warps, |mem, job, index, of| {
        let mem = mem.warp(HIT_WORDS);
        assert_eq!(mem.lanes(), LANES);
        run_hits(&mem, &mem, &bed.array(&mem), job, list, share(job.count, index, of));
    });
    // The answers stay as the first half has left them.
    let job = job(bed, rows, ids);
    bed.run(warps, |mem, _| {
        let mem = mem.warp(MISS_WORDS);
        run_misses(&mem, &mem, &bed.array(&mem), &job, list);
    });
    answers(bed, ids)
}

fn scatter(bed: &Bed, rows: Rows, ids: &[u64], threads: u32) -> Vec<i32> {
    move_rows(bed, rows, ids, threads, |mem, job, index, of| {
        write_rows(mem, &bed.array(mem), job, (index, of))
    })
}

/// Whether the buffer holds these rows of what `shadow` holds.
fn holds(bed: &Bed, rows: Rows, ids: &[u64], shadow: &[u32]) -> bool {
    let each = rows.0 as usize / 4;
    let got = bed.get(bed::OUT, ids.len() * each);
    let at = |id: &u64| (*id * u64::from(rows.1) / 4) as usize;
    ids.iter().zip(got.chunks(each)).all(|(id, got)| got == &shadow[at(id)..at(id) + each])
}

fn ids(count: u64, limit: u64, seed: u64) -> Vec<u64> {
    let mut random = Random(seed);
    (0..count).map(|_| random.below(limit)).collect()
}

#[test]
fn rows_of_every_kind_come_as_they_are_and_each_page_by_one_command() {
    for rows in [Rows(256, 256), Rows(264, 264), Rows(264, 512), Rows(4, 12), Rows(2048, 1024)] {
        let bed = Bed::new(4096, Disk { late: 3, ..Disk::default() });
        let ids = ids(300, rows.count(&bed).min(1000), u64::from(rows.0));
        for _ in 0..2 {
            assert!(gather(&bed, rows, &ids, 4).iter().all(|code| *code == 0));
            assert!(holds(&bed, rows, &ids, &bed.media()), "rows of {}", rows.0);
        }
        let pages = |id: &u64| {
            let first = id * u64::from(rows.1);
            first / PAGE..(first + u64::from(rows.0) - 1) / PAGE + 1
        };
        let pages = ids.iter().flat_map(pages).collect::<BTreeSet<_>>().len();
        assert_eq!(bed.reads() as usize, pages, "rows of {}", rows.0);
    }
}

#[test]
fn a_cache_of_one_page_serves_warps_and_threads() {
    let rows = Rows(1024, 1532);
    let bed = Bed::new(1, Disk { late: 2, ..Disk::default() });
    let ids = ids(200, rows.count(&bed), 3);
    assert!(gather(&bed, rows, &ids, 4).iter().all(|code| *code == 0));
    assert!(holds(&bed, rows, &ids, &bed.media()));
    let read = |mem: &Mem, job: &GatherJob, index, of| read_rows(mem, &bed.array(mem), job, (index, of));
    assert!(move_rows(&bed, rows, &ids, 32, read).iter().all(|code| *code == 0));
    assert!(holds(&bed, rows, &ids, &bed.media()));
}

#[test]
fn reads_and_writes_are_those_of_a_shadow() {
    for (slots, disk) in [
        (1, Disk::default()),
        (8, Disk { late: 5, ..Disk::default() }),
        (24, Disk { late: 3, fails: Some((7, Answer::TimedOut)), ..Disk::default() }),
        (16, Disk { fails: Some((5, Answer::Failed(Status(0x281)))), ..Disk::default() }),
    ] {
        let (rows, bed) = (Rows(264, 520), Bed::new(slots, disk));
        let (mut shadow, mut random) = (bed.media(), Random(u64::from(slots)));
        for round in 0..6u32 {
            let ids: BTreeSet<u64> = (0..60).map(|_| random.below(rows.count(&bed))).collect();
            let ids: Vec<u64> = ids.into_iter().collect();
            let words: Vec<u32> =
                (0..ids.len() as u32 * 66).map(|i: u32| i.wrapping_mul(31) ^ round << 20).collect();
            bed.put(bed::OUT, words.iter().copied());
            let mut left: Vec<usize> = (0..ids.len()).collect();
            // Rows that fail, because the backing did, are written again: a part of one may have been.
            while !left.is_empty() {
                let some: Vec<u64> = left.iter().map(|place| ids[*place]).collect();
                let part = left.iter().flat_map(|place| words[place * 66..][..66].iter().copied());
                bed.put(bed::OUT, part);
                let codes = scatter(&bed, rows, &some, 6);
                left =
                    left.iter().zip(codes).filter(|(_, code)| *code != 0).map(|(place, _)| *place).collect();
            }
            for (id, row) in ids.iter().zip(words.chunks(66)) {
                shadow[(*id * 130) as usize..][..66].copy_from_slice(row);
            }
            let wanted: Vec<u64> = (0..80).map(|_| random.below(rows.count(&bed))).collect();
            let codes = gather(&bed, rows, &wanted, 3);
            let there: Vec<u64> =
                wanted.iter().zip(&codes).filter(|(_, code)| **code == 0).map(|(id, _)| *id).collect();
            if there.len() == wanted.len() {
                assert!(holds(&bed, rows, &wanted, &shadow), "{slots} slots, round {round}");
            }
            assert!(codes.iter().all(|code| *code == 0 || disk.fails.is_some()), "{codes:?}");
        }
        // As often as it takes: what cannot be written stays.
        while bed.flush().failed > 0 {}
        assert_eq!(bed.flush().written, 0);
        assert!(bed.media() == shadow, "{slots} slots");
    }
}

#[test]
fn all_pinned_is_an_error_and_ends_with_the_pins() {
    let bed = Bed::new(3, Disk { patience: 20_000_000, ..Disk::default() });
    bed.run(1, |mem, _| {
        let array = bed.array(mem);
        let read = |byte| array.pin(mem, byte).map(|pin| mem.load(pin.address()));
        let pins: Vec<_> = (0..3).map(|page| array.pin(mem, page * PAGE).unwrap()).collect();
        assert_eq!(read(9 * PAGE), Err(ArrayError::NoRoom));
        assert_eq!(read(2 * PAGE + 4), Ok(word(2 * PAGE / 4 + 1)));
        assert!(pins.iter().zip(0..).all(|(pin, page)| mem.load(pin.address()) == word(page * PAGE / 4)));
        drop(pins);
        assert_eq!(read(9 * PAGE), Ok(word(9 * PAGE / 4)));
        assert_eq!(read(bed.bytes()), Err(ArrayError::Range));
    });
}

#[test]
fn threads_that_hold_a_page_and_want_another_end() {
    let bed = Bed::new(2, Disk { patience: 50_000_000, ..Disk::default() });
    bed.run(12, |mem, index| {
        let array = bed.array(mem);
        for round in 0..3 {
            let page = |more| (u64::from(index) * 2 + round + more) * PAGE;
            let Ok(one) = array.pin(mem, page(0)) else { continue };
            match array.pin(mem, page(1)) {
                Ok(other) => assert_eq!(mem.load(other.address()), word(page(1) / 4)),
                Err(error) => assert!([ArrayError::NoRoom, ArrayError::TimedOut].contains(&error), "{error}"),
            }
            assert_eq!(mem.load(one.address()), word(page(0) / 4));
        }
    });
    bed.run(1, |mem, _| assert!(bed.array(mem).pin(mem, 50 * PAGE).is_ok(), "nothing is left of it"));
}

#[test]
fn a_page_has_so_many_pins_and_no_more() {
    let bed = Bed::new(8, Disk::default());
    bed.run(1, |mem, _| {
        let array = bed.array(mem);
        let pins: Vec<_> = (0..1 << 22).map(|_| array.pin(mem, 0).unwrap()).collect();
        assert_eq!(array.pin(mem, 0).err(), Some(ArrayError::TooManyPins));
        drop(pins);
        assert!(array.pin(mem, 0).is_ok());
    });
}

const OUTCOME_UNKNOWN: Option<ArrayError> = Some(ArrayError::WriteBack(Answer::OutcomeUnknown));

/// A dirty page whose first write will have an unknown outcome.
fn about_to_have_an_unknown_outcome() -> Bed {
    let bed = Bed::new(8, Disk { fails: Some((1, Answer::OutcomeUnknown)), ..Disk::default() });
    bed.calm(true);
    bed.put(bed::OUT, [77]);
    assert_eq!(scatter(&bed, Rows(4, 4), &[5], 1), [0]);
    bed.calm(false);
    bed
}

#[test]
fn a_write_with_an_unknown_outcome_is_repeated_in_the_next_life_only() {
    let bed = about_to_have_an_unknown_outcome();
    assert_eq!((bed.flush().error, bed.flush().error), (OUTCOME_UNKNOWN, OUTCOME_UNKNOWN));
    assert_eq!(bed.commands(), 2, "it was written again");
    bed.calm(true);
    assert_eq!(bed.flush().error, OUTCOME_UNKNOWN);
    bed.next_life();
    assert_eq!((bed.flush().written, bed.flush().written), (1, 0));
    assert_eq!(bed.media()[5], 77);
}

/// A thread finds a page whose write is over, and stops before it claims the page. Meanwhile another thread writes
/// it, with an unknown outcome again: the page looks as before.
#[test]
fn a_late_thread_does_not_write_a_page_whose_outcome_is_unknown_again() {
    let bed = about_to_have_an_unknown_outcome();
    assert_eq!((bed.flush().error, bed.commands()), (OUTCOME_UNKNOWN, 2));
    for steps in 0..8 {
        bed.next_life();
        let before = bed.commands();
        bed.meanwhile(steps, |bed| {
            let mem = bed.mem();
            // If the page is the first thread's by now, this one gives up.
            flush_slots(&mem, &bed.array(&mem), (0, 1), mem.now() + 20_000_000);
        });
        assert_eq!(bed.flush().error, OUTCOME_UNKNOWN);
        assert_eq!(bed.commands(), before + 1, "steps: {steps}; over: {}", bed.is_over());
        bed.meanwhile(u32::MAX, |_| ());
    }
    bed.next_life();
    bed.calm(true);
    assert_eq!((bed.flush().written, bed.media()[5]), (1, 77));
}

/// A thread waits for a read, which fails. Before it has read why, the page is read again and written, and the write
/// fails.
#[test]
fn a_failed_write_is_not_taken_for_the_read_that_one_waited_for() {
    for answer in [Answer::Failed(Status(0x282)), Answer::OutcomeUnknown] {
        for steps in 0..3 {
            let unwritable = Some((0, answer));
            let bed =
                Bed::new(8, Disk { late: 1, fails: Some((1, UNREADABLE)), unwritable, ..Disk::default() });
            let mem = bed.mem();
            let array = bed.array(&mem);
            bed.next_life();
            let [mut reads, mut waits] = [(); 2].map(|()| PageRequest::new(&array, &mem, 0));
            assert_eq!(array.advance(&mem, &mut reads), PageStep::Pending);
            assert_eq!(array.advance(&mem, &mut waits), PageStep::Pending);
            while array.advance(&mem, &mut reads) == PageStep::Pending {}
            bed.meanwhile(steps, |bed| {
                let mem = bed.mem();
                bed.calm(true);
                drop(bed.array(&mem).pin_mut(&mem, 0).unwrap());
                assert_eq!(bed.flush().failed, 1);
            });
            let step = array.advance(&mem, &mut waits);
            // The last comes too late.
            let own = PageStep::Failed(ArrayError::Read(UNREADABLE));
            assert_eq!(step, if steps == 2 { own } else { PageStep::Pending }, "{answer:?}, {steps} steps");
        }
    }
}

#[test]
fn a_page_that_can_never_be_written_does_not_keep_others_from_making_room() {
    let bed = Bed::new(8, Disk { unwritable: Some((0, UNREADABLE)), ..Disk::default() });
    bed.run(1, |mem, _| {
        let array = bed.array(mem);
        // One after the other: page 0 is in the first way.
        assert!((0..8).all(|page| array.pin_mut(mem, page * PAGE).is_ok()));
        let read = |page| array.pin(mem, page * PAGE).map(|_| ());
        let failed = ArrayError::WriteBack(UNREADABLE);
        assert_eq!(read(100), Err(failed), "what was tried first");
        assert!((100..120).all(|page| read(page) == Ok(())));
        assert_eq!((bed.flush().failed, bed.flush().error), (1, Some(failed)));
    });
}

#[test]
fn a_flush_that_is_late_begins_nothing() {
    let bed = Bed::new(8, Disk::default());
    assert_eq!(scatter(&bed, Rows(4, 4), &[5], 1), [0]);
    bed.run(1, |mem, _| {
        let flushed = flush_slots(mem, &bed.array(mem), (0, 1), 0);
        assert_eq!((flushed.written, flushed.failed, flushed.error), (0, 1, Some(ArrayError::TimedOut)));
    });
    assert_eq!(bed.flush().written, 1);
}

#[test]
fn a_long_row_ends_at_the_time_limit() {
    // 100 pages, of which the limit allows ten.
    let (rows, bed) =
        (Rows(100 << 10, 100 << 10), Bed::new(128, Disk { ticks: bed::LIMIT / 10, ..Disk::default() }));
    let read = |mem: &Mem, job: &GatherJob, index, of| read_rows(mem, &bed.array(mem), job, (index, of));
    assert_eq!(move_rows(&bed, rows, &[0], 1, read), [ArrayError::TimedOut.code()]);
    assert_eq!(bed.reads(), 10);
    let bed = Bed::new(128, Disk { ticks: bed::LIMIT / 10, ..Disk::default() });
    assert_eq!(scatter(&bed, rows, &[0], 1), [ArrayError::TimedOut.code()]);
    assert_eq!(bed.reads(), 10);
}

#[test]
fn a_page_is_written_back_by_one_command_at_a_time() {
    // The backing refuses two.
    let bed = Bed::new(8, Disk { late: 40, ..Disk::default() });
    let flushing = AtomicU32::new(4);
    bed.run(8, |mem, index| {
        let array = bed.array(mem);
        if index < 4 {
            loop {
                mem.store(array.pin_mut(mem, u64::from(index) * 4).unwrap().address(), index);
                if flushing.load(Relaxed) == 0 || mem.now() > bed::LIMIT / 3 {
                    break;
                }
            }
        } else {
            assert!((0..50).all(|_| flush_slots(mem, &array, (0, 1), u64::MAX).failed == 0));
            flushing.fetch_sub(1, Relaxed);
        }
    });
    bed.flush();
    assert_eq!(bed.media()[..4], [0, 1, 2, 3]);
}

#[test]
fn threads_that_miss_together_read_a_page_once() {
    let (bed, together) = (Bed::new(256, Disk { late: 3, ..Disk::default() }), Barrier::new(8));
    bed.run(8, |mem, _| {
        let array = bed.array(mem);
        for page in 0..bed.bytes() / PAGE {
            together.wait();
            assert_eq!(mem.load(array.pin(mem, page * PAGE).unwrap().address()), word(page * PAGE / 4));
        }
    });
    assert_eq!(u64::from(bed.reads()), bed.bytes() / PAGE);
}
