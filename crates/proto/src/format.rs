//! How a namespace lays out its blocks, and the arithmetic of blocks and bytes.

use core::fmt;

use crate::wire::{bits, flags};

/// LBAF: one of the formats that a namespace offers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct LbaFormat(pub u32);

impl LbaFormat {
    bits! { u32;
        /// Metadata bytes of a block.
        ms with_ms 0 16 u16;
        /// Power of two of the data bytes of a block; 0 for a format that is not available.
        lbads with_lbads 16 8 u8;
        /// Relative performance: 0 best, 3 degraded.
        rp with_rp 24 2 u8;
    }
}

/// FLBAS: the format in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Flbas(pub u8);

impl Flbas {
    bits! { u8;
        /// The lower four bits of the format's index.
        index_low with_index_low 0 4 u8;
        /// The upper two bits of the format's index.
        index_high with_index_high 5 2 u8;
    }
    flags! { u8;
        /// Metadata follows the data of each block; else it has a buffer of its own.
        extended with_extended 4;
    }

    /// The index of the format among `nlbaf_z + 1`; the upper bits count only if there are more than 16.
    #[must_use]
    pub const fn index(self, nlbaf_z: u8) -> u8 {
        if nlbaf_z > 15 { self.index_low() | self.index_high() << 4 } else { self.index_low() }
    }
}

/// Why a format is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FormatError {
    /// The index names no format.
    NoSuchFormat {
        /// The index.
        index: u8,
    },
    /// Blocks of this size are not supported.
    BlockSize {
        /// Power of two of the size.
        lbads: u8,
    },
    /// This kind of protection information is not supported, or does not fit into the metadata.
    Protection {
        /// The kind.
        kind: u8,
        /// Metadata bytes of a block.
        metadata: u16,
    },
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NoSuchFormat { index } => {
                write!(f, "the namespace uses format {index}, which it does not list")
            }
            Self::BlockSize { lbads } => write!(f, "blocks of 2^{lbads} bytes are not supported"),
            Self::Protection { kind, metadata } => {
                write!(f, "protection type {kind} with {metadata} bytes of metadata is not supported")
            }
        }
    }
}

impl core::error::Error for FormatError {}

/// Why a range of blocks is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RangeError {
    /// The range has no blocks.
    Empty,
    /// The range goes past the end of the namespace.
    OutOfRange {
        /// The first block.
        lba: u64,
        /// How many.
        blocks: u64,
        /// Blocks of the namespace.
        nsze: u64,
    },
}

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Empty => f.write_str("the range has no blocks"),
            Self::OutOfRange { lba, blocks, nsze } => {
                write!(f, "{blocks} blocks from block {lba} on reach past the namespace's {nsze}")
            }
        }
    }
}

impl core::error::Error for RangeError {}

/// Checks that `blocks` from `lba` on lie in a namespace of `nsze` blocks.
#[inline(always)]
pub const fn check_range(nsze: u64, lba: u64, blocks: u64) -> Result<(), RangeError> {
    if blocks == 0 {
        return Err(RangeError::Empty);
    }
    match nsze.checked_sub(blocks) {
        Some(last) if lba <= last => Ok(()),
        _ => Err(RangeError::OutOfRange { lba, blocks, nsze }),
    }
}

/// How a namespace lays out its blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Format {
    /// Power of two of the data bytes of a block: 9 to 16.
    pub lba_shift: u8,
    /// Metadata bytes of a block.
    pub metadata: u16,
    /// Metadata follows the data of each block.
    pub extended: bool,
    /// Protection information: 0 none, else type 1 to 3.
    pub pi: u8,
    /// Protection information comes first in the metadata, else last.
    pub pi_first: bool,
}

impl Format {
    /// The smallest block: 512 bytes.
    pub const MIN_LBA_SHIFT: u8 = 9;
    /// The largest supported block: 64 KiB.
    pub const MAX_LBA_SHIFT: u8 = 16;
    /// Bytes of protection information with a 16-bit guard.
    pub const PI_BYTES: u16 = 8;

    /// A format without metadata.
    pub const fn plain(lba_shift: u8) -> Result<Self, FormatError> {
        Self::new(Flbas(0), LbaFormat(0).with_lbads(lba_shift), 0)
    }

    /// The format that FLBAS, the LBA format which it names, and DPS describe.
    pub const fn new(flbas: Flbas, lbaf: LbaFormat, dps: u8) -> Result<Self, FormatError> {
        let (lbads, metadata, pi) = (lbaf.lbads(), lbaf.ms(), dps & 7);
        if lbads < Self::MIN_LBA_SHIFT || lbads > Self::MAX_LBA_SHIFT {
            return Err(FormatError::BlockSize { lbads });
        }
        if pi > 3 || pi != 0 && metadata < Self::PI_BYTES {
            return Err(FormatError::Protection { kind: pi, metadata });
        }
        let extended = flbas.extended() && metadata != 0;
        Ok(Self { lba_shift: lbads, metadata, extended, pi, pi_first: pi != 0 && dps & 8 != 0 })
    }

    /// Data bytes of a block.
    #[inline(always)]
    #[must_use]
    pub const fn lba_bytes(&self) -> u64 {
        1u64.wrapping_shl(self.lba_shift as u32)
    }

    /// Data bytes of `blocks`; none if 64 bits cannot hold them.
    #[inline(always)]
    #[must_use]
    pub const fn data_bytes(&self, blocks: u64) -> Option<u64> {
        blocks.checked_mul(self.lba_bytes())
    }

    /// Metadata bytes of `blocks`, wherever they travel; none if 64 bits cannot hold them.
    #[inline(always)]
    #[must_use]
    pub const fn metadata_bytes(&self, blocks: u64) -> Option<u64> {
        blocks.checked_mul(self.metadata as u64)
    }

    /// Bytes that the data pointer must describe for `blocks`: data, and metadata too if it is extended.
    #[inline(always)]
    #[must_use]
    pub const fn transfer_bytes(&self, blocks: u64) -> Option<u64> {
        let per_block = self.lba_bytes() + if self.extended { self.metadata as u64 } else { 0 };
        blocks.checked_mul(per_block)
    }

    /// Most blocks whose transfer takes no more than `bytes`.
    #[inline]
    #[must_use]
    pub const fn blocks_within(&self, bytes: u64) -> u64 {
        bytes / (self.lba_bytes() + if self.extended { self.metadata as u64 } else { 0 })
    }

    /// True if a transfer needs a metadata buffer of its own.
    #[inline]
    #[must_use]
    pub const fn has_separate_metadata(&self) -> bool {
        self.metadata != 0 && !self.extended
    }
}

/// Most bytes of a transfer: MDTS counts in pages of `4096 << mpsmin`; none means no limit.
#[inline]
#[must_use]
pub const fn max_transfer_bytes(mdts: u8, mpsmin: u8) -> Option<u64> {
    let shift = mdts as u32 + 12 + (mpsmin & 15) as u32;
    if mdts == 0 || shift > 63 { None } else { Some(1 << shift) }
}
