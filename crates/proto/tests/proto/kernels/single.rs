//! The owner kernel with one command in flight.

use onehop_proto::Status;
use onehop_proto::kernel::{Exit, ItemOutcome, Job, run_single, scratch_init};
use onehop_proto::queue::Memory;

use super::bed::{At, Bed, CONTROL, Manner};

const OK: (ItemOutcome, u32) = (ItemOutcome::Done(Status(0)), 0);

fn run(bed: &Bed, job: &Job<Bed>) -> Exit {
    Exit::from_words(run_single(bed, || bed.queue(1), job, 0, job.count)).unwrap()
}

fn bed(entries: u32, manner: Manner) -> Bed {
    let bed = Bed::new(32, entries, entries, manner);
    scratch_init(&bed, At(CONTROL));
    bed
}

#[test]
fn every_item_ends_once_and_alone() {
    for entries in [2, 3, 4, 16] {
        let bed = bed(entries, Manner::Proper);
        // The queue goes on from launch to launch.
        for _ in 0..3 {
            let job = bed.job(500);
            assert_eq!(run(&bed, &job), Exit::Finished);
            assert!((0..500).all(|i| bed.outcome(i) == OK), "{entries} entries");
        }
        let controller = bed.controller.borrow();
        assert_eq!((controller.cids.len(), controller.most), (1500, 1));
        assert!(controller.cids.windows(2).all(|pair| pair[0] != pair[1]), "an identifier twice in a row");
    }
}

#[test]
fn faults_end_it() {
    let twice = bed(16, Manner::Twice);
    let job = twice.job(10);
    assert!(matches!(run(&twice, &job), Exit::UnexpectedCompletion(_)));
    assert_eq!((twice.outcome(0), twice.outcome(1).0), (OK, ItemOutcome::Unknown));
    let silent = bed(16, Manner::Silent);
    let job = silent.job(10);
    assert_eq!(run(&silent, &job), Exit::TimedOut);
    assert_eq!((silent.outcome(0).0, silent.outcome(1).0), (ItemOutcome::Unknown, ItemOutcome::Pending));
    let stuck = bed(4, Manner::StuckHead);
    let job = stuck.job(10);
    assert_eq!(run(&stuck, &job), Exit::TimedOut);
    assert_eq!((stuck.outcome(2), stuck.outcome(3).0), (OK, ItemOutcome::Pending));
    assert!(stuck.now() < 3 * job.stall);
}

#[test]
fn a_poison_ends_it_even_where_the_controller_is_quick() {
    let bed = bed(16, Manner::Proper);
    let job = bed.job(2000);
    bed.poison_after.set(5);
    assert_eq!(run(&bed, &job), Exit::Poisoned(7));
    assert!((256..2000).all(|i| bed.outcome(i).0 == ItemOutcome::Pending));
}

#[test]
fn what_may_be_tried_again_is() {
    let failed = Status(0x0282);
    let bed = bed(16, Manner::Ends(failed));
    let job = bed.job(5);
    assert_eq!(run(&bed, &job), Exit::Finished);
    assert!((0..5).all(|i| bed.outcome(i) == (ItemOutcome::Done(failed), 2)));
    assert_eq!(bed.controller.borrow().cids.len(), 15);
}

#[test]
fn places_beyond_the_rings_are_refused() {
    for (word, value) in [(0, 16), (0, u32::MAX), (4, 16), (8, 16), (8, 1 << 20)] {
        let bed = bed(16, Manner::Proper);
        let job = bed.job(5);
        bed.store(At(CONTROL + word), value);
        assert_eq!(run(&bed, &job), Exit::InvalidControl, "{value} at {word}");
        assert_eq!(bed.load(At(CONTROL + word)), value);
        assert!((0..5).all(|i| bed.outcome(i).0 == ItemOutcome::Pending));
        assert!(bed.controller.borrow().cids.is_empty());
        // The memory is good again once it has been prepared.
        scratch_init(&bed, At(CONTROL));
        assert_eq!(run(&bed, &job), Exit::Finished);
        assert!((0..5).all(|i| bed.outcome(i) == OK));
    }
}
