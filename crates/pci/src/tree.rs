//! All devices of a system, their topology, and the route between two of them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::names::Names;
use crate::{Acs, Address, Device, Error, PortType, Result, Root};

/// Upper limit of functions.
const MAX_DEVICES: usize = 4096;

/// An IOMMU group: devices that the IOMMU cannot isolate from each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IommuGroup {
    /// `DMA`, `DMA-FQ` (translating, with lazy flushes), `identity`; `None` if the kernel does not report it.
    pub kind: Option<String>,
    /// Its members.
    pub devices: Vec<Address>,
}

impl IommuGroup {
    /// Whether addresses are translated; `None` if unknown.
    #[must_use]
    pub fn translates(&self) -> Option<bool> {
        match self.kind.as_deref()? {
            "identity" => Some(false),
            kind if kind.starts_with("DMA") => Some(true),
            _ => None,
        }
    }
}

/// The distance of two devices, in terms of `nvidia-smi topo`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum PathClass {
    /// At most one switch between them.
    Pix,
    /// Several switches.
    Pxb,
    /// The host bridge.
    Phb,
    /// Two host bridges of one NUMA node.
    Node,
    /// Two NUMA nodes.
    Sys,
}

impl PathClass {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        }
    }

    /// What it means.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Pix => "one PCIe switch",
            Self::Pxb => "several PCIe switches",
            Self::Phb => "the CPU's root complex",
            Self::Node => "two host bridges of one NUMA node, as far as known",
            Self::Sys => "the link between NUMA nodes",
        }
    }

    /// Whether packets turn round in a switch, below the root complex.
    #[must_use]
    pub fn below_root(self) -> bool {
        matches!(self, Self::Pix | Self::Pxb)
    }
}

/// The route between two devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Path {
    /// Their distance.
    pub class: PathClass,
    /// Bridges from the first device up, without the common one.
    pub up: Vec<Address>,
    /// The bridge above both.
    pub common: Option<Address>,
    /// Bridges down to the second device.
    pub down: Vec<Address>,
}

impl Path {
    /// All bridges on the route.
    pub fn bridges(&self) -> impl Iterator<Item = Address> + '_ {
        self.up.iter().chain(&self.common).chain(&self.down).copied()
    }
}

/// All devices of a system.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Tree {
    /// The devices.
    pub devices: BTreeMap<Address, Device>,
    /// IOMMU groups by number.
    pub groups: BTreeMap<u32, IommuGroup>,
    /// Devices that could not be read.
    pub problems: Vec<Error>,
}

impl Tree {
    /// Reads every device. A system without PCI has none.
    ///
    /// # Errors
    /// When the list of devices exists, but cannot be read.
    pub fn scan(root: &Root) -> Result<Self> {
        let found = match root.list("/sys/bus/pci/devices") {
            Err(error) if !error.is_missing() => return Err(error),
            found => found.unwrap_or_default(),
        };
        let names = Names::load(root);
        let mut tree = Self::default();
        for name in found.iter().take(MAX_DEVICES) {
            let device = name.parse().and_then(|address| Device::read(root, address, &names));
            match device {
                Ok(device) => drop(tree.devices.insert(device.address, device)),
                Err(error) => tree.problems.push(error),
            }
        }
        let numbers: BTreeSet<u32> = tree.devices.values().filter_map(|device| device.iommu_group).collect();
        tree.groups = numbers.into_iter().map(|number| (number, tree.group(root, number))).collect();
        Ok(tree)
    }

    fn group(&self, root: &Root, number: u32) -> IommuGroup {
        let members = self.devices.values().filter(|device| device.iommu_group == Some(number));
        let kind = root.text(&format!("/sys/kernel/iommu_groups/{number}/type")).ok();
        IommuGroup {
            kind: kind.filter(|kind| !kind.is_empty()),
            devices: members.map(|device| device.address).collect(),
        }
    }

    /// A device by its address.
    #[must_use]
    pub fn get(&self, address: Address) -> Option<&Device> {
        self.devices.get(&address)
    }

    /// The device's IOMMU group.
    #[must_use]
    pub fn group_of(&self, device: &Device) -> Option<&IommuGroup> {
        self.groups.get(&device.iommu_group?)
    }

    /// The devices directly below a bridge or host bridge. Bridges that are not visible are skipped.
    pub fn children<'a>(
        &'a self,
        host: &'a str,
        bridge: Option<Address>,
    ) -> impl Iterator<Item = &'a Device> {
        let nearest = |device: &Device| {
            device.parents.iter().rev().find(|parent| self.devices.contains_key(parent)).copied()
        };
        let right_below = move |device: &&Device| nearest(device) == bridge;
        self.devices.values().filter(right_below).filter(move |device| device.host == host)
    }

    /// The host bridges.
    #[must_use]
    pub fn hosts(&self) -> BTreeSet<&str> {
        self.devices.values().map(|device| device.host.as_str()).collect()
    }

    /// The route between two devices; `None` if their topology is unknown.
    #[must_use]
    pub fn path(&self, from: Address, to: Address) -> Option<Path> {
        let (from, to) = (self.get(from)?, self.get(to)?);
        if from.host.is_empty() || to.host.is_empty() {
            return None;
        }
        let same_host = from.host == to.host;
        let pairs = from.parents.iter().zip(&to.parents);
        let shared = if same_host { pairs.take_while(|(a, b)| a == b).count() } else { 0 };
        let up: Vec<_> = from.parents[shared..].iter().rev().copied().collect();
        let down = to.parents[shared..].to_vec();
        let common = shared.checked_sub(1).map(|at| from.parents[at]);
        let class = match (common, same_host) {
            (Some(_), _) if up.len() <= 1 && down.len() <= 1 => PathClass::Pix,
            (Some(_), _) => PathClass::Pxb,
            (None, true) => PathClass::Phb,
            // Without a node from the firmware, two devices count as one node.
            (None, false) => match (from.numa_node, to.numa_node) {
                (Some(one), Some(other)) if one != other => PathClass::Sys,
                _ => PathClass::Node,
            },
        };
        Some(Path { class, up, common, down })
    }

    /// The ports on the route at which access control may redirect packets to the root, with their settings; `None` for
    /// a port that could not be read.
    #[must_use]
    pub fn access_control(&self, path: &Path) -> Vec<(Address, Option<Acs>)> {
        let turning = |address: &Address| {
            let config = self.get(*address)?.config.as_ref();
            let kind = config.and_then(|config| config.express).map(|express| express.kind);
            match kind {
                Some(PortType::Upstream | PortType::Bridge) => None,
                // A port without ACS lets everything through.
                Some(_) if config.is_some_and(|c| c.has_extended()) => {
                    Some((*address, Some(config.and_then(|c| c.acs).unwrap_or(Acs { can: 0, control: 0 }))))
                }
                _ => Some((*address, None)),
            }
        };
        path.up.iter().chain(&path.down).filter_map(turning).collect()
    }
}
