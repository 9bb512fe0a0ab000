//! The kernel as the oracle, if this machine lets us mount an image: it allocates differently from the tools.

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use onehop_files::live::LiveFile;
use onehop_files::{DriveId, ExtentMap, Image, Place};

use crate::ext::{TOOLS, debugfs, fsck, mkfs, random_tree, without_lost_found};
use crate::live::pretend_drive;
use crate::mounted::Mounted;
use crate::support::{
    Node, Rng, Scratch, Tree, assert_same, harvest, have, large, open, plant, run, skip, try_run,
};

/// `None`, with a message, if mounting is not allowed.
pub fn mount(scratch: &Scratch, image: &str) -> Option<Mounted> {
    Mounted::new(Path::new(image), scratch.path("mounted"))
        .map_err(|said| skip(&format!("images cannot be mounted here: {}", said.replace(image, "IMAGE"))))
        .ok()
}

/// Collects everything below a directory of this machine.
pub fn gather(dir: &Path, prefix: &[u8], tree: &mut Tree) {
    use std::os::unix::ffi::OsStrExt;
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let path = [prefix, entry.file_name().as_bytes()].concat();
        let kind = entry.file_type().unwrap();
        let node = if kind.is_dir() {
            gather(&entry.path(), &[&path[..], b"/"].concat(), tree);
            Node::Directory
        } else if kind.is_symlink() {
            Node::Link(std::fs::read_link(entry.path()).unwrap().as_os_str().as_bytes().to_vec())
        } else {
            Node::File(std::fs::read(entry.path()).unwrap())
        };
        tree.insert(path, node);
    }
}

/// Writes, holes, preallocation, removal: the life of a disk.
fn live(dir: &Path, rng: &mut Rng) {
    let count = if large() { 2000 } else { 60 };
    for i in 0..count {
        let path = dir.join(format!("live{}", rng.below(40)));
        match rng.below(6) {
            0 => drop(std::fs::remove_file(&path)),
            1 => {
                let (at, len) = (rng.below(4 << 20), rng.size(1 << 20));
                let mode = ["-p", "-n", "-z", "-l"][rng.below(4) as usize];
                let _ = std::fs::File::options().create(true).append(true).open(&path).unwrap();
                let flags: &[&str] = if mode == "-l" { &[] } else { &[mode] };
                let numbers = [format!("-o{at}"), format!("-l{len}")];
                let rest = [&numbers[0][..], &numbers[1][..], path.to_str().unwrap()];
                try_run("fallocate", &[flags, &rest[..]].concat(), "");
            }
            2 => drop(std::fs::File::options().write(true).open(&path).map(|f| f.set_len(rng.size(5 << 20)))),
            _ => {
                let file =
                    std::fs::File::options().create(true).truncate(false).write(true).open(&path).unwrap();
                let len = rng.size(200_000) as usize;
                let _ = file.write_all_at(&rng.bytes(len), rng.below(4 << 20));
                if i % 7 == 0 {
                    file.sync_all().unwrap();
                }
            }
        }
    }
    let many = dir.join("many");
    std::fs::create_dir_all(&many).unwrap();
    for i in 0..if large() { 20_000 } else { 1500 } {
        std::fs::File::create(many.join(format!("name-{i}"))).unwrap().write_all(b"x").unwrap();
    }
}

#[test]
fn files_of_the_kernel_read_as_the_kernel_reads_them() {
    if !have(&TOOLS) || !have(&["mount", "umount", "fallocate"]) {
        return;
    }
    let mut rng = Rng::new();
    let kinds = [
        "-t ext4 -b 1024 -N 60000",
        "-t ext4 -b 4096 -O inline_data -N 60000",
        "-t ext4 -b 4096 -O bigalloc -C 16384 -g 4096",
        "-t ext3 -b 1024 -N 60000",
        "-t ext2 -b 4096 -N 60000",
        "-t ext4 -b 1024 -O ^metadata_csum,uninit_bg,^64bit,^resize_inode,meta_bg -N 60000",
        "-t ext4 -b 2048 -I 1024 -O ^filetype,metadata_csum_seed,orphan_file,large_dir,ea_inode -N 60000",
        "-t ext4 -b 4096 -I 128 -O ^extents,^64bit,^has_journal,sparse_super2,^resize_inode -N 60000",
        "-t ext4 -b 4096 -O fast_commit,mmp,stable_inodes,verity -E stride=16,stripe_width=64,nodiscard -N 60000",
    ];
    for kind in kinds {
        println!("{kind}");
        let scratch = Scratch::new();
        let image = mkfs(&scratch, kind, &Tree::new(), if large() { 512 << 20 } else { 96 << 20 });
        let Some(mounted) = mount(&scratch, &image) else { return };
        plant(&random_tree(&mut rng, 8 << 20, 150), mounted.path());
        live(mounted.path(), &mut rng);
        drop(mounted);
        let ours = without_lost_found(harvest(&open(&image), &image));
        let Some(mounted) = mount(&scratch, &image) else { return };
        let mut theirs = Tree::new();
        gather(mounted.path(), b"", &mut theirs);
        assert_same(&ours, &without_lost_found(theirs));
        assert_mounted_is_refused(&image, mounted.path(), kind);
    }
}

