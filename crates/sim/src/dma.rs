//! The bus as the simulated controller sees it: mappings, and copies to and from them.
//!
//! Bus addresses are invented, far from any pointer, with unmapped gaps between mappings. So a driver that mixes up
//! addresses, or unmaps memory that a command still uses, is detected.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use onehop_os::{BusRange, DmaMemory, Error, HostMem, Mapped, Mapper, Result};
use onehop_proto::BusAddr;

const FIRST: u64 = 0x10_0000_0000;
const PAGE: u64 = 4096;
/// Mappings start on the largest page size that a controller here can ask for.
const ALIGN: u64 = 1 << 20;

/// A bus-contiguous range of mapped memory.
pub(crate) struct Segment {
    pub addr: u64,
    bytes: usize,
    /// `None` for memory that only an [`IoEngine`](crate::IoEngine) reaches.
    mem: Option<HostMem>,
}

impl Segment {
    pub(crate) fn of(addr: u64, mem: HostMem) -> Self {
        Self { addr, bytes: mem.len(), mem: Some(mem) }
    }

    /// A segment at an address, perhaps with the host's memory.
    pub(crate) fn at(addr: u64, bytes: usize, mem: Option<HostMem>) -> Self {
        Self { addr, bytes, mem }
    }

    /// The memory, if the core reaches it.
    pub(crate) fn host(&self) -> Result<&HostMem> {
        self.mem.as_ref().ok_or(Error::NotReachable)
    }

    /// The offset of an access, if it lies completely within the segment.
    pub(crate) fn offset(&self, addr: u64, bytes: usize) -> Option<usize> {
        let offset = usize::try_from(addr.checked_sub(self.addr)?).ok()?;
        (offset.checked_add(bytes)? <= self.bytes).then_some(offset)
    }
}

/// Why the controller could not reach memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreachable {
    /// Nothing is mapped where the access starts.
    Unmapped { addr: u64, bytes: usize },
    /// The access extends past the end of a mapping.
    PastEnd { addr: u64, bytes: usize },
    /// A write to read-only memory.
    ReadOnly { addr: u64, bytes: usize },
    /// The segment is not memory that this controller reaches.
    NotShared { addr: u64, bytes: usize },
    /// The function is not a bus master.
    NoMaster { addr: u64, bytes: usize },
}

impl std::fmt::Display for Unreachable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unmapped { addr, bytes } => {
                write!(f, "{bytes} bytes at bus {addr:#x}, where nothing is mapped")
            }
            Self::PastEnd { addr, bytes } => {
                write!(f, "{bytes} bytes at bus {addr:#x} end past their mapping")
            }
            Self::ReadOnly { addr, bytes } => {
                write!(f, "{bytes} bytes at bus {addr:#x}, which may only be read")
            }
            Self::NotShared { addr, bytes } => {
                write!(f, "{bytes} bytes at bus {addr:#x}, which are not memory shared with the controller")
            }
            Self::NoMaster { addr, bytes } => {
                write!(f, "{bytes} bytes at bus {addr:#x}, while the function is not a bus master")
            }
        }
    }
}

/// Everything that is mapped.
pub(crate) struct Space {
    segments: RwLock<BTreeMap<u64, Arc<Segment>>>,
    cmb: RwLock<Option<Arc<Segment>>>,
    next: AtomicU64,
    /// Whether the function may access memory: Bus Master Enable of its Command register.
    master: AtomicBool,
}

