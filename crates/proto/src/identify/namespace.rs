//! Namespaces: CNS 00h, what the NVM command set adds (05h), and what every command set reports (08h).

use crate::format::{Flbas, Format, FormatError, LbaFormat};
use crate::wire::{Wire, bits, flags, record, wire_newtypes};

record! {
    /// Identify Namespace.
    Namespace, NamespaceBuilder, 4096;
    /// Blocks.
    nsze 0 u64;
    /// Blocks that may be allocated.
    ncap 8 u64;
    /// Blocks that are allocated.
    nuse 16 u64;
    /// Features: bit 0 thin, bit 1 own atomics, bit 2 error on deallocated blocks, bit 4 granularities.
    nsfeat 24 u8;
    /// Formats, zero-based.
    nlbaf_z 25 u8;
    /// The format in use.
    flbas 26 Flbas;
    /// Metadata: bit 0 extended, bit 1 separate.
    mc 27 u8;
    /// Protection: bits 2:0 types 1 to 3, bit 3 first, bit 4 last.
    dpc 28 u8;
    /// Protection in use: bits 2:0 type, bit 3 first.
    dps 29 u8;
    /// Sharing: bit 0 other controllers see it too.
    nmic 30 u8;
    /// Reservations.
    rescap 31 u8;
    /// Format progress: bit 7 supported, bits 6:0 per cent left.
    fpi 32 u8;
    /// Deallocation: bits 2:0 what a read gives (1 zeros, 2 ones), bit 3 Write Zeroes deallocates, bit 4 guard.
    dlfeat 33 u8;
    /// Blocks written atomically, zero-based.
    nawun_z 34 u16;
    /// Blocks written atomically despite power loss, zero-based.
    nawupf_z 36 u16;
    /// Blocks compared and written atomically, zero-based.
    nacwu_z 38 u16;
    /// Atomic boundary in blocks, zero-based.
    nabsn_z 40 u16;
    /// First block of the first atomic boundary.
    nabo 42 u16;
    /// Atomic boundary despite power loss in blocks, zero-based.
    nabspf_z 44 u16;
    /// Boundary in blocks that I/O should not cross; 0 is none.
    noiob 46 u16;
    /// Bytes of media.
    nvmcap 48 u128;
    /// Preferred write granularity in blocks, zero-based.
    npwg_z 64 u16;
    /// Preferred write alignment in blocks, zero-based.
    npwa_z 66 u16;
    /// Preferred deallocate granularity in blocks, zero-based.
    npdg_z 68 u16;
    /// Preferred deallocate alignment in blocks, zero-based.
    npda_z 70 u16;
    /// Optimal write size in blocks, zero-based.
    nows_z 72 u16;
    /// Copy: most blocks of a source range.
    mssrl 74 u16;
    /// Copy: most blocks in all.
    mcl 76 u32;
    /// Copy: source ranges, zero-based.
    msrc_z 80 u8;
    /// Formats with attributes of their own; they follow the others.
    nulbaf 82 u8;
    /// Asymmetric access group.
    anagrpid 92 u32;
    /// Attributes: bit 0 write protected.
    nsattr 99 u8;
    /// NVM set.
    nvmsetid 100 u16;
    /// Endurance group.
    endgid 102 u16;
    /// Globally unique identifier, high byte first; zeros for none.
    nguid 104 [u8; 16];
    /// IEEE identifier, high byte first; zeros for none.
    eui64 120 [u8; 8];
}

/// Where the formats start.
const FORMATS: usize = 128;
/// How many there may be.
const MAX_FORMATS: u8 = 64;

