//! Members of RAID sets, encryption and the like, each written into a volume that would be readable otherwise, compared
//! with `blkid`.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use onehop_files::{Error, Image, Volume, Which};

use crate::exfat_image::{Item, Maker};
use crate::ext::{self, mkfs};
use crate::foreign::refused;
use crate::support::{Node, Scratch, Tree, have, open, run, run_with, skip, try_run};

/// A Linux RAID 1.x superblock at a byte of the member; `blkid` verifies its checksum.
fn md1(at: usize) -> Vec<u8> {
    let mut sb = vec![0; 1024];
    for (word, value) in [(0, 0xA92B_4EFC_u32), (1, 1), (18, 1), (23, 2), (36, at as u32 / 512)] {
        sb[4 * word..][..4].copy_from_slice(&value.to_le_bytes());
    }
    sum(&mut sb[..256], 54);
    sb
}

/// A version 0.90 superblock of a member of this many KiB.
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

/// What makes a volume a member, and `blkid`'s name for it; empty if blkid does not check this place.
struct Case {
    parts: Vec<(usize, Vec<u8>)>,
    name: &'static str,
    kind: &'static str,
}

impl Case {
    /// Adds more of it elsewhere.
    fn and(mut self, at: usize, bytes: impl AsRef<[u8]>) -> Self {
        self.parts.push((at, bytes.as_ref().to_vec()));
        self
    }

    fn write(&self, path: &str) {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        self.parts.iter().for_each(|(at, bytes)| file.write_all_at(bytes, *at as u64).unwrap());
    }
}

fn case(at: usize, bytes: impl AsRef<[u8]>, name: &'static str, kind: &'static str) -> Case {
    Case { parts: vec![(at, bytes.as_ref().to_vec())], name, kind }
}

/// Zeros of this length, with these parts in them.
fn composed(len: usize, parts: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (at, part) in parts {
        bytes[*at..*at + part.len()].copy_from_slice(part);
    }
    bytes
}

fn linux_raid(len: usize) -> Vec<Case> {
    let (one, old) = ((len / 512 - 16) / 8 * 4096, len / 65536 * 65536 - 65536);
    let mut swapped = md0(old as u32 / 1024);
    swapped.chunks_exact_mut(4).for_each(<[u8]>::reverse);
    let places = [(4096, md1(4096)), (one, md1(one)), (old, md0(old as u32 / 1024)), (old, swapped)];
    places.map(|(at, sb)| case(at, sb, "Linux RAID member", "linux_raid_member")).into()
}

/// Firmware RAID and its drivers: all but one at the end.
fn firmware_raid(len: usize) -> Vec<Case> {
    let end = |sectors: usize| (len / 512 - sectors) * 512;
    let mut cases = Vec::new();
    let isw = b"Intel Raid ISM Cfg Sig. 1.0.00";
    cases.push(case(end(2), isw, "Intel RAID member", "isw_raid_member"));
    cases.push(case(len / 4096 * 4096 - 8192, isw, "Intel RAID member", ""));
    for (anchor, magic) in [(1, [0xDE, 0x11, 0xDE, 0x11]), (257, [0x11, 0xDE, 0x11, 0xDE])] {
        cases.push(case(end(anchor), composed(512, &[(0, &magic)]), "DDF RAID member", "ddf_raid_member"));
    }
    cases.push(case(end(1), b"$XIDE$", "LSI MegaRAID member", "lsi_mega_raid_member"));
    let via = [0x55, 0xAA, 1, 3];
    let sum = via.iter().fold(0_u8, |sum, b| sum.wrapping_add(*b));
    let via = composed(51, &[(0, &via), (50, &[sum])]);
    cases.push(case(end(1), via, "VIA RAID member", "via_raid_member"));
    let sil = composed(512, &[(0x63, &[0x2F]), (0x13E, &0xD100_u16.to_le_bytes())]);
    cases.push(case(end(1), sil, "Silicon Image RAID member", "silicon_medley_raid_member"));
    let mut nvidia = composed(120, &[(0, b"NVIDIA  "), (8, &30_u32.to_le_bytes())]);
    let words = nvidia.chunks_exact(4).map(|w| u32::from_le_bytes(w.try_into().unwrap()));
    let sum = words.fold(0_u32, u32::wrapping_add);
    nvidia[12..16].copy_from_slice(&sum.wrapping_neg().to_le_bytes());
    cases.push(case(end(2), nvidia, "NVIDIA RAID member", "nvidia_raid_member"));
    for sectors in [63, 255, 256, 16, 399, 591, 675, 735, 911, 974, 991, 951, 3087] {
        let magic = b"Promise Technology, Inc.";
        cases.push(case(end(sectors), magic, "Promise RAID member", "promise_fasttrack_raid_member"));
    }
    for magic in [0x5A78_16F3_u32, 0x5A78_16FD] {
        cases.push(case(end(11), magic.to_le_bytes(), "HighPoint RAID member", "hpt45x_raid_member"));
    }
    for magic in [0x5A78_16F0_u32, 0x5A78_16FD] {
        cases.push(case(4640, magic.to_le_bytes(), "HighPoint RAID member", "hpt37x_raid_member"));
    }
    let adaptec = composed(512, &[(0, &[0x37, 0xFC, 0x4D, 0x1E]), (256, b"DPTM")]);
    cases.push(case(end(1), adaptec, "Adaptec RAID member", "adaptec_raid_member"));
    let jmicron = composed(128, &[(0, b"JM\x01\0"), (4, &0xB2B5_u16.to_le_bytes())]);
    cases.push(case(end(1), jmicron, "JMicron RAID member", "jmicron_raid_member"));
    cases
}

