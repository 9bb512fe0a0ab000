//! The emulated GPU's address space: regions and BARs at addresses that differ from host pointers and bus addresses.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, RwLock, RwLockWriteGuard};
use std::time::{Duration, Instant};

use onehop_os::{HostMem, Registers};
use onehop_proto::GpuAddr;
use onehop_proto::kernel::{Lanes, Taken, Warp};
use onehop_proto::queue::Memory;

use crate::meeting::Meeting;
use crate::{Error, Place};

/// The first address of each kind of memory. Host pointers and the simulator's bus addresses are in other ranges.
const fn base(place: Option<Place>) -> u64 {
    match place {
        Some(Place::Vram) => 0x0b00_0000_0000,
        Some(Place::PinnedHost) => 0x0c00_0000_0000,
        Some(Place::Cmb) => 0x0d00_0000_0000,
        None => 0x0e00_0000_0000,
    }
}

/// An unmapped gap after each mapping, so that overruns are noticed.
const GUARD: u64 = 1 << 16;

#[derive(Clone)]
enum MappedTarget {
    Memory(HostMem),
    Registers(Arc<dyn Registers>),
}

#[derive(Clone)]
struct SpaceMapping {
    start: u64,
    len: u64,
    target: MappedTarget,
}

#[derive(Default)]
struct MappingTable {
    mappings: Vec<SpaceMapping>,
    used: [u64; 4],
}

/// The address space of one emulated GPU.
pub(crate) struct Space {
    table: RwLock<MappingTable>,
    version: AtomicU64,
    start: Instant,
}

/// See [`Emulated::hold`](crate::Emulated::hold).
pub struct HeldSpace<'a> {
    _table: RwLockWriteGuard<'a, MappingTable>,
}

/// Removes a mapping when it is dropped.
pub(crate) struct Unmap {
    space: Arc<Space>,
    start: u64,
}

impl Drop for Unmap {
    fn drop(&mut self) {
        let mut table = self.space.table.write().unwrap_or_else(|e| e.into_inner());
        table.mappings.retain(|m| m.start != self.start);
        self.space.version.fetch_add(1, Ordering::Release);
    }
}

impl Space {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { table: RwLock::default(), version: AtomicU64::new(0), start: Instant::now() })
    }

    pub(crate) fn hold(&self) -> HeldSpace<'_> {
        HeldSpace { _table: self.table.write().unwrap_or_else(|e| e.into_inner()) }
    }

    pub(crate) fn map_memory(self: &Arc<Self>, place: Place, mem: HostMem) -> (GpuAddr, Unmap) {
        let len = mem.len() as u64;
        self.map(Some(place), len, MappedTarget::Memory(mem))
    }

    pub(crate) fn map_registers(self: &Arc<Self>, regs: Arc<dyn Registers>) -> (GpuAddr, Unmap) {
        let len = u64::from(regs.size());
        self.map(None, len, MappedTarget::Registers(regs))
    }

    fn map(self: &Arc<Self>, place: Option<Place>, len: u64, target: MappedTarget) -> (GpuAddr, Unmap) {
        let mut table = self.table.write().unwrap_or_else(|e| e.into_inner());
        let used = &mut table.used[place.map_or(3, |p| p as usize)];
        let start = base(place) + *used;
        *used += len.next_multiple_of(GUARD) + GUARD;
        table.mappings.push(SpaceMapping { start, len, target });
        table.mappings.sort_by_key(|m| m.start);
        self.version.fetch_add(1, Ordering::Release);
        (GpuAddr(start), Unmap { space: self.clone(), start })
    }

    /// The memory at a range of addresses, and the range's offset in it.
    pub(crate) fn memory_at(&self, at: u64, bytes: u64) -> Option<(HostMem, usize)> {
        let table = self.table.read().unwrap_or_else(|e| e.into_inner());
        let index = table.mappings.partition_point(|m| m.start <= at).checked_sub(1)?;
        let mapping = table.mappings.get(index)?;
        let offset = at - mapping.start;
        let MappedTarget::Memory(mem) = &mapping.target else { return None };
        (offset < mapping.len && bytes <= mapping.len - offset).then(|| (mem.clone(), offset as usize))
    }

    pub(crate) fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

/// One GPU thread's view of memory, or that of a warp whose lanes take turns on one CPU thread.
pub struct EmulatedThread {
    space: Arc<Space>,
    lanes: u32,
    seen: Cell<u64>,
    mappings: RefCell<Vec<SpaceMapping>>,
    last: Cell<usize>,
    local: Vec<Cell<u32>>,
    looks: RefCell<Vec<[u32; 2]>>,
    /// For a persistent thread: how often it has paused since it was last active.
    pauses: Option<Cell<u32>>,
    /// Where an independent thread meets the others of its warp.
    meeting: Option<Arc<Meeting>>,
}

impl EmulatedThread {
    pub(crate) fn new(space: &Arc<Space>) -> Self {
        Self::warp(space, 1, 0)
    }

