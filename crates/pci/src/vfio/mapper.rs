//! Bus addresses by the type1 IOMMU: one stretch for each piece of memory, wherever its pages are.

use std::sync::{Arc, Mutex, PoisonError};

use onehop_os::{DmaMemory, Heap, HostMem, Mapped, Mapper, Run};
use onehop_proto::BusAddr;

use super::{Device, sys};
use crate::pages::{PAGE, Span};
use crate::{Error, Result};

/// Addresses below are left alone: a null pointer that a device follows is to be a fault.
const FIRST: u64 = 16 << 20;
/// Addresses that any IOMMU has, where the kernel does not tell.
const ALWAYS: (u64, u64) = (FIRST, (1 << 32) - (64 << 20));

/// Maps memory of this process for one device.
pub(super) struct VfioMapper {
    name: String,
    space: Arc<Space>,
}

/// The device's address space, and what of it is free.
struct Space {
    device: Arc<Device>,
    free: Mutex<Vec<Heap>>,
}

impl VfioMapper {
    pub(super) fn new(device: Arc<Device>, name: &str) -> Result<Self> {
        let mut ranges =
            sys::iova_ranges(device.container()).map_err(|e| Error::call("VFIO_IOMMU_GET_INFO", e))?;
        if ranges.is_empty() {
            ranges.push(ALWAYS);
        }
        let free = ranges.into_iter().map(heap).collect();
        let name = format!("vfio, for {name}");
        Ok(Self { name, space: Arc::new(Space { device, free: Mutex::new(free) }) })
    }

    fn cannot(&self, why: impl Into<String>) -> onehop_os::Error {
        onehop_os::Error::CannotMap { mapper: self.name.clone(), why: why.into() }
    }
}

/// A range as whole pages above the first ones. Its last address is never used, so that no end is beyond 64 bits.
fn heap((first, last): (u64, u64)) -> Heap {
    let start = first.max(FIRST).next_multiple_of(PAGE as u64);
    Heap::new(start as usize, (last / PAGE as u64 * PAGE as u64) as usize)
}

impl Space {
    fn take(&self, len: usize) -> Option<usize> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.iter_mut().find_map(|heap| heap.take(len))
    }

    fn give(&self, at: usize, len: usize) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        // Stretches of different ranges never touch, so any heap may keep it.
        if let Some(heap) = free.first_mut() {
            heap.give(at, len);
        }
    }
}

/// Undoes a mapping, and lets its memory go after that.
struct Undo {
    space: Arc<Space>,
    at: usize,
    len: usize,
    _memory: HostMem,
}

impl Drop for Undo {
    fn drop(&mut self) {
        // What cannot be unmapped is not given out again.
        if sys::unmap(self.space.device.container(), self.at as u64, self.len as u64).is_ok() {
            self.space.give(self.at, self.len);
        }
    }
}

impl Mapper for VfioMapper {
    fn name(&self) -> &str {
        &self.name
    }

    fn alloc(&self, bytes: usize) -> onehop_os::Result<HostMem> {
        HostMem::touched(bytes)
    }

    fn map(&self, memory: &dyn DmaMemory) -> onehop_os::Result<Mapped> {
        let host = memory.host().ok_or_else(|| {
            self.cannot(
                "it is memory of a GPU that this process has not mapped; VFIO reaches a GPU's memory only through a \
                 mapping of its BAR1 (static BAR1). Use our kernel module (`?via=kmod`), or a route with data in host memory",
            )
        })?;
        if host.is_empty() {
            return Err(self.cannot("it has no bytes"));
        }
        let Span { start, len, skip } = Span::of(host);
        let at = self
            .space
            .take(len)
            .ok_or_else(|| self.cannot(format!("the IOMMU has no {len} bus addresses left in a row")))?;
        let container = self.space.device.container();
        // SAFETY: `Undo` holds a handle on the memory, which keeps its pages mapped, until it has been unmapped here.
        if let Err(e) = unsafe { sys::map(container, start as *mut u8, at as u64, len as u64) } {
            self.space.give(at, len);
            return Err(self.cannot(why(&e, len)));
        }
        let undo = Undo { space: self.space.clone(), at, len, _memory: host.clone() };
        let run = Run { addr: BusAddr((at + skip) as u64), len: host.len() as u64 };
        Ok(Mapped::new(vec![run], Box::new(undo)))
    }
}

fn why(error: &std::io::Error, len: usize) -> String {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    match error.raw_os_error() {
        Some(libc::ENOMEM) => format!(
            "VFIO_IOMMU_MAP_DMA of {len} bytes: {error}; this process may lock {} of memory (`ulimit -l`); raise the limit, \
             or be root",
            limit.map_or("any amount".into(), |bytes| format!("{} KiB", bytes >> 10))
        ),
        Some(libc::EFAULT) => format!(
            "VFIO_IOMMU_MAP_DMA of {len} bytes: {error}; some of it is no memory that the kernel pins, such as a BAR that was \
             taken away"
        ),
        Some(libc::ENOSPC) => {
            format!(
                "VFIO_IOMMU_MAP_DMA: {error}; too many pieces of memory are mapped (vfio_iommu_type1.dma_entry_limit)"
            )
        }
        _ => format!("VFIO_IOMMU_MAP_DMA of {len} bytes: {error}"),
    }
}