/// Volume managers, encryption, and other layers on block devices.
fn stacked(len: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    cases.push(case(0, b"LUKS\xba\xbe\0\x01", "LUKS encryption", "crypto_LUKS"));
    for at in (14..=22).map(|bits| 1_usize << bits) {
        let second = composed(512, &[(0, b"SKUL\xba\xbe\0\x02"), (256, &(at as u64).to_be_bytes())]);
        cases.push(case(at, second, "LUKS encryption", "crypto_LUKS"));
    }
    for sector in 0..4 {
        cases.push(case(512 * sector, lvm_label(sector as u64), "LVM physical volume", "LVM2_member"));
    }
    cases.push(case(0, b"HM\x01\0", "LVM physical volume", "LVM1_member"));
    cases.push(case(0, b"bluestore block device\n", "Ceph BlueStore", "ceph_bluestore"));
    for magic in [0x8374_026B_u32, 0x8374_026C, 0x8374_026D] {
        let md = composed(4096, &[(60, &magic.to_be_bytes())]);
        cases.push(case(len - 4096, md, "DRBD backing device", "drbd"));
    }
    let manager = b"$DRBDmgr=q=c0ffeec0ffeec0ffeec0ffeec0ffee00\n";
    cases.push(
        case(0, manager, "DRBD control volume", "drbdmanage_control_volume").and(4096, b"\x1a\xdb\x98\xa2"),
    );
    cases.push(case(0, b"DRBDdlh*", "DRBD Proxy data log", "drbdproxy_datalog"));
    cases.push(case(0, b"SnAp\x01\0\0\0\x01\0\0\0", "dm-snapshot exception store", "DM_snapshot_cow"));
    cases.push(case(0, b"verity\0\0\x01\0\0\0", "dm-verity hashes", "DM_verity_hash"));
    cases.push(case(0, b"integrt\0\x01", "dm-integrity", "DM_integrity"));
    cases.push(case(0, b"dmvdo001", "VDO", "vdo"));
    for at in [512, 9 * 512] {
        cases.push(case(at, stratis(), "Stratis pool member", "stratis"));
    }
    // `blkid` follows the boot sector to a block of metadata.
    let place = (2_u64 << 20).to_le_bytes();
    let metadata = b"-FVE-FS-\x40\0\x02\0";
    let to_go = [
        (0, &b"\xeb\x58\x90MSWIN4.1"[..]),
        (424, b"\x3b\xd6\x67\x49\x29\x2e\xd8\x4a\x83\x99\xf6\xa3\x39\xe3\xd0\x01"),
        (440, &place),
    ];
    let seven = [(0, &b"\xeb\x58\x90-FVE-FS-"[..]), (176, &place)];
    for boot in [composed(512, &to_go), composed(512, &seven)] {
        cases.push(case(0, boot, "BitLocker encryption", "BitLocker").and(2 << 20, metadata));
    }
    cases.push(case(0, b"\xeb\x52\x90-FVE-FS-", "BitLocker encryption", "BitLocker"));
    // `blkid` detects it from 2.39 on.
    let (_, known) = try_run("blkid", &["-k"], "");
    let theirs = if known.lines().any(|kind| kind == "cs_fvault2") { "cs_fvault2" } else { "" };
    cases.push(case(0, core_storage(), "FileVault 2 encryption (Core Storage)", theirs));
    cases.push(case(32, b"ORCLDISK", "Oracle ASM disk", "oracleasm"));
    cases.push(case(1 << 20, b"\x0d\xd0\x01\xc0", "VMFS volume member", "VMFS_volume_member"));
    cases.push(case(0, b"UBI#\x01\0\0\0", "UBI", "ubi"));
    cases
}

