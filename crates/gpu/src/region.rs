//! Memory that bytes arrive in.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use onehop_os::{DmaBuf, DmaMemory, GpuRange, HostMem, Marks, Udmabuf};
use onehop_proto::GpuAddr;

use crate::{Error, Result};

/// The location of a region's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Place {
    /// In the GPU's own memory.
    Vram,
    /// In host memory that the GPU reaches over the bus.
    PinnedHost,
    /// In a controller's memory buffer.
    Cmb,
}

impl Place {
    /// Its name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vram => "vram",
            Self::PinnedHost => "host",
            Self::Cmb => "cmb",
        }
    }
}

/// Memory that the CPU cannot access: its owner copies. Ranges are checked before these are called.
pub(crate) trait DeviceBytes: Send + Sync {
    /// Copies bytes out.
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()>;
    /// Copies bytes out to host memory, which is checked as well.
    fn read_to(&self, offset: usize, to: &HostMem, at: usize, bytes: usize) -> Result<()> {
        let mut data = vec![0; bytes];
        self.read(offset, &mut data)?;
        Ok(to.write(at, &data)?)
    }
    /// Copies bytes in; an aligned 4-byte word is never seen half written.
    fn write(&self, offset: usize, data: &[u8]) -> Result<()>;
    /// Sets every byte of a range.
    fn fill(&self, offset: usize, bytes: usize, value: u8) -> Result<()>;
    /// Writes a word to several places, as [`DmaMemory::mark`] does.
    fn mark(&self, marks: &Marks, limit: Duration) -> Result<()>;
    /// How many of them still hold it.
    fn marks_left(&self, marks: &Marks, limit: Duration) -> Result<u64>;
    /// Whether no copy or fill of it is in progress, including failed ones.
    fn is_settled(&self) -> Result<bool> {
        Ok(true)
    }
    /// A range as memory of a GPU of this process.
    fn gpu_range(&self, offset: usize, bytes: usize) -> Option<GpuRange<'_>> {
        let _ = (offset, bytes);
        None
    }
    /// A dma-buf of a range.
    fn dma_buf(&self, offset: usize, bytes: usize) -> Result<DmaBuf>;
    /// A file descriptor by which another process opens all of it, if it can be shared that way.
    fn share(&self) -> Result<Option<OwnedFd>>;
}

/// The address space of a region's addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AddressSpace {
    /// An emulated GPU.
    Model,
    /// All CUDA contexts of this process: host memory that is registered.
    Cuda,
    /// One CUDA context: its own plain allocations, which its peers reach as well.
    Context(ContextKey),
    /// One CUDA context: its other memory (mapped, opened or borrowed), which peers do not reach, as far as is known.
    Alone(ContextKey),
    /// Everything that copies of one CUDA context reach; the caller of a copy guarantees that its range is allocated.
    /// Kernels never get such addresses.
    Everything(ContextKey),
}

/// Identifies a CUDA context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ContextKey {
    pub(crate) device: i32,
    /// The driver's number of a context that the program created, which is never reused; `None` for the primary
    /// context.
    pub(crate) made: Option<u64>,
}

#[derive(Clone)]
enum Backing {
    /// The CPU and the GPU reach the same bytes; `_hold` keeps the GPU's mapping, and is dropped first.
    Host { _hold: Arc<dyn Send + Sync>, mem: HostMem, exporter: Option<Arc<Udmabuf>> },
    /// Only the GPU reaches them.
    Device { mem: Arc<dyn DeviceBytes>, start: usize },
}

/// Memory with a GPU address. Clones are the same memory; it is freed with the last of them.
#[derive(Clone)]
pub struct Region {
    place: Place,
    addr: GpuAddr,
    space: AddressSpace,
    len: usize,
    backing: Backing,
}

impl Region {
    pub(crate) fn on_host(place: Place, addr: GpuAddr, mem: HostMem, hold: Arc<dyn Send + Sync>) -> Self {
        let (space, len) = (AddressSpace::Model, mem.len());
        Self { place, addr, space, len, backing: Backing::Host { _hold: hold, mem, exporter: None } }
    }

    /// The same, exportable as a dma-buf.
    pub(crate) fn exported_by(mut self, by: Option<Arc<Udmabuf>>) -> Self {
        if let Backing::Host { exporter, .. } = &mut self.backing {
            *exporter = by;
        }
        self
    }

