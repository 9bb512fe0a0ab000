//! The memory operations of a GPU thread, and of a warp's 32.
//!
//! Read-modify-writes and everything with an order or a scope are PTX of our own: core's would be relaxed, and their scope
//! would end at the GPU's edge. Operations of a whole warp are LLVM's intrinsics and never PTX of our own: only for
//! intrinsics does the compiler know that it must not copy them into branches.

use core::arch::{asm, global_asm, nvptx};

use onehop_proto::GpuAddr;
use onehop_proto::array::{HIT_WORDS, MISS_WORDS};
use onehop_proto::kernel::{GROUP_WORDS, LOCAL_WORDS, Lanes, SINGLE_WORDS, Seat, Taken, Warp};
use onehop_proto::queue::Memory;

use crate::params::{DOOR_WORDS, GROUP_SHARED_BYTES, LANES, OWNER_SHARED_BYTES};

global_asm!(".extern .shared .align 16 .b8 onehop_local[];");

// SAFETY: declared as LLVM defines them.
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn bar_warp_sync(mask: u32);
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn vote_ballot_sync(mask: u32, yes: bool) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn shfl_sync_idx(mask: u32, value: u32, from: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.activemask"]
    fn activemask() -> u32;
    #[link_name = "llvm.nvvm.match.any.sync.i64"]
    fn match_any_sync(mask: u32, value: u64) -> u32;
}

const ALL: u32 = u32::MAX;

/// Where the calling thread is in its grid.
#[inline(always)]
#[must_use]
pub fn seat() -> Seat {
    // SAFETY: these read registers.
    unsafe {
        Seat {
            block: (nvptx::_block_idx_x() as u32, nvptx::_grid_dim_x() as u32),
            thread: (nvptx::_thread_idx_x() as u32, nvptx::_block_dim_x() as u32),
        }
    }
}

/// A thread that acts on its own.
#[derive(Clone, Copy)]
pub struct GpuThread {
    _made_by_new: (),
}

impl GpuThread {
    /// The calling thread.
    ///
    /// # Safety
    /// What it is used on is there, and is what the host says it is: queues, arrays, jobs, and the addresses in them.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn new() -> Self {
        Self { _made_by_new: () }
    }
}

/// One lane of a warp whose 32 lanes are all there.
#[derive(Clone, Copy)]
pub struct Lane {
    lane: u32,
    /// Where the warp's words of shared memory begin, in words, and how many there are before its doorbells.
    base: u32,
    words: u32,
}

/// A doorbell of a warp's queue. Their addresses lie in shared memory, behind the warp's tables: in registers they
/// would lie all the time, for one use in a turn.
#[derive(Clone, Copy)]
pub enum Door {
    Sq = 0,
    Cq = 1,
}

const _: () = assert!(OWNER_SHARED_BYTES == (LOCAL_WORDS + DOOR_WORDS) * 4);
const _: () = assert!(GROUP_SHARED_BYTES == (GROUP_WORDS + DOOR_WORDS) * 4);

const _: () = assert!(
    LOCAL_WORDS.is_multiple_of(2) && SINGLE_WORDS.is_multiple_of(2) && GROUP_WORDS.is_multiple_of(2),
    "doorbells lie behind them"
);

// The warps' words follow each other. Kernels with other numbers of words do not use four at once.
const _: () = assert!(
    LOCAL_WORDS.is_multiple_of(4) && HIT_WORDS.is_multiple_of(4) && MISS_WORDS.is_multiple_of(4),
    "`local_four` and `fetch` need words that are aligned so"
);
const _: () = assert!(DOOR_WORDS.is_multiple_of(4), "they lie between the words of two warps");

