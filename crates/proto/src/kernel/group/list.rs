//! The commands that a warp has taken on and that have not ended.

use super::{Group, local};
use crate::Status;
use crate::kernel::slots::moment;
use crate::kernel::{ItemOutcome, Warp};
use crate::queue::Address;
use crate::queue::shared::{DONE, STATE};

impl<W: Warp> Group<'_, W> {
    /// Records how the first `count` commands of the list ended; those to be retried and those that found no room stay.
    /// Returns how many.
    #[inline(always)]
    pub(super) fn settle(&self, listed: u32, count: u32) -> u32 {
        let (warp, job) = (self.warp, self.job);
        self.spread(count, |i| {
            let status = Status((warp.local(local::ENDED + i) >> 17) as u16);
            let (item, retries) = (warp.local(local::ITEM + i), warp.local(local::RETRIES + i));
            if job.again(status, retries) {
                let due = job.due(warp, status);
                warp.set_local(local::RETRIES + i, retries + 1);
                warp.set_local(local::DUE + 2 * i, due as u32);
                warp.set_local(local::DUE + 2 * i + 1, (due >> 32) as u32);
                warp.add_local(local::KEPT, 1);
            } else {
                ItemOutcome::Done(status).store(warp, job, item, retries);
                warp.ended(item);
                warp.set_local(local::ITEM + i, u32::MAX);
            }
        });
        let kept = warp.local(local::KEPT) + listed - count;
        warp.once(|| {
            warp.set_local(local::WAITS, kept);
            if kept != 0 {
                self.close_up(listed);
            }
        });
        kept
    }

    /// Moves what is left of the list to its front.
    #[inline(always)]
    fn close_up(&self, listed: u32) {
        let warp = self.warp;
        let mut kept = 0;
        for from in 0..listed {
            if warp.local(local::ITEM + from) != u32::MAX {
                let copy = |to: u32, from: u32| warp.set_local(to, warp.local(from));
                copy(local::ITEM + kept, local::ITEM + from);
                copy(local::RETRIES + kept, local::RETRIES + from);
                copy(local::DUE + kept * 2, local::DUE + from * 2);
                copy(local::DUE + kept * 2 + 1, local::DUE + from * 2 + 1);
                kept += 1;
            }
        }
    }

    /// Whether every command of the list may be tried.
    #[inline(always)]
    pub(super) fn is_due(&self, listed: u32) -> bool {
        let warp = self.warp;
        if warp.local(local::WAITS) == 0 {
            return true;
        }
        warp.sync();
        warp.once(|| {
            let mut last = 0;
            for at in 0..listed {
                last = last.max(moment(warp, local::DUE + 2 * at));
            }
            warp.set_local(local::OPEN, (last == 0 || warp.now() >= last) as u32);
        });
        warp.local(local::OPEN) != 0
    }

    /// Records an unknown outcome for the first `in_doubt` commands of the list, unless they have ended after all, and for
    /// the others how often they were tried.
    #[inline(always)]
    pub(super) fn give_up(&self, listed: u32, in_doubt: u32) {
        let (warp, queue, job) = (self.warp, self.queue, self.job);
        self.spread(listed, |i| {
            let (item, retries) = (warp.local(local::ITEM + i), warp.local(local::RETRIES + i));
            if i < in_doubt {
                let slot = queue.slot(warp.local(local::SLOT + i) as u16);
                let state = warp.load_acquire(slot.plus(STATE));
                let status = Status((state >> 17) as u16);
                let (outcome, retries) = match state & 3 == DONE {
                    false => (ItemOutcome::Unknown, retries),
                    true if job.again(status, retries) => (ItemOutcome::Pending, retries + 1),
                    true => (ItemOutcome::Done(status), retries),
                };
                outcome.store(warp, job, item, retries);
            } else if retries != u32::MAX {
                ItemOutcome::Pending.store(warp, job, item, retries);
            }
        });
        warp.fence();
    }
}
