//! Owner mode against a faulty controller: no command completes twice, and none in flight is forgotten.
#![no_main]

use std::collections::BTreeMap;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use onehop_fuzz::{Bed, Post};
use onehop_proto::Sqe;
use onehop_proto::queue::{Event, NO_CID, Owner, Slot};

#[derive(Arbitrary, Debug)]
struct Input {
    sq_entries: u8,
    cq_entries: u8,
    slots: u8,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Stage(u8),
    Publish,
    Poll(u8),
    Post(Post),
}

fuzz_target!(|input: Input| {
    let entries = |byte: u8| 2 + u32::from(byte) % 63;
    let (bed, rings, _) = Bed::new(entries(input.sq_entries), entries(input.cq_entries), &[]);
    let mut owner = Owner::new(rings, vec![Slot::default(); input.slots.into()]);
    let mut busy = BTreeMap::new();
    for step in &input.steps {
        match step {
            Step::Stage(count) => (0..*count % 65).for_each(|_| stage(&bed, &mut owner, &mut busy)),
            Step::Publish => owner.publish(&bed),
            Step::Poll(count) => (0..*count % 65).for_each(|_| poll(&bed, &mut owner, &mut busy)),
            Step::Post(post) => bed.post(post),
        }
        assert_eq!(owner.in_flight() as usize, busy.len());
        assert!(owner.in_flight() <= owner.capacity() && owner.staged() < rings.sq_entries);
    }
});

type Queue = Owner<Bed, Vec<Slot>>;

fn stage(bed: &Bed, owner: &mut Queue, busy: &mut BTreeMap<u16, u16>) {
    let staged = owner.staged();
    let Ok(slot) = owner.stage(bed, &Sqe::new(2, 1), 0) else {
        let honest = bed.controller.borrow().is_honest();
        let owes = bed.controller.borrow().owes() as u32;
        let full = owner.in_flight() == owner.capacity();
        assert!(!honest || full || owes + staged > 0, "an idle queue is said to be full");
        return;
    };
    let cid = owner.cid(slot).expect("a staged command is in flight");
    assert!(cid != NO_CID && !busy.values().any(|other| *other == cid), "CID {cid:#x} is taken");
    assert_eq!(busy.insert(slot, cid), None, "slot {slot} is taken");
    assert_eq!(owner.staged(), staged + 1);
}

fn poll(bed: &Bed, owner: &mut Queue, busy: &mut BTreeMap<u16, u16>) {
    match owner.poll(bed) {
        Some(Event::Done { slot, cqe, .. }) => {
            assert_eq!(busy.remove(&slot), Some(cqe.cid()), "a command completes that is not in flight");
            assert_eq!(owner.cid(slot), None);
        }
        Some(Event::UnexpectedCompletion(cqe)) => {
            assert!(!busy.values().any(|cid| *cid == cqe.cid()), "a completion is lost");
            assert!(!bed.controller.borrow().is_honest(), "a proper completion is taken for a stray");
        }
        None => {}
    }
}