impl Lane {
    /// The calling thread, in the `warp`th warp of its block, in which each has `words` words of its own; it rings these
    /// doorbells.
    ///
    /// # Safety
    /// All 32 lanes of the warp come here, and to all that they do together later; the launch asked for so much shared
    /// memory; the doorbells and what the lane is used on are there, as for [`GpuThread::new`].
    #[inline(always)]
    pub unsafe fn new(warp: u32, words: u32, doors: [u64; 2]) -> Self {
        let lane;
        // SAFETY: reads a register.
        unsafe { asm!("mov.u32 {0}, %laneid;", out(reg32) lane, options(pure, nomem, nostack)) };
        let this = Self { lane, base: warp * (words + DOOR_WORDS), words };
        this.once(|| {
            this.set_local(words, doors[0] as u32);
            this.set_local(words + 1, (doors[0] >> 32) as u32);
            this.set_local(words + 2, doors[1] as u32);
            this.set_local(words + 3, (doors[1] >> 32) as u32);
        });
        this
    }

    /// This lane's number. The compiler does not know that it is always the same, and so keeps no sums of it in registers.
    #[inline(always)]
    fn number(&self) -> u32 {
        let lane;
        // SAFETY: copies a register.
        unsafe { asm!("mov.u32 {0}, {1};", out(reg32) lane, in(reg32) self.lane, options(nomem, nostack)) };
        lane
    }

    /// The address of a word of the block's dynamic shared memory.
    #[inline(always)]
    fn shared(&self, index: u32) -> u32 {
        let base: u32;
        // SAFETY: the address of a symbol.
        unsafe { asm!("mov.u32 {0}, onehop_local;", out(reg32) base, options(pure, nomem, nostack)) };
        base + (self.base + index) * 4
    }

    #[inline(always)]
    fn ballot(yes: bool) -> u32 {
        // SAFETY: all lanes of the warp come here together, as `Warp` says.
        unsafe { vote_ballot_sync(ALL, yes) }
    }

    #[inline(always)]
    fn barrier() {
        // SAFETY: all lanes of the warp come here together, as `Warp` says.
        unsafe { bar_warp_sync(ALL) }
    }
}

/// One instruction that reads or writes a word; the addresses are the host's promise.
macro_rules! load {
    ($op:literal, $at:expr) => {{
        let value: u32;
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe { asm!(concat!($op, " {0}, [{1}];"), out(reg32) value, in(reg64) $at.0, options(nostack)) };
        value
    }};
}

macro_rules! store {
    ($op:literal, $at:expr, $value:expr) => {
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe { asm!(concat!($op, " [{0}], {1};"), in(reg64) $at.0, in(reg32) $value, options(nostack)) }
    };
}

macro_rules! modify {
    ($op:literal, $at:expr, $value:expr) => {{
        let old: u32;
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe {
            asm!(concat!($op, " {0}, [{1}], {2};"),
                out(reg32) old, in(reg64) $at.0, in(reg32) $value, options(nostack))
        };
        old
    }};
}

macro_rules! exchange {
    ($op:literal, $at:expr, $old:expr, $new:expr) => {{
        let seen: u32;
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe {
            asm!(concat!($op, " {0}, [{1}], {2}, {3};"),
                out(reg32) seen, in(reg64) $at.0, in(reg32) $old, in(reg32) $new, options(nostack))
        };
        seen
    }};
}

