//! GPU memory as a dma-buf, for the driver of another device.
//!
//! A dma-buf covers whole host pages and starts on one. So the export is either the whole allocation or the pages
//! around a range, together with the offset of the range in it: an importer that ignored the offset would access other
//! bytes.

use std::os::fd::{FromRawFd, OwnedFd};

use onehop_os::DmaBuf;

use super::capabilities::allocation;
use super::context::Context;
use super::driver::{DevicePtr, Failure, dotted};
use crate::{Error, Result};

/// CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
const DMA_BUF_FD: i32 = 1;
/// CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE
const MAPPING_PCIE: u64 = 1;
/// The CUDA version that introduced that flag.
const PCIE_SINCE: i32 = 12080;
/// The host's page size. Larger ones exist; the driver then refuses unsuitable ranges.
const PAGE: u64 = 4096;

/// How much of an allocation a dma-buf covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Span {
    /// All of it: one export serves all its ranges.
    Allocation,
    /// The pages around the range: needs less of the GPU's BAR.
    Pages,
}

/// A dma-buf of GPU memory.
#[derive(Debug)]
pub struct GpuDmaBuf {
    /// The dma-buf.
    pub fd: OwnedFd,
    /// Offset of the range in it.
    pub offset: u64,
    /// How long the range is.
    pub bytes: u64,
    /// Size of the dma-buf.
    pub whole: u64,
    /// Whether importers use PCIe, even if there is a coherent link.
    pub pcie: bool,
    /// Why not, if it was requested.
    pub why_not_pcie: Option<String>,
}

impl From<GpuDmaBuf> for DmaBuf {
    fn from(buf: GpuDmaBuf) -> Self {
        Self { fd: buf.fd, offset: buf.offset, bytes: buf.bytes }
    }
}

/// Exports the memory of a range with the default mapping.
pub(super) fn export(context: &Context, at: DevicePtr, bytes: usize, span: Span) -> Result<GpuDmaBuf> {
    let range = range_of(context, at, bytes, span)?;
    let fd = handle(context, range, 0).map_err(|failure| explain(context, range, failure))?;
    Ok(range.buf(fd, false, None))
}

