//! The capabilities that matter to whoever moves bytes between devices.

use serde::Serialize;

use crate::config::Space;
use crate::link::{Link, Speed};

/// What a PCI Express function is.
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
    /// Something that is not known here.
    Other,
}

/// What the PCI Express capability says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Express {
    /// What it is.
    pub kind: PortType,
    /// Whether it can be reset alone (FLR).
    pub function_reset: bool,
    /// Payload of a packet, as it is set.
    pub max_payload: u16,
    /// The most that it asks for at once.
    pub max_read_request: u16,
    /// Whether it may mark its packets as free of order.
    pub relaxed_ordering: bool,
    /// Its link; a device within the root complex has none.
    pub link: Link,
}

impl Express {
    pub(crate) fn parse(space: &Space<'_>, at: usize) -> Option<Self> {
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

/// MSI-X: how many interrupts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct MsiX {
    /// Vectors.
    pub vectors: u16,
    /// The BAR that holds their table: the kernel keeps its page for itself.
    pub bar: u8,
    /// Where in it.
    pub offset: u32,
    /// Whether they are switched on.
    pub enabled: bool,
}

impl MsiX {
    pub(crate) fn parse(space: &Space<'_>, at: usize) -> Option<Self> {
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
    /// 0 to 3: D0 is awake.
    pub state: u8,
    /// Where its control register is in config space.
    pub control_at: u8,
}

impl Power {
    pub(crate) fn parse(space: &Space<'_>, at: usize) -> Option<Self> {
        let control_at = at + 4;
        Some(Self { state: (space.half(control_at)? & 3) as u8, control_at: u8::try_from(control_at).ok()? })
    }
}

/// Access control services: whether a port sends packets between devices below it up to the root.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Acs {
    /// What it can do.
    pub can: u16,
    /// What is switched on.
    pub control: u16,
}

impl Acs {
    /// Requests are sent up.
    pub const REQUEST_REDIRECT: u16 = 1 << 2;
    /// Completions are sent up.
    pub const COMPLETION_REDIRECT: u16 = 1 << 3;
    /// A device may ask for its packets to be let through.
    pub const DIRECT_TRANSLATED: u16 = 1 << 6;
    /// What goes to a peer is dropped or sent up, by a vector.
    pub const EGRESS_CONTROL: u16 = 1 << 5;

    pub(crate) fn parse(space: &Space<'_>, at: usize) -> Option<Self> {
        Some(Self { can: space.half(at + 4)?, control: space.half(at + 6)? })
    }

    /// Whether packets between two devices below this port are sent up to the root, or stopped.
    #[must_use]
    pub fn redirects(self) -> bool {
        self.control & (Self::REQUEST_REDIRECT | Self::COMPLETION_REDIRECT | Self::EGRESS_CONTROL) != 0
    }

    /// Whether devices below this port are kept apart, as the kernel wants it for IOMMU groups of their own: source validation,
    /// both redirects, upstream forwarding.
    #[must_use]
    pub fn isolates(self) -> bool {
        const WANTED: u16 = 1 | Acs::REQUEST_REDIRECT | Acs::COMPLETION_REDIRECT | 1 << 4;
        self.control & WANTED == WANTED
    }

    /// The names of what is switched on, as `lspci` has them.
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
    /// Its size now.
    pub size: u64,
    /// The sizes that it can have: bit n is 2ⁿ bytes.
    pub sizes: u64,
}

impl Resizable {
    /// The largest size.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.sizes.checked_ilog2().map_or(0, |bit| 1 << bit)
    }

    pub(crate) fn parse(space: &Space<'_>, at: usize) -> Vec<Self> {
        let one = |n: usize| {
            let (can, control) = (space.word(at + 4 + 8 * n)?, space.word(at + 8 + 8 * n)?);
            // Bit 4 of the first word is 1 MiB; the rest of them, from 256 TiB on, are in the upper half of the second.
            let sizes = u64::from(can >> 4) << 20 | u64::from(control >> 16) << 48;
            let size = 1_u64.checked_shl(20 + (control >> 8 & 0x3f))?;
            Some(Self { bar: (control & 7) as u8, size, sizes })
        };
        // The first control word says how many there are; six BARs at most.
        let count = space.word(at + 8).map_or(0, |control| (control >> 5 & 7).min(6));
        (0..count as usize).map_while(one).collect()
    }
}

/// How many virtual functions a device can have.
pub(crate) fn sriov_functions(space: &Space<'_>, at: usize) -> Option<u16> {
    space.half(at + 0xe)
}