    /// The view of one thread of a warp whose threads act independently.
    pub(crate) fn lane(space: &Arc<Space>, warp: &Arc<Meeting>) -> Self {
        Self { meeting: Some(warp.clone()), ..Self::new(space) }
    }

    /// The view of a warp with `local` words of local memory.
    pub(crate) fn warp(space: &Arc<Space>, lanes: u32, local: u32) -> Self {
        Self {
            // Code must not rely on what another launch left there.
            local: (0..local).map(|i| Cell::new(0xdead_0000 | i)).collect(),
            looks: RefCell::default(),
            pauses: None,
            meeting: None,
            space: space.clone(),
            lanes,
            seen: Cell::new(u64::MAX),
            mappings: RefCell::default(),
            last: Cell::new(0),
        }
    }

    /// The view of a persistent warp: it sleeps where others only yield.
    pub(crate) fn patient(space: &Arc<Space>, lanes: u32, local: u32) -> Self {
        Self { pauses: Some(Cell::new(0)), ..Self::warp(space, lanes, local) }
    }

    fn fault(access: &'static str, addr: GpuAddr, bytes: u32, what: &'static str) -> ! {
        // A GPU destroys the context; here the thread ends, and joining the launch returns the error.
        std::panic::resume_unwind(Box::new(Error::Fault { access, addr, bytes, what }))
    }

    fn with<R>(
        &self,
        access: &'static str,
        addr: GpuAddr,
        bytes: u32,
        f: impl FnOnce(&SpaceMapping, u64) -> R,
    ) -> R {
        let version = self.space.version.load(Ordering::Acquire);
        if version != self.seen.get() {
            let table = self.space.table.read().unwrap_or_else(|e| e.into_inner());
            self.mappings.replace(table.mappings.clone());
            self.seen.set(version);
            self.last.set(0);
        }
        let mappings = self.mappings.borrow();
        let hit = |m: &SpaceMapping| addr.0.wrapping_sub(m.start) < m.len;
        let mut index = self.last.get();
        if !mappings.get(index).is_some_and(hit) {
            index = mappings.partition_point(|m| m.start <= addr.0).wrapping_sub(1);
            self.last.set(index);
        }
        let Some(mapping) = mappings.get(index).filter(|m| hit(m)) else {
            Self::fault(access, addr, bytes, "no mapping")
        };
        let offset = addr.0 - mapping.start;
        if offset + u64::from(bytes) > mapping.len {
            Self::fault(access, addr, bytes, "the end of a mapping");
        }
        if !addr.0.is_multiple_of(u64::from(bytes)) {
            Self::fault(access, addr, bytes, "no alignment for it");
        }
        f(mapping, offset)
    }

    fn word<R>(&self, access: &'static str, addr: GpuAddr, f: impl FnOnce(&AtomicU32) -> R) -> R {
        self.with(access, addr, 4, |mapping, offset| match &mapping.target {
            MappedTarget::Memory(mem) => match mem.word(offset as usize) {
                Ok(word) => f(word),
                Err(_) => Self::fault(access, addr, 4, "no alignment for it"),
            },
            MappedTarget::Registers(_) => Self::fault(access, addr, 4, "a device's registers"),
        })
    }
}

impl EmulatedThread {
    /// A register of a device.
    pub(crate) fn register(&self, at: GpuAddr) -> u32 {
        let (regs, offset) = self.with("register read", at, 4, |mapping, offset| match &mapping.target {
            MappedTarget::Registers(regs) => (regs.clone(), offset as u32),
            MappedTarget::Memory(_) => Self::fault("register read", at, 4, "memory and no register"),
        });
        regs.read32(offset)
    }
}

impl Memory for EmulatedThread {
    type Addr = GpuAddr;
    type Door = GpuAddr;

    fn load(&self, at: GpuAddr) -> u32 {
        self.word("load", at, |word| word.load(Ordering::Relaxed))
    }

    fn load_acquire(&self, at: GpuAddr) -> u32 {
        self.word("load", at, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, at: GpuAddr, value: u32) {
        self.word("store", at, |word| word.store(value, Ordering::Relaxed));
    }

    fn store_release(&self, at: GpuAddr, value: u32) {
        self.word("store", at, |word| word.store(value, Ordering::Release));
    }

    fn store_entry(&self, at: GpuAddr, entry: &[u32; 16]) {
        self.with("store", at, 64, |mapping, offset| match &mapping.target {
            MappedTarget::Memory(mem) => {
                if mem.write_words(offset as usize, entry).is_err() {
                    Self::fault("store", at, 64, "no alignment for it");
                }
            }
            MappedTarget::Registers(_) => Self::fault("store", at, 64, "a device's registers"),
        });
    }

    fn fetch_add(&self, at: GpuAddr, value: u32) -> u32 {
        self.word("atomic", at, |word| word.fetch_add(value, Ordering::AcqRel))
    }

    fn fetch_or(&self, at: GpuAddr, bits: u32) -> u32 {
        self.word("atomic", at, |word| word.fetch_or(bits, Ordering::AcqRel))
    }

    fn fetch_and(&self, at: GpuAddr, mask: u32) -> u32 {
        self.word("atomic", at, |word| word.fetch_and(mask, Ordering::AcqRel))
    }

    fn compare_exchange(&self, at: GpuAddr, old: u32, new: u32) -> u32 {
        self.word("atomic", at, |word| {
            word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).unwrap_or_else(|seen| seen)
        })
    }

