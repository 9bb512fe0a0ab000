//! Owner mode with one command in flight: what counts is the time from one completion to the next doorbell.
//!
//! The next entry is written, and fenced, while the controller works on the one before; when that has completed only the
//! doorbell remains to be rung. One lane does it all. The orders are those of [`super::run_owner`]: entries before the
//! doorbell that covers them by the fence between; a completion is acquired by the first fence after it was seen, and
//! outcomes are only used behind the one that ends the launch.

use super::slots::{restore, save, single_cid, store_single_cid};
use super::{Exit, ItemOutcome, Job, OwnerQueue, Phase, Warp, WorkItem};
use crate::queue::{CidSpace, Ring};
use crate::{Sqe, Status};

/// Polls of the completion queue between two checks of the clock, and between two of the poison word.
const LOOKS: u32 = 32;
const POISON_LOOKS: u32 = 1024;
/// Items between two checks of both, however quick the controller is.
const ITEMS: u32 = 256;

/// Words of local memory that a warp needs: the exit.
pub const SINGLE_WORDS: u32 = 2;
const EXIT: u32 = 0;

struct Single<'a, W: Warp> {
    warp: &'a W,
    job: &'a Job<W>,
    ring: Ring<W>,
    space: CidSpace,
    /// The identifier of the entry at the tail, or of the one before.
    cid: u16,
}

/// What [`super::run_owner`] does, for a queue whose window is one command. The warp has [`SINGLE_WORDS`] of local memory.
#[inline(always)]
pub fn run_single<W: Warp>(
    warp: &W,
    queue: impl Fn() -> OwnerQueue<W>,
    job: &Job<W>,
    first: u32,
    end: u32,
) -> [u32; 2] {
    warp.once(|| {
        let OwnerQueue { rings, scratch, .. } = queue();
        let Some(state) = restore(warp, scratch, &rings) else {
            let exit = Exit::InvalidControl.words();
            warp.set_local(EXIT, exit[0]);
            warp.set_local(EXIT + 1, exit[1]);
            return;
        };
        let space = CidSpace::new(1);
        let (ring, cid) = (Ring::new(rings, state), single_cid(warp, scratch, &space));
        let mut run = Single { warp, job, ring, space, cid };
        let exit = run.run(first, end.min(job.count));
        run.ring.release(warp);
        let scratch = queue().scratch;
        save(warp, scratch, run.ring.state());
        store_single_cid(warp, scratch, run.cid);
        warp.fence();
        let exit = exit.words();
        warp.set_local(EXIT, exit[0]);
        warp.set_local(EXIT + 1, exit[1]);
    });
    [warp.local(EXIT), warp.local(EXIT + 1)]
}

impl<W: Warp> Single<'_, W> {
    #[inline(always)]
    fn run(&mut self, first: u32, end: u32) -> Exit {
        let (warp, job) = (self.warp, self.job);
        let (mut item, mut retries) = (first, 0);
        // Whether the entry of `item` is at the tail, behind a fence.
        let mut staged = false;
        let mut tries = 0;
        while item < end {
            if item.wrapping_sub(first).is_multiple_of(ITEMS)
                && let Err(exit) = self.look(true)
            {
                return exit;
            }
            if !staged {
                let Some(of_item) = self.stage(item) else { return Exit::TimedOut };
                tries = of_item;
            }
            retries = if retries == 0 { tries } else { retries };
            let cid = self.cid;
            // The controller must be able to complete it without waiting for a doorbell.
            if self.ring.unacknowledged() + 1 >= self.ring.rings().cq_entries {
                self.ring.release(warp);
            }
            self.ring.advance(1);
            warp.begun(item);
            warp.ring(self.ring.rings().sq_door, self.ring.state().tail);
            self.ring.release(warp);
            staged = false;
            if item + 1 < end
                && let Some(of_next) = self.stage(item + 1)
            {
                (staged, tries) = (true, of_next);
            }
            warp.spent(Phase::Submit);
            let words = match self.wait() {
                Ok(words) => words,
                Err(exit) => {
                    ItemOutcome::Unknown.store(warp, job, item, retries);
                    return exit;
                }
            };
            warp.spent(Phase::Idle);
            self.ring.pass(1);
            self.ring.update_sq_head(words[0] as u16);
            if words[1] as u16 != cid {
                ItemOutcome::Unknown.store(warp, job, item, retries);
                return Exit::UnexpectedCompletion(words[1] as u16);
            }
            let status = Status((words[1] >> 17) as u16);
            if !job.again(status, retries) {
                ItemOutcome::Done(status).store(warp, job, item, retries);
                warp.ended(item);
                warp.spent(Phase::Complete);
                (item, retries) = (item + 1, 0);
                continue;
            }
            retries += 1;
            if let Err(exit) = self.wait_until(job.due(warp, status)) {
                ItemOutcome::Pending.store(warp, job, item, retries);
                return exit;
            }
            // In place of the staged one, which the controller does not know of.
            staged = self.stage(item).is_some();
        }
        Exit::Finished
    }

    /// Writes the entry of an item at the tail, and fences; returns how often it was tried before. None if there is no room.
    #[inline(always)]
    fn stage(&mut self, item: u32) -> Option<u32> {
        if self.ring.room() == 0 {
            return None;
        }
        let work: WorkItem = self.job.work(self.warp, item);
        self.cid = self.space.next(self.cid);
        let sqe: Sqe = work.command(self.job.nsid).with_cid(self.cid);
        self.ring.write(self.warp, 0, &sqe);
        self.warp.fence();
        Some(work.tries())
    }

    /// Waits for a completion; returns its last two words.
    #[inline(always)]
    fn wait(&self) -> Result<[u32; 2], Exit> {
        let mut since = None;
        let mut spins = 0u32;
        loop {
            let (words, there) = self.ring.look(self.warp, 0);
            if there {
                return Ok(words);
            }
            spins = spins.wrapping_add(1);
            if spins > W::SPINS {
                self.warp.pause();
            }
            if spins.is_multiple_of(LOOKS) {
                let now = self.look(spins.is_multiple_of(POISON_LOOKS))?;
                if now.wrapping_sub(*since.get_or_insert(now)) > self.job.stall {
                    return Err(Exit::TimedOut);
                }
            }
        }
    }

    /// Waits for a moment.
    #[inline(always)]
    fn wait_until(&self, due: u64) -> Result<(), Exit> {
        while self.look(true)? < due {
            self.warp.pause();
        }
        Ok(())
    }

    /// Checks the clock, and perhaps the poison word.
    #[inline(always)]
    fn look(&self, poison: bool) -> Result<u64, Exit> {
        if poison {
            match self.warp.load(self.job.poison) {
                0 => {}
                code => return Err(Exit::Poisoned(code)),
            }
        }
        let now = self.warp.now();
        if now >= self.job.deadline { Err(Exit::TimedOut) } else { Ok(now) }
    }
}
