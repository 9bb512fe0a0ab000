//! A warp that also takes the times: of every command, and of its own work. It is slower than the warp within, so rates
//! are measured without it.

use core::cell::Cell;

use super::{Lanes, Phase, Taken, Warp};
use crate::queue::{Address, Memory};

/// Where the times lie: behind the outcomes of their job.
pub mod times {
    /// Bytes of a command: the cycles at its beginning and at its end, by the clock that its warp reads.
    pub const ITEM_BYTES: u64 = 16;
    /// Numbers of a warp, 64 bits each: cycles spent [idle, on submission, on completion](crate::kernel::Phase), all its
    /// cycles, all its nanoseconds, and the cycle and the nanosecond at which it began.
    pub const WARP_WORDS: u32 = 7;
    /// Bytes of a warp.
    pub const WARP_BYTES: u64 = WARP_WORDS as u64 * 8;

    /// How far behind the first outcome the commands' times lie.
    #[must_use]
    pub const fn items_at(count: u32) -> u64 {
        (count as u64 * 8).next_multiple_of(128)
    }

    /// How far behind the first outcome the warps' numbers lie.
    #[must_use]
    pub const fn warps_at(count: u32) -> u64 {
        items_at(count) + count as u64 * ITEM_BYTES
    }

    /// Bytes from the first outcome to behind the last warp's numbers.
    #[must_use]
    pub const fn end(count: u32, warps: u32) -> u64 {
        warps_at(count) + warps as u64 * WARP_BYTES
    }
}

/// A [`Warp`] with a clock.
pub struct Metered<W: Warp> {
    warp: W,
    items: W::Addr,
    warps: W::Addr,
    /// The cycle and the nanosecond at which it began.
    begun: [u64; 2],
    last: Cell<u64>,
    idle: Cell<u64>,
    submit: Cell<u64>,
    complete: Cell<u64>,
}

impl<W: Warp> Metered<W> {
    /// Begins to measure a job of `commands` commands whose outcomes lie there, with room for [`times::end`] bytes.
    #[inline(always)]
    pub fn begin(warp: W, outcomes: W::Addr, count: u32) -> Self {
        let begun = [warp.cycles(), warp.now()];
        let zero = || Cell::new(0);
        Self {
            // Elements of eight bytes, so that what lies far behind is reached by 64-bit arithmetic.
            items: outcomes.element((times::items_at(count) / 8) as u32, 8),
            warps: outcomes.element((times::warps_at(count) / 8) as u32, 8),
            warp,
            begun,
            last: Cell::new(begun[0]),
            idle: zero(),
            submit: zero(),
            complete: zero(),
        }
    }

    /// Stores the numbers of this warp, the `index`th.
    #[inline(always)]
    pub fn report(&self, index: u32) {
        let at = self.warps.element(index, times::WARP_BYTES as u32);
        let all = [self.cycles() - self.begun[0], self.now() - self.begun[1]];
        let spent = [self.idle.get(), self.submit.get(), self.complete.get()];
        let numbers = [spent[0], spent[1], spent[2], all[0], all[1], self.begun[0], self.begun[1]];
        self.once(|| {
            let mut i = 0;
            while i < times::WARP_WORDS {
                self.note(at.element(i, 8), numbers[i as usize]);
                i += 1;
            }
        });
    }

    #[inline(always)]
    fn note(&self, at: W::Addr, number: u64) {
        self.store_pair(at, [number as u32, (number >> 32) as u32]);
    }

    #[inline(always)]
    fn item(&self, item: u32) -> W::Addr {
        self.items.element(item, times::ITEM_BYTES as u32)
    }
}

/// Methods that are the warp's own.
macro_rules! delegate {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(#[inline(always)]
        fn $name(&self, $($arg: $type),*) $(-> $result)? {
            self.warp.$name($($arg),*)
        })*
    };
}

impl<W: Warp> Memory for Metered<W> {
    type Addr = W::Addr;
    type Door = W::Door;

    delegate! {
        fn load(at: W::Addr) -> u32;
        fn load_acquire(at: W::Addr) -> u32;
        fn store(at: W::Addr, value: u32);
        fn store_release(at: W::Addr, value: u32);
        fn store_entry(at: W::Addr, entry: &[u32; 16]);
        fn load_pair(at: W::Addr) -> [u32; 2];
        fn store_pair(at: W::Addr, words: [u32; 2]);
        fn load_constant(at: W::Addr) -> [u32; 4];
        fn fetch_add(at: W::Addr, value: u32) -> u32;
        fn fetch_or(at: W::Addr, bits: u32) -> u32;
        fn fetch_and(at: W::Addr, mask: u32) -> u32;
        fn compare_exchange(at: W::Addr, old: u32, new: u32) -> u32;
        fn fetch_or_relaxed(at: W::Addr, bits: u32) -> u32;
        fn fetch_and_relaxed(at: W::Addr, mask: u32) -> u32;
        fn fetch_and_acquire(at: W::Addr, mask: u32) -> u32;
        fn compare_exchange_acquire(at: W::Addr, old: u32, new: u32) -> u32;
        fn compare_exchange_relaxed(at: W::Addr, old: u32, new: u32) -> u32;
        fn combine(at: W::Addr, f: impl FnOnce(u32) -> u64) -> (u64, u32);
        fn fence();
        fn fence_all();
        fn ring(door: W::Door, value: u32);
        fn pause();
        fn now() -> u64;
    }
}

impl<W: Warp> Lanes for Metered<W> {
    delegate! {
        fn lanes() -> u32;
        fn each(f: impl FnMut(u32));
        fn once(f: impl FnMut());
        fn sync();
        fn local(index: u32) -> u32;
        fn set_local(index: u32, value: u32);
        fn local_four(index: u32) -> [u32; 4];
        fn set_local_four(index: u32, words: [u32; 4]);
        fn add_local(index: u32, value: u32) -> u32;
    }
}

impl<W: Warp> Warp for Metered<W> {
    const PLACES: u32 = W::PLACES;
    const SPINS: u32 = W::SPINS;

    delegate! {
        fn exchange_local(index: u32, old: u32, new: u32) -> u32;
        fn fetch(to: u32, from: W::Addr);
        fn wait_fetches();
        fn cycles() -> u64;
    }

    #[inline(always)]
    fn take(
        &self,
        limit: u32,
        look: impl FnMut(u32) -> ([u32; 2], bool),
        act: impl FnMut(u32, [u32; 2]) -> bool,
    ) -> Taken {
        self.warp.take(limit, look, act)
    }

    #[inline(always)]
    fn begun(&self, item: u32) {
        self.note(self.item(item), self.cycles());
    }

    #[inline(always)]
    fn ended(&self, item: u32) {
        self.note(self.item(item).plus(8), self.cycles());
    }

    #[inline(always)]
    fn spent(&self, on: Phase) {
        let now = self.cycles();
        let sum = match on {
            Phase::Idle => &self.idle,
            Phase::Submit => &self.submit,
            Phase::Complete => &self.complete,
        };
        sum.set(sum.get() + now - self.last.replace(now));
    }
}
