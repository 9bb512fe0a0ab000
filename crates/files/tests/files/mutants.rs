//! Volumes and tables with random changes: no panic, no hang, and no places outside of the drive. Needs no tools. The
//! fuzz targets `gpt`, `mbr`, `ext`, `fat` and `exfat` go further.

use std::sync::{Arc, LazyLock};

use onehop_files::{Blocks, Volume, Which, partitions};
use proptest::prelude::*;

use crate::exfat_image::{Item, Maker, fix_checksums};
use crate::table::{fix_gpt_checksums, gpt, mbr};
use crate::template::{Patch, Sparse, explore};

static TEMPLATES: LazyLock<Vec<(&str, Sparse)>> = LazyLock::new(|| {
    let packed: [(&str, &[u8]); 6] = [
        ("ext4", include_bytes!("../templates/ext4")),
        ("ext4-csum", include_bytes!("../templates/ext4-csum")),
        ("ext2", include_bytes!("../templates/ext2")),
        ("fat12", include_bytes!("../templates/fat12")),
        ("fat16", include_bytes!("../templates/fat16")),
        ("fat32", include_bytes!("../templates/fat32")),
    ];
    packed.into_iter().map(|(name, packed)| (name, Sparse::unpack(packed))).collect()
});

static EXFAT: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let file = |row| Item::File { bytes: vec![7; 3000], valid: 2000, row };
    let deep = Item::Dir(vec![("another name that is long enough for two entries".into(), file(false))]);
    let root =
        vec![("row".to_owned(), file(true)), ("chain".to_owned(), file(false)), ("dir".to_owned(), deep)];
    let mut maker = Maker::new(9, 0, 120);
    maker.step = 3;
    maker.build("LABEL", &root)
});

fn patches() -> impl Strategy<Value = Vec<Patch>> {
    let value = prop_oneof![0..64_u32, Just(u32::MAX), Just(1 << 31), any::<u32>()];
    let patch = (any::<u16>(), any::<u8>(), any::<u8>(), value)
        .prop_map(|(line, byte, width, value)| Patch { line, byte, width, value });
    prop::collection::vec(patch, 1..6)
}

#[test]
fn the_templates_are_sound() {
    for (name, template) in TEMPLATES.iter() {
        let volume = Volume::open(Arc::new(template.clone()), Which::Auto).unwrap();
        assert!(explore(Arc::new(template.clone()), 0, template.size()), "{name}");
        let path = if name.starts_with("ext") { "dir/pieces" } else { "pieces.bin" };
        assert!(volume.extents(&volume.lookup(path).unwrap()).unwrap().len() > 1, "{name}");
        if name.starts_with("ext") {
            let paths = [
                "dir/pieces",
                "dir/tiny",
                "dir/inline",
                "plain",
                "short",
                "slow",
                "map",
                "dir/loop/loop/pieces",
            ];
            assert!(paths.iter().all(|p| volume.extents(&volume.lookup(p).unwrap()).is_ok()), "{name}");
        }
    }
    let exfat = Volume::open(Arc::new(EXFAT.clone()), Which::Auto).unwrap();
    assert!(exfat.extents(&exfat.lookup("CHAIN").unwrap()).unwrap().len() > 2);
    assert_eq!(partitions::read(&mbr()).unwrap().partitions.len(), 4);
    for lba in [512, 4096] {
        let found = partitions::read(&gpt(lba, 64, &[(10, 19), (20, 30)])).unwrap();
        assert_eq!((found.partitions.len(), found.notes.len()), (2, 0), "{lba}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_volumes(which in 0..6_usize, patches in patches()) {
        let mut image = TEMPLATES[which].1.clone();
        image.patch(&patches);
        let size = image.size();
        explore(Arc::new(image), 0, size);
    }

    #[test]
    fn changed_exfat(patches in patches(), fixed in any::<bool>()) {
        let mut image = Sparse::from_bytes(&EXFAT);
        image.patch(&patches);
        let mut bytes = vec![0; EXFAT.len()];
        image.read_at(0, &mut bytes).unwrap();
        if fixed {
            fix_checksums(&mut bytes);
        }
        let size = bytes.len() as u64;
        explore(Arc::new(bytes), 0, size);
    }

    #[test]
    fn changed_tables(patches in patches(), fixed in any::<bool>(), kind in 0..3) {
        let lba = if kind == 1 { 4096 } else { 512 };
        let start = if kind == 2 { mbr() } else { gpt(lba, 64, &[(10, 19), (20, 30)]) };
        let mut image = Sparse::from_bytes(&start);
        image.patch(&patches);
        let mut bytes = vec![0; start.len()];
        image.read_at(0, &mut bytes).unwrap();
        if fixed && kind != 2 {
            fix_gpt_checksums(&mut bytes, lba);
        }
        if let Ok(found) = partitions::read(&bytes) {
            prop_assert!(found.partitions.iter().all(|p| p.len > 0 && p.start + p.len <= bytes.len() as u64));
        }
    }
}
