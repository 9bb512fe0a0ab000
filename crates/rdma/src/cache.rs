//! A cache of registrations, because making one takes longer than most transfers.
//!
//! A registration is identified by its allocation and range. An address is not enough: freed and reused, it is other
//! memory, and a device with the old registration would write to memory that has no owner. So freeing memory must be
//! reported ([`Cache::forget`]), and an allocation's number is never reused.
//!
//! Ranges grow to whole pages, and a registration serves every range within it. Unused ones are evicted, least recently
//! used first, when a new one would exceed the limits. Nothing is registered or released under the lock.

use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onehop_os::Deadline;

use crate::{Error, MemoryRef, Result};

/// Ranges are whole pages of this size, which kernels register for devices.
pub(crate) const PAGE: u64 = 4096;
/// How long to wait for another thread that registers the same range.
const WAIT: Duration = Duration::from_secs(30);

/// An allocation: its owner, and a number that the owner never reuses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Allocation {
    /// The GPU or process that assigns the numbers.
    pub of: [u8; 16],
    /// The number.
    pub number: u64,
}

impl Allocation {
    /// Identifies memory by its address: valid while a registration holds the memory.
    pub(crate) fn by_address(memory: &MemoryRef) -> Self {
        match memory.host() {
            Some(mem) => Self { of: *b"memory of a host", number: mem.host_ptr() as u64 },
            None => Self { of: *b"memory of a GPU\0", number: memory.gpu_addr().map_or(0, |at| at.0) },
        }
    }
}

/// Limits of registrations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheLimits {
    /// Number of registrations.
    pub count: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Default for CacheLimits {
    fn default() -> Self {
        Self { count: 4096, bytes: 1 << 40 }
    }
}

/// Counters of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheCounters {
    /// Found in the cache.
    pub hits: u64,
    /// Registered.
    pub misses: u64,
    /// Evicted for others.
    pub evicted: u64,
    /// Present number of registrations.
    pub count: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// The registrations of one device.
pub struct Cache<R> {
    limits: CacheLimits,
    state: Mutex<CacheState<R>>,
    made: Condvar,
}

struct CacheState<R> {
    of: HashMap<Allocation, Vec<CacheSlot<R>>>,
    account: CacheCounters,
    /// Counts uses, to find the least recent.
    clock: u64,
    /// The number of the next registration being made.
    next: u64,
}

struct CacheSlot<R> {
    range: Range<u64>,
    used: u64,
    what: SlotContent<R>,
}

enum SlotContent<R> {
    Here(Arc<CachedRegion<R>>),
    /// A thread is making it.
    Coming(u64),
}

struct CachedRegion<R> {
    region: R,
    start: u64,
}

impl<R> CacheSlot<R> {
    fn covers(&self, range: &Range<u64>) -> bool {
        self.range.start <= range.start && range.end <= self.range.end
    }

    fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Only the cache holds it; no other thread gets it while the cache is locked.
    fn is_idle(&self) -> bool {
        matches!(&self.what, SlotContent::Here(entry) if Arc::strong_count(entry) == 1)
    }
}

/// A registration in use. It stays while this lives, even if the cache drops it.
pub struct HeldRegistration<R> {
    entry: Arc<CachedRegion<R>>,
    offset: u64,
}

impl<R> HeldRegistration<R> {
    /// Offset of the requested range in the registration.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The same for what lies further on in it.
    pub(crate) fn further(self, by: u64) -> Self {
        Self { offset: self.offset + by, ..self }
    }
}

impl<R> Clone for HeldRegistration<R> {
    fn clone(&self) -> Self {
        Self { entry: self.entry.clone(), offset: self.offset }
    }
}

impl<R> Deref for HeldRegistration<R> {
    type Target = R;

    fn deref(&self) -> &R {
        &self.entry.region
    }
}

/// The place reserved for a registration being made; removed if that fails.
struct Coming<'a, R> {
    cache: &'a Cache<R>,
    allocation: Allocation,
    number: u64,
}

impl<R> Drop for Coming<'_, R> {
    fn drop(&mut self) {
        let mut state = self.cache.lock();
        if let Some(slots) = state.of.get_mut(&self.allocation) {
            let before =
                slots.iter().position(|slot| matches!(slot.what, SlotContent::Coming(n) if n == self.number));
            if let Some(at) = before {
                let gone = slots.remove(at);
                state.account.count -= 1;
                state.account.bytes -= gone.bytes();
            }
        }
        drop(state);
        self.cache.made.notify_all();
    }
}

