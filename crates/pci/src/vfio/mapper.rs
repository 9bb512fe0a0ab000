//! Bus addresses through VFIO: one contiguous range for each mapping, wherever its pages are.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use onehop_os::{BusRange, DmaBuf, DmaMemory, Heap, HostMem, Mapped, Mapper};
use onehop_proto::BusAddr;

use super::VfioDevice;
use crate::Result;
use crate::pages::{PAGE, PageSpan};

/// Lower addresses stay unmapped, so that a device that follows a null pointer faults.
const FIRST: u64 = 16 << 20;
/// Addresses that every IOMMU has, if the kernel does not report ranges.
const ALWAYS: (u64, u64) = (FIRST, (1 << 32) - (64 << 20));

/// Maps memory of this process for one device.
pub(super) struct VfioMapper {
    name: String,
    space: Arc<IovaSpace>,
}

/// The device's address space, and its free ranges.
struct IovaSpace {
    device: Arc<VfioDevice>,
    free: Mutex<Vec<Heap>>,
}

impl VfioMapper {
    pub(super) fn new(device: Arc<VfioDevice>, name: &str) -> Result<Self> {
        let mut ranges = device.iommu.ranges()?;
        if ranges.is_empty() {
            ranges.push(ALWAYS);
        }
        let free = ranges.into_iter().map(heap).collect();
        let name = format!("vfio ({}), for {name}", device.iommu.name());
        Ok(Self { name, space: Arc::new(IovaSpace { device, free: Mutex::new(free) }) })
    }

    fn cannot(&self, why: impl Into<String>) -> onehop_os::Error {
        onehop_os::Error::CannotMap { mapper: self.name.clone(), why: why.into() }
    }

    /// Allocates addresses for some pages and calls `map` with them.
    fn place(
        &self,
        pages: (usize, usize),
        bytes: usize,
        memory: Option<HostMem>,
        map: impl FnOnce(u64) -> std::result::Result<(), String>,
    ) -> onehop_os::Result<Mapped> {
        let (len, skip) = pages;
        let none = || self.cannot(format!("the IOMMU has no {len} contiguous bus addresses left"));
        let at = self.space.take(len).ok_or_else(none)?;
        if let Err(why) = map(at as u64) {
            self.space.free(at, len);
            return Err(self.cannot(why));
        }
        let undo = Undo { space: self.space.clone(), at, len, memory };
        let run = BusRange { addr: BusAddr((at + skip) as u64), len: bytes as u64 };
        Ok(Mapped::new(vec![run], Box::new(undo)))
    }

    fn host(&self, host: &HostMem) -> onehop_os::Result<Mapped> {
        if host.is_empty() {
            return Err(self.cannot("it has no bytes"));
        }
        let PageSpan { start, len, skip } = PageSpan::of(host);
        self.place((len, skip), host.len(), Some(host.clone()), |at| {
            let (iommu, begun) = (&self.space.device.iommu, Instant::now());
            // SAFETY: `HostMem` is memory that may change at any time. `Undo` holds a handle on it, which keeps
            // its pages mapped, until it has been unmapped there, and for good where that fails.
            let mapped = unsafe { iommu.map(start as *mut u8, at, len as u64) };
            mapped.map_err(|(call, error)| {
                let took = begun.elapsed();
                let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
                FailedMapping { call, error, bytes: len, at, took }.describe(limit, iommu.takes_dma_bufs())
            })
        })
    }

    fn dma_buf(&self, buffer: &DmaBuf) -> onehop_os::Result<Mapped> {
        let page = PAGE as u64;
        let (start, bytes) = (buffer.offset / page * page, buffer.bytes as usize);
        let skip = (buffer.offset - start) as usize;
        let whole = skip.checked_add(bytes).and_then(|bytes| bytes.checked_next_multiple_of(PAGE));
        let len = whole.filter(|_| bytes > 0).ok_or_else(|| self.cannot(format!("it has {bytes} bytes")))?;
        self.place((len, skip), bytes, None, |at| {
            let mapped = self.space.device.iommu.map_dma_buf(buffer.fd.as_fd(), start, at, len as u64);
            mapped.map_err(|error| why_not_imported(&error))
        })
    }
}

/// A range in whole pages from [`FIRST`] on. Its last address is never used, so that no end exceeds 64 bits.
fn heap((first, last): (u64, u64)) -> Heap {
    let start = first.max(FIRST).next_multiple_of(PAGE as u64);
    Heap::new(start as usize, (last / PAGE as u64 * PAGE as u64) as usize)
}

impl IovaSpace {
    fn take(&self, len: usize) -> Option<usize> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.iter_mut().find_map(|heap| heap.take(len))
    }

    fn free(&self, at: usize, len: usize) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        // Ranges in different heaps never touch, so any heap may hold it.
        if let Some(heap) = free.first_mut() {
            heap.free(at, len);
        }
    }
}