impl Namespace<'_> {
    /// The highest index that names a format.
    fn last_format(&self) -> u8 {
        self.nlbaf_z().saturating_add(self.nulbaf()).min(MAX_FORMATS - 1)
    }

    /// One of the formats; none if there are not that many.
    #[must_use]
    pub fn lbaf(&self, index: u8) -> Option<LbaFormat> {
        (index <= self.last_format()).then(|| LbaFormat::get(self.bytes(), FORMATS + index as usize * 4))
    }

    /// The index of the format in use.
    #[must_use]
    pub fn format_index(&self) -> u8 {
        self.flbas().index(self.last_format())
    }

    /// The format in use; refuses unsupported ones.
    pub fn format(&self) -> Result<Format, FormatError> {
        let index = self.format_index();
        let lbaf = self.lbaf(index).ok_or(FormatError::NoSuchFormat { index })?;
        Format::new(self.flbas(), lbaf, self.dps())
    }

    /// True if the namespace is active: an inactive one reads as zeros.
    #[must_use]
    pub fn active(&self) -> bool {
        self.bytes().iter().any(|&b| b != 0)
    }

    /// True if NPWG, NPWA, NPDG, NPDA and NOWS are meant.
    #[must_use]
    pub fn granularities(&self) -> bool {
        self.nsfeat() & 0x10 != 0
    }
}

impl NamespaceBuilder<'_> {
    /// One of the formats, 0 to 63; nothing past the last.
    pub fn lbaf(self, index: u8, format: LbaFormat) -> Self {
        if index < MAX_FORMATS {
            format.put(self.0, FORMATS + index as usize * 4);
        }
        self
    }
}

/// ELBAF: what the NVM command set adds to a format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct ExtendedFormat(pub u32);

impl ExtendedFormat {
    bits! { u32;
        /// Bits of the storage tag.
        sts with_sts 0 7 u8;
        /// Guard of the protection information: 0 16 bits, 1 32 bits, 2 64 bits.
        pif with_pif 7 2 u8;
    }
}

wire_newtypes! { ExtendedFormat Pic }

/// PIC: protection information capabilities.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Pic(pub u8);

impl Pic {
    flags! { u8;
        /// 16-bit guard with a storage tag.
        storage_tag_16 with_storage_tag_16 0;
        /// 16-bit guard: the storage tag mask is all ones.
        full_mask with_full_mask 1;
        /// Storage tags may be checked.
        storage_tag_check with_storage_tag_check 2;
    }
}

record! {
    /// Identify Namespace for the NVM command set.
    NvmNamespace, NvmNamespaceBuilder, 4096;
    /// Which bits of the storage tag are checked.
    lbstm 0 u64;
    /// Protection information capabilities.
    pic 8 Pic;
}

/// Where the extended formats start.
const EXTENDED_FORMATS: usize = 12;

impl NvmNamespace<'_> {
    /// What goes with the format of this index, 0 to 63.
    #[must_use]
    pub fn elbaf(&self, index: u8) -> Option<ExtendedFormat> {
        (index < MAX_FORMATS)
            .then(|| ExtendedFormat::get(self.bytes(), EXTENDED_FORMATS + index as usize * 4))
    }
}

impl NvmNamespaceBuilder<'_> {
    /// What goes with the format of this index, 0 to 63; nothing past the last.
    pub fn elbaf(self, index: u8, format: ExtendedFormat) -> Self {
        if index < MAX_FORMATS {
            format.put(self.0, EXTENDED_FORMATS + index as usize * 4);
        }
        self
    }
}

record! {
    /// Identify Namespace independent of the command set.
    IndependentNamespace, IndependentNamespaceBuilder, 4096;
    /// Features: bit 3 identifiers are not reused.
    nsfeat 0 u8;
    /// Sharing: bit 0 other controllers see it too.
    nmic 1 u8;
    /// Reservations.
    rescap 2 u8;
    /// Format progress: bit 7 supported, bits 6:0 per cent left.
    fpi 3 u8;
    /// Asymmetric access group.
    anagrpid 4 u32;
    /// Attributes: bit 0 write protected.
    nsattr 8 u8;
    /// NVM set.
    nvmsetid 10 u16;
    /// Endurance group.
    endgid 12 u16;
    /// Status: bit 0 ready.
    nstat 14 u8;
}
