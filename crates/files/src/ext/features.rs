//! The feature words of ext2, ext3 and ext4, by name.

/// A feature: its bit, and its name in `mke2fs -O` and `debugfs`.
type FeatureNames = [(u32, &'static str)];

pub(super) mod incompat {
    pub(crate) const FILETYPE: u32 = 0x2;
    pub(crate) const RECOVER: u32 = 0x4;
    pub(crate) const META_BG: u32 = 0x10;
    pub(crate) const EXTENTS: u32 = 0x40;
    pub(crate) const BITS64: u32 = 0x80;
    pub(crate) const MMP: u32 = 0x100;
    pub(crate) const FLEX_BG: u32 = 0x200;
    pub(crate) const EA_INODE: u32 = 0x400;
    pub(crate) const CSUM_SEED: u32 = 0x2000;
    pub(crate) const LARGE_DIR: u32 = 0x4000;
    pub(crate) const INLINE_DATA: u32 = 0x8000;
    pub(crate) const ENCRYPT: u32 = 0x1_0000;
    pub(crate) const CASEFOLD: u32 = 0x2_0000;
}

pub(super) mod ro_compat {
    pub(crate) const SPARSE_SUPER: u32 = 0x1;
    pub(crate) const GDT_CSUM: u32 = 0x10;
    pub(crate) const BIGALLOC: u32 = 0x200;
    pub(crate) const METADATA_CSUM: u32 = 0x400;
    pub(crate) const SHARED_BLOCKS: u32 = 0x4000;
}

pub(super) mod compat {
    pub(crate) const HAS_JOURNAL: u32 = 0x4;
    pub(crate) const SPARSE_SUPER2: u32 = 0x200;
}

/// Incompat features that the reader supports. A reader may ignore compat and ro_compat features.
pub(super) const UNDERSTOOD: u32 = {
    use incompat::*;
    FILETYPE
        | META_BG
        | EXTENTS
        | BITS64
        | MMP
        | FLEX_BG
        | EA_INODE
        | CSUM_SEED
        | LARGE_DIR
        | INLINE_DATA
        | ENCRYPT
        | CASEFOLD
};

const INCOMPAT: &FeatureNames = &[
    (0x1, "compression"),
    (0x2, "filetype"),
    (0x4, "needs_recovery"),
    (0x8, "journal_dev"),
    (0x10, "meta_bg"),
    (0x40, "extent"),
    (0x80, "64bit"),
    (0x100, "mmp"),
    (0x200, "flex_bg"),
    (0x400, "ea_inode"),
    (0x1000, "dirdata"),
    (0x2000, "metadata_csum_seed"),
    (0x4000, "large_dir"),
    (0x8000, "inline_data"),
    (0x1_0000, "encrypt"),
    (0x2_0000, "casefold"),
];

/// The names of the bits in an incompat word; unnamed bits are printed as the kernel does.
pub(super) fn incompat_names(bits: u32) -> String {
    let set = (0..32).map(|i| 1_u32 << i).filter(|bit| bits & bit != 0);
    let name = |bit: u32| match INCOMPAT.iter().find(|(b, _)| *b == bit) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("FEATURE_I{}", bit.trailing_zeros()),
    };
    set.map(name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_have_names() {
        assert_eq!(incompat_names(0x1 | 0x1000 | 0x8000_0000), "compression, dirdata, FEATURE_I31");
        assert_eq!(UNDERSTOOD & incompat::RECOVER, 0);
    }
}