impl Space {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            segments: RwLock::default(),
            cmb: RwLock::default(),
            next: AtomicU64::new(FIRST),
            master: AtomicBool::new(true),
        })
    }

    /// Allows or forbids the function's memory accesses.
    pub(crate) fn set_master(&self, on: bool) {
        self.master.store(on, Ordering::SeqCst);
    }

    pub(crate) fn is_master(&self) -> bool {
        self.master.load(Ordering::Relaxed)
    }

    /// Maps the controller memory buffer at a bus address, or unmaps it.
    pub(crate) fn set_cmb(&self, window: Option<Segment>) {
        *self.cmb.write().unwrap_or_else(PoisonError::into_inner) = window.map(Arc::new);
    }

    /// The memory of an access, and the access's offset in it.
    pub(crate) fn find(
        &self,
        addr: u64,
        bytes: usize,
    ) -> std::result::Result<(Arc<Segment>, usize), Unreachable> {
        let segment = self.segment(addr).ok_or_else(|| self.missing(addr, bytes))?;
        let offset = segment.offset(addr, bytes).ok_or(Unreachable::PastEnd { addr, bytes })?;
        Ok((segment, offset))
    }

    /// The segment that contains an address.
    fn segment(&self, addr: u64) -> Option<Arc<Segment>> {
        if let Some(cmb) = self.cmb.read().unwrap_or_else(PoisonError::into_inner).as_ref()
            && cmb.offset(addr, 1).is_some()
        {
            return Some(cmb.clone());
        }
        if !self.is_master() {
            return None;
        }
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        let (_, segment) = segments.range(..=addr).next_back()?;
        segment.offset(addr, 1).map(|_| segment.clone())
    }

    /// Why an address is not mapped.
    fn missing(&self, addr: u64, bytes: usize) -> Unreachable {
        if self.is_master() {
            Unreachable::Unmapped { addr, bytes }
        } else {
            Unreachable::NoMaster { addr, bytes }
        }
    }

    /// Calls `f` for each segment of an access, in order: the segment, the offset in it, and the bytes of the access.
    fn each(
        &self,
        addr: u64,
        bytes: usize,
        mut work: impl FnMut(&Segment, usize, Range<usize>) -> std::result::Result<(), Unreachable>,
    ) -> std::result::Result<(), Unreachable> {
        let mut done = 0;
        loop {
            let found = addr.checked_add(done as u64).and_then(|here| Some((here, self.segment(here)?)));
            let Some((here, segment)) = found else {
                let past = done > 0 && self.is_master();
                return Err(if past {
                    Unreachable::PastEnd { addr, bytes }
                } else {
                    self.missing(addr, bytes)
                });
            };
            let at = (here - segment.addr) as usize;
            let len = (segment.bytes - at).min(bytes - done);
            work(&segment, at, done..done + len)?;
            done += len;
            if done == bytes {
                return Ok(());
            }
        }
    }

    /// Whether all of an access is mapped, and whether it is writable.
    pub(crate) fn reach(&self, addr: u64, bytes: usize) -> std::result::Result<(), Unreachable> {
        self.each(addr, bytes, |segment, _, _| match segment.host() {
            Ok(mem) if mem.is_writable() => Ok(()),
            Ok(_) => Err(Unreachable::ReadOnly { addr, bytes }),
            Err(_) => Ok(()),
        })
    }

    /// Copies from mapped memory, as the controller does.
    pub(crate) fn read(&self, addr: u64, out: &mut [u8]) -> std::result::Result<(), Unreachable> {
        let lost = Unreachable::NotShared { addr, bytes: out.len() };
        self.each(addr, out.len(), |segment, at, part| {
            segment.host().and_then(|mem| mem.read(at, &mut out[part])).map_err(|_| lost)
        })
    }

    /// Copies to mapped memory, as the controller does.
    pub(crate) fn write(&self, addr: u64, data: &[u8]) -> std::result::Result<(), Unreachable> {
        let bytes = data.len();
        self.each(addr, bytes, |segment, at, part| {
            segment.host().and_then(|mem| mem.write(at, &data[part])).map_err(|error| match error {
                Error::ReadOnly { .. } => Unreachable::ReadOnly { addr, bytes },
                _ => Unreachable::NotShared { addr, bytes },
            })
        })
    }

    /// Allocates `bytes` of address space, followed by an unmapped gap.
    fn take(&self, bytes: u64) -> u64 {
        let step = bytes.next_multiple_of(ALIGN) + ALIGN;
        self.next.fetch_add(step, Ordering::Relaxed)
    }

    fn insert(&self, segments: Vec<Segment>) {
        let mut map = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        for segment in segments {
            map.insert(segment.addr, Arc::new(segment));
        }
    }

    /// Inserts a segment unless it overlaps another.
    pub(crate) fn insert_free(&self, segment: Segment) -> bool {
        let bytes = segment.bytes as u64;
        let Some(end) = segment.addr.checked_add(bytes).filter(|_| bytes > 0) else { return false };
        let mut map = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        let before = map.range(..end).next_back();
        if before.is_some_and(|(addr, other)| addr + other.bytes as u64 > segment.addr) {
            return false;
        }
        map.insert(segment.addr, Arc::new(segment));
        true
    }

    /// Whether an address is in the controller memory buffer.
    pub(crate) fn in_cmb(&self, addr: u64) -> bool {
        let cmb = self.cmb.read().unwrap_or_else(PoisonError::into_inner);
        cmb.as_ref().is_some_and(|cmb| cmb.offset(addr, 1).is_some())
    }

    pub(crate) fn remove(&self, addrs: &[u64]) {
        let mut map = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        for addr in addrs {
            map.remove(addr);
        }
    }
}

