//! Copies of many ranges by few threads.
//!
//! Warps take ranges in turn. A thread has eight loads of 16 bytes under way, so that a warp copies a page of 4 KiB at once.
//! Few warps suffice for the link to host memory. More would have more bytes under way than the link takes, and accesses that wait
//! for it delay those of every other kernel.

use onehop_proto::GpuAddr;

use crate::{Block, pair};

/// Threads of a warp.
const LANES: u32 = 32;
/// Bytes of a load.
const GRANULE: u32 = 16;
/// Loads that a thread has under way.
const LOADS: u32 = 8;
/// Bytes that a warp copies at a time.
const STEP: u32 = LANES * GRANULE * LOADS;
/// Addresses and bytes of a range are multiples of this.
pub const ALIGN: u64 = GRANULE as u64;
/// Bytes of an entry of the list.
pub const ENTRY_BYTES: u64 = 32;

/// The kernel's arguments.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct RangeList {
    /// The entries, aligned to 16.
    pub list: u64,
    /// How many there are.
    pub count: u32,
    /// 1 to wait after each step until its bytes have arrived: so that no more are under way to host memory.
    pub settles: u32,
}

impl RangeList {
    /// The arguments as words.
    #[must_use]
    pub const fn words(&self) -> [u64; 2] {
        [self.list, pair(self.count, self.settles)]
    }
}

/// An entry of the list.
#[must_use]
pub const fn entry(from: GpuAddr, to: GpuAddr, bytes: u32) -> [u64; 4] {
    [from.0, to.0, bytes as u64, 0]
}

/// The kernel.
#[inline(always)]
pub fn copy<B: Block>(block: &B, job: &RangeList) {
    block.each(|thread| {
        let (warps, lane) = (block.threads() / LANES, thread % LANES);
        let mut index = block.number() * warps + thread / LANES;
        let mut entry = load_entry(block, job, index);
        while index < job.count {
            let ([from_low, from_high, to_low, to_high], bytes) = entry;
            index += warps * block.count();
            // Under way while the bytes of this one are copied.
            entry = load_entry(block, job, index);
            copy_one(
                block,
                GpuAddr(pair(from_low, from_high)),
                GpuAddr(pair(to_low, to_high)),
                bytes,
                lane,
                job.settles,
            );
        }
    });
}

/// The addresses and the bytes of an entry, if there is one.
#[inline(always)]
fn load_entry<B: Block>(block: &B, job: &RangeList, index: u32) -> ([u32; 4], u32) {
    if index >= job.count {
        return ([0; 4], 0);
    }
    let at = GpuAddr(job.list).plus(u64::from(index) * ENTRY_BYTES);
    (block.load_four(at), block.load(at.plus(16)))
}

#[inline(always)]
fn copy_one<B: Block>(block: &B, from: GpuAddr, to: GpuAddr, bytes: u32, lane: u32, settles: u32) {
    let mut start = 0;
    while start < bytes {
        let mut words = [[0; 4]; LOADS as usize];
        let mut load = 0;
        while load < LOADS {
            let at = start + (load * LANES + lane) * GRANULE;
            if at < bytes {
                words[load as usize] = block.load_four(from.plus(u64::from(at)));
            }
            load += 1;
        }
        load = 0;
        while load < LOADS {
            let at = start + (load * LANES + lane) * GRANULE;
            if at < bytes {
                block.store_four(to.plus(u64::from(at)), words[load as usize]);
            }
            load += 1;
        }
        if settles != 0 {
            block.settle();
        }
        start += STEP;
    }
}
