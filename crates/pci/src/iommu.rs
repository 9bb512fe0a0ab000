//! How the IOMMU treats a device's addresses.

use crate::{Address, Root};

/// The type of a group with lazy flushes.
pub(crate) const LAZY: &str = "DMA-FQ";

/// The type of a device's IOMMU group: `None` if it is in no group, empty if the kernel does not report the type.
pub(crate) fn group_type(root: &Root, address: Address) -> Option<String> {
    let group = format!("/sys/bus/pci/devices/{address}/iommu_group");
    root.link_name(&group).map(|_| root.text(&format!("{group}/type")).unwrap_or_default())
}

/// Whether an IOMMU translates the device's addresses, so that it reaches only memory that is mapped for it.
#[must_use]
pub fn is_translated(root: &Root, address: Address) -> bool {
    group_type(root, address).is_some_and(|kind| kind != "identity")
}

/// Whether the IOMMU is flushed lazily, so that a device still reaches unmapped memory for a while, which may have
/// another owner by then. VFIO flushes by itself; our module needs a group with strict flushes, which not every kernel
/// can set for every group.
#[must_use]
pub fn is_lazy(root: &Root, address: Address) -> bool {
    group_type(root, address).is_some_and(|kind| kind == LAZY)
}
