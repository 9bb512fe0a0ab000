//! ext2 and ext4 volumes with changed bytes: everything found on them keeps the API's guarantees.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/files/tests/common/template.rs"]
mod template;

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use onehop_files::Blocks;
use template::{Patch, Sparse, explore};

static TEMPLATES: LazyLock<[Sparse; 3]> = LazyLock::new(|| {
    [
        Sparse::unpack(include_bytes!("../../crates/files/tests/templates/ext4")),
        Sparse::unpack(include_bytes!("../../crates/files/tests/templates/ext2")),
        Sparse::unpack(include_bytes!("../../crates/files/tests/templates/ext4-csum")),
    ]
});

fuzz_target!(|bytes: &[u8]| {
    let Some((which, patches)) = bytes.split_first() else { return };
    let mut image = TEMPLATES[usize::from(*which) % TEMPLATES.len()].clone();
    image.patch(&Patch::all(patches));
    let size = image.size();
    explore(Arc::new(image), 0, size);
});