/// What a thread and a warp's lane have in common.
macro_rules! memory {
    () => {
    type Addr = GpuAddr;

    #[inline(always)]
    fn load(&self, at: GpuAddr) -> u32 {
        load!("ld.relaxed.sys.global.u32", at)
    }

    #[inline(always)]
    fn load_acquire(&self, at: GpuAddr) -> u32 {
        load!("ld.acquire.sys.global.u32", at)
    }

    #[inline(always)]
    fn store(&self, at: GpuAddr, value: u32) {
        store!("st.relaxed.sys.global.u32", at, value);
    }

    #[inline(always)]
    fn store_release(&self, at: GpuAddr, value: u32) {
        store!("st.release.sys.global.u32", at, value);
    }

    #[inline(always)]
    fn store_entry(&self, at: GpuAddr, entry: &[u32; 16]) {
        let mut i = 0;
        while i < 16 {
            // SAFETY: the host vouches for the addresses that it describes to a kernel.
            unsafe {
                asm!("st.relaxed.sys.global.v4.u32 [{0}], {{{1}, {2}, {3}, {4}}};",
                    in(reg64) at.0 + i as u64 * 4, in(reg32) entry[i], in(reg32) entry[i + 1],
                    in(reg32) entry[i + 2], in(reg32) entry[i + 3], options(nostack));
            }
            i += 4;
        }
    }

    #[inline(always)]
    fn load_pair(&self, at: GpuAddr) -> [u32; 2] {
        let both: u64;
        // One access of eight bytes: the halves are of one moment.
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe { asm!("ld.relaxed.sys.global.u64 {0}, [{1}];", out(reg64) both, in(reg64) at.0, options(nostack)) };
        [both as u32, (both >> 32) as u32]
    }

    #[inline(always)]
    fn store_pair(&self, at: GpuAddr, words: [u32; 2]) {
        let both = words[0] as u64 | (words[1] as u64) << 32;
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe { asm!("st.relaxed.sys.global.u64 [{0}], {1};", in(reg64) at.0, in(reg64) both, options(nostack)) };
    }

    #[inline(always)]
    fn load_constant(&self, at: GpuAddr) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the host vouches for the addresses that it describes to a kernel. No program writes handles,
        // or the items of an array's job; if one writes work items meanwhile, the values are arbitrary, and none
        // of them becomes an address of this GPU.
        unsafe {
            asm!("ld.global.nc.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) at.0, options(nostack));
        }
        [a, b, c, d]
    }

    #[inline(always)]
    fn load_four(&self, at: GpuAddr) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe {
            asm!("ld.relaxed.sys.global.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) at.0, options(nostack));
        }
        [a, b, c, d]
    }

    #[inline(always)]
    fn store_four(&self, at: GpuAddr, [a, b, c, d]: [u32; 4]) {
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe {
            asm!("st.relaxed.sys.global.v4.u32 [{0}], {{{1}, {2}, {3}, {4}}};",
                in(reg64) at.0, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
        }
    }

    #[inline(always)]
    fn fetch_add(&self, at: GpuAddr, value: u32) -> u32 {
        modify!("atom.acq_rel.sys.global.add.u32", at, value)
    }

    #[inline(always)]
    fn fetch_add_acquire(&self, at: GpuAddr, value: u32) -> u32 {
        modify!("atom.acquire.gpu.global.add.u32", at, value)
    }

    #[inline(always)]
    fn fetch_add_release(&self, at: GpuAddr, value: u32) -> u32 {
        modify!("atom.release.gpu.global.add.u32", at, value)
    }

    #[inline(always)]
    fn fetch_add_relaxed(&self, at: GpuAddr, value: u32) -> u32 {
        modify!("atom.relaxed.sys.global.add.u32", at, value)
    }

    #[inline(always)]
    fn fetch_or(&self, at: GpuAddr, bits: u32) -> u32 {
        modify!("atom.acq_rel.sys.global.or.b32", at, bits)
    }

    #[inline(always)]
    fn fetch_and(&self, at: GpuAddr, mask: u32) -> u32 {
        modify!("atom.acq_rel.sys.global.and.b32", at, mask)
    }

    #[inline(always)]
    fn compare_exchange(&self, at: GpuAddr, old: u32, new: u32) -> u32 {
        exchange!("atom.acq_rel.sys.global.cas.b32", at, old, new)
    }

    #[inline(always)]
    fn fetch_or_relaxed(&self, at: GpuAddr, bits: u32) -> u32 {
        modify!("atom.relaxed.sys.global.or.b32", at, bits)
    }

    #[inline(always)]
    fn fetch_and_relaxed(&self, at: GpuAddr, mask: u32) -> u32 {
        modify!("atom.relaxed.sys.global.and.b32", at, mask)
    }

    #[inline(always)]
    fn fetch_and_acquire(&self, at: GpuAddr, mask: u32) -> u32 {
        modify!("atom.acquire.sys.global.and.b32", at, mask)
    }

    #[inline(always)]
    fn compare_exchange_acquire(&self, at: GpuAddr, old: u32, new: u32) -> u32 {
        exchange!("atom.acquire.sys.global.cas.b32", at, old, new)
    }

    #[inline(always)]
    fn compare_exchange_relaxed(&self, at: GpuAddr, old: u32, new: u32) -> u32 {
        exchange!("atom.relaxed.sys.global.cas.b32", at, old, new)
    }

    #[inline(always)]
    fn fence(&self) {
        // SAFETY: touches no memory.
        unsafe { asm!("fence.acq_rel.sys;", options(nostack)) };
    }

    #[inline(always)]
    fn fence_all(&self) {
        // SAFETY: touches no memory.
        unsafe { asm!("fence.sc.sys;", options(nostack)) };
    }

    #[inline(always)]
    fn pause(&self) {
        // SAFETY: touches no memory.
        unsafe { asm!("nanosleep.u32 20;", options(nostack)) };
    }

    #[inline(always)]
    fn now(&self) -> u64 {
        let now: u64;
        // SAFETY: reads a register.
        unsafe { asm!("mov.u64 {0}, %globaltimer;", out(reg64) now, options(nomem, nostack)) };
        now
    }

    };
}

impl Memory for GpuThread {
    memory!();
    type Door = GpuAddr;

    #[inline(always)]
    fn ring(&self, door: GpuAddr, value: u32) {
        store!("st.relaxed.mmio.sys.global.u32", door, value);
    }

    /// The lanes of a warp that are here at this moment with the same address: one acts, and the others are parked until
    /// it has. Lanes that took turns would each wait for memory on their own, and the holder of a lock for all of them.
    #[inline(always)]
    fn combine(&self, at: GpuAddr, f: impl FnOnce(u32) -> u64) -> (u64, u32) {
        let before: u32;
        // SAFETY: reads a register.
        unsafe { asm!("mov.u32 {0}, %lanemask_lt;", out(reg32) before, options(pure, nomem, nostack)) };
        // SAFETY: every active lane comes here, and all with the same address to what follows.
        let group = unsafe { match_any_sync(activemask(), at.0) };
        let (rank, first) = ((group & before).count_ones(), group.trailing_zeros());
        let mut word = 0;
        // SAFETY: as above.
        unsafe { bar_warp_sync(group) };
        if rank == 0 {
            word = f(group.count_ones());
        }
        // SAFETY: as above.
        unsafe { bar_warp_sync(group) };
        // SAFETY: as above.
        let half = |word| unsafe { shfl_sync_idx(group, word, first, LANES - 1) };
        (u64::from(half(word as u32)) | u64::from(half((word >> 32) as u32)) << 32, rank)
    }
}

impl Memory for Lane {
    memory!();
    type Door = Door;

    #[inline(always)]
    fn ring(&self, door: Door, value: u32) {
        let at: u64;
        // SAFETY: within the shared memory that the launch asked for.
        unsafe {
            asm!("ld.shared.u64 {0}, [{1}];",
                out(reg64) at, in(reg32) self.shared(self.words + door as u32 * 2), options(nostack));
        }
        store!("st.relaxed.mmio.sys.global.u32", GpuAddr(at), value);
    }
}

impl Lanes for Lane {
    #[inline(always)]
    fn lanes(&self) -> u32 {
        LANES
    }

    #[inline(always)]
    fn each(&self, mut f: impl FnMut(u32)) {
        f(self.number());
        Self::barrier();
    }

    #[inline(always)]
    fn once(&self, mut f: impl FnMut()) {
        if self.lane == 0 {
            f();
        }
        Self::barrier();
    }

    #[inline(always)]
    fn sync(&self) {
        Self::barrier();
    }

    #[inline(always)]
    fn local(&self, index: u32) -> u32 {
        let value: u32;
        // SAFETY: within the shared memory that the launch asked for.
        unsafe {
            asm!("ld.shared.u32 {0}, [{1}];", out(reg32) value, in(reg32) self.shared(index), options(nostack))
        };
        value
    }

    #[inline(always)]
    fn set_local(&self, index: u32, value: u32) {
        // SAFETY: within the shared memory that the launch asked for.
        unsafe {
            asm!("st.shared.u32 [{0}], {1};", in(reg32) self.shared(index), in(reg32) value, options(nostack))
        };
    }

    #[inline(always)]
    fn local_four(&self, index: u32) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: within the shared memory that the launch asked for, and aligned: the index is a multiple of
        // four, as `Lanes` says, and the base is a multiple of four words in the kernels that use this.
        unsafe {
            asm!("ld.shared.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) self.shared(index),
                options(nostack));
        }
        [a, b, c, d]
    }

    #[inline(always)]
    fn add_local(&self, index: u32, value: u32) -> u32 {
        let old: u32;
        // SAFETY: within the shared memory that the launch asked for.
        unsafe {
            asm!("atom.relaxed.cta.shared.add.u32 {0}, [{1}], {2};",
                out(reg32) old, in(reg32) self.shared(index), in(reg32) value, options(nostack));
        }
        old
    }
}