    /// Host memory for copies of the emulated GPU alone: its kernels have no address of it.
    #[must_use]
    pub fn of_host(mem: HostMem) -> Self {
        Self::on_host(Place::Vram, GpuAddr(0), mem, Arc::new(()))
    }

    pub(crate) fn on_device(addr: GpuAddr, len: usize, mem: Arc<dyn DeviceBytes>) -> Self {
        let (place, space) = (Place::Vram, AddressSpace::Model);
        Self { place, addr, space, len, backing: Backing::Device { mem, start: 0 } }
    }

    /// The same in another address space.
    pub(crate) fn in_space(self, space: AddressSpace) -> Self {
        Self { space, ..self }
    }

    /// The address space of its addresses.
    pub(crate) fn space(&self) -> AddressSpace {
        self.space
    }

    /// Whether it is the memory of [`AddressSpace::Everything`].
    pub(crate) fn is_everything(&self) -> bool {
        matches!(self.space, AddressSpace::Everything(_))
    }

    /// Where its bytes are.
    #[must_use]
    pub fn place(&self) -> Place {
        self.place
    }

    /// Its address on the GPU.
    #[must_use]
    pub fn addr(&self) -> GpuAddr {
        self.addr
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of it, which keeps all of it alive.
    ///
    /// # Errors
    /// When the range does not lie within it.
    pub fn slice(&self, range: Range<usize>) -> Result<Self> {
        let len = range.end.saturating_sub(range.start);
        self.check(range.start, len)?;
        let backing = match &self.backing {
            Backing::Host { _hold, mem, exporter } => Backing::Host {
                _hold: _hold.clone(),
                mem: mem.slice(range.start..range.start + len)?,
                exporter: exporter.clone(),
            },
            Backing::Device { mem, start } => {
                Backing::Device { mem: mem.clone(), start: start + range.start }
            }
        };
        let addr = self.addr.plus(range.start as u64);
        Ok(Self { addr, len, backing, ..self.clone() })
    }

    /// Copies bytes out of it.
    ///
    /// # Errors
    /// When the range does not lie within it, or the GPU failed.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.check(offset, out.len())?;
        match &self.backing {
            Backing::Host { mem, .. } => mem.read(offset, out).map_err(Error::Memory),
            Backing::Device { mem, start } => mem.read(start + offset, out),
        }
    }

    /// Copies bytes out of it to host memory, at `at`; by the copy engine if that memory is pinned.
    ///
    /// # Errors
    /// When either range does not lie within its memory, the host's is read-only, or the GPU failed.
    pub fn read_to(&self, offset: usize, to: &HostMem, at: usize, bytes: usize) -> Result<()> {
        self.check(offset, bytes)?;
        to.check_writable_range(at, bytes)?;
        match &self.backing {
            Backing::Host { mem, .. } => Ok(to.write(at, &mem.to_vec(offset, bytes)?)?),
            Backing::Device { mem, start } => mem.read_to(start + offset, to, at, bytes),
        }
    }

