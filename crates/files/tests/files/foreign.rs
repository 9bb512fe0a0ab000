//! Unsupported file systems are reported by name.

use std::sync::Arc;

use onehop_files::{Error, Image, Volume, Which};

use crate::support::{Scratch, contents, have, open, run, try_run};

pub fn refused(image: Vec<u8>, which: Which, name: &str) {
    let error = Volume::open(Arc::new(image), which).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what == name), "{name}: {error}");
}

#[test]
fn other_file_systems_are_refused_by_name() {
    let makers: [(&str, &[&str], u64, &str); 6] = [
        ("mkfs.xfs", &["-q", "-f"], 320, "XFS"),
        ("mkfs.btrfs", &["-q", "-f"], 128, "btrfs"),
        ("mkfs.ntfs", &["-F", "-Q", "-q"], 16, "NTFS"),
        ("mkfs.f2fs", &["-q", "-f"], 128, "F2FS"),
        ("mkswap", &[], 16, "Linux swap"),
        ("mkswap", &["-p", "8192"], 16, "Linux swap"),
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
fn the_image_of_a_sleeping_system_is_refused() {
    for (page, signature) in [(4096, &b"S1SUSPEND\0"[..]), (4096, b"LINHIB0001"), (65536, b"ULSUSPEND\0")] {
        let mut image = vec![0; 1 << 20];
        image[page - 10..page].copy_from_slice(signature);
        refused(image, Which::Auto, "Linux swap");
    }
}

#[test]
fn an_empty_drive_is_reported() {
    for bytes in [vec![], vec![0; 100], vec![0; 512], vec![0xFF; 1 << 20]] {
        let error = Volume::open(Arc::new(bytes), Which::Auto).unwrap_err();
        assert!(matches!(error, Error::NoFileSystem(_)), "{error}");
    }
}

/// Formatting a drive leaves some of its former contents. Linux never uses the backup of an exFAT.
#[test]
fn leftovers_do_not_count() {
    if !have(&["mkfs.exfat", "mkfs.ext4", "mformat", "mcopy", "mkswap", "blkid"]) {
        return;
    }
    let scratch = Scratch::new();
    let kind =
        |image: &str| try_run("blkid", &["-p", "-o", "value", "-s", "TYPE", image], "").1.trim().to_owned();
    let file = scratch.path("file");
    std::fs::write(&file, b"new").unwrap();
    let format = |image: &str| {
        run("mformat", &["-i", image, "-F", "-c", "1", "-T", "131072", "::"]);
        run("mcopy", &["-i", image, file.to_str().unwrap(), "::"]);
    };
    let image = scratch.image("exfat-fat", 64 << 20, 0);
    run("mkfs.exfat", &[&image]);
    format(&image);
    assert_eq!(kind(&image), "vfat");
    let volume = open(&image);
    let new = volume.lookup("file").unwrap();
    assert_eq!(contents(&volume, &new, &std::fs::File::open(&image).unwrap()), b"new");
    // Its boot sector stays, but is no longer valid.
    let image = scratch.image("exfat-swap", 64 << 20, 0);
    run("mkfs.exfat", &[&image]);
    run("mkswap", &[&image]);
    refused(std::fs::read(&image).unwrap(), Which::Auto, "Linux swap");
    // `blkid` and `mount` do not decide here either.
    let image = scratch.image("ext4-fat", 64 << 20, 0);
    run("mkfs.ext4", &["-q", "-F", &image]);
    format(&image);
    assert!(!["ext4", "vfat"].contains(&&kind(&image)[..]));
    refused(std::fs::read(&image).unwrap(), Which::Auto, "an ext and a FAT in one place");
}