impl Warp for Lane {
    const SPINS: u32 = 256;

    #[inline(always)]
    fn take(
        &self,
        limit: u32,
        mut look: impl FnMut(u32) -> ([u32; 2], bool),
        mut act: impl FnMut(u32, [u32; 2]) -> bool,
    ) -> Taken {
        let lane = self.number();
        // Row by row and by hand: an array that a loop runs over would lie in memory.
        let mut row = |row: u32| {
            // The same for all lanes; those past the limit poll its last place, and that does not count.
            if row * LANES < limit {
                let place = lane + row * LANES;
                let (words, yes) = look(place.min(limit - 1));
                (words, yes && place < limit)
            } else {
                ([0; 2], false)
            }
        };
        let ((w0, y0), (w1, y1), (w2, y2), (w3, y3)) = (row(0), row(1), row(2), row(3));
        let (b0, b1, b2, b3) = (Self::ballot(y0), Self::ballot(y1), Self::ballot(y2), Self::ballot(y3));
        let count = if b0 != ALL {
            (!b0).trailing_zeros()
        } else if b1 != ALL {
            LANES + (!b1).trailing_zeros()
        } else if b2 != ALL {
            2 * LANES + (!b2).trailing_zeros()
        } else {
            3 * LANES + (!b3).trailing_zeros()
        };
        if count == 0 {
            return Taken::default();
        }
        let mut well = true;
        let mut last;
        // One copy of the act: four cost registers and instruction cache. The rows go round and round, or the compiler
        // would see an end to it and unroll.
        let mut rows = [w0, w1, w2, w3];
        let mut place = lane;
        let mut left = count;
        loop {
            last = rows[0][0];
            if place < count {
                well &= act(place, rows[0]);
            }
            if left <= LANES {
                break;
            }
            left -= LANES;
            place += LANES;
            rows = [rows[1], rows[2], rows[3], rows[0]];
        }
        // SAFETY: all lanes of the warp come here together, as `Warp` says.
        let last = unsafe { shfl_sync_idx(ALL, last, (count - 1) % LANES, LANES - 1) };
        let all_well = Self::ballot(well) == ALL;
        Self::barrier();
        Taken { count, last, all_well }
    }