    fn combine(&self, at: GpuAddr, f: impl FnOnce(u32) -> u64) -> (u64, u32) {
        match &self.meeting {
            Some(meeting) => meeting.combine(at, f),
            None => (f(1), 0),
        }
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
        // A persistent thread was just active: completions follow a fence.
        if let Some(pauses) = &self.pauses {
            pauses.set(0);
        }
    }

    fn ring(&self, door: GpuAddr, value: u32) {
        let regs = self.with("doorbell write", door, 4, |mapping, offset| match &mapping.target {
            MappedTarget::Registers(regs) => (regs.clone(), offset as u32),
            MappedTarget::Memory(_) => Self::fault("doorbell write", door, 4, "memory and no doorbell"),
        });
        regs.0.write32(regs.1, value);
    }

    fn pause(&self) {
        let pauses = self.pauses.as_ref().map_or(0, |pauses| pauses.replace(pauses.get().saturating_add(1)));
        match pauses {
            0..200 => std::thread::yield_now(),
            200..2000 => std::thread::sleep(Duration::from_micros(20)),
            _ => std::thread::sleep(Duration::from_micros(500)),
        }
    }

    fn now(&self) -> u64 {
        self.space.now()
    }
}

impl Lanes for EmulatedThread {
    fn lanes(&self) -> u32 {
        self.lanes
    }

    fn each(&self, f: impl FnMut(u32)) {
        (0..self.lanes).for_each(f);
    }

    fn once(&self, mut f: impl FnMut()) {
        f();
    }

    fn local(&self, index: u32) -> u32 {
        self.local[index as usize].get()
    }

    fn set_local(&self, index: u32, value: u32) {
        self.local[index as usize].set(value);
    }

    fn add_local(&self, index: u32, value: u32) -> u32 {
        let word = &self.local[index as usize];
        word.replace(word.get().wrapping_add(value))
    }
}

impl Warp for EmulatedThread {
    fn take(
        &self,
        limit: u32,
        mut look: impl FnMut(u32) -> ([u32; 2], bool),
        mut act: impl FnMut(u32, [u32; 2]) -> bool,
    ) -> Taken {
        let mut looks = self.looks.borrow_mut();
        looks.clear();
        looks.extend((0..limit).map(&mut look).take_while(|(_, yes)| *yes).map(|(words, _)| words));
        let mut all_well = true;
        for (place, words) in looks.iter().enumerate() {
            all_well &= act(place as u32, *words);
        }
        Taken { count: looks.len() as u32, last: looks.last().map_or(0, |words| words[0]), all_well }
    }

    fn exchange_local(&self, index: u32, old: u32, new: u32) -> u32 {
        let word = &self.local[index as usize];
        let seen = word.get();
        if seen == old {
            word.set(new);
        }
        seen
    }

    fn fetch(&self, to: u32, from: GpuAddr) {
        for (i, word) in (to..).zip(self.load_constant(from)) {
            self.set_local(i, word);
        }
    }

    fn wait_fetches(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault_of(f: impl FnOnce() + std::panic::UnwindSafe) -> &'static str {
        let payload = std::panic::catch_unwind(f).unwrap_err();
        match payload.downcast::<Error>().map(|e| *e) {
            Ok(Error::Fault { what, .. }) => what,
            _ => "another panic",
        }
    }

    #[test]
    fn only_gpu_addresses_reach_memory() {
        let space = Space::new();
        let mem = HostMem::anonymous(4096).unwrap();
        let pointer = GpuAddr(mem.host_ptr() as u64);
        let (addr, unmap) = space.map_memory(Place::Vram, mem.clone());
        let view = || EmulatedThread::new(&space);
        view().store(addr.plus(8), 7);
        assert_eq!(mem.to_vec(8, 1).unwrap(), [7]);
        let caught = |at: GpuAddr| {
            let space = space.clone();
            fault_of(std::panic::AssertUnwindSafe(move || {
                EmulatedThread::new(&space).load(at);
            }))
        };
        assert_eq!(caught(pointer), "no mapping");
        assert_eq!(caught(addr.plus(4096)), "no mapping");
        assert_eq!(caught(addr.plus(2)), "no alignment for it");
        assert_eq!(fault_of(std::panic::AssertUnwindSafe(|| view().ring(addr, 1))), "memory and no doorbell");
        drop(unmap);
        assert_eq!(caught(addr), "no mapping");
    }
}
