//! Partition tables, as sgdisk and sfdisk write them.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use onehop_files::partitions::{self, TableKind};
use onehop_files::{Blocks, Error, Image, Volume, Which};

use crate::support::{Scratch, have, run, run_with};
use crate::table::{gpt, mbr, mbr_slot};

fn table(image: &str) -> onehop_files::Result<partitions::Table> {
    partitions::read(&Image::open(image).unwrap())
}

fn overwrite(image: &str, offset: u64, bytes: &[u8]) {
    std::fs::OpenOptions::new().write(true).open(image).unwrap().write_all_at(bytes, offset).unwrap();
}

/// An image that reports a block size, as a drive does.
struct Sized(Image, u32);

impl Blocks for Sized {
    fn size(&self) -> u64 {
        self.0.size()
    }
    fn read_at(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.0.read_at(offset, out)
    }
    fn lba_bytes(&self) -> Option<u32> {
        Some(self.1)
    }
}

#[test]
fn gpt_by_sgdisk() {
    if !have(&["sgdisk"]) {
        return;
    }
    let dir = Scratch::new();
    let image = dir.image("gpt", 64 << 20, 0);
    let args = "-n 1:2048:+8M -c 1:models -t 1:8300 -n 7:0:+1M -c 7:läuft -t 7:0700 -n 128:0:0 -u 128:R";
    run("sgdisk", &[&args.split(' ').collect::<Vec<_>>()[..], &[&image]].concat());
    let got = table(&image).unwrap();
    assert_eq!((got.kind, &got.notes[..]), (TableKind::Gpt, &[][..]));
    let short: Vec<_> = got.partitions.iter().map(|p| (p.index, p.start, p.len, p.name.as_str())).collect();
    let rest = (11 << 20, (64 << 20) - (11 << 20) - 33 * 512);
    assert_eq!(short[0], (1, 1 << 20, 8 << 20, "models"));
    assert_eq!(short[1], (7, 9 << 20, 1 << 20, "läuft"));
    // sgdisk ends the last partition at its own alignment.
    assert_eq!((short[2].0, short[2].1), (128, rest.0 - (1 << 20)));
    assert!(short[2].2 > rest.1 && short[2].1 + short[2].2 <= (64 << 20) - 33 * 512);
    assert_eq!(got.partitions[0].kind, "0fc63daf-8483-4772-8e79-3d69d8477de4");
    for (spoiled, said) in [(512 + 60, "header"), (512, "signature"), (1024 + 5, "entries")] {
        let copy = dir.image("copy", 0, 0);
        std::fs::copy(&image, &copy).unwrap();
        overwrite(&copy, spoiled, b"\x55");
        let again = table(&copy).unwrap();
        assert_eq!(again.partitions, got.partitions);
        assert!(
            again.notes[0].contains("backup is used") && again.notes[0].contains(said),
            "{:?}",
            again.notes
        );
        overwrite(&copy, (64 << 20) - 512, b"\x55");
        let error = table(&copy).unwrap_err().to_string();
        assert!(error.contains("both copies") && error.contains(said), "{error}");
    }
    overwrite(&image, (64 << 20) - 512, b"\x55");
    assert!(table(&image).unwrap().notes[0].contains("backup of the GPT cannot be used"));
}

