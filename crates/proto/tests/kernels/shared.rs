//! Shared mode, where a mock can decide the order of things.

use onehop_proto::queue::{Drained, Shared};
use onehop_proto::{Sqe, Status};

use crate::bed::{At, Bed, CONTROL, Manner};

#[test]
fn what_has_completed_is_never_given_up() {
    let bed = Bed::new(1, 4, 4, Manner::Proper);
    let queue = Shared::new(bed.rings(), At(CONTROL)).unwrap();
    queue.initialise(&bed);
    let bounds = queue.bounds(1000);
    let token = queue.submit(&bed, &Sqe::new(2, 1), &bounds).unwrap();
    bed.pass_time(5000);
    assert_eq!(queue.wait(&bed, &token, &bounds).unwrap().status, Status(0));
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
    assert_eq!(queue.wait(&bed, &first, &queue.bounds(1000)).unwrap().status, Status(0));
    assert!(queue.submit(&bed, &Sqe::new(2, 1), &queue.bounds(1000)).is_ok());
}