/// Unmaps on drop.
struct MappingGuard {
    space: Arc<Space>,
    addrs: Vec<u64>,
}

impl Drop for MappingGuard {
    fn drop(&mut self) {
        self.space.remove(&self.addrs);
    }
}

/// Assigns the simulated controller's bus addresses.
pub struct SimMapper {
    space: Arc<Space>,
    name: String,
    scatter: Option<u64>,
}

impl SimMapper {
    pub(crate) fn new(space: Arc<Space>, scatter: Option<u64>) -> Self {
        let name = if scatter.is_some() { "sim (scattered pages)" } else { "sim" };
        Self { space, name: name.into(), scatter }
    }

    /// Number of bus-contiguous mappings.
    #[must_use]
    pub fn mappings(&self) -> usize {
        self.space.segments.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Lets the drive reach memory at an address of the caller's choice, as a guest's or an IOMMU's would be.
    ///
    /// # Errors
    /// When the address is in use.
    pub fn map_at(&self, at: BusAddr, memory: &HostMem) -> Result<Mapped> {
        let segment = Segment::of(at.0, memory.clone());
        if !self.space.insert_free(segment) {
            let why = format!("the {} bytes at {at} are taken, or not an address range", memory.len());
            return Err(Error::CannotMap { mapper: self.name.clone(), why });
        }
        let runs = vec![BusRange { addr: at, len: memory.len() as u64 }];
        Ok(Mapped::new(runs, Box::new(MappingGuard { space: self.space.clone(), addrs: vec![at.0] })))
    }

    /// Assigns a bus address to memory that only an [`IoEngine`](crate::IoEngine) reaches, `skew` bytes into a page.
    #[must_use]
    pub fn map_foreign(&self, bytes: usize, skew: u64) -> Mapped {
        let skew = skew % PAGE;
        let addr = self.space.take(skew + bytes as u64) + skew;
        self.mapped(vec![Segment { addr, bytes, mem: None }])
    }

    fn mapped(&self, segments: Vec<Segment>) -> Mapped {
        let run = |s: &Segment| BusRange { addr: BusAddr(s.addr), len: s.bytes as u64 };
        let runs = segments.iter().map(run).collect();
        let addrs = segments.iter().map(|s| s.addr).collect();
        self.space.insert(segments);
        Mapped::new(runs, Box::new(MappingGuard { space: self.space.clone(), addrs }))
    }

    /// Each page as a separate run, in descending order of address, so that nothing is contiguous by chance.
    fn scattered(&self, mem: &HostMem, page: u64) -> Result<Vec<Segment>> {
        let skew = mem.host_ptr() as u64 % PAGE;
        let pages = (skew + mem.len() as u64).div_ceil(page);
        let base = self.space.take(pages * page * 2);
        let mut segments = Vec::new();
        let mut done = 0;
        for i in 0..pages {
            let start = if i == 0 { skew } else { 0 };
            let len = (page - start).min(mem.len() as u64 - done);
            let part = mem.slice(done as usize..(done + len) as usize)?;
            segments.push(Segment::of(base + (pages - 1 - i) * page * 2 + start, part));
            done += len;
        }
        Ok(segments)
    }
}

impl Mapper for SimMapper {
    fn name(&self) -> &str {
        &self.name
    }

    fn alloc(&self, bytes: usize) -> Result<HostMem> {
        HostMem::anonymous(bytes)
    }

