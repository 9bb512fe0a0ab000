//! Shared mode, where a mock can decide the order of things.

use onehop_proto::kernel::{Exit, ItemOutcome, run_group, run_owner, run_shared, run_single};
use onehop_proto::queue::{Drained, Memory, Shared, SharedLayout, Stop, SubmitError};
use onehop_proto::{Sqe, Status};

use super::bed::{At, Bed, CONTROL, Manner};

#[test]
fn what_has_completed_is_never_given_up() {
    let bed = Bed::new(1, 4, 4, Manner::Proper);
    let queue = Shared::new(bed.rings(), At(CONTROL)).unwrap();
    queue.initialise(&bed);
    let bounds = queue.bounds(1000);
    let token = queue.submit(&bed, &Sqe::new(2, 1), &bounds).unwrap();
    bed.pass_time(5000);
    assert_eq!(queue.wait(&bed, &token, &bounds).unwrap(), Status(0));
    assert_eq!(queue.drain(&bed), Drained::None);
}

#[test]
fn a_last_look_finds_the_slot_that_a_completion_frees() {
    let bed = Bed::new(1, 2, 2, Manner::Proper);
    let queue = Shared::new(bed.rings(), At(CONTROL)).unwrap();
    queue.initialise(&bed);
    let first = queue.submit(&bed, &Sqe::new(2, 1), &queue.bounds(1000)).unwrap();
    bed.pass_time(5000);
    // The only slot is taken, but its completion is there: draining makes it free only when its owner has looked.
    let second = queue.submit(&bed, &Sqe::new(2, 1), &queue.bounds(1000));
    assert!(second.is_err());
    assert_eq!(queue.wait(&bed, &first, &queue.bounds(1000)).unwrap(), Status(0));
    assert!(queue.submit(&bed, &Sqe::new(2, 1), &queue.bounds(1000)).is_ok());
}

fn group(bed: &Bed, job: &onehop_proto::kernel::Job<Bed>, range: (u32, u32)) -> Exit {
    let queue = Shared::new(bed.rings(), At(CONTROL)).unwrap();
    Exit::from_words(run_group(bed, &queue, job, range, (0, 1))).unwrap()
}

fn bed(lanes: u32, entries: u32, manner: Manner) -> Bed {
    let bed = Bed::new(lanes, entries, entries, manner);
    Shared::new(bed.rings(), At(CONTROL)).unwrap().initialise(&bed);
    bed
}

#[test]
fn a_group_ends_every_item_once() {
    for (lanes, entries) in [(32, 256), (32, 2), (1, 16), (5, 4), (40, 1024)] {
        let bed = bed(lanes, entries, Manner::Proper);
        let job = bed.job(2000);
        assert_eq!(group(&bed, &job, (0, 700)), Exit::Finished);
        assert_eq!(group(&bed, &job, (700, 3000)), Exit::Finished);
        assert!(
            (0..2000).all(|i| bed.outcome(i) == (ItemOutcome::Done(Status(0)), 0)),
            "{lanes} lanes, {entries}"
        );
        assert_eq!(bed.controller.borrow().cids.len(), 2000);
    }
}

#[test]
fn a_group_tries_again_and_says_how_often() {
    let failed = Status(0x0282);
    let bed = bed(32, 64, Manner::Ends(failed));
    let job = bed.job(100);
    assert_eq!(group(&bed, &job, (0, 100)), Exit::Finished);
    assert!((0..100).all(|i| bed.outcome(i) == (ItemOutcome::Done(failed), 2)));
    assert_eq!(bed.controller.borrow().cids.len(), 300);
}

#[test]
fn a_group_ends_by_its_bounds() {
    let silent = bed(32, 64, Manner::Silent);
    let job = silent.job(100);
    assert_eq!(group(&silent, &job, (0, 100)), Exit::TimedOut);
    assert!((0..63).all(|i| silent.outcome(i) == (ItemOutcome::Unknown, 0)));
    assert!((63..100).all(|i| silent.outcome(i) == (ItemOutcome::Pending, 0)));
    assert!(silent.now() < 3 * job.stall);

    let stuck = bed(32, 64, Manner::StuckHead);
    let job = stuck.job(100);
    assert_eq!(group(&stuck, &job, (0, 100)), Exit::TimedOut);
    assert_eq!((0..100).filter(|i| stuck.outcome(*i).0 == ItemOutcome::Done(Status(0))).count(), 63);

    let waiting = bed(32, 64, Manner::Ends(Status(0x0282 | 1 << 11)));
    let mut job = waiting.job(5);
    job.deadline = 500_000;
    assert_eq!(group(&waiting, &job, (0, 5)), Exit::TimedOut);
    assert!((0..5).all(|i| waiting.outcome(i) == (ItemOutcome::Pending, 1)));
}

