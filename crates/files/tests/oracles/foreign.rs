//! File systems that are not read are known by name.

use std::sync::Arc;

use onehop_files::{Error, Image, Volume, Which};

use crate::support::{Scratch, have, run};

#[test]
fn other_file_systems_are_refused_by_name() {
    let makers: [(&str, &[&str], u64, &str); 5] = [
        ("mkfs.xfs", &["-q", "-f"], 320, "XFS"),
        ("mkfs.btrfs", &["-q", "-f"], 128, "btrfs"),
        ("mkfs.ntfs", &["-F", "-Q", "-q"], 16, "NTFS"),
        ("mkfs.f2fs", &["-q", "-f"], 128, "F2FS"),
        ("mkswap", &[], 16, "Linux swap"),
    ];
    for (tool, args, mib, name) in makers {
        if !have(&[tool]) {
            continue;
        }
        let scratch = Scratch::new();
        let image = scratch.image("image", mib << 20, 0);
        run(tool, &[args, &[&image]].concat());
        let error = Volume::open(Arc::new(Image::open(&image).unwrap()), Which::Auto).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { what, .. } if what == name), "{tool}: {error}");
    }
}

#[test]
fn a_drive_with_nothing_on_it_says_so() {
    for bytes in [vec![], vec![0; 100], vec![0; 512], vec![0xFF; 1 << 20]] {
        let error = Volume::open(Arc::new(bytes), Which::Auto).unwrap_err();
        assert!(matches!(error, Error::NoFileSystem(_)), "{error}");
    }
}
