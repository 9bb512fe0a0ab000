//! The owner kernel.

use onehop_proto::kernel::{Exit, ItemOutcome, MAX_WINDOW, WorkItem, run_owner, scratch_init, share};
use onehop_proto::queue::{Address, Memory};
use onehop_proto::{GpuAddr, Status};

use super::bed::{At, Bed, CONTROL, Manner};

const OK: (ItemOutcome, u32) = (ItemOutcome::Done(Status(0)), 0);

fn run(bed: &Bed, window: u32, job: &onehop_proto::kernel::Job<Bed>, range: (u32, u32)) -> Exit {
    Exit::from_words(run_owner(bed, || bed.queue(window), job, range.0, range.1)).unwrap()
}

#[test]
fn every_item_ends_once_whatever_the_sizes() {
    for (lanes, sq, cq, window) in
        [(32, 2, 2, 1), (32, 64, 64, 63), (1, 7, 5, 40), (32, 1024, 300, 1023), (5, 256, 1024, 200)]
    {
        let bed = Bed::new(lanes, sq, cq, Manner::Proper);
        scratch_init(&bed, At(CONTROL));
        let job = bed.job(3000);
        for part in 0..3 {
            assert_eq!(run(&bed, window, &job, share(job.count, part, 3)), Exit::Finished);
        }
        assert!((0..3000).all(|i| bed.outcome(i) == OK), "{lanes} lanes, {sq} and {cq} entries");
        assert_eq!(bed.controller.borrow().cids.len(), 3000);
    }
}

#[test]
fn a_second_completion_of_one_command_in_a_batch_is_unexpected() {
    let bed = Bed::new(32, 64, 64, Manner::Twice);
    scratch_init(&bed, At(CONTROL));
    let job = bed.job(40);
    let exit = run(&bed, 20, &job, (0, 40));
    let cid = bed.controller.borrow().cids[19];
    assert_eq!(exit, Exit::UnexpectedCompletion(cid));
    let ended = (0..40).filter(|i| bed.outcome(*i) == OK).count();
    assert_eq!(ended, 19, "each command whose completion was taken ended, and none twice");
    assert_eq!((0..40).filter(|i| bed.outcome(*i).0 == ItemOutcome::Unknown).count(), 1);
}

#[test]
fn a_head_that_sticks_ends_within_the_stall_bound() {
    let bed = Bed::new(32, 16, 64, Manner::StuckHead);
    scratch_init(&bed, At(CONTROL));
    let job = bed.job(100);
    assert_eq!(run(&bed, 15, &job, (0, 100)), Exit::TimedOut);
    assert!(bed.now() < 3 * job.stall, "{} ns for a bound of {}", bed.now(), job.stall);
    assert_eq!((0..100).filter(|i| bed.outcome(*i) == OK).count(), 15);
    assert!((15..100).all(|i| bed.outcome(i) == (ItemOutcome::Pending, 0)));
}

#[test]
fn silence_leaves_submitted_commands_with_an_unknown_outcome() {
    let bed = Bed::new(32, 16, 16, Manner::Silent);
    scratch_init(&bed, At(CONTROL));
    let job = bed.job(100);
    assert_eq!(run(&bed, 10, &job, (0, 100)), Exit::TimedOut);
    assert!((0..10).all(|i| bed.outcome(i) == (ItemOutcome::Unknown, 0)));
    assert!((10..100).all(|i| bed.outcome(i) == (ItemOutcome::Pending, 0)));
}

#[test]
fn a_deadline_and_a_poison_end_it() {
    let bed = Bed::new(32, 16, 16, Manner::Silent);
    scratch_init(&bed, At(CONTROL));
    let mut job = bed.job(10);
    job.stall = u64::MAX;
    job.deadline = 200_000;
    assert_eq!(run(&bed, 10, &job, (0, 10)), Exit::TimedOut);
    assert!(bed.now() < 400_000);
    let bed = Bed::new(32, 16, 16, Manner::Silent);
    scratch_init(&bed, At(CONTROL));
    let mut job = bed.job(10);
    job.stall = u64::MAX;
    bed.poison_after.set(10);
    assert_eq!(run(&bed, 10, &job, (0, 10)), Exit::Poisoned(7));
}

