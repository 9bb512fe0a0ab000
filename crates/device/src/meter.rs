//! A lane that also takes the times: of every command, and of what its warp does. Its kernels are slower than those that
//! do not, and their own.

use core::arch::asm;
use core::cell::Cell;

use onehop_proto::GpuAddr;
use onehop_proto::kernel::{Phase, Taken, Warp};
use onehop_proto::queue::{Address, Memory};

use crate::gpu::{Door, Lane};
use crate::params::{Job, times};

/// A [`Lane`] with a clock.
pub struct Metered {
    lane: Lane,
    /// Where the commands' times lie, and the warps'.
    items: u64,
    warps: u64,
    begun: [u64; 2],
    last: Cell<u64>,
    idle: Cell<u64>,
    submit: Cell<u64>,
    complete: Cell<u64>,
}

fn cycles() -> u64 {
    let now;
    // SAFETY: reads a register.
    unsafe { asm!("mov.u64 {0}, %clock64;", out(reg64) now, options(nomem, nostack)) };
    now
}

impl Metered {
    /// See [`Lane::new`].
    #[inline(always)]
    pub fn new(warp: u32, words: u32, doors: [u64; 2]) -> Self {
        let zero = || Cell::new(0);
        Self {
            lane: Lane::new(warp, words, doors),
            items: 0,
            warps: 0,
            begun: [0; 2],
            last: zero(),
            idle: zero(),
            submit: zero(),
            complete: zero(),
        }
    }

    /// Begins to measure a job.
    #[inline(always)]
    pub fn begin(self, job: &Job) -> Self {
        let begun = [cycles(), self.now()];
        let (items, warps) = (times::items_at(job.count), times::warps_at(job.count));
        Self {
            items: job.outcomes + items,
            warps: job.outcomes + warps,
            begun,
            last: Cell::new(begun[0]),
            ..self
        }
    }

    /// Leaves the numbers of a warp.
    #[inline(always)]
    pub fn report(&self, warp: u32) {
        let at = GpuAddr(self.warps).element(warp, times::WARP_WORDS * 8);
        let all = [cycles() - self.begun[0], self.now() - self.begun[1]];
        let numbers = [self.idle.get(), self.submit.get(), self.complete.get(), all[0], all[1]];
        self.once(|| {
            let mut i = 0;
            while i < times::WARP_WORDS {
                self.note(at.element(i, 8), numbers[i as usize]);
                i += 1;
            }
        });
    }

    #[inline(always)]
    fn note(&self, at: GpuAddr, number: u64) {
        self.store_pair(at, [number as u32, (number >> 32) as u32]);
    }

    #[inline(always)]
    fn item(&self, item: u32) -> GpuAddr {
        GpuAddr(self.items).element(item, times::ITEM_BYTES as u32)
    }
}

/// Methods that are the lane's own.
macro_rules! delegate {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(#[inline(always)]
        fn $name(&self, $($arg: $type),*) $(-> $result)? {
            self.lane.$name($($arg),*)
        })*
    };
}

impl Memory for Metered {
    type Addr = GpuAddr;
    type Door = Door;

    delegate! {
        fn load(at: GpuAddr) -> u32;
        fn load_acquire(at: GpuAddr) -> u32;
        fn store(at: GpuAddr, value: u32);
        fn store_release(at: GpuAddr, value: u32);
        fn store_entry(at: GpuAddr, entry: &[u32; 16]);
        fn load_pair(at: GpuAddr) -> [u32; 2];
        fn store_pair(at: GpuAddr, words: [u32; 2]);
        fn load_constant(at: GpuAddr) -> [u32; 4];
        fn fetch_add(at: GpuAddr, value: u32) -> u32;
        fn fetch_or(at: GpuAddr, bits: u32) -> u32;
        fn fetch_and(at: GpuAddr, mask: u32) -> u32;
        fn compare_exchange(at: GpuAddr, old: u32, new: u32) -> u32;
        fn fetch_or_relaxed(at: GpuAddr, bits: u32) -> u32;
        fn fetch_and_relaxed(at: GpuAddr, mask: u32) -> u32;
        fn fetch_and_acquire(at: GpuAddr, mask: u32) -> u32;
        fn compare_exchange_acquire(at: GpuAddr, old: u32, new: u32) -> u32;
        fn fence();
        fn fence_all();
        fn ring(door: Door, value: u32);
        fn pause();
        fn now() -> u64;
    }
}

impl Warp for Metered {
    const SPINS: u32 = Lane::SPINS;

    delegate! {
        fn lanes() -> u32;
        fn each(f: impl FnMut(u32));
        fn once(f: impl FnMut());
        fn sync();
        fn local(index: u32) -> u32;
        fn set_local(index: u32, value: u32);
        fn local_four(index: u32) -> [u32; 4];
        fn add_local(index: u32, value: u32) -> u32;
        fn exchange_local(index: u32, old: u32, new: u32) -> u32;
        fn fetch(to: u32, from: GpuAddr);
        fn fetched();
    }

    #[inline(always)]
    fn take(
        &self,
        limit: u32,
        look: impl FnMut(u32) -> ([u32; 2], bool),
        act: impl FnMut(u32, [u32; 2]) -> bool,
    ) -> Taken {
        self.lane.take(limit, look, act)
    }

    #[inline(always)]
    fn begun(&self, item: u32) {
        self.note(self.item(item), cycles());
    }

    #[inline(always)]
    fn ended(&self, item: u32) {
        self.note(self.item(item).plus(8), cycles());
    }

    #[inline(always)]
    fn spent(&self, on: Phase) {
        let now = cycles();
        let sum = match on {
            Phase::Idle => &self.idle,
            Phase::Submit => &self.submit,
            Phase::Complete => &self.complete,
        };
        sum.set(sum.get() + now - self.last.replace(now));
    }
}
