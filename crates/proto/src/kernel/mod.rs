//! What GPU threads run: ordinary generic functions over [`Memory`], [`Lanes`] and [`Warp`]. The emulated GPU calls them on CPU
//! threads, the device crate wraps them into kernel entries.

mod answer;
mod descriptor;
mod device_queue;
mod group;
mod handle;
mod job;
mod marks;
mod meter;
mod owner;
mod peek;
mod place;
mod shared;
mod single;
mod slots;
mod unseen;

pub use answer::Answer;
pub use descriptor::{KernelJob, KernelQueue};
pub use device_queue::{Command, DeviceOp, DeviceQueue};
pub use group::{GROUP_WORDS, run_group};
pub use handle::{Gate, Handle, signal, tally};
pub use job::{Exit, ItemOutcome, Job, WorkItem, share};
pub use marks::{Marking, Permit, Seat, count_marks, run_mark};
pub use meter::{Metered, times};
pub use owner::{MAX_WINDOW, OwnerQueue, run_owner};
pub use peek::{MOST_PEEKED, PeekNotes, run_peek};
pub use place::{Copies, PlaceOrder, run_place};
pub use shared::run_shared;
pub use single::{SINGLE_WORDS, run_single};
pub use slots::{LOCAL_WORDS, scratch_bytes, scratch_init};
pub use unseen::has_unseen;

use crate::queue::Memory;

/// What a warp spends its time on, for measurements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Nothing moved.
    Idle,
    /// From a command to the doorbell that covers it.
    Submit,
    /// From an available completion to the stored outcome.
    Complete,
}

/// The result of [`Warp::take`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Taken {
    /// How many places there were before the first no.
    pub count: u32,
    /// The first word of the last of them.
    pub last: u32,
    /// Whether every act said yes.
    pub all_well: bool,
}

/// Threads that run in step and act on one queue pair together, on either side of it.
///
/// Code between two calls is run by every lane with the same values; only the closures see single lanes. A value that may
/// differ between lanes, such as a clock or a word that others write, is read by one lane, which leaves it in local
/// memory.
///
/// Local memory is words of the warp alone, close to it and gone after the launch. [`Self::each`],
/// [`Self::once`], [`Warp::take`] and [`Warp::wait_fetches`] end with a barrier: what lanes stored before is
/// then seen by all of them. Only a [`Warp::take`] that takes nothing ends with a vote instead, which orders no
/// stores. They do not begin with a barrier, so a word that all lanes read after such a call is not written in
/// the very next one.
pub trait Lanes: Memory {
    /// How many lanes there are.
    fn lanes(&self) -> u32;
    /// Runs `f` on every lane.
    fn each(&self, f: impl FnMut(u32));
    /// Runs `f` on one lane.
    fn once(&self, f: impl FnMut());
    /// A barrier and nothing else.
    #[inline(always)]
    fn sync(&self) {
        self.once(|| ());
    }
    /// Reads a word of local memory.
    fn local(&self, index: u32) -> u32;
    /// Writes a word of local memory.
    fn set_local(&self, index: u32, value: u32);
    /// Reads four words of local memory; `index` is a multiple of four.
    #[inline(always)]
    fn local_four(&self, index: u32) -> [u32; 4] {
        [self.local(index), self.local(index + 1), self.local(index + 2), self.local(index + 3)]
    }
    /// Writes four words of local memory; `index` is a multiple of four.
    #[inline(always)]
    fn set_local_four(&self, index: u32, [a, b, c, d]: [u32; 4]) {
        self.set_local(index, a);
        self.set_local(index + 1, b);
        self.set_local(index + 2, c);
        self.set_local(index + 3, d);
    }
    /// Adds to a word of local memory and returns the old value, atomically.
    fn add_local(&self, index: u32, value: u32) -> u32;
}

/// What the host's side of a queue pair needs of a warp beside that.
pub trait Warp: Lanes {
    /// How many places of a ring each lane polls in [`Self::take`].
    const PLACES: u32 = 4;
    /// How often a warp that finds nothing polls again before it pauses.
    const SPINS: u32 = 0;

    /// Looks at the places below `limit`, which is at most [`Self::PLACES`] for each lane, and acts on those before the
    /// first no.
    ///
    /// `look` may be called for places after the first no, and more than once for a place that `act` is not called for.
    /// All looks come before the first act: that is how many far reads cost little more than one.
    fn take(
        &self,
        limit: u32,
        look: impl FnMut(u32) -> ([u32; 2], bool),
        act: impl FnMut(u32, [u32; 2]) -> bool,
    ) -> Taken;
    /// Compares a word with `old`, writes `new` if they are equal, and returns the former value, atomically.
    fn exchange_local(&self, index: u32, old: u32, new: u32) -> u32;
    /// Begins to copy four words, which are constant as long as the kernel runs, to local memory; both places are
    /// multiples of four words.
    fn fetch(&self, to: u32, from: Self::Addr);
    /// Waits for the copies begun by [`Self::fetch`] on all lanes.
    fn wait_fetches(&self);

    /// A clock that is quick to read: cycles of the multiprocessor or CPU that runs the warp, where there is one.
    #[inline(always)]
    fn cycles(&self) -> u64 {
        self.now()
    }
    /// A lane begins with the command of an item. A hook for measurements, as the next two are; usually it does nothing.
    #[inline(always)]
    fn begun(&self, _item: u32) {}
    /// A lane has stored how an item ended.
    #[inline(always)]
    fn ended(&self, _item: u32) {}
    /// All lanes: what the time since the last such call was spent on.
    #[inline(always)]
    fn spent(&self, _on: Phase) {}
}
