//! Marks in memory that a device is about to write, by a kernel that may come late.
//!
//! A kernel that finds no room on the GPU starts when there is some, perhaps long after its host has abandoned it and the
//! memory has other users. So its blocks check a permit. Each block announces that it writes, and then checks whether its
//! launch is still the permitted one. The host revokes the permit and then checks which blocks write. Each side writes,
//! fences and reads, so one of them sees the other: a block that the host does not see writes nothing.
//!
//! Only plain loads and stores cross the bus, because not every platform makes read-modify-writes of CPU and GPU atomic
//! to each other.

use crate::GpuAddr;
use crate::queue::{Address, Memory};

/// Words that a kernel marks, and what it needs to be allowed to.
#[derive(Clone, Copy, Debug)]
pub struct Marking<A = GpuAddr> {
    /// Where the first word of eight bytes lies, on a multiple of eight.
    pub first: A,
    /// How many there are, side by side.
    pub count: u32,
    /// The value written into each.
    pub word: u64,
    /// [`Permit::BYTES`] that the host shares, zeroed before the first launch.
    pub permit: A,
    /// The number of this launch; not zero.
    pub launch: u32,
}

/// The layout of the memory by which a host permits launches to write.
pub struct Permit;

impl Permit {
    /// The most blocks of a launch.
    pub const MOST_BLOCKS: u32 = 32;
    /// The number of the launch that may write; zero for none. The host writes it.
    pub const LAUNCH: u32 = 0;
    /// Bytes in all.
    pub const BYTES: u32 = Self::block(Self::MOST_BLOCKS);

    /// Where a block announces that it writes: a word that is zero when it does not.
    #[must_use]
    pub const fn block(block: u32) -> u32 {
        4 + 4 * block
    }
}

/// A thread and its block among all of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Seat {
    /// The block, and how many there are: [`Permit::MOST_BLOCKS`] at most.
    pub block: (u32, u32),
    /// The thread, and how many its block has.
    pub thread: (u32, u32),
}

/// One thread's part of a marking. `meet` is a barrier of its block.
#[inline(always)]
pub fn run_mark<M: Memory>(mem: &M, marking: &Marking<M::Addr>, seat: Seat, meet: impl Fn()) {
    let leads = seat.thread.0 == 0;
    let block = marking.permit.plus(Permit::block(seat.block.0));
    if leads {
        mem.store(block, 1);
        mem.fence_all();
    }
    meet();
    // Each thread checks by itself: it comes behind the fence, too.
    if mem.load(marking.permit.plus(Permit::LAUNCH)) == marking.launch {
        each(marking.count, seat, |i| {
            let at = marking.first.element(i, 8);
            mem.store_pair(at, [marking.word as u32, (marking.word >> 32) as u32]);
        });
    }
    meet();
    if leads {
        // This covers the writes of the other threads, too: they met after them.
        mem.fence();
        mem.store_release(block, 0);
    }
}

/// Counts the words of one thread's part that still hold the mark.
#[inline(always)]
pub fn count_marks<M: Memory>(mem: &M, (first, count): (M::Addr, u32), word: u64, seat: Seat) -> u32 {
    let mut left = 0;
    each(count, seat, |i| {
        left += u32::from(mem.load_pair(first.element(i, 8)) == [word as u32, (word >> 32) as u32]);
    });
    left
}

/// Calls `f` with the index of each word that is this thread's.
#[inline(always)]
fn each(count: u32, Seat { block, thread }: Seat, mut f: impl FnMut(u32)) {
    let step = block.1 * thread.1;
    let mut index = block.0 * thread.1 + thread.0;
    while index < count {
        f(index);
        // A count of 32 bits less one step never wraps.
        index = index.saturating_add(step);
    }
}