/// `blkid` verifies the label's checksum.
fn lvm_label(sector: u64) -> Vec<u8> {
    let mut label = composed(
        512,
        &[
            (0, b"LABELONE"),
            (8, &sector.to_le_bytes()),
            (20, &32_u32.to_le_bytes()),
            (24, b"LVM2 001"),
            (32, b"AqBvc12uIadcbe21XmO5NYINqUBBBzdO"),
        ],
    );
    let crc = label[20..].iter().fold(0xF597_A6CF_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| (c >> 1) ^ (0xEDB8_8320 & (c & 1).wrapping_neg()))
    });
    label[16..20].copy_from_slice(&crc.to_le_bytes());
    label
}

/// The header of a physical volume, encrypted by AES-XTS; `blkid` verifies its checksum, which is not inverted.
fn core_storage() -> Vec<u8> {
    let mut header = composed(
        512,
        &[
            (4, &u32::MAX.to_le_bytes()),
            (8, &1_u16.to_le_bytes()),
            (10, &0x10_u16.to_le_bytes()),
            (64, &(16_u64 << 20).to_le_bytes()),
            (88, b"CS"),
            (90, &1_u32.to_le_bytes()),
            (96, &4096_u32.to_le_bytes()),
            (168, &16_u32.to_le_bytes()),
            (172, &2_u32.to_le_bytes()),
            (304, &[0xC5; 16]),
        ],
    );
    let crc = !crc32c::crc32c(&header[8..]);
    header[..4].copy_from_slice(&crc.to_le_bytes());
    header
}

fn stratis() -> Vec<u8> {
    let mut block = composed(
        512,
        &[
            (4, b"!Stra0tis\x86\xff\x02^\x41rh"),
            (20, &32768_u64.to_le_bytes()),
            (32, b"c0ffeec0ffeec0ffeec0ffeec0ffee00deadbeefdeadbeefdeadbeefdeadbeef"),
        ],
    );
    let crc = crc32c::crc32c(&block[4..]);
    block[..4].copy_from_slice(&crc.to_le_bytes());
    block
}

/// A file system seen inside a member must not be read: the mirror's other leg may be newer, or it may be a leftover.
#[test]
fn members_are_refused_with_any_contents() {
    if !have(&ext::TOOLS) || !have(&["blkid"]) {
        return;
    }
    let scratch = Scratch::new();
    let tree = Tree::from([(b"file".to_vec(), Node::File(vec![7; 5000]))]);
    let path = mkfs(&scratch, "-t ext4 -b 1024", &tree, 16 << 20);
    let ext = std::fs::read(&path).unwrap();
    let file = Item::File { bytes: vec![7; 5000], valid: 5000, row: true };
    let mut exfat = Maker::new(9, 0, 4000).build("", &[("file".to_owned(), file)]);
    // A length that is not a multiple of 4 KiB.
    exfat.resize((16 << 20) + 512, 0);
    for (fs, volume) in [("ext4", ext), ("exfat", exfat)] {
        let len = volume.len();
        std::fs::write(&path, &volume).unwrap();
        drop(open(&path));
        let cases = [linux_raid(len), firmware_raid(len), stacked(len)].into_iter().flatten();
        judge(&scratch, fs, &volume, cases);
        // A superblock that names another place belongs to a file, or to a longer member.
        let one = (len / 512 - 16) / 8 * 4096;
        std::fs::write(&path, &volume).unwrap();
        case(one, md1(one - 4096), "", "").write(&path);
        assert_eq!(kind(&path), fs);
        drop(open(&path));
    }
}

