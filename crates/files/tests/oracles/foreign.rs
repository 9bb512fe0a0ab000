//! File systems that are not read are known by name.

use std::sync::Arc;

use onehop_files::{Error, Image, Volume, Which};

use crate::exfat_image::{Item, Maker};
use crate::ext::{self, mkfs};
use crate::support::{Node, Scratch, Tree, contents, have, open, run, try_run};

fn refused(image: Vec<u8>, which: Which, name: &str) {
    let error = Volume::open(Arc::new(image), which).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what == name), "{name}: {error}");
}

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

/// A superblock of Linux RAID 1.x at a byte of the member; `blkid` looks at its checksum.
fn md1(at: usize) -> Vec<u8> {
    let mut sb = vec![0; 1024];
    for (word, value) in [(0, 0xA92B_4EFC_u32), (1, 1), (18, 1), (23, 2), (36, at as u32 / 512)] {
        sb[4 * word..][..4].copy_from_slice(&value.to_le_bytes());
    }
    sum(&mut sb[..256], 54);
    sb
}

/// One of 0.90, of a member that holds so many KiB.
fn md0(kib: u32) -> Vec<u8> {
    let mut sb = vec![0; 4096];
    for (word, value) in [(0, 0xA92B_4EFC_u32), (2, 90), (7, 1), (8, kib), (9, 2), (10, 2)] {
        sb[4 * word..][..4].copy_from_slice(&value.to_le_bytes());
    }
    sum(&mut sb, 38);
    sb
}

fn sum(sb: &mut [u8], word: usize) {
    let words = sb.chunks_exact(4).map(|w| u64::from(u32::from_le_bytes(w.try_into().unwrap())));
    let sum: u64 = words.sum();
    sb[4 * word..][..4].copy_from_slice(&((sum & 0xFFFF_FFFF) as u32 + (sum >> 32) as u32).to_le_bytes());
}

/// What a member of something holds is no file system of its own, though one is to be seen: the other leg of a mirror may
/// be newer, or what is seen was there before.
#[test]
fn members_are_refused_whatever_is_seen_in_them() {
    if !have(&ext::TOOLS) || !have(&["blkid"]) {
        return;
    }
    let scratch = Scratch::new();
    let tree = Tree::from([(b"file".to_vec(), Node::File(vec![7; 5000]))]);
    let path = mkfs(&scratch, "-t ext4 -b 1024", &tree, 16 << 20);
    let ext = std::fs::read(&path).unwrap();
    let file = Item::File { bytes: vec![7; 5000], valid: 5000, row: true };
    let exfat = Maker::new(9, 0, 4000).build("", &[("file".to_owned(), file)]);
    for (fs, volume) in [("ext4", ext), ("exfat", exfat)] {
        let len = volume.len();
        let (one, old) = ((len / 512 - 16) / 8 * 4096, len / 65536 * 65536 - 65536);
        let mut old_swapped = md0(old as u32 / 1024);
        old_swapped.chunks_exact_mut(4).for_each(<[u8]>::reverse);
        let raid = "Linux RAID member";
        let members = [
            (0, b"LUKS\xba\xbe\0\x01".to_vec(), "LUKS encryption", "crypto_LUKS"),
            (512, b"LABELONE".to_vec(), "LVM physical volume", ""),
            (4096, md1(4096), raid, "linux_raid_member"),
            (one, md1(one), raid, "linux_raid_member"),
            (old, md0(old as u32 / 1024), raid, "linux_raid_member"),
            (old, old_swapped, raid, "linux_raid_member"),
            (
                len / 512 * 512 - 1024,
                b"Intel Raid ISM Cfg Sig. 1.0.00".to_vec(),
                "Intel RAID member",
                "isw_raid_member",
            ),
            (len / 4096 * 4096 - 8192, b"Intel Raid ISM Cfg Sig. 1.0.00".to_vec(), "Intel RAID member", ""),
        ];
        for (at, magic, name, kind) in members {
            let mut member = volume.clone();
            member[at..at + magic.len()].copy_from_slice(&magic);
            std::fs::write(&path, &member).unwrap();
            let said = run("blkid", &["-p", "-o", "value", "-s", "TYPE", &path]);
            assert!(kind.is_empty() || said.trim() == kind, "{name} at {at} of {fs}: blkid says {said}");
            refused(member, Which::Auto, name);
        }
        // One that says that it is elsewhere is what is left in a file, or of a longer member.
        let mut copy = volume.clone();
        copy[one..one + 1024].copy_from_slice(&md1(one - 4096));
        std::fs::write(&path, &copy).unwrap();
        assert_eq!(run("blkid", &["-p", "-o", "value", "-s", "TYPE", &path]).trim(), fs);
        drop(open(&path));
    }
}

#[test]
fn a_drive_that_is_a_member_as_a_whole_has_no_partitions_of_its_own() {
    if !have(&ext::TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    let path = mkfs(&scratch, "-t ext4 -b 1024", &Tree::new(), 8 << 20);
    let ext = std::fs::read(&path).unwrap();
    // An MBR with one partition, and 1 MiB that is nobody's.
    let drive = |room: usize| {
        let mut image = vec![0; (1 << 20) + ext.len() + room];
        image[1 << 20..][..ext.len()].copy_from_slice(&ext);
        image[450] = 0x83;
        image[454..458].copy_from_slice(&2048_u32.to_le_bytes());
        image[458..462].copy_from_slice(&((ext.len() / 512) as u32).to_le_bytes());
        image[510..512].copy_from_slice(&[0x55, 0xAA]);
        image
    };
    drop(Volume::open(Arc::new(drive(1 << 20)), Which::Auto).unwrap());
    for which in [Which::Auto, Which::Partition(1)] {
        let (mut imsm, mut md) = (drive(1 << 20), drive(1 << 20));
        let len = imsm.len();
        imsm[len - 1024..][..16].copy_from_slice(b"Intel Raid ISM C");
        refused(imsm, which, "Intel RAID member");
        md[len - 65536..][..4096].copy_from_slice(&md0(64));
        refused(md, which, "Linux RAID member");
    }
    // Where the last partition goes to the end of the drive, it is the member.
    let mut last = drive(0);
    let len = last.len();
    last[len - 65536..][..4096].copy_from_slice(&md0(64));
    refused(last.clone(), Which::Partition(1), "Linux RAID member");
    let error = Volume::open(Arc::new(last), Which::Auto).unwrap_err().to_string();
    assert!(
        error.contains("which partition? there are these: 1") && error.contains("Linux RAID member"),
        "{error}"
    );
}

/// Whoever formats a drive leaves some of what was there. The backup of an exFAT is never used by Linux.
#[test]
fn what_was_there_before_does_not_count() {
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
    // Its boot sector stays, but it is not sound any more.
    let image = scratch.image("exfat-swap", 64 << 20, 0);
    run("mkfs.exfat", &[&image]);
    run("mkswap", &[&image]);
    refused(std::fs::read(&image).unwrap(), Which::Auto, "Linux swap");
    // Here `blkid` and `mount` do not decide either.
    let image = scratch.image("ext4-fat", 64 << 20, 0);
    run("mkfs.ext4", &["-q", "-F", &image]);
    format(&image);
    assert!(!["ext4", "vfat"].contains(&&kind(&image)[..]));
    refused(std::fs::read(&image).unwrap(), Which::Auto, "an ext and a FAT in one place");
}
