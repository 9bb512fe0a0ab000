//! A device's page tables: those of a type1 container, which takes whole groups and any memory mapped in this process,
//! or those of iommufd, which takes single devices, the kernel's own memory, and dma-bufs of vfio-pci.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use super::{iommufd, refusal, sys};
use crate::{Address, Error, Result, Root};

const CONTAINER: &str = "/dev/vfio/vfio";
const IOMMUFD: &str = "/dev/iommu";

/// The page tables of one device.
pub(super) enum Iommu {
    /// The group is closed before its container.
    Type1 { _group: File, container: File },
    /// An address space of an iommufd.
    Iommufd { file: File, space: u32 },
}

/// Whether the kernel has iommufd, but no containers.
pub(super) fn only_iommufd(root: &Root) -> bool {
    root.exists(IOMMUFD) && !root.exists(CONTAINER)
}

/// Fails if there is no iommufd, before anything is changed.
pub(super) fn has_iommufd(root: &Root, address: Address) -> Result<()> {
    match root.exists(IOMMUFD) {
        true => Ok(()),
        false => Err(refusal::iommufd(address, IOMMUFD, &io::Error::from_raw_os_error(libc::ENOENT))),
    }
}

fn open(root: &Root, path: &str) -> io::Result<File> {
    let path = root.folder().unwrap_or(Path::new("/")).join(path.trim_start_matches('/'));
    File::options().read(true).write(true).open(path)
}

fn failed(call: &'static str) -> impl Fn(io::Error) -> Error {
    move |e| Error::call(call, e)
}

/// Opens the device through its group.
pub(super) fn by_group(root: &Root, address: Address) -> Result<(File, Iommu)> {
    let number = refusal::group(root, address)?;
    let name = format!("/dev/vfio/{number}");
    let container = open(root, CONTAINER).map_err(|e| refusal::container(address, &e))?;
    if sys::api_version(&container).map_err(failed("VFIO_GET_API_VERSION"))? != sys::API_VERSION
        || !sys::has_type1_v2(&container).map_err(failed("VFIO_CHECK_EXTENSION"))?
    {
        return Err(refusal::no_type1(address));
    }
    let group = open(root, &name).map_err(|e| refusal::open_group(root, address, &name, &e))?;
    if !sys::is_viable(&group).map_err(failed("VFIO_GROUP_GET_STATUS"))? {
        return Err(refusal::not_viable(root, address, number));
    }
    sys::set_container(&group, &container).map_err(failed("VFIO_GROUP_SET_CONTAINER"))?;
    sys::set_iommu(&container).map_err(|e| refusal::set_iommu(address, &e))?;
    let text = CString::new(address.to_string()).unwrap_or_default();
    let device: File = sys::device(&group, &text).map_err(|e| refusal::device(address, &e))?.into();
    Ok((device, Iommu::Type1 { _group: group, container }))
}

/// Opens the device through its own file.
pub(super) fn by_iommufd(root: &Root, address: Address) -> Result<(File, Iommu)> {
    let file = open(root, IOMMUFD).map_err(|e| refusal::iommufd(address, IOMMUFD, &e))?;
    let name = device_file(root, address).ok_or_else(|| refusal::no_device_file(address))?;
    let device = open(root, &name).map_err(|e| refusal::iommufd(address, &name, &e))?;
    iommufd::bind(&device, &file).map_err(|e| refusal::bind(root, address, &e))?;
    let space = iommufd::space(&file).map_err(failed("IOMMU_IOAS_ALLOC"))?;
    iommufd::attach(&device, space).map_err(|e| refusal::attach(address, &e))?;
    Ok((device, Iommu::Iommufd { file, space }))
}

/// The device's own file; it exists if VFIO was built with iommufd.
fn device_file(root: &Root, address: Address) -> Option<String> {
    let names = root.list(&format!("/sys/bus/pci/devices/{address}/vfio-dev")).ok()?;
    let name = names.into_iter().find(|name| name.starts_with("vfio"))?;
    Some(format!("/dev/vfio/devices/{name}"))
}

impl Iommu {
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Type1 { .. } => "type1",
            Self::Iommufd { .. } => "iommufd",
        }
    }

    /// Whether it takes dma-bufs of any exporter.
    pub(super) const fn takes_dma_bufs(&self) -> bool {
        matches!(self, Self::Iommufd { .. })
    }

    /// The bus addresses that it can map, as first and last of each range; empty if not reported.
    pub(super) fn ranges(&self) -> Result<Vec<(u64, u64)>> {
        match self {
            Self::Type1 { container, .. } => {
                sys::iova_ranges(container).map_err(failed("VFIO_IOMMU_GET_INFO"))
            }
            Self::Iommufd { file, space } => {
                iommufd::ranges(file, *space).map_err(failed("IOMMU_IOAS_IOVA_RANGES"))
            }
        }
    }

    /// Maps memory of this process for the device at `iova`. The error contains the failed call.
    ///
    /// # Safety
    /// The memory stays mapped in this process until it is unmapped here, and is not subject to Rust's aliasing
    /// rules meanwhile: the device may change it at any moment.
    pub(super) unsafe fn map(
        &self,
        vaddr: *mut u8,
        iova: u64,
        size: u64,
    ) -> std::result::Result<(), (&'static str, io::Error)> {
        // SAFETY: the caller's promise is what both require.
        unsafe {
            match self {
                Self::Type1 { container, .. } => {
                    sys::map(container, vaddr, iova, size).map_err(|e| ("VFIO_IOMMU_MAP_DMA", e))
                }
                Self::Iommufd { file, space } => {
                    iommufd::map(file, *space, vaddr, iova, size).map_err(|e| ("IOMMU_IOAS_MAP", e))
                }
            }
        }
    }

    /// Maps a part of a dma-buf at `iova`; the kernel holds the buffer meanwhile.
    pub(super) fn map_dma_buf(
        &self,
        buffer: BorrowedFd<'_>,
        start: u64,
        iova: u64,
        size: u64,
    ) -> io::Result<()> {
        match self {
            Self::Type1 { .. } => Err(io::ErrorKind::Unsupported.into()),
            Self::Iommufd { file, space } => iommufd::map_file(file, *space, buffer, (start, iova, size)),
        }
    }

    pub(super) fn unmap(&self, iova: u64, size: u64) -> io::Result<()> {
        match self {
            Self::Type1 { container, .. } => sys::unmap(container, iova, size),
            Self::Iommufd { file, space } => iommufd::unmap(file, *space, iova, size),
        }
    }
}