impl<R> Cache<R> {
    /// An empty cache.
    #[must_use]
    pub fn new(limits: CacheLimits) -> Self {
        let (of, account) = (HashMap::new(), CacheCounters::default());
        Self {
            limits,
            state: Mutex::new(CacheState { of, account, clock: 0, next: 0 }),
            made: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, CacheState<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its counters.
    #[must_use]
    pub fn account(&self) -> CacheCounters {
        self.lock().account
    }

    /// A registration that covers a range, if there is one.
    pub(crate) fn existing(&self, allocation: Allocation, range: &Range<u64>) -> Option<HeldRegistration<R>> {
        match self.lock().find(allocation, range) {
            Lookup::Here(entry) => Some(HeldRegistration { offset: range.start - entry.start, entry }),
            Lookup::Coming | Lookup::Nothing => None,
        }
    }

    /// A registration of a range of an allocation of `len` bytes. On a miss, `make` registers the pages that it is
    /// given.
    ///
    /// # Errors
    /// When the range is outside the allocation, all permitted registrations are in use, or registering fails.
    pub fn get(
        &self,
        allocation: Allocation,
        len: u64,
        range: Range<u64>,
        make: impl FnOnce(Range<u64>) -> Result<R>,
    ) -> Result<HeldRegistration<R>> {
        if range.start >= range.end || range.end > len {
            let bytes = range.end.saturating_sub(range.start);
            return Err(Error::OutOfRange { offset: range.start, bytes, len });
        }
        let pages = range.start / PAGE * PAGE..range.end.next_multiple_of(PAGE).min(len);
        let deadline = Deadline::after(WAIT);
        let mut state = self.lock();
        loop {
            match state.find(allocation, &range) {
                Lookup::Here(entry) => {
                    let offset = range.start - entry.start;
                    return Ok(HeldRegistration { entry, offset });
                }
                Lookup::Nothing => break,
                Lookup::Coming if deadline.passed() => return Err(Error::TimedOut("registering memory")),
                Lookup::Coming => {
                    let waited = self.made.wait_timeout(state, deadline.left());
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
        let (number, evicted) = state.reserve(allocation, &pages, &self.limits);
        drop(state);
        // Released before more is registered: the limit may be the system's.
        drop(evicted);
        let number = number?;
        let place = Coming { cache: self, allocation, number };
        let entry = Arc::new(CachedRegion { region: make(pages.clone())?, start: pages.start });
        self.lock().put(allocation, number, &entry);
        drop(place);
        Ok(HeldRegistration { offset: range.start - entry.start, entry })
    }

    /// The allocation is freed, or about to be: its registrations are not handed out again. Those in use stay until
    /// they are dropped.
    pub fn forget(&self, allocation: Allocation) {
        let mut state = self.lock();
        let gone = state.of.remove(&allocation).unwrap_or_default();
        for slot in &gone {
            state.account.count -= 1;
            state.account.bytes -= slot.bytes();
        }
        drop(state);
        // Outside the lock: it takes a while.
        drop(gone);
        self.made.notify_all();
    }
}

enum Lookup<R> {
    Here(Arc<CachedRegion<R>>),
    Coming,
    Nothing,
}

impl<R> CacheState<R> {
    fn find(&mut self, allocation: Allocation, range: &Range<u64>) -> Lookup<R> {
        self.clock += 1;
        let slots = self.of.entry(allocation).or_default();
        let mut coming = false;
        for slot in slots.iter_mut().filter(|slot| slot.covers(range)) {
            match &slot.what {
                SlotContent::Here(entry) => {
                    slot.used = self.clock;
                    self.account.hits += 1;
                    return Lookup::Here(entry.clone());
                }
                SlotContent::Coming(_) => coming = true,
            }
        }
        if coming { Lookup::Coming } else { Lookup::Nothing }
    }

    /// Makes room for one more, and reserves its place; returns what was evicted.
    fn reserve(
        &mut self,
        allocation: Allocation,
        pages: &Range<u64>,
        limits: &CacheLimits,
    ) -> (Result<u64>, Vec<CacheSlot<R>>) {
        let bytes = pages.end - pages.start;
        let mut evicted = Vec::new();
        while self.account.count >= limits.count || bytes > limits.bytes.saturating_sub(self.account.bytes) {
            let Some(slot) = self.evict() else {
                let full = Error::Full {
                    bytes,
                    held: self.account.count,
                    held_bytes: self.account.bytes,
                    most: limits.count,
                    most_bytes: limits.bytes,
                };
                return (Err(full), evicted);
            };
            evicted.push(slot);
        }
        self.next += 1;
        let slot = CacheSlot { range: pages.clone(), used: self.clock, what: SlotContent::Coming(self.next) };
        self.of.entry(allocation).or_default().push(slot);
        self.account.misses += 1;
        self.account.count += 1;
        self.account.bytes += bytes;
        (Ok(self.next), evicted)
    }

    fn evict(&mut self) -> Option<CacheSlot<R>> {
        let idle = self.of.iter().flat_map(|(allocation, slots)| {
            let idle = slots.iter().enumerate().filter(|(_, slot)| slot.is_idle());
            idle.map(|(at, slot)| (slot.used, *allocation, at))
        });
        let (_, allocation, at) = idle.min_by_key(|(used, ..)| *used)?;
        let slots = self.of.get_mut(&allocation)?;
        let gone = slots.remove(at);
        if slots.is_empty() {
            self.of.remove(&allocation);
        }
        self.account.count -= 1;
        self.account.bytes -= gone.bytes();
        self.account.evicted += 1;
        Some(gone)
    }

    /// Stores a new registration in its place, if that still exists: the allocation may have been freed meanwhile.
    fn put(&mut self, allocation: Allocation, number: u64, entry: &Arc<CachedRegion<R>>) {
        let slots = self.of.get_mut(&allocation).into_iter().flatten();
        for slot in slots {
            if matches!(slot.what, SlotContent::Coming(n) if n == number) {
                slot.what = SlotContent::Here(entry.clone());
            }
        }
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
