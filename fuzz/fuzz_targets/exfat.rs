//! exFAT volumes with changed bytes, with and without corrected checksums.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/files/tests/common/exfat_image.rs"]
mod exfat_image;
#[allow(dead_code)]
#[path = "../../crates/files/tests/common/template.rs"]
mod template;

use std::sync::{Arc, LazyLock};

use exfat_image::{Item, Maker, fix_checksums};
use libfuzzer_sys::fuzz_target;
use onehop_files::Blocks;
use template::{Patch, Sparse, explore};

static IMAGE: LazyLock<(Vec<u8>, Sparse)> = LazyLock::new(|| {
    let file = |row| Item::File { bytes: vec![7; 3000], valid: 2000, row };
    let deep = Item::Dir(vec![("a name that is long enough for more entries than two".into(), file(false))]);
    let mut maker = Maker::new(9, 0, 100);
    maker.step = 3;
    let root = [("row".to_owned(), file(true)), ("map".to_owned(), file(false)), ("dir".to_owned(), deep)];
    let bytes = maker.build("LABEL", &root);
    let sparse = Sparse::from_bytes(&bytes);
    (bytes, sparse)
});

fuzz_target!(|bytes: &[u8]| {
    let Some((how, patches)) = bytes.split_first() else { return };
    let mut changed = IMAGE.1.clone();
    changed.patch(&Patch::all(patches));
    let mut image = vec![0; IMAGE.0.len()];
    changed.read_at(0, &mut image).expect("memory can be read");
    if how % 4 != 0 {
        fix_checksums(&mut image);
    }
    let size = image.len() as u64;
    explore(Arc::new(image), 0, size);
});