#[test]
fn retries_outlive_a_launch() {
    // A status to be tried again: CRD 1, a million ticks away.
    let failed = Status(0x0282 | 1 << 11);
    assert!(!failed.dnr() && failed.crd() == 1);
    let bed = Bed::new(32, 64, 64, Manner::Ends(failed));
    scratch_init(&bed, At(CONTROL));
    let mut job = bed.job(5);
    job.deadline = 500_000;
    assert_eq!(run(&bed, 8, &job, (0, 5)), Exit::TimedOut, "it waits, and that is no stall");
    assert!((0..5).all(|i| bed.outcome(i) == (ItemOutcome::Pending, 1)));
    // The next launch continues the count; two retries are allowed in all.
    let job = bed.job(5);
    for item in 0..5 {
        let work = WorkItem { lba: 1, prp1: 4096, prp2: 0, blocks: 1, control: 2 }.with_tries(1);
        assert_eq!(work.command(1), work.with_tries(0).command(1));
        bed.set_work(item, &work);
    }
    assert_eq!(run(&bed, 8, &job, (0, 5)), Exit::Finished);
    assert!((0..5).all(|i| bed.outcome(i) == (ItemOutcome::Done(failed), 2)));
}

#[test]
fn identifiers_outlive_the_queue() {
    let bed = Bed::new(32, 64, 64, Manner::Proper);
    scratch_init(&bed, At(CONTROL));
    for _ in 0..5 {
        let job = bed.job(8);
        assert_eq!(run(&bed, 63, &job, (0, 8)), Exit::Finished);
        bed.create_again(Manner::Proper);
        scratch_init(&bed, At(CONTROL));
    }
    let mut cids = bed.controller.borrow().cids.clone();
    cids.sort_unstable();
    cids.dedup();
    assert_eq!(cids.len(), 40, "an identifier was used in two lives of the queue");
}

#[test]
fn large_windows_are_cut() {
    let bed = Bed::new(32, 4096, 4096, Manner::Proper);
    scratch_init(&bed, At(CONTROL));
    let job = bed.job(5000);
    assert_eq!(run(&bed, 4095, &job, (0, 5000)), Exit::Finished);
    assert!(bed.controller.borrow().most <= MAX_WINDOW as usize);
}

#[test]
fn items_beyond_four_gibytes_have_their_own_addresses() {
    assert_eq!(GpuAddr(64).element(1 << 28, WorkItem::BYTES), GpuAddr(64 + (1 << 33)));
    assert_eq!(share(u32::MAX, 2, 3), (0xaaaa_aaaa, u32::MAX));
    assert_eq!(share(10, 0, 0), (0, 10));
}

#[test]
fn places_beyond_the_rings_are_refused() {
    for (word, value) in [(0, 16), (0, u32::MAX), (4, 16), (8, 32), (8, 1 << 20)] {
        let bed = Bed::new(32, 16, 32, Manner::Proper);
        scratch_init(&bed, At(CONTROL));
        let job = bed.job(50);
        bed.store(At(CONTROL + word), value);
        assert_eq!(run(&bed, 10, &job, (0, 50)), Exit::InvalidControl, "{value} at {word}");
        assert_eq!(bed.load(At(CONTROL + word)), value);
        assert!((0..50).all(|i| bed.outcome(i).0 == ItemOutcome::Pending));
        assert!(bed.controller.borrow().cids.is_empty());
        // The memory is good again once it has been prepared.
        scratch_init(&bed, At(CONTROL));
        assert_eq!(run(&bed, 10, &job, (0, 50)), Exit::Finished);
        assert!((0..50).all(|i| bed.outcome(i) == OK));
    }
}