/// Undoes a mapping, then releases its memory.
struct Undo {
    space: Arc<IovaSpace>,
    at: usize,
    len: usize,
    memory: Option<HostMem>,
}

impl Drop for Undo {
    fn drop(&mut self) {
        // If unmapping fails, the device may still reach the memory: neither addresses nor memory are reused.
        match self.space.device.iommu.unmap(self.at as u64, self.len as u64) {
            Ok(()) => self.space.free(self.at, self.len),
            Err(_) => std::mem::forget(self.memory.take()),
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
        let buffer = if self.space.device.iommu.takes_dma_bufs() { memory.dma_buf() } else { None };
        match (buffer, memory.host()) {
            // Memory that is also mapped for the CPU is mapped by its pages if the kernel does not take its dma-buf.
            (Some(Ok(buffer)), host) => self.dma_buf(&buffer).or_else(|error| host.map_or(Err(error), |host| self.host(host))),
            (_, Some(host)) => self.host(host),
            (Some(Err(error)), None) => Err(self.cannot(error.to_string())),
            (None, None) => Err(self.cannot(
                "it is memory of a GPU that this process has not mapped; VFIO reaches a GPU's memory only through a \
                 mapping of its BAR1 (static BAR1). Use our kernel module (`?via=kmod`), or a route with data in host memory",
            )),
        }
    }
}

fn why_not_imported(error: &io::Error) -> String {
    let of_others = "this kernel's iommufd takes dma-bufs of vfio-pci at most. Use our kernel module (`?via=kmod`), or a \
                     route with data in host memory";
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENOTTY | libc::EBADF) => {
            format!("IOMMU_IOAS_MAP_FILE of its dma-buf: {error}; {of_others}")
        }
        Some(libc::ENODEV) => {
            format!("IOMMU_IOAS_MAP_FILE of its dma-buf: {error}; its exporter has revoked it")
        }
        _ => format!("IOMMU_IOAS_MAP_FILE of its dma-buf: {error}"),
    }
}

/// A mapping that failed, and why.
struct FailedMapping {
    call: &'static str,
    error: io::Error,
    /// Bytes and bus address.
    bytes: usize,
    at: u64,
    took: Duration,
}

impl FailedMapping {
    /// What failed, and what helps: `limit` is what this process may lock.
    fn describe(&self, limit: Option<u64>, iommufd: bool) -> String {
        let because = match (self.error.raw_os_error(), limit) {
            (Some(libc::ENOMEM), Some(limit)) => format!(
                "; this process may lock {} KiB of memory (`ulimit -l`); raise the limit, or be root",
                limit >> 10
            ),
            (Some(libc::ENOMEM), None) => {
                "; `ulimit -l` is unlimited, so the kernel itself has no memory left for it".into()
            }
            (Some(libc::EFAULT), _) if iommufd => {
                "; the kernel cannot pin some of it. iommufd takes no mapped BARs; VFIO's groups do (`?via=vfio`, \
                 CONFIG_VFIO_CONTAINER)"
                    .into()
            }
            (Some(libc::EFAULT), _) => {
                "; the kernel cannot pin some of it, such as a BAR that was removed".into()
            }
            (Some(libc::ENOSPC), _) => {
                "; too many ranges are mapped (vfio_iommu_type1.dma_entry_limit)".into()
            }
            _ => String::new(),
        };
        let Self { call, error, bytes, at, took } = self;
        format!(
            "{call} of {bytes} bytes of host memory at bus address {at:#x}: {error}, after {took:.1?}{because}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(errno: i32, limit: Option<u64>, iommufd: bool) -> String {
        let error = io::Error::from_raw_os_error(errno);
        let took = Duration::from_millis(12_300);
        FailedMapping { call: "IOMMU_IOAS_MAP", error, bytes: 8192, at: FIRST, took }.describe(limit, iommufd)
    }

    #[test]
    fn a_failed_mapping_is_described_with_advice_that_fits() {
        for errno in [libc::ENOMEM, libc::EFAULT, libc::ENOSPC, libc::EINTR] {
            let text = described(errno, None, false);
            assert!(text.contains("8192 bytes of host memory at bus address 0x1000000"), "{text}");
            assert!(text.contains("after 12.3s"), "{text}");
        }
        assert!(described(libc::ENOMEM, Some(65536), false).contains("64 KiB"));
        // A limit that does not exist cannot be raised.
        assert!(!described(libc::ENOMEM, None, false).contains("raise"));
        assert!(described(libc::EFAULT, None, true).contains("?via=vfio"));
        assert!(!described(libc::EFAULT, None, false).contains("?via=vfio"));
    }
}
