//! Completions that kernels have left in a queue, for the host that takes the queue from the controller.

use super::slots::restore;
use crate::queue::shared::word;
use crate::queue::{Address, Memory, Rings, Shared};
use crate::{Cqe, Status};

/// Whether a queue holds completions that no thread has taken, other than those of commands aborted with their submission
/// queue: such a command's data may still be in transit. `control` is the queue's control memory, in the layout of its
/// mode. No thread drives the queue meanwhile. Also true if the control memory is inconsistent.
pub fn has_unseen<M: Memory>(mem: &M, rings: &Rings<M>, control: M::Addr, is_shared: bool) -> bool {
    let Some((head, phase)) = next(mem, rings, control, is_shared) else { return true };
    (0..rings.cq_entries)
        .map(|i| {
            let place = head + i;
            let laps = place >= rings.cq_entries;
            let at = rings.cq.plus(place % rings.cq_entries * Cqe::BYTES as u32);
            (mem.load_acquire(at.plus(12)), phase ^ laps)
        })
        .take_while(|(dw3, phase)| (dw3 >> 16 & 1 != 0) == *phase)
        .any(|(dw3, _)| !Status((dw3 >> 17) as u16).is(Status::ABORTED_SQ_DELETION))
}

/// The place of the next completion, and its phase.
fn next<M: Memory>(mem: &M, rings: &Rings<M>, control: M::Addr, is_shared: bool) -> Option<(u32, bool)> {
    if !is_shared {
        return restore(mem, control, rings).map(|state| (state.head, state.phase));
    }
    let queue = Shared::new(*rings, control)?;
    let head = mem.load(control.plus(word::CQ_HEAD));
    let (_, phase) = queue.cq_slot(head);
    Some((head % rings.cq_entries, phase != 0))
}