    #[inline(always)]
    fn exchange_local(&self, index: u32, old: u32, new: u32) -> u32 {
        let seen: u32;
        // SAFETY: within the shared memory that the launch asked for.
        unsafe {
            asm!("atom.relaxed.cta.shared.cas.b32 {0}, [{1}], {2}, {3};",
                out(reg32) seen, in(reg32) self.shared(index), in(reg32) old, in(reg32) new, options(nostack));
        }
        seen
    }

    #[inline(always)]
    fn fetch(&self, to: u32, from: GpuAddr) {
        // SAFETY: to within the shared memory that the launch asked for, from where the host vouches for.
        unsafe {
            asm!("cp.async.ca.shared.global [{0}], [{1}], 16;",
                in(reg32) self.shared(to), in(reg64) from.0, options(nostack));
        }
    }

    #[inline(always)]
    fn wait_fetches(&self) {
        // SAFETY: waits, and touches only what `fetch` was given.
        unsafe { asm!("cp.async.wait_all;", options(nostack)) };
        Self::barrier();
    }

    #[inline(always)]
    fn cycles(&self) -> u64 {
        let now;
        // SAFETY: reads a register.
        unsafe { asm!("mov.u64 {0}, %clock64;", out(reg64) now, options(nomem, nostack)) };
        now
    }
}