/// Linux checks the type and the start of a protective entry, and only warns about its size.
#[test]
fn a_protective_entry_of_no_blocks_protects_a_gpt() {
    if !have(&["partx"]) {
        return;
    }
    let dir = Scratch::new();
    let image = dir.image("gpt", 0, 0);
    let sound = gpt(512, 1000, &[(100, 499), (500, 899)]);
    for count in [0_u32, 1, u32::MAX] {
        let mut bytes = sound.clone();
        bytes[458..462].copy_from_slice(&count.to_le_bytes());
        std::fs::write(&image, bytes).unwrap();
        let got = table(&image).unwrap();
        let places: Vec<_> =
            got.partitions.iter().map(|p| format!("{} {} {}", p.index, p.start / 512, p.len / 512)).collect();
        let theirs = run("partx", &["-g", "-o", "NR,START,SECTORS", &image]);
        let theirs: Vec<_> =
            theirs.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!((got.kind, &places), (TableKind::Gpt, &theirs), "{count} blocks");
    }
    // Anywhere else it is a leftover, or code of a boot sector.
    let mut elsewhere = sound;
    elsewhere[454..462].copy_from_slice(&[2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(partitions::read(&elsewhere).unwrap().kind, TableKind::None);
}

/// No tool makes a table for 4096-byte blocks in a file, so this one is ours.
#[test]
fn gpt_at_blocks_of_4096_bytes() {
    let dir = Scratch::new();
    let image = dir.image("gpt4k", 0, 0);
    std::fs::write(&image, gpt(4096, 1000, &[(100, 499), (500, 899)])).unwrap();
    let got = table(&image).unwrap();
    assert_eq!((got.kind, got.partitions.len(), &got.notes[..]), (TableKind::Gpt, 2, &[][..]));
    assert_eq!((got.partitions[0].start, got.partitions[0].len), (100 << 12, 400 << 12));
    assert_eq!(got.partitions[0].name, "p");
    let with_lba = |lba| partitions::read(&Sized(Image::open(&image).unwrap(), lba));
    assert_eq!(with_lba(4096).unwrap(), got);
    assert!(with_lba(512).unwrap_err().to_string().contains("both copies"));
    assert!(with_lba(1000).unwrap_err().to_string().contains("1000"));
}

#[test]
fn mbr_with_logical_partitions_by_sfdisk() {
    if !have(&["sfdisk"]) {
        return;
    }
    let dir = Scratch::new();
    let image = dir.image("mbr", 64 << 20, 0);
    let input = "label: dos\n2048,8192,83\n16384,,5\n";
    let logical = "32768,4096,0c\n40960,2048,83\n49152,2048,07\n";
    run_with("sfdisk", &["-q", &image], input);
    run_with("sfdisk", &["-q", "--append", &image], logical);
    let got = table(&image).unwrap();
    assert_eq!(got.kind, TableKind::Mbr);
    let short: Vec<_> =
        got.partitions.iter().map(|p| (p.index, p.start / 512, p.len / 512, p.kind.as_str())).collect();
    let want =
        [(1, 2048, 8192, "83"), (5, 32768, 4096, "0c"), (6, 40960, 2048, "83"), (7, 49152, 2048, "07")];
    assert_eq!(short, want);
    // The chain's second sector leads back to the first.
    let file = std::fs::File::open(&image).unwrap();
    let mut first = [0; 512];
    file.read_exact_at(&mut first, 16384 * 512).unwrap();
    let second = 16384 + u64::from(u32::from_le_bytes(first[470..474].try_into().unwrap()));
    let mut link = [0; 16];
    link[4] = 5;
    link[8..12].copy_from_slice(&(second as u32 - 16384).to_le_bytes());
    link[12] = 1;
    overwrite(&image, second * 512 + 462, &link);
    assert!(table(&image).unwrap_err().to_string().contains("does not end"));
}

/// One slot of a sector: the sector, which slot, type, start, count.
type SlotOf = (usize, usize, u8, u32, u32);
/// A description, the slots that differ, and number and first block of each partition.
type Case = (&'static str, &'static [SlotOf], &'static [(u32, u64)]);

/// Chains made by old systems, but by no tool today. libblkid numbers them as Linux does.
#[test]
fn partitions_have_the_numbers_that_linux_gives_them() {
    if !have(&["partx"]) {
        return;
    }
    let dir = Scratch::new();
    let image = dir.image("chain", 0, 0);
    let cases: [Case; 6] = [
        ("one of type 0 in the chain", &[(16, 0, 0, 1, 4)], &[(1, 2), (5, 9), (6, 17), (7, 25)]),
        ("one of type 0 in sector 0", &[(0, 1, 0, 50, 4)], &[(1, 2), (2, 50), (5, 9), (6, 17), (7, 25)]),
        ("an empty one in the chain", &[(16, 0, 0x83, 1, 0)], &[(1, 2), (5, 9), (6, 25)]),
        (
            "the link in the first slot",
            &[(8, 0, 0x05, 8, 8), (8, 1, 0x83, 2, 4)],
            &[(1, 2), (5, 10), (6, 17), (7, 25)],
        ),
        (
            "all slots in use",
            &[(8, 2, 0x83, 5, 2), (16, 3, 0x83, 6, 1)],
            &[(1, 2), (5, 9), (6, 13), (7, 17), (8, 22), (9, 25)],
        ),
        (
            "garbage in the third and the fourth",
            &[(16, 2, 0x83, 7, 9), (24, 3, 0x17, 0xF000_0000, 0xF000_0000)],
            &[(1, 2), (5, 9), (6, 17), (7, 25)],
        ),
    ];
    for (what, changes, want) in cases {
        let mut bytes = mbr();
        for &(sector, slot, kind, start, count) in changes {
            mbr_slot(&mut bytes, sector, slot, kind, start, count);
        }
        std::fs::write(&image, bytes).unwrap();
        let got = table(&image).unwrap();
        let places: Vec<_> = got.partitions.iter().map(|p| (p.index, p.start / 512)).collect();
        assert_eq!(places, want, "{what}");
        let listed = run("partx", &["-g", "-o", "NR,START,SECTORS", &image]);
        let number = |word: &str| word.parse::<u64>().unwrap();
        let listed: Vec<Vec<_>> =
            listed.lines().map(|l| l.split_whitespace().map(number).collect()).collect();
        // `partx` lists the extended partition as well, as Linux does.
        let listed: Vec<_> = listed.into_iter().filter(|row| row[0] != 3).collect();
        let ours: Vec<_> =
            got.partitions.iter().map(|p| vec![p.index.into(), p.start / 512, p.len / 512]).collect();
        assert_eq!(ours, listed, "{what}");
    }
}

/// The kernel also reports that such a partition exceeds the drive, and truncates it.
#[test]
fn a_partition_that_leaves_the_drive_is_cut_and_the_others_are_read() {
    let mut bytes = mbr();
    mbr_slot(&mut bytes, 0, 1, 0x0C, 50, 100);
    mbr_slot(&mut bytes, 0, 3, 0, 70, 1);
    let got = partitions::read(&bytes).unwrap();
    let places: Vec<_> = got.partitions.iter().map(|p| (p.index, p.start / 512, p.len / 512)).collect();
    assert_eq!(places, [(1, 2, 6), (2, 50, 14), (5, 9, 4), (6, 17, 4), (7, 25, 4)]);
    let want = [
        "partition 2 is 51200 bytes at 25600 of 32768, and is truncated",
        "partition 4 is 512 bytes at 35840",
    ];
    assert!(got.notes.iter().zip(want).all(|(note, start)| note.starts_with(start)), "{:?}", got.notes);
    assert!(got.notes.len() == 2 && got.notes[1].ends_with("is ignored"), "{:?}", got.notes);
}

#[test]
fn a_file_system_in_a_partition_that_is_cut_is_refused_and_its_neighbour_read() {
    if !have(&["sfdisk", "mke2fs"]) {
        return;
    }
    let dir = Scratch::new();
    let image = dir.image("cut", 48 << 20, 0);
    run_with("sfdisk", &["-q", &image], "label: dos\n2048,32768,83\n40960,40960,83\n");
    for (start, size) in [(2048, "16M"), (40960, "20M")] {
        run("mke2fs", &["-q", "-F", "-t", "ext4", "-E", &format!("offset={}", start * 512), &image, size]);
    }
    std::fs::File::options().write(true).open(&image).unwrap().set_len(32 << 20).unwrap();
    let open = |which| Volume::open(Arc::new(Image::open(&image).unwrap()), which);
    assert!(open(Which::Partition(1)).unwrap().notes()[0].contains("partition 2 is 20971520 bytes"));
    let error = open(Which::Partition(2)).unwrap_err().to_string();
    assert!(error.contains("12582912"), "{error}");
    // Its file system is still detected, so the other one is not mistaken for the only one.
    assert!(matches!(open(Which::Auto), Err(Error::WhichPartition(_))));
}

#[test]
fn partitions_are_chosen_by_number_or_by_being_the_only_one() {
    if !have(&["sgdisk", "mke2fs"]) {
        return;
    }
    let dir = Scratch::new();
    let image = dir.image("disk", 64 << 20, 0xA5);
    run("sgdisk", &["-n", "1:0:+8M", "-n", "2:0:+16M", "-n", "3:0:+16M", &image]);
    let offset = |n: u32| format!("offset={}", table(&image).unwrap().partitions[n as usize - 1].start);
    let mkfs = |n| {
        run("mke2fs", &["-q", "-F", "-t", "ext4", "-E", &offset(n), "-L", &format!("p{n}"), &image, "8M"])
    };
    let open = |which| Volume::open(Arc::new(Image::open(&image).unwrap()), which);
    let error = |which| open(which).unwrap_err().to_string();
    assert!(error(Which::Auto).contains("nothing known"), "{}", error(Which::Auto));
    mkfs(2);
    assert_eq!(open(Which::Auto).unwrap().label(), "p2");
    mkfs(3);
    assert!(error(Which::Auto).contains("ext2/3/4"), "{}", error(Which::Auto));
    assert_eq!(open(Which::Partition(3)).unwrap().label(), "p3");
    assert!(error(Which::Partition(1)).contains("no file system"), "{}", error(Which::Partition(1)));
    assert!(error(Which::Partition(9)).contains("choose one of: 1 ("));
    assert!(error(Which::Whole).contains("no file system"));
}