/// `blkid` detects ZFS from 64 MiB on.
#[test]
fn parts_of_a_zfs_pool_are_refused() {
    if !have(&ext::TOOLS) || !have(&["blkid"]) {
        return;
    }
    let scratch = Scratch::new();
    let len = (64 << 20) + 5120;
    let volume = std::fs::read(mkfs(&scratch, "-t ext4 -b 1024", &Tree::new(), len as u64)).unwrap();
    let uberblocks: Vec<_> =
        (0..4).flat_map(|_| composed(1024, &[(0, &0x00BA_B10C_u64.to_le_bytes())])).collect();
    let swapped: Vec<_> =
        (0..4).flat_map(|_| composed(1024, &[(0, &0x00BA_B10C_u64.to_be_bytes())])).collect();
    // The first entry that `zpool` writes to a label's list; a spare may have no more than that.
    let list = b"\x01\x01\0\0\0\0\0\0\0\0\0\x01\0\0\0\x24\0\0\0\x20\0\0\0\x07version\0";
    let labels = [0, 256 << 10, (64 << 20) - (512 << 10), (64 << 20) - (256 << 10)];
    let alone = scratch.image("uberblocks", len as u64, 0);
    case(128 << 10, &uberblocks, "ZFS", "").write(&alone);
    let theirs = kind(&alone);
    if theirs.is_empty() {
        skip("this blkid checks only the list");
    }
    // `blkid`'s name; up to 2.40 it does not check the list.
    let name = if theirs.is_empty() { "" } else { "zfs_member" };
    let cases = labels.into_iter().flat_map(|label| {
        let at = label + (128 << 10);
        [
            case(at, &uberblocks, "ZFS", name),
            case(at, &swapped, "ZFS", name),
            case(label + (16 << 10), list, "ZFS", ""),
        ]
    });
    judge(&scratch, "ext4", &volume, cases);
}

/// Checks each case: `blkid` detects it alone and on top of `volume`, and we refuse the latter.
fn judge(scratch: &Scratch, fs: &str, volume: &[u8], cases: impl IntoIterator<Item = Case>) {
    let mut wrong = Vec::new();
    for case in cases {
        let path = scratch.image("alone", volume.len() as u64, 0);
        case.write(&path);
        let alone = kind(&path);
        std::fs::write(&path, volume).unwrap();
        case.write(&path);
        let (within, ours) = (kind(&path), Volume::open(Arc::new(Image::open(&path).unwrap()), Which::Auto));
        let theirs = case.kind.is_empty() || alone == case.kind && within != fs;
        if !theirs || !matches!(&ours, Err(Error::Unsupported { what, .. }) if what == case.name) {
            let (name, at) = (case.name, case.parts[0].0);
            wrong.push(format!("{name} at {at}: blkid says {alone:?} and {within:?}, we {ours:?}"));
        }
    }
    assert!(wrong.is_empty(), "{fs}: {}", wrong.join("\n"));
}

/// `blkid`'s result; empty if it finds several kinds.
fn kind(path: &str) -> String {
    let (good, said) = try_run("blkid", &["-p", "-o", "value", "-s", "TYPE", path], "");
    if good { said.trim().to_owned() } else { String::new() }
}

/// Runs a tool on an empty image, then lets `after` change the result.
fn made_by(tool: &str, args: &[&str], after: impl Fn(&std::fs::File), name: &str) {
    if !have(&[tool, "blkid"]) {
        return;
    }
    let scratch = Scratch::new();
    let path = scratch.image("image", 64 << 20, 0);
    let spare = scratch.image("data", 1 << 20, 7);
    let args: Vec<_> = args.iter().map(|a| a.replace("IMAGE", &path).replace("DATA", &spare)).collect();
    run_with(tool, &args.iter().map(String::as_str).collect::<Vec<_>>(), "secret");
    after(&std::fs::File::options().write(true).open(&path).unwrap());
    assert!(!kind(&path).is_empty(), "{tool}");
    refused(std::fs::read(&path).unwrap(), Which::Auto, name);
}

