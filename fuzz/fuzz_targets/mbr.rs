//! MBR partition tables with changed bytes: chains end, partitions are on the drive and disjoint.
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

static TABLE: LazyLock<Sparse> = LazyLock::new(|| Sparse::from_bytes(&table::mbr()));

fuzz_target!(|bytes: &[u8]| {
    let mut table = TABLE.clone();
    table.patch(&Patch::all(bytes));
    let Ok(found) = partitions::read(&table) else { return };
    let mut places: Vec<_> = found.partitions.iter().map(|p| (p.start, p.len)).collect();
    places.sort_unstable();
    assert!(places.iter().all(|(start, len)| *len > 0 && start + len <= table.size()));
    assert!(places.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));
});