#[test]
fn one_directory_of_many_names() {
    if !have(&TOOLS) || !have(&["mount", "umount"]) {
        return;
    }
    // The kernel uses the hash tree as it adds names; mke2fs scans the whole directory for each.
    let names = if large() { 100_000 } else { 4_000 };
    for kind in ["-b 1024", "-b 4096 -O ^metadata_csum", "-b 4096 -O large_dir,inline_data"] {
        let scratch = Scratch::new();
        let image = mkfs(&scratch, &format!("-t ext4 -N 110000 {kind}"), &Tree::new(), 256 << 20);
        let Some(mounted) = mount(&scratch, &image) else { return };
        let many = mounted.path().join("many");
        std::fs::create_dir(&many).unwrap();
        for i in 0..names {
            let text = if i % 100 == 0 { format!("{i}") } else { String::new() };
            std::fs::write(many.join(format!("{i}-a-name-of-some-length")), text).unwrap();
        }
        // Directory blocks with free space again, and names that moved into them.
        for i in (0..names).step_by(7) {
            let from = many.join(format!("{i}-a-name-of-some-length"));
            std::fs::rename(from, many.join(format!("moved-{i}"))).unwrap();
        }
        let mut theirs = Tree::new();
        gather(mounted.path(), b"", &mut theirs);
        drop(mounted);
        let depth = run("debugfs", &["-R", "htree_dump /many", &image]);
        // A single level holds fewer names.
        let levels = if large() { "Indirect levels: 1" } else { "Indirect levels:" };
        assert!(depth.contains(levels), "{kind}: the directory has no such tree");
        let volume = open(&image);
        assert_same(&without_lost_found(harvest(&volume, &image)), &without_lost_found(theirs));
        assert_eq!(volume.lookup("many/moved-700").unwrap().size(), 3);
        let empty = format!("many/{}-a-name-of-some-length", names - 2);
        assert_eq!(volume.lookup(&empty).unwrap().size(), 0);
        assert!(volume.lookup("many/700-a-name-of-some-length").is_err(), "it has been renamed");
    }
}

/// A mounted image that is being written to must be refused.
fn assert_mounted_is_refused(image: &str, at: &Path, kind: &str) {
    let mut byte = [0];
    std::fs::write(at.join("more"), b"x").unwrap();
    std::fs::File::open(at.join("more")).unwrap().read_exact(&mut byte).unwrap();
    run("sync", &["-f", at.to_str().unwrap()]);
    let blocks = std::sync::Arc::new(onehop_files::Image::open(image).unwrap());
    let error = onehop_files::Volume::open(blocks, onehop_files::Which::Auto).err();
    let error = error.unwrap_or_else(|| panic!("{kind}: a mounted volume is opened")).to_string();
    assert!(error.contains("mounted somewhere"), "{error}");
}