    fn map(&self, memory: &dyn DmaMemory) -> Result<Mapped> {
        let mem = memory.host().ok_or_else(|| Error::CannotMap {
            mapper: self.name.clone(),
            why: "the simulated drive reaches host memory only; use the emulated GPU with it".into(),
        })?;
        if mem.is_empty() {
            return Err(Error::CannotMap { mapper: self.name.clone(), why: "it has no bytes".into() });
        }
        let segments = match self.scatter {
            Some(page) => self.scattered(mem, page)?,
            None => {
                // The offset within a page stays the same, as it does behind an IOMMU.
                let skew = mem.host_ptr() as u64 % PAGE;
                vec![Segment::of(self.space.take(skew + mem.len() as u64) + skew, mem.clone())]
            }
        };
        Ok(self.mapped(segments))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reaches_only_what_is_mapped() {
        let space = Space::new();
        let mapper = SimMapper::new(space.clone(), None);
        let mem = mapper.alloc(8192).unwrap();
        let mapped = mapper.map(&mem).unwrap();
        let at = mapped.contiguous().unwrap().0;
        assert!(at >= FIRST);
        space.write(at + 8190, &[1, 2]).unwrap();
        assert_eq!(mem.to_vec(8190, 2).unwrap(), [1, 2]);
        let past = space.write(at + 8190, &[1, 2, 3]);
        assert_eq!(past, Err(Unreachable::PastEnd { addr: at + 8190, bytes: 3 }));
        assert!(matches!(space.read(at + 8192, &mut [0]), Err(Unreachable::Unmapped { .. })));
        assert!(matches!(space.read(at - 1, &mut [0]), Err(Unreachable::Unmapped { .. })));
        drop(mapped);
        assert!(matches!(space.read(at, &mut [0]), Err(Unreachable::Unmapped { .. })));
        assert_eq!(mapper.mappings(), 0);
    }

    #[test]
    fn addresses_may_be_chosen_once() {
        let space = Space::new();
        let mapper = SimMapper::new(space.clone(), None);
        let mem = mapper.alloc(8192).unwrap();
        let _low = mapper.map_at(BusAddr(0x1000), &mem).unwrap();
        for taken in [0, 0x1000, 0x2000, u64::MAX - 4095] {
            assert!(mapper.map_at(BusAddr(taken), &mem).is_err(), "{taken:#x}");
        }
        let _next = mapper.map_at(BusAddr(0x3000), &mem).unwrap();
        space.write(0x1ff0, &[7; 16]).unwrap();
        assert_eq!(mem.to_vec(0xff0, 16).unwrap(), [7; 16]);
    }

    #[test]
    fn neighbours_are_one_memory() {
        let space = Space::new();
        let mem = HostMem::anonymous(3 * 4096).unwrap();
        for (i, part) in [0..4096, 4096..8192].into_iter().enumerate() {
            let part = mem.slice(part).unwrap();
            assert!(space.insert_free(Segment::at(0x10000 + i as u64 * 4096, 4096, Some(part))));
        }
        space.write(0x10ffe, &[1, 2, 3, 4]).unwrap();
        assert_eq!(mem.to_vec(4094, 4).unwrap(), [1, 2, 3, 4]);
        let mut back = [0; 8192];
        space.read(0x10000, &mut back).unwrap();
        assert_eq!(back[4094..4098], [1, 2, 3, 4]);
        assert_eq!(space.reach(0x10000, 8192), Ok(()));
        assert!(matches!(space.reach(0x10000, 8193), Err(Unreachable::PastEnd { .. })));
        assert!(space.insert_free(Segment::at(0x12000, 4096, None)));
        assert!(matches!(space.write(0x11fff, &[0; 2]), Err(Unreachable::NotShared { .. })));
        space.set_master(false);
        assert!(matches!(space.read(0x10000, &mut [0]), Err(Unreachable::NoMaster { .. })));
    }

    #[test]
    fn scattered_pages_are_never_neighbours() {
        let mapper = SimMapper::new(Space::new(), Some(4096));
        let mem = mapper.alloc(4 * 4096).unwrap();
        let whole = mapper.map(&mem).unwrap();
        assert_eq!(whole.runs().len(), 4);
        assert_eq!(whole.bytes(), 4 * 4096);
        assert!(whole.contiguous().is_err());
        for pair in whole.runs().windows(2) {
            assert_ne!(pair[0].addr.0 + pair[0].len, pair[1].addr.0);
        }
        let part = mapper.map(&mem.slice(100..5000).unwrap()).unwrap();
        assert_eq!(part.runs()[0].addr.0 % 4096, 100);
        assert_eq!(part.runs()[0].len, 3996);
        assert_eq!(part.runs()[1].len, 904);
    }
}
