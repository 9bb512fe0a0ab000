//! ext: cases that a random tree does not contain, and volumes that must be refused.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use onehop_files::{Error, Image, Place, Volume, Which};

use crate::ext::{TOOLS, debugfs, fsck, mkfs, random_tree, without_lost_found};
use crate::kernel::{gather, mount};
use crate::support::{
    Node, Rng, Scratch, Tree, assert_same, contents, harvest, have, large, open, run, try_run,
};

fn file(bytes: impl Into<Vec<u8>>) -> Node {
    Node::File(bytes.into())
}

fn tree<const N: usize>(nodes: [(&str, Node); N]) -> Tree {
    nodes.into_iter().map(|(path, node)| (path.as_bytes().to_vec(), node)).collect()
}

fn error(image: &str) -> String {
    let blocks = Arc::new(Image::open(image).unwrap());
    Volume::open(blocks, Which::Auto).expect_err("this must be refused").to_string()
}

fn read(volume: &Volume, path: &str, image: &str) -> onehop_files::Result<Vec<u8>> {
    let file = volume.lookup(path)?;
    volume.extents(&file)?;
    Ok(contents(volume, &file, &std::fs::File::open(image).unwrap()))
}

/// XORs a byte of an image.
fn spoil(image: &str, at: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(image).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

#[test]
fn unwritten_extents_and_holes_are_zeros_whatever_the_disk_holds() {
    if !have(&TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    let mut rng = Rng::new();
    let data = rng.bytes(10_000);
    let image =
        mkfs(&scratch, "-t ext4 -b 4096", &tree([("a", file(data.clone())), ("empty", file([]))]), 64 << 20);
    // 33000 blocks exceed one extent, written or not.
    debugfs(
        &image,
        "fallocate a 4 300\nfallocate a 400 405\nsif a size 2000000\nfallocate empty 0 8999\nsif empty size 36864000\n",
    );
    let volume = open(&image);
    let a = volume.lookup("/a").unwrap();
    let bytes = read(&volume, "/a", &image).unwrap();
    assert_eq!(bytes.len(), 2_000_000);
    assert!(bytes[..10_000] == data && bytes[12_288..].iter().all(|&b| b == 0));
    assert!(
        matches!(volume.extents(&a).unwrap(), [_, last] if last.place == Place::Zeros && last.offset == 12_288)
    );
    let empty = read(&volume, "/empty", &image).unwrap();
    assert!(empty.len() == 36_864_000 && empty.iter().all(|&b| b == 0));
    assert_eq!(volume.extents(&volume.lookup("/empty").unwrap()).unwrap().len(), 1);
}

#[test]
fn trees_and_maps_of_every_depth() {
    if !have(&TOOLS) {
        return;
    }
    let mut rng = Rng::new();
    let extents = if large() { 200_000 } else { 15_000 };
    // Every other block is a hole: one extent each, or a block map with gaps.
    let mut bytes = rng.bytes(extents * 2048);
    bytes.chunks_mut(2048).for_each(|pair| pair[..1024].fill(0));
    let want = tree([("fragmented", file(bytes))]);
    for kind in ["-t ext4 -b 1024", "-t ext2 -b 1024"] {
        let scratch = Scratch::new();
        let image = mkfs(&scratch, kind, &want, extents as u64 * 1400 + (8 << 20));
        fsck(&image);
        let volume = open(&image);
        assert_same(&without_lost_found(harvest(&volume, &image)), &want);
        let got = volume.lookup("fragmented").unwrap();
        let on_drive = volume.extents(&got).unwrap().iter().filter(|e| matches!(e.place, Place::Drive(_)));
        assert_eq!(on_drive.count(), extents);
    }
}

#[test]
fn sparse_files_near_the_limits() {
    if !have(&TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    let start = tree([("far", file(b"x")), ("map", file(b"x"))]);
    let image = mkfs(&scratch, "-t ext4 -b 1024", &start, 16 << 20);
    // The last block that a tree can address, and a size that needs both halves of the field.
    debugfs(&image, "fallocate far 4294967294 4294967294\nsif far size 4398046511104\n");
    let volume = open(&image);
    let far = volume.lookup("far").unwrap();
    assert_eq!(far.size(), 1 << 42);
    let mut out = [1; 100];
    assert_eq!(volume.read(&far, (1 << 42) - 50, &mut out).unwrap(), 50);
    assert_eq!(out[..50], [0; 50]);
    assert_eq!(volume.read(&far, u64::MAX, &mut out).unwrap(), 0);
    debugfs(&image, "sif far size 4398046511105\n");
    let volume = open(&image);
    let error = volume.extents(&volume.lookup("far").unwrap()).unwrap_err().to_string();
    assert!(error.contains("4398046511105"), "{error}");
}

#[test]
fn large_directories_plain_and_hashed() {
    if !have(&TOOLS) {
        return;
    }
    // mke2fs scans the whole directory for each name that it adds; `kernel` has a larger one.
    let (directories, names) = if large() { (10, 10_000) } else { (1, 2_500) };
    let mut want = tree([]);
    // Blocks of 64 KiB are too expensive for many files with data.
    let text = |i: usize| if i.is_multiple_of(50) { format!("{i}") } else { String::new() };
    for dir in 0..directories {
        want.insert(format!("dir{dir}").into_bytes(), Node::Directory);
        let name = |i| format!("dir{dir}/{i}-a-name-of-some-length").into_bytes();
        want.extend((0..names).map(|i| (name(i), file(text(i)))));
    }
    for kind in ["-b 1024 -O inline_data", "-b 4096 -O ^metadata_csum", "-b 65536 -g 8192"] {
        let kind = &format!("-t ext4 -N 110000 {kind}");
        let scratch = Scratch::new();
        let image = mkfs(&scratch, kind, &want, (48 << 20) + (((directories * names) as u64) << 13));
        assert_same(&without_lost_found(harvest(&open(&image), &image)), &want);
        // Exit code 1: it has rebuilt all directories with hash trees.
        try_run("e2fsck", &["-f", "-y", "-D", &image], "");
        assert!(run("debugfs", &["-R", "htree_dump /dir0", &image]).contains("Indirect levels"));
        let volume = open(&image);
        assert_same(&without_lost_found(harvest(&volume, &image)), &want);
        assert_eq!(read(&volume, "dir0/50-a-name-of-some-length", &image).unwrap(), b"50");
        assert!(matches!(volume.lookup("dir0/50-a-name"), Err(Error::NotFound { .. })));
    }
}

#[test]
fn paths_and_links() {
    if !have(&TOOLS) {
        return;
    }
    let link = |to: &str| Node::Link(to.into());
    let long = format!("/{}b/file", "./".repeat(100));
    let mut want = tree([
        ("b", Node::Directory),
        ("b/c", Node::Directory),
        ("b/file", file(b"here")),
        ("relative", link("b/c/../file")),
        ("b/absolute", link("/relative")),
        ("b/up", link("../../../b/./file")),
        ("dir", link("b/c/")),
        ("slow", link(&long)),
        ("loop", link("loop")),
        ("ping", link("b/pong")),
        ("b/pong", link("../ping")),
        ("dangling", link("nowhere/at/all")),
        ("bomb", link("bomb/bomb/bomb/bomb")),
        ("n0", link("b/file")),
    ]);
    want.extend((1..41).map(|i| (format!("n{i}").into_bytes(), link(&format!("n{}", i - 1)))));
    for kind in ["-t ext4", "-t ext2 -b 1024", "-t ext4 -O inline_data"] {
        let scratch = Scratch::new();
        let image = mkfs(&scratch, kind, &want, 16 << 20);
        let volume = open(&image);
        assert_same(&without_lost_found(harvest(&volume, &image)), &want);
        for path in [
            "b/file",
            "//b///c/../file",
            "relative",
            "b/absolute",
            "b/up",
            "dir/../file",
            "slow",
            "n39",
            "../b/file",
        ] {
            assert_eq!(read(&volume, path, &image).unwrap(), b"here", "{path}");
        }
        for path in ["loop", "ping", "n40", "bomb"] {
            assert!(matches!(volume.lookup(path), Err(Error::TooManyLinks { most: 40, .. })), "{path}");
        }
        for path in ["dangling", "b/nothing", "B/file", "b/fil", "nothing/file"] {
            assert!(matches!(volume.lookup(path), Err(Error::NotFound { .. })), "{path}");
        }
        for path in ["b/file/", "b/file/..", "relative/."] {
            assert!(matches!(volume.lookup(path), Err(Error::WrongKind { .. })), "{path}");
        }
        let said = read(&volume, "b", &image).unwrap_err().to_string();
        assert!(said.contains("is directory, not file") || said.contains("is a directory"), "{said}");
        assert_eq!(volume.lookup("").unwrap().id, volume.lookup("/..").unwrap().id);
        let target = volume.read_link(&volume.lookup_link("slow").unwrap()).unwrap();
        assert_eq!(target, long.as_bytes());
    }
}

#[test]
fn unknown_features_are_refused_by_name() {
    if !have(&TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    // Without checksums, so that the superblock can be edited.
    let image = mkfs(&scratch, "-t ext4 -O ^metadata_csum", &Tree::new(), 8 << 20);
    let set = |at: u64, bits: u32| {
        let raw = std::fs::OpenOptions::new().read(true).write(true).open(&image).unwrap();
        let mut word = [0; 4];
        raw.read_exact_at(&mut word, 1024 + at).unwrap();
        let old = u32::from_le_bytes(word);
        raw.write_all_at(&(old ^ bits).to_le_bytes(), 1024 + at).unwrap();
    };
    for (bits, name) in
        [(1, "compression"), (8, "journal_dev"), (0x1000, "dirdata"), (1 << 30, "FEATURE_I30")]
    {
        set(0x60, bits);
        assert!(
            error(&image).contains(&format!("the ext4 feature {name} is not supported")),
            "{}",
            error(&image)
        );
        set(0x60, bits);
    }
    for (at, bits, said) in [(0x60, 4, "needs_recovery"), (0x38, 2 << 16, "errors")] {
        set(at, bits);
        assert!(error(&image).contains(said) && error(&image).contains("e2fsck"), "{}", error(&image));
        set(at, bits);
    }
    // A journal keeps a volume consistent that was not unmounted; without a journal it is not.
    set(0x38, 1 << 16);
    drop(open(&image));
    set(0x5C, 4);
    assert!(error(&image).contains("no journal and was not unmounted"), "{}", error(&image));
    // Bits that a reader may ignore.
    set(0x38, 1 << 16);
    set(0x64, 0x8000_0000);
    set(0x5C, 0x8000_0000);
    drop(open(&image));
}

/// The oldest revision has no features, but the kernel honours them.
#[test]
fn features_count_in_the_oldest_revision_too() {
    if !have(&TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    let want = random_tree(&mut Rng::new(), 1 << 20, 60);
    let image = mkfs(&scratch, "-t ext4 -b 1024 -I 128 -O 64bit,^metadata_csum", &want, 16 << 20);
    debugfs(&image, "ssv rev_level 0\n");
    assert!(run("debugfs", &["-R", "stats -h", &image]).contains("0 (original)"));
    assert_same(&without_lost_found(harvest(&open(&image), &image)), &want);
    debugfs(&image, "feature needs_recovery\n");
    assert!(error(&image).contains("needs_recovery"), "{}", error(&image));
    debugfs(&image, "feature -needs_recovery\n");
    let dirdata = 1024 + 0x61;
    spoil(&image, dirdata);
    assert!(error(&image).contains("the ext4 feature dirdata"), "{}", error(&image));
    spoil(&image, dirdata);
    // Last, because the kernel upgrades the revision.
    if let Some(mounted) = mount(&scratch, &image) {
        let mut seen = Tree::new();
        gather(mounted.path(), b"", &mut seen);
        assert_same(&without_lost_found(seen), &want);
    }
}

#[test]
fn a_volume_in_use_elsewhere_is_refused() {
    if !have(&TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    let image = mkfs(&scratch, "-t ext4 -b 1024 -O mmp,^metadata_csum", &Tree::new(), 16 << 20);
    drop(open(&image));
    let raw = std::fs::OpenOptions::new().read(true).write(true).open(&image).unwrap();
    let mut block = [0; 8];
    raw.read_exact_at(&mut block, 1024 + 0x168).unwrap();
    let mmp = u64::from_le_bytes(block) * 1024;
    raw.write_all_at(&17_u32.to_le_bytes(), mmp + 4).unwrap();
    raw.write_all_at(b"gpu-server\0", mmp + 16).unwrap();
    assert!(error(&image).contains("MMP says that gpu-server has it mounted"), "{}", error(&image));
}

#[test]
fn inodes_that_only_the_kernel_can_read() {
    if !have(&TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    let want = tree([
        ("secret", file(b"text")),
        ("fold", Node::Directory),
        ("fold/Name", file(b"text")),
        ("d", Node::Directory),
    ]);
    let image = mkfs(&scratch, "-t ext4 -O encrypt,casefold -E encoding=utf8,nodiscard", &want, 16 << 20);
    debugfs(&image, "sif secret flags 0x80800\nsif fold flags 0x40080000\nsif d flags 0x80800\n");
    let volume = open(&image);
    let said = read(&volume, "secret", &image).unwrap_err().to_string();
    assert!(said.contains("encrypted") && said.contains("not supported"), "{said}");
    assert!(volume.lookup("d/x").unwrap_err().to_string().contains("an encrypted ext4 directory"));
    assert_eq!(read(&volume, "fold/Name", &image).unwrap(), b"text");
    assert!(volume.lookup("fold/name").unwrap_err().to_string().contains("casefold"));
    // Linux only stores the flag for compression.
    debugfs(&image, "sif secret flags 0x80004\n");
    assert_eq!(read(&open(&image), "secret", &image).unwrap(), b"text");
    // Verity only adds a tree behind the end of the file.
    debugfs(&image, "sif secret flags 0x180000\n");
    assert_eq!(read(&open(&image), "secret", &image).unwrap(), b"text");
}

/// A name of the journal, or of the blocks that are kept for resizing.
#[test]
fn the_file_system_s_own_files_have_no_names() {
    if !have(&TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    let image = mkfs(&scratch, "-t ext4", &tree([("file", file(*b"text"))]), 16 << 20);
    debugfs(&image, "link <8> journal\nlink <7> resize\n");
    let volume = open(&image);
    for name in ["journal", "resize"] {
        let error = read(&volume, name, &image).unwrap_err();
        assert!(error.to_string().contains("the file system's own"), "{name}: {error}");
    }
    assert_eq!(read(&volume, "file", &image).unwrap(), b"text");
}

/// Each kind of metadata has a checksum: a flipped bit in each is found and reported by name.
#[test]
fn flipped_bits_are_found() {
    if !have(&TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    let mut bytes = Rng::new().bytes(64 << 10);
    bytes.chunks_mut(2048).for_each(|pair| pair[..1024].fill(0));
    let mut want = tree([("file", file(bytes)), ("dir", Node::Directory)]);
    want.extend((0..300).map(|i| (format!("dir/a-long-enough-name-{i}").into_bytes(), file([]))));
    let image = mkfs(&scratch, "-t ext4 -b 1024", &want, 16 << 20);
    try_run("e2fsck", &["-f", "-y", "-D", &image], "");
    let number = |command: &str| -> u64 {
        let out = run("debugfs", &["-R", command, &image]);
        out.split([' ', '\n']).find_map(|w| w.parse().ok()).unwrap_or_else(|| panic!("{command}: {out}"))
    };
    let imap = run("debugfs", &["-R", "imap file", &image]);
    let word =
        |after: &str| imap.split(after).nth(1).unwrap().trim_start().split([',', '\n']).next().unwrap();
    let inode = word("located at block").parse::<u64>().unwrap() * 1024
        + u64::from_str_radix(word("offset").trim_start_matches("0x"), 16).unwrap();
    let node = run("debugfs", &["-R", "ex file", &image]);
    let node = node.lines().nth(1).unwrap().split_whitespace().nth(7).unwrap().parse::<u64>().unwrap();
    let cases = [
        (1024 + 0x78, "superblock", "the checksum of its superblock"),
        (2 * 1024 + 0x10, "descriptor", "the checksum of group 0's descriptor"),
        (inode + 4, "inode", "the checksum of inode"),
        (node * 1024 + 16, "extent block", "extent tree"),
        (number("bmap dir 0") * 1024 + 44, "root of the hash tree", "the checksum of block 0 of directory"),
        (number("bmap dir 3") * 1024 + 10, "directory block", "the checksum of block 3 of directory"),
    ];
    assert!(read(&open(&image), "file", &image).is_ok());
    for (at, what, said) in cases {
        spoil(&image, at);
        let blocks = Arc::new(Image::open(&image).unwrap());
        let result = Volume::open(blocks, Which::Auto).and_then(|v| {
            read(&v, "file", &image)?;
            v.list(&v.lookup("dir")?)
        });
        let error = result.err().unwrap_or_else(|| panic!("{what}: a flipped bit is not found"));
        assert!(
            matches!(error, Error::Damaged { .. }) && error.to_string().contains(said),
            "{what}: {error}"
        );
        spoil(&image, at);
    }
    // An image that ends too early.
    std::fs::OpenOptions::new().write(true).open(&image).unwrap().set_len((16 << 20) - 4096).unwrap();
    assert!(error(&image).contains("only 16773120 bytes"), "{}", error(&image));
}
