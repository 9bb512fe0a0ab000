//! What the IOMMU does with a device's addresses.

use crate::{Address, Root};

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