/// Exports it with the PCIe mapping if the driver supports that; otherwise as [`export`] does, with the reason.
pub(super) fn export_pcie(context: &Context, at: DevicePtr, bytes: usize, span: Span) -> Result<GpuDmaBuf> {
    let range = range_of(context, at, bytes, span)?;
    let version = context.driver.version();
    let why_not = if version < PCIE_SINCE {
        format!("it came with CUDA {}, and the driver is of CUDA {}", dotted(PCIE_SINCE), dotted(version))
    } else {
        match handle(context, range, MAPPING_PCIE) {
            Ok(fd) => return Ok(range.buf(fd, true, None)),
            Err(Failure::Code(_, 801)) => {
                "the GPU has no such mapping (CUDA_ERROR_NOT_SUPPORTED); only GPUs with a coherent link to the CPU, \
                 such as Grace Hopper, need it"
                    .into()
            }
            Err(failure) => explain(context, range, failure).to_string(),
        }
    };
    let fd = handle(context, range, 0).map_err(|failure| explain(context, range, failure))?;
    Ok(range.buf(fd, false, Some(why_not)))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DmaBufRange {
    start: DevicePtr,
    whole: u64,
    offset: u64,
    bytes: u64,
}

impl DmaBufRange {
    fn buf(self, fd: OwnedFd, pcie: bool, why_not_pcie: Option<String>) -> GpuDmaBuf {
        GpuDmaBuf { fd, offset: self.offset, bytes: self.bytes, whole: self.whole, pcie, why_not_pcie }
    }
}

fn range_of(context: &Context, at: DevicePtr, bytes: usize, span: Span) -> Result<DmaBufRange> {
    let (base, len) = allocation(context, at)?;
    round(base, len as u64, at, bytes as u64, span)
        .map_err(|why| Error::NotSupported { what: format!("a dma-buf of {bytes} bytes of GPU memory"), why })
}

/// The pages to export for the bytes from `at` on, in an allocation of `len` bytes at `base`.
fn round(
    base: DevicePtr,
    len: u64,
    at: DevicePtr,
    bytes: u64,
    span: Span,
) -> std::result::Result<DmaBufRange, String> {
    let within = at.checked_sub(base).filter(|offset| *offset <= len && bytes <= len - offset);
    if within.is_none() || bytes == 0 {
        return Err(format!("the {bytes} bytes do not lie within one allocation of {len}"));
    }
    let (start, end) = match span {
        Span::Allocation => (base, base + len),
        Span::Pages => (at - at % PAGE, (at + bytes).next_multiple_of(PAGE)),
    };
    // An end within a page is rounded up: the GPU's own pages are larger than the host's.
    let end = end.next_multiple_of(PAGE);
    if start < base || !start.is_multiple_of(PAGE) {
        return Err(
            "the allocation does not start on a page, because the driver cut it from a larger one; allocate \
                    whole pages (DeviceKind::Exportable does)"
                .into(),
        );
    }
    Ok(DmaBufRange { start, whole: end - start, offset: at - start, bytes })
}

fn handle(context: &Context, range: DmaBufRange, flags: u64) -> std::result::Result<OwnedFd, Failure> {
    let mut fd = -1;
    context.attempt(|driver| {
        // SAFETY: `fd` lives across the call; a range that is not allocated is refused by the driver.
        unsafe { driver.range_handle(&mut fd, range.start, range.whole as usize, DMA_BUF_FD, flags) }
    })?;
    // SAFETY: the driver has just made this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn explain(context: &Context, range: DmaBufRange, failure: Failure) -> Error {
    let hint = match failure.code() {
        Some(801) => {
            "dma-bufs need NVIDIA's open kernel modules, a kernel from 5.12 on with CONFIG_PCI_P2PDMA, and a data \
             centre or professional GPU of Turing or later; without them use pinned host memory"
        }
        Some(1) => {
            "the range must be whole host pages of one allocation that is capable of GPUDirect; allocate it with \
             DeviceKind::Exportable"
        }
        Some(2) => {
            "the GPU's window on the bus (BAR1) is full: export less (Span::Pages), or switch on resizable BAR"
        }
        Some(304) => {
            "the kernel refused the descriptor: the process may have too many files open (ulimit -n)"
        }
        _ => "",
    };
    let what = format!("exporting {} bytes of GPU memory as a dma-buf", range.whole);
    context.driver.error_with(what, failure, hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_grow_to_pages_and_keep_their_offset() {
        let (base, len) = (0x7f00_0020_0000, 0x20_0000);
        let all = round(base, len, base + 70_001, 10, Span::Allocation).unwrap();
        assert_eq!(all, DmaBufRange { start: base, whole: len, offset: 70_001, bytes: 10 });
        let pages = round(base, len, base + 8191, 2, Span::Pages).unwrap();
        assert_eq!(pages, DmaBufRange { start: base + 4096, whole: 8192, offset: 4095, bytes: 2 });
        let end = round(base, len, base + len - 1, 1, Span::Pages).unwrap();
        assert_eq!((end.start, end.whole), (base + len - 4096, 4096));
        assert!(round(base, len, base + len - 1, 2, Span::Pages).is_err());
        assert!(round(base, len, base - 1, 2, Span::Pages).is_err());
        assert!(round(base, len, base, 0, Span::Pages).is_err());
        // Two small allocations of one driver page: the second starts within a host page.
        assert!(round(base + 512, 512, base + 512, 8, Span::Allocation).unwrap_err().contains("whole pages"));
        assert!(round(base + 512, 512, base + 512, 8, Span::Pages).is_err());
    }
}