#[test]
fn members_made_by_tools_are_refused() {
    let nothing = |_: &std::fs::File| {};
    let luks = "luksFormat -q --type luks2 --pbkdf pbkdf2 --pbkdf-force-iterations 1000 IMAGE -";
    let luks: Vec<_> = luks.split(' ').collect();
    made_by("cryptsetup", &luks, nothing, "LUKS encryption");
    let first_header_lost = |image: &std::fs::File| image.write_all_at(&[0; 16384], 0).unwrap();
    made_by("cryptsetup", &luks, first_header_lost, "LUKS encryption");
    made_by("veritysetup", &["format", "DATA", "IMAGE"], nothing, "dm-verity hashes");
    made_by("make-bcache", &["-B", "IMAGE"], nothing, "bcache");
    made_by("make-bcache", &["-C", "IMAGE"], nothing, "bcache");
    let drbd = |version: &'static str| vec!["--force", "0", version, "IMAGE", "internal", "create-md"];
    made_by("drbdmeta", &drbd("v08"), nothing, "DRBD backing device");
    made_by("drbdmeta", &[drbd("v09"), vec!["1"]].concat(), nothing, "DRBD backing device");
}

#[test]
fn volumes_of_pvcreate_are_refused() {
    if !have(&["pvcreate", "losetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let path = scratch.image("image", 64 << 20, 0);
    let (good, device) = try_run("losetup", &["-f", "--show", &path], "");
    if !good {
        return skip(&format!("there are no loop devices here: {}", device.trim().replace(&path, "IMAGE")));
    }
    for sector in ["0", "1", "2", "3"] {
        let made = try_run("pvcreate", &["-qq", "-y", "-ff", "--labelsector", sector, device.trim()], "");
        if !made.0 {
            skip(&format!("pvcreate does nothing here: {}", made.1.trim()));
            break;
        }
        refused(std::fs::read(&path).unwrap(), Which::Auto, "LVM physical volume");
    }
    run("losetup", &["-d", device.trim()]);
}

/// A signature in a partition belongs to the partition and does not hide one of the drive.
#[test]
fn a_member_in_a_partition_does_not_hide_that_the_drive_is_one() {
    let mut drive = vec![0; 8 << 20];
    drive[450] = 0x83;
    drive[454..458].copy_from_slice(&2048_u32.to_le_bytes());
    drive[458..462].copy_from_slice(&4096_u32.to_le_bytes());
    drive[510..512].copy_from_slice(&[0x55, 0xAA]);
    // If VMFS had the whole drive, its signature would be at the partition's first sector.
    drive[1 << 20..][..4].copy_from_slice(b"\x0d\xd0\x01\xc0");
    let error = Volume::open(Arc::new(drive.clone()), Which::Partition(1)).unwrap_err();
    assert!(matches!(error, Error::NoFileSystem(_)), "{error}");
    drive[(8 << 20) - 512..][..6].copy_from_slice(b"$XIDE$");
    refused(drive, Which::Partition(1), "LSI MegaRAID member");
}

#[test]
fn a_drive_that_is_a_member_as_a_whole_has_no_partitions_of_its_own() {
    if !have(&ext::TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    let path = mkfs(&scratch, "-t ext4 -b 1024", &Tree::new(), 8 << 20);
    let ext = std::fs::read(&path).unwrap();
    // An MBR with one partition, and 1 MiB outside of it.
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
    // A last partition that ends with the drive is the member itself.
    let mut last = drive(0);
    let len = last.len();
    last[len - 65536..][..4096].copy_from_slice(&md0(64));
    refused(last.clone(), Which::Partition(1), "Linux RAID member");
    let error = Volume::open(Arc::new(last), Which::Auto).unwrap_err().to_string();
    assert!(
        error.contains("which partition? choose one of: 1") && error.contains("Linux RAID member"),
        "{error}"
    );
}
