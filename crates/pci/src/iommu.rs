//! What the IOMMU does with a device's addresses.

use crate::{Address, Root};

/// The type of a group that is flushed lazily.
pub(crate) const LAZY: &str = "DMA-FQ";

/// The type of a device's IOMMU group; none where it is in no group. What the kernel does not tell is an empty type.
pub(crate) fn group_type(root: &Root, address: Address) -> Option<String> {
    let group = format!("/sys/bus/pci/devices/{address}/iommu_group");
    root.link_name(&group).map(|_| root.text(&format!("{group}/type")).unwrap_or_default())
}

/// Whether an IOMMU translates what a device puts on the bus, so that it reaches what it was given and nothing else.
#[must_use]
pub fn is_translated(root: &Root, address: Address) -> bool {
    group_type(root, address).is_some_and(|kind| kind != "identity")
}

/// Whether the IOMMU forgets what was unmapped only a while later, so that a device still reaches memory that is somebody else's
/// by then. VFIO flushes by itself; our module needs a group that does not, which not every kernel can make of any group.
#[must_use]
pub fn is_lazy(root: &Root, address: Address) -> bool {
    group_type(root, address).is_some_and(|kind| kind == LAZY)
}