    /// Copies bytes into it.
    ///
    /// # Errors
    /// When the range does not lie within it, it is read-only, or the GPU failed.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.check(offset, data.len())?;
        match &self.backing {
            Backing::Host { mem, .. } => mem.write(offset, data).map_err(Error::Memory),
            Backing::Device { mem, start } => mem.write(start + offset, data),
        }
    }

    /// Sets every byte of a range.
    ///
    /// # Errors
    /// As for [`Region::write`].
    pub fn fill(&self, offset: usize, bytes: usize, value: u8) -> Result<()> {
        self.check(offset, bytes)?;
        match &self.backing {
            Backing::Host { mem, .. } => mem.fill(offset, bytes, value).map_err(Error::Memory),
            Backing::Device { mem, start } => mem.fill(start + offset, bytes, value),
        }
    }

    /// Sets a 32-bit word so that a running kernel sees it.
    ///
    /// # Errors
    /// When it does not lie within the region, or is not aligned.
    pub fn signal(&self, offset: usize, value: u32) -> Result<()> {
        match &self.backing {
            Backing::Host { mem, .. } => mem.word(offset)?.store(value, Ordering::Release),
            Backing::Device { mem, start } => {
                self.check_word(offset)?;
                mem.write(start + offset, &value.to_le_bytes())?;
            }
        }
        Ok(())
    }

    /// Reads a 32-bit word that a running kernel may write.
    ///
    /// # Errors
    /// When it does not lie within the region, or is not aligned.
    pub fn word(&self, offset: usize) -> Result<u32> {
        match &self.backing {
            Backing::Host { mem, .. } => Ok(mem.word(offset)?.load(Ordering::Acquire)),
            Backing::Device { mem, start } => {
                self.check_word(offset)?;
                let mut word = [0; 4];
                mem.read(start + offset, &mut word)?;
                Ok(u32::from_le_bytes(word))
            }
        }
    }

    /// Whether every copy and fill has ended that was started through this region or a part of it, including failed
    /// ones.
    ///
    /// # Errors
    /// When the GPU does not report it: see [`Error::is_under_way`].
    pub fn is_settled(&self) -> Result<bool> {
        self.device().map_or(Ok(true), DeviceBytes::is_settled)
    }

    /// The owner that copies its bytes, if the CPU does not reach them.
    pub(crate) fn device(&self) -> Option<&dyn DeviceBytes> {
        match &self.backing {
            Backing::Host { .. } => None,
            Backing::Device { mem, .. } => Some(&**mem),
        }
    }

    fn check(&self, offset: usize, bytes: usize) -> Result<()> {
        if offset <= self.len && bytes <= self.len - offset {
            Ok(())
        } else {
            Err(onehop_os::Error::OutOfRange { offset, bytes, len: self.len }.into())
        }
    }

    fn check_word(&self, offset: usize) -> Result<()> {
        self.check_aligned(offset, 4, 4)
    }

    fn check_marks(&self, marks: &Marks) -> Result<()> {
        self.check_aligned(marks.first as usize, marks.span() as usize, Marks::BYTES)
    }

    fn check_aligned(&self, offset: usize, bytes: usize, align: u64) -> Result<()> {
        self.check(offset, bytes)?;
        if self.addr.plus(offset as u64).0.is_multiple_of(align) {
            Ok(())
        } else {
            Err(onehop_os::Error::OutOfRange { offset, bytes, len: self.len }.into())
        }
    }
}

fn refused(error: Error) -> onehop_os::Error {
    onehop_os::Error::CannotMap { mapper: "the GPU's driver".into(), why: error.to_string() }
}

impl DmaMemory for Region {
    fn bytes(&self) -> usize {
        self.len
    }

    fn host(&self) -> Option<&HostMem> {
        match &self.backing {
            Backing::Host { mem, .. } => Some(mem),
            Backing::Device { .. } => None,
        }
    }

    fn gpu_addr(&self) -> Option<GpuAddr> {
        Some(self.addr)
    }