/// Beside silent commands, too, one that may be tried again is not given up with the status of its first try.
#[test]
fn what_may_be_tried_again_is_left_for_the_next_launch() {
    for (status, wanted) in [
        (Status(0x0282), (ItemOutcome::Pending, 1)),
        (Status(0x4002), (ItemOutcome::Done(Status(0x4002)), 0)),
    ] {
        let bed = bed(32, 64, Manner::EndsOne(status));
        let job = bed.job(20);
        assert_eq!(group(&bed, &job, (0, 20)), Exit::TimedOut);
        let ended: Vec<_> =
            (0..20).map(|i| bed.outcome(i)).filter(|one| *one != (ItemOutcome::Unknown, 0)).collect();
        assert_eq!(ended, [wanted]);
    }
}

/// Free slots that the queue does not have lie behind its control block.
#[test]
fn slots_that_there_are_not_are_never_taken() {
    const FREE: u32 = 0x140;
    for (entries, as_group) in [(2, false), (2, true), (64, false), (64, true)] {
        let bed = bed(32, entries, Manner::Proper);
        let layout = SharedLayout::new(entries, entries).unwrap();
        let behind: Vec<At> = (0..64).map(|i| At(CONTROL + layout.bytes() + i * 4)).collect();
        for at in &behind {
            bed.store(*at, 0xa5a5_a5a5);
        }
        for word in 0..layout.capacity().div_ceil(32) {
            bed.store(At(CONTROL + FREE + word * 4), u32::MAX);
        }
        let job = bed.job(200);
        let exit = if as_group {
            group(&bed, &job, (0, 200))
        } else {
            let queue = Shared::new(bed.rings(), At(CONTROL)).unwrap();
            run_shared(&bed, &queue, &job, 0, 1)
        };
        assert_eq!(exit, Exit::Finished);
        assert!((0..200).all(|i| bed.outcome(i) == (ItemOutcome::Done(Status(0)), 0)));
        assert!(behind.iter().all(|at| bed.load(*at) == 0xa5a5_a5a5), "{entries} entries, {as_group}");
    }
}

/// Completions of other commands arrive all the time: a waiting thread finds some at every poll.
#[test]
fn a_wait_ends_in_time_beside_a_flow_of_other_completions() {
    for entries in [2, 8, 64] {
        let bed = bed(32, entries, Manner::Elsewhere);
        let queue = Shared::new(bed.rings(), At(CONTROL)).unwrap();
        let bounds = queue.bounds(1_000);
        let token = queue.submit(&bed, &Sqe::new(2, 1), &bounds).unwrap();
        assert_eq!(queue.wait(&bed, &token, &bounds), Err(Stop::Deadline), "{entries}");
        // The other slots, and then none.
        let layout = SharedLayout::new(entries, entries).unwrap();
        let more = (0..100).map_while(|_| queue.submit(&bed, &Sqe::new(2, 1), &bounds).ok()).count();
        assert_eq!(more as u32 + 1, layout.capacity());
        let full = queue.submit(&bed, &Sqe::new(2, 1), &bounds);
        assert_eq!(full, Err(SubmitError::Stopped(Stop::Deadline)), "{entries}");
    }
}

#[test]
fn so_does_a_launch() {
    for entries in [2, 8, 64] {
        for as_group in [true, false] {
            let bed = bed(32, entries, Manner::Elsewhere);
            let job = bed.job(100);
            let exit = if as_group {
                group(&bed, &job, (0, 100))
            } else {
                let queue = Shared::new(bed.rings(), At(CONTROL)).unwrap();
                run_shared(&bed, &queue, &job, 0, 1)
            };
            assert_eq!(exit, Exit::TimedOut, "{entries}, {as_group}");
            assert_eq!(bed.outcome(0), (ItemOutcome::Unknown, 0), "{entries}, {as_group}");
        }
    }
}

/// One that begins when the host has given it up: its queue may be gone.
#[test]
fn a_launch_that_was_told_to_end_before_it_began_rings_no_doorbell() {
    let launches: [fn(&Bed, &onehop_proto::kernel::Job<Bed>) -> Exit; 4] = [
        |bed, job| Exit::from_words(run_owner(bed, || bed.queue(15), job, 0, 9)).unwrap(),
        |bed, job| Exit::from_words(run_single(bed, || bed.queue(1), job, 0, 9)).unwrap(),
        |bed, job| group(bed, job, (0, 9)),
        |bed, job| run_shared(bed, &Shared::new(bed.rings(), At(CONTROL)).unwrap(), job, 0, 1),
    ];
    for (kind, launch) in launches.iter().enumerate() {
        let bed = match kind {
            0 | 1 => Bed::new(32, 16, 16, Manner::Proper),
            _ => bed(32, 16, Manner::Proper),
        };
        if kind < 2 {
            onehop_proto::kernel::scratch_init(&bed, At(CONTROL));
        }
        let job = bed.job(9);
        bed.store(job.poison, 3);
        assert_eq!(launch(&bed, &job), Exit::Poisoned(3), "{kind}");
        assert!(bed.controller.borrow().cids.is_empty(), "{kind}");
        assert!((0..9).all(|i| bed.outcome(i) == (ItemOutcome::Pending, 0)), "{kind}");
    }
}
