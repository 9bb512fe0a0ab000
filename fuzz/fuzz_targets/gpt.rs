//! GUID partition tables with changed bytes, with and without corrected checksums: partitions are on the drive and
//! disjoint.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/files/tests/common/table.rs"]
mod table;
#[allow(dead_code)]
#[path = "../../crates/files/tests/common/template.rs"]
mod template;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use onehop_files::{Blocks, partitions};
use template::{Patch, Sparse};

static TABLES: LazyLock<[(usize, Sparse); 2]> = LazyLock::new(|| {
    let parts = [(8, 11), (12, 20), (30, 50)];
    [512, 4096].map(|lba| (lba, Sparse::from_bytes(&table::gpt(lba, 64, &parts))))
});

fuzz_target!(|bytes: &[u8]| {
    let Some((how, patches)) = bytes.split_first() else { return };
    let (lba, table) = &TABLES[usize::from(how & 1)];
    let mut table = table.clone();
    table.patch(&Patch::all(patches));
    let mut image = vec![0; table.size() as usize];
    table.read_at(0, &mut image).expect("memory can be read");
    if how & 6 != 0 {
        table::fix_gpt_checksums(&mut image, *lba);
    }
    let Ok(found) = partitions::read(&image) else { return };
    let mut places: Vec<_> = found.partitions.iter().map(|p| (p.start, p.len)).collect();
    places.sort_unstable();
    assert!(places.iter().all(|(start, len)| *len > 0 && start + len <= image.len() as u64));
    assert!(places.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));
});
