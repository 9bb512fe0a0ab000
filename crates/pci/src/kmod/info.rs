//! What the module reports about a device.

use std::fmt;

use super::sys;

/// What makes a device unsafe for users other than root, as the module reports it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Missing(u32);

/// The module's bits, its words in sysfs, what they mean, and the fix.
const WORDS: [(&str, &str, &str); 5] = [
    (
        "translation",
        "no IOMMU translates its addresses, so a program that drives it reaches all memory",
        "enable the IOMMU in the firmware (with intel_iommu=on, without iommu=pt)",
    ),
    (
        "strict",
        "the IOMMU is flushed lazily, so the device still reaches memory shortly after it was unmapped",
        "make its group strict: with no driver bound, write DMA into the device's iommu_group/type, or boot with \
         iommu.strict=1",
    ),
    ("alone", "it shares its IOMMU group with other devices, or is in none", "move it to a slot of its own"),
    (
        "msi",
        "interrupts are not remapped, so a write of the device can raise any",
        "enable interrupt remapping in the firmware",
    ),
    (
        "direct",
        "the firmware reserves memory that the device can reach (RMRR or IVMD)",
        "disable what needs that memory in the firmware, such as remote management of storage, or use another slot",
    ),
];

impl Missing {
    pub(super) fn of(bits: u32) -> Self {
        Self(bits)
    }

    /// Parses the module's `onehop_missing`: `nothing`, or words.
    pub(crate) fn parse(text: &str) -> Self {
        let bit = |word: &str| WORDS.iter().position(|known| known.0 == word).map_or(0, |at| 1 << at);
        Self(text.split_whitespace().map(bit).fold(0, |all, bit| all | bit))
    }

    /// Whether nothing is missing.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    fn words(self) -> impl Iterator<Item = &'static (&'static str, &'static str, &'static str)> {
        WORDS.iter().enumerate().filter(move |(at, _)| self.0 & 1 << at != 0).map(|(_, words)| words)
    }

    /// The module's words.
    #[must_use]
    pub fn names(self) -> Vec<&'static str> {
        self.words().map(|words| words.0).collect()
    }

    /// How to fix it, in words.
    #[must_use]
    pub fn fix(self) -> String {
        self.words().map(|words| words.2).collect::<Vec<_>>().join("; ")
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words().map(|words| words.1).collect::<Vec<_>>().join("; "))
    }
}

/// Why the module disabled a device's bus mastering; several reasons may apply.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stopped(u32);

const REASONS: [&str; 6] = [
    "the driver that exported the memory revoked it",
    "the device whose memory was mapped has been removed",
    "another process reset the device",
    "the machine slept",
    "PCIe reported an error",
    "the device is no longer isolated: another device joined its IOMMU group, or root changed the group's type",
];

impl Stopped {
    pub(super) fn of(bits: u32) -> Self {
        Self(bits)
    }

    /// Whether bus mastering was not disabled.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = REASONS.iter().enumerate().filter(|(at, _)| self.0 & 1 << at != 0);
        f.write_str(&words.map(|(_, reason)| *reason).collect::<Vec<_>>().join("; "))
    }
}

/// The module's view of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Info {
    /// Whether the function can be reset. If not, the caller of
    /// [`Session::start_unreset`](super::Session::start_unreset) vouches that its engines are stopped.
    pub can_reset: bool,
    /// Whether DMA is enabled.
    pub dma_on: bool,
    /// Whether it must be reset before DMA can be enabled.
    pub reset_needed: bool,
    /// What makes it unsafe for users other than root.
    pub missing: Missing,
    /// Why bus mastering was disabled.
    pub stopped: Stopped,
    /// How often bus mastering was disabled.
    pub epoch: u32,
    /// Its interrupt vectors.
    pub vectors: u32,
    /// The vendor's ID.
    pub vendor: u16,
    /// The device's ID.
    pub device: u16,
    /// Class, subclass and programming interface.
    pub class: crate::Class,
    /// Number of mappings.
    pub mappings: u32,
    /// Address bits of its mappings.
    pub mask_bits: u32,
    /// Bytes of its mappings that count against the user's limit of locked memory.
    pub charged: u64,
    /// Mappable bytes of each BAR; 0 if it does not exist, or shares a page with another.
    pub bars: [u64; 6],
}

impl From<sys::RawInfo> for Info {
    fn from(info: sys::RawInfo) -> Self {
        let has = |bit| info.flags & bit != 0;
        Self {
            can_reset: has(sys::INFO_RESET),
            dma_on: has(sys::INFO_DMA_ON),
            reset_needed: has(sys::INFO_RESET_NEEDED),
            missing: Missing::of(info.missing),
            stopped: Stopped::of(info.stopped),
            epoch: info.epoch,
            vectors: info.vectors,
            vendor: info.vendor,
            device: info.device,
            class: crate::Class(info.class_code & 0xff_ffff),
            mappings: info.mappings,
            mask_bits: info.mask_bits,
            charged: info.charged,
            bars: info.bar_len,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_the_same_in_sysfs_and_by_the_call() {
        for (text, bits) in [
            ("nothing\n", 0),
            ("translation alone msi\n", 13),
            ("strict\n", 2),
            ("msi msi", 8),
            ("strict direct", 18),
            ("what is this", 0),
        ] {
            assert_eq!(Missing::parse(text), Missing::of(bits), "{text}");
        }
        let both = Missing::of(6);
        assert_eq!(both.names(), ["strict", "alone"]);
        assert!(both.to_string().contains("unmapped; it shares"), "{both}");
        assert!(both.fix().contains("iommu.strict=1; move it"), "{}", both.fix());
        assert!(Missing::of(0).is_empty() && !both.is_empty());
    }

    #[test]
    fn reasons_come_together() {
        let both = Stopped::of(1 | 16);
        assert!(!both.is_empty());
        assert!(both.to_string().contains("revoked it; PCIe"), "{both}");
        assert!(Stopped::of(0).is_empty());
        assert!(Stopped::of(32).to_string().contains("no longer isolated"));
    }
}