#[test]
fn a_file_that_asks_for_compression_is_read_and_mapped_like_others() {
    if !have(&TOOLS) || !have(&["mount", "umount", "chattr"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = mkfs(&scratch, "-t ext4", &Tree::new(), 16 << 20);
    let Some(mounted) = mount(&scratch, &image) else { return };
    let path = mounted.path().join("file");
    std::fs::File::create(&path).unwrap();
    let (good, said) = try_run("chattr", &["+c", path.to_str().unwrap()], "");
    if !good {
        return skip(&format!("files cannot get attribute c here: {}", said.trim()));
    }
    let bytes = vec![b'a'; 100_000];
    std::fs::write(&path, &bytes).unwrap();
    let system = pretend_drive(&scratch, mounted.path(), 16 << 20);
    let map = LiveFile::open(&path, &system).unwrap().map().unwrap();
    drop(mounted);
    assert_same(
        &without_lost_found(harvest(&open(&image), &image)),
        &Tree::from([(b"file".to_vec(), Node::File(bytes))]),
    );
    map.verify(&Image::open(&image).unwrap()).unwrap();
}

/// The kernel returns zeros between an inline file's bytes and its size, and e2fsck accepts that.
#[test]
fn inline_files_end_in_zeros() {
    if !have(&TOOLS) || !have(&["mount", "umount"]) {
        return;
    }
    let scratch = Scratch::new();
    let lens = [(1, 60), (1, 5000), (60, 61), (61, 4096), (100, 1 << 20)];
    let name = |(data, len)| format!("{data}-{len}");
    let tree = |part: fn((usize, usize)) -> Vec<u8>| -> Tree {
        lens.into_iter().map(|lens| (name(lens).into_bytes(), Node::File(part(lens)))).collect()
    };
    let want = tree(|(data, len)| [vec![b'a'; data], vec![0; len - data]].concat());
    let image =
        mkfs(&scratch, "-t ext4 -b 1024 -O inline_data", &tree(|(data, _)| vec![b'a'; data]), 16 << 20);
    debugfs(&image, &lens.map(|(data, len)| format!("sif {} size {len}\n", name((data, len)))).concat());
    fsck(&image);
    let volume = open(&image);
    assert_same(&without_lost_found(harvest(&volume, &image)), &want);
    let drive = DriveId { serial: "S".into(), nsid: 1, wwid: String::new(), lba_bytes: 512, bytes: 16 << 20 };
    for name in want.keys() {
        let file = volume.lookup(name).unwrap();
        let extents = volume.extents(&file).unwrap();
        assert!(matches!(extents[0].place, Place::Inline(_)), "{extents:?}");
        let map = ExtentMap::of_volume(&volume, &file, "inline", drive.clone()).unwrap();
        assert_eq!(ExtentMap::parse(&map.to_bytes()).unwrap().extents().unwrap(), extents);
    }
    let Some(mounted) = mount(&scratch, &image) else { return };
    let mut seen = Tree::new();
    gather(mounted.path(), b"", &mut seen);
    assert_same(&without_lost_found(seen), &want);
}

/// A long attribute of a short link counts among the link's blocks without being one of its target.
#[test]
fn links_with_long_attributes_keep_their_targets() {
    if !have(&TOOLS) || !have(&["mount", "umount"]) {
        return;
    }
    let scratch = Scratch::new();
    // Read as a block number, `f` is within the volume, and the name of 59 letters is not.
    let targets = ["f", "dir/../f", &"x".repeat(59), &"y".repeat(60), &"z".repeat(300)];
    let mut want: Tree =
        (0..).zip(targets).map(|(i, to)| (format!("link{i}").into_bytes(), Node::Link(to.into()))).collect();
    want.insert(b"f".to_vec(), Node::File(b"here".into()));
    want.insert(b"dir".to_vec(), Node::Directory);
    for kind in ["-t ext4 -b 1024 -O ea_inode", "-t ext4 -b 4096 -O ea_inode,inline_data"] {
        let image = mkfs(&scratch, kind, &want, 16 << 20);
        let Some(mounted) = mount(&scratch, &image) else { return };
        for i in 0..targets.len() {
            let link = mounted.path().join(format!("link{i}"));
            let set =
                rustix::fs::lsetxattr(link, "trusted.long", &[7; 6000], rustix::fs::XattrFlags::empty());
            if let Err(error) = set {
                return skip(&format!("links cannot get attributes here: {error}"));
            }
        }
        drop(mounted);
        // e2fsck mistakes the name for a block; the kernel decides.
        let Some(mounted) = mount(&scratch, &image) else { return };
        let mut seen = Tree::new();
        gather(mounted.path(), b"", &mut seen);
        drop(mounted);
        assert_same(&without_lost_found(seen), &want);
        let volume = open(&image);
        assert_same(&without_lost_found(harvest(&volume, &image)), &want);
        for path in ["link0", "link1"] {
            assert_eq!(volume.lookup(path).unwrap().size(), 4, "{kind}, {path}");
        }
    }
}
