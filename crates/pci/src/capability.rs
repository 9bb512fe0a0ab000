//! The PCI capabilities that matter for transfers between devices.

use serde::Serialize;

use crate::config::ConfigBytes;
use crate::link::{Link, Speed};

/// The kind of a PCI Express function.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PortType {
    /// A device.
    Endpoint,
    /// A port of the root complex.
    RootPort,
    /// A switch's port towards the root.
    Upstream,
    /// A switch's port towards devices.
    Downstream,
    /// A bridge to or from plain PCI.
    Bridge,
    /// A device within the root complex.
    Integrated,
    /// Another kind.
    Other,
}

/// The PCI Express capability.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Express {
    /// Its kind.
    pub kind: PortType,
    /// Whether it supports function level reset (FLR).
    pub function_reset: bool,
    /// Configured payload size of a packet.
    pub max_payload: u16,
    /// Largest read request.
    pub max_read_request: u16,
    /// Whether relaxed ordering is enabled.
    pub relaxed_ordering: bool,
    /// Its link; empty for a device within the root complex.
    pub link: Link,
}

impl Express {
    pub(crate) fn parse(space: &ConfigBytes<'_>, at: usize) -> Option<Self> {
        let kind = match space.half(at + 2)? >> 4 & 0xf {
            0 | 1 => PortType::Endpoint,
            4 => PortType::RootPort,
            5 => PortType::Upstream,
            6 => PortType::Downstream,
            7 | 8 => PortType::Bridge,
            9 => PortType::Integrated,
            _ => PortType::Other,
        };
        let (can, control) = (space.word(at + 4)?, space.half(at + 8)?);
        let (link_can, link_status) = (space.word(at + 0xc)?, space.half(at + 0x12)?);
        let lanes = |bits: u32| Some(bits as u8 & 0x3f).filter(|lanes| (1..=32).contains(lanes));
        let status = u32::from(link_status);
        let size = |bits: u16| 128_u16 << (bits & 7).min(5);
        Some(Self {
            kind,
            function_reset: can & 1 << 28 != 0,
            max_payload: size(control >> 5),
            max_read_request: size(control >> 12),
            relaxed_ordering: control & 0x10 != 0,
            link: Link {
                speed: Speed::of_generation(status as u8 & 0xf),
                width: lanes(status >> 4),
                max_speed: Speed::of_generation(link_can as u8 & 0xf),
                max_width: lanes(link_can >> 4),
            },
        })
    }
}

/// The MSI-X capability.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct MsiX {
    /// Number of vectors.
    pub vectors: u16,
    /// The BAR with the vector table; the kernel does not let that page be mapped.
    pub bar: u8,
    /// Offset of the table.
    pub offset: u32,
    /// Whether MSI-X is enabled.
    pub enabled: bool,
}

impl MsiX {
    pub(crate) fn parse(space: &ConfigBytes<'_>, at: usize) -> Option<Self> {
        let (control, table) = (space.half(at + 2)?, space.word(at + 4)?);
        Some(Self {
            vectors: (control & 0x7ff) + 1,
            bar: table as u8 & 7,
            offset: table & !7,
            enabled: control & 0x8000 != 0,
        })
    }
}

/// The power state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Power {
    /// 0 to 3: D0 is the operational state.
    pub state: u8,
    /// Offset of its control register in config space.
    pub control_at: u8,
}

impl Power {
    pub(crate) fn parse(space: &ConfigBytes<'_>, at: usize) -> Option<Self> {
        let control_at = at + 4;
        Some(Self { state: (space.half(control_at)? & 3) as u8, control_at: u8::try_from(control_at).ok()? })
    }
}

/// Access Control Services: whether a port redirects packets between devices below it to the root.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Acs {
    /// Supported controls.
    pub can: u16,
    /// Enabled controls.
    pub control: u16,
}

impl Acs {
    /// Requests are redirected upstream.
    pub const REQUEST_REDIRECT: u16 = 1 << 2;
    /// Completions are redirected upstream.
    pub const COMPLETION_REDIRECT: u16 = 1 << 3;
    /// Packets to a peer are blocked or redirected, by a vector.
    pub const EGRESS_CONTROL: u16 = 1 << 5;

    pub(crate) fn parse(space: &ConfigBytes<'_>, at: usize) -> Option<Self> {
        Some(Self { can: space.half(at + 4)?, control: space.half(at + 6)? })
    }

    /// Whether packets between two devices below this port are redirected to the root, or blocked.
    #[must_use]
    pub fn redirects(self) -> bool {
        self.control & (Self::REQUEST_REDIRECT | Self::COMPLETION_REDIRECT | Self::EGRESS_CONTROL) != 0
    }

    /// Whether devices below this port are isolated as the kernel requires for separate IOMMU groups: source
    /// validation, both redirects, upstream forwarding.
    #[must_use]
    pub fn isolates(self) -> bool {
        const WANTED: u16 = 1 | Acs::REQUEST_REDIRECT | Acs::COMPLETION_REDIRECT | 1 << 4;
        self.control & WANTED == WANTED
    }

    /// The names of the enabled controls, as in `lspci`.
    #[must_use]
    pub fn names(self) -> Vec<&'static str> {
        const NAMES: [&str; 7] =
            ["SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans"];
        NAMES
            .iter()
            .enumerate()
            .filter(|(bit, _)| self.control & 1 << bit != 0)
            .map(|(_, name)| *name)
            .collect()
    }
}

/// A BAR whose size can be changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Resizable {
    /// The BAR.
    pub bar: u8,
    /// Its present size.
    pub size: u64,
    /// Supported sizes: bit n stands for 2ⁿ bytes.
    pub sizes: u64,
}

impl Resizable {
    /// The largest size.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.sizes.checked_ilog2().map_or(0, |bit| 1 << bit)
    }

    pub(crate) fn parse(space: &ConfigBytes<'_>, at: usize) -> Vec<Self> {
        let one = |n: usize| {
            let (can, control) = (space.word(at + 4 + 8 * n)?, space.word(at + 8 + 8 * n)?);
            // Bit 4 of the first word is 1 MiB; the sizes from 256 TiB on are in the upper half of the second.
            let sizes = u64::from(can >> 4) << 20 | u64::from(control >> 16) << 48;
            let size = 1_u64.checked_shl(20 + (control >> 8 & 0x3f))?;
            Some(Self { bar: (control & 7) as u8, size, sizes })
        };
        // The first control word holds the number of resizable BARs, six at most.
        let count = space.word(at + 8).map_or(0, |control| (control >> 5 & 7).min(6));
        (0..count as usize).map_while(one).collect()
    }
}

/// The number of virtual functions that a device supports.
pub(crate) fn sriov_functions(space: &ConfigBytes<'_>, at: usize) -> Option<u16> {
    space.half(at + 0xe)
}