    fn gpu_range(&self) -> Option<GpuRange<'_>> {
        match &self.backing {
            Backing::Device { mem, start } if !self.is_everything() => mem.gpu_range(*start, self.len),
            // That memory is the host's, too.
            Backing::Host { .. } | Backing::Device { .. } => None,
        }
    }

    fn dma_buf(&self) -> Option<onehop_os::Result<DmaBuf>> {
        match &self.backing {
            Backing::Host { mem, exporter, .. } => exporter.as_ref().map(|by| by.export(mem)),
            Backing::Device { mem, start } => Some(mem.dma_buf(*start, self.len).map_err(refused)),
        }
    }

    fn mark(&self, marks: &Marks, limit: Duration) -> onehop_os::Result<()> {
        match &self.backing {
            Backing::Host { mem, .. } => mem.mark(marks, limit),
            Backing::Device { mem, start } => {
                self.check_marks(marks).map_err(refused)?;
                mem.mark(&Marks { first: *start as u64 + marks.first, ..*marks }, limit).map_err(refused)
            }
        }
    }

    fn marks_left(&self, marks: &Marks, limit: Duration) -> onehop_os::Result<u64> {
        match &self.backing {
            Backing::Host { mem, .. } => mem.marks_left(marks, limit),
            Backing::Device { mem, start } => {
                self.check_marks(marks).map_err(refused)?;
                let marks = Marks { first: *start as u64 + marks.first, ..*marks };
                mem.marks_left(&marks, limit).map_err(refused)
            }
        }
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({} bytes of {} at {:?})", self.len(), self.place.name(), self.addr)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Device memory owned by this test.
    struct Far(Mutex<Vec<u8>>);

    impl DeviceBytes for Far {
        fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
            out.copy_from_slice(&self.0.lock().unwrap()[offset..offset + out.len()]);
            Ok(())
        }
        fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
            self.0.lock().unwrap()[offset..offset + data.len()].copy_from_slice(data);
            Ok(())
        }
        fn fill(&self, offset: usize, bytes: usize, value: u8) -> Result<()> {
            self.0.lock().unwrap()[offset..offset + bytes].fill(value);
            Ok(())
        }
        fn mark(&self, marks: &Marks, _: Duration) -> Result<()> {
            self.write(marks.first as usize, &marks.word.to_le_bytes().repeat(marks.count as usize))
        }
        fn marks_left(&self, marks: &Marks, _: Duration) -> Result<u64> {
            let mut bytes = vec![0; marks.span() as usize];
            self.read(marks.first as usize, &mut bytes)?;
            Ok(bytes.chunks(8).filter(|word| **word == marks.word.to_le_bytes()).count() as u64)
        }
        fn dma_buf(&self, offset: usize, bytes: usize) -> Result<DmaBuf> {
            Ok(DmaBuf {
                fd: std::fs::File::open("/dev/null").unwrap().into(),
                offset: offset as u64,
                bytes: bytes as u64,
            })
        }
        fn share(&self) -> Result<Option<OwnedFd>> {
            Ok(None)
        }
    }

    fn both() -> [Region; 2] {
        let mem = HostMem::anonymous(4096).unwrap();
        let host = Region::on_host(Place::PinnedHost, GpuAddr(1 << 30), mem, Arc::new(()));
        let far = Arc::new(Far(Mutex::new(vec![0; 4096])));
        [host, Region::on_device(GpuAddr(1 << 40), 4096, far)]
    }

    #[test]
    fn device_memory_behaves_as_host_memory_does() {
        for region in both() {
            region.write(5, &[1, 2, 3]).unwrap();
            region.fill(7, 3, 9).unwrap();
            region.signal(12, 0x0403_0201).unwrap();
            assert_eq!(region.word(12).unwrap(), 0x0403_0201);
            let part = region.slice(4..16).unwrap();
            assert_eq!((part.len(), part.addr().0 - region.addr().0), (12, 4));
            let mut bytes = [0; 12];
            part.read(0, &mut bytes).unwrap();
            assert_eq!(bytes, [0, 1, 2, 9, 9, 9, 0, 0, 1, 2, 3, 4]);
            part.write(11, &[7]).unwrap();
            assert_eq!(region.word(12).unwrap(), 0x0703_0201);
            assert!(part.write(11, &[0; 2]).is_err());
            assert!(part.read(usize::MAX, &mut [0]).is_err());
            assert!(part.fill(0, 13, 0).is_err() && part.signal(9, 0).is_err() && part.word(2).is_err());
            assert!(region.slice(4000..4097).is_err());
        }
    }

    #[test]
    fn marks_show_what_was_not_overwritten() {
        const LIMIT: Duration = Duration::from_secs(5);
        for region in both() {
            // The marks are aligned, but the region is not.
            for (start, first) in [(0, 504), (4, 508)] {
                let part = region.slice(start..start + 2000).unwrap();
                let marks = Marks { first, count: 3, word: 0x0123_4567_89ab_cdef };
                part.fill(0, 2000, 0).unwrap();
                part.mark(&marks, LIMIT).unwrap();
                assert_eq!(part.marks_left(&marks, LIMIT).unwrap(), 3);
                part.write(first as usize + 8, &[0xff; 8]).unwrap();
                assert_eq!(part.marks_left(&marks, LIMIT).unwrap(), 2);
                let mut all = [0; 2000];
                part.read(0, &mut all).unwrap();
                assert_eq!(all.iter().filter(|byte| **byte != 0).count(), 24);
                for bad in [
                    Marks { count: 200, ..marks },
                    Marks { first: first + 1480, ..marks },
                    Marks { first: first + 4, ..marks },
                    Marks { count: u64::MAX, ..marks },
                ] {
                    assert!(
                        part.mark(&bad, LIMIT).is_err() && part.marks_left(&bad, LIMIT).is_err(),
                        "{bad:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn only_device_memory_has_a_dma_buf_and_only_host_memory_a_mapping() {
        let [host, far] = both();
        assert!(host.host().is_some() && host.dma_buf().is_none());
        let buf = far.slice(100..300).unwrap().dma_buf().unwrap().unwrap();
        assert!(far.host().is_none());
        assert_eq!((buf.offset, buf.bytes), (100, 200));
    }
}
