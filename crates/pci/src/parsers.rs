//! Parsers of the kernel's answers, exposed for fuzzing. Not part of the interface.

use onehop_os::BusRange;

use crate::places::ProcessMaps;
use crate::{Address, Root, kmod, pagemap, vfio};

/// The IOMMU's ranges in an answer of `VFIO_IOMMU_GET_INFO`.
#[must_use]
pub fn iova_ranges(info: &[u8]) -> Vec<(u64, u64)> {
    vfio::parse_ranges(info)
}

/// What is at an address in a text of `/proc/self/maps`: device, BAR, offset in it, bus address.
#[must_use]
pub fn peer_place(
    root: &Root,
    maps: &str,
    start: usize,
    len: usize,
) -> Option<Result<(Address, u8, u64, u64), String>> {
    let found = ProcessMaps::parse(maps).device_memory(root, start, len)?;
    Some(found.map(|place| (place.device, place.bar, place.offset, place.bus)))
}

/// The runs of physical addresses in entries of `/proc/self/pagemap`.
///
/// # Errors
/// What is wrong with an entry.
pub fn page_runs(entries: &[u8]) -> Result<Vec<BusRange>, &'static str> {
    pagemap::runs(entries)
}

/// What the kernel module reports as missing, from its file in sysfs.
#[must_use]
pub fn missing(text: &str) -> kmod::Missing {
    kmod::Missing::parse(text)
}
