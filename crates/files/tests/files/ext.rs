//! ext2, ext3 and ext4, as mke2fs and debugfs write and read them.

use onehop_files::{File, Place, Volume};

use crate::support::{
    Node, Rng, Scratch, Tree, assert_same, harvest, have, large, open, plant, run, run_with, try_run,
};

pub const TOOLS: [&str; 3] = ["mke2fs", "debugfs", "e2fsck"];

/// A random tree with everything that is hard for a reader, of about `budget` bytes.
pub fn random_tree(rng: &mut Rng, budget: u64, most_names: u64) -> Tree {
    let mut tree = Tree::new();
    let mut dirs: Vec<Vec<u8>> = vec![Vec::new()];
    let mut left = budget;
    for i in 0..most_names {
        let parent = dirs[rng.below(dirs.len() as u64) as usize].clone();
        let path = [&parent[..], &name(rng, i)].concat();
        if path.len() > 900 {
            continue;
        }
        let node = match rng.below(20) {
            0..4 => Node::Directory,
            4..6 => {
                // Short targets are stored in the inode, long ones in a block; none of them exists.
                let len = [1, 59, 60, 61, 200, 1000][rng.below(6) as usize];
                Node::Link((0..len).map(|_| b'a' + rng.below(26) as u8).collect())
            }
            _ => {
                let len = rng.size((left / 4).clamp(1, 3 << 20));
                left = left.saturating_sub(len);
                Node::File(file(rng, len as usize))
            }
        };
        if matches!(node, Node::Directory) {
            dirs.push([&path[..], b"/"].concat());
        }
        tree.insert(path, node);
    }
    tree
}

fn name(rng: &mut Rng, i: u64) -> Vec<u8> {
    let mut name = format!("{i}").into_bytes();
    let more = [0, 3, 7, 30, 240][rng.below(5) as usize];
    name.extend(
        (0..more)
            .map(|_| if rng.chance(5) { 0xC3 } else { b'A' + rng.below(60) as u8 })
            .filter(|&b| b != b'\\'),
    );
    name
}

/// Data, with holes in a third of all files.
fn file(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = rng.bytes(len);
    if rng.chance(33) {
        for _ in 0..rng.below(6) {
            let start = rng.below(len as u64 + 1) as usize;
            let end = (start + rng.size(200_000) as usize).min(len);
            bytes[start..end].fill(0);
        }
    }
    bytes
}

/// Makes a file system of `tree` on a disk full of 0xA5; `options` are separated by blanks.
pub fn mkfs(scratch: &Scratch, options: &str, tree: &Tree, size: u64) -> String {
    try_mkfs(scratch, options, tree, size).unwrap_or_else(|why| panic!("mke2fs {options}: {why}"))
}

/// Fails with what mke2fs says.
fn try_mkfs(scratch: &Scratch, options: &str, tree: &Tree, size: u64) -> Result<String, String> {
    let from = scratch.path("tree");
    plant(tree, &from);
    let image = scratch.image("image", size, 0xA5);
    let mut args = vec!["-q", "-F", "-E", "nodiscard"];
    args.extend(options.split(' ').filter(|o| !o.is_empty()));
    args.extend(["-d", from.to_str().unwrap(), &image]);
    let (made, said) = try_run("mke2fs", &args, "");
    std::fs::remove_dir_all(&from).unwrap();
    if made { Ok(image) } else { Err(said) }
}

pub fn debugfs(image: &str, script: &str) -> String {
    run_with("debugfs", &["-w", "-f", "-", image], script)
}

/// Checks the images that serve as reference. (mke2fs and debugfs do not account quotas for what they write.)
pub fn fsck(image: &str) {
    if !run("debugfs", &["-R", "stats -h", image]).contains("quota") {
        run("e2fsck", &["-f", "-n", image]);
    }
}

pub fn without_lost_found(mut tree: Tree) -> Tree {
    tree.remove(&b"lost+found"[..]);
    tree
}

fn check(options: &str, rng: &mut Rng, size: u64) {
    try_check(options, rng, size).unwrap_or_else(|why| panic!("mke2fs {options}: {why}"));
}

/// Fails only where mke2fs cannot make the file system.
fn try_check(options: &str, rng: &mut Rng, size: u64) -> Result<(), String> {
    println!("mke2fs {options}");
    let scratch = Scratch::new();
    let mut tree = random_tree(rng, size / 4, 150);
    if options.contains("inline_data") {
        // mke2fs 1.47 drops a hole at the end of such files.
        let files =
            tree.values_mut().filter_map(|n| if let Node::File(bytes) = n { bytes.last_mut() } else { None });
        files.for_each(|last| *last = 1);
    }
    let image = try_mkfs(&scratch, options, &tree, size)?;
    fsck(&image);
    assert_same(&without_lost_found(harvest(&open(&image), &image)), &tree);
    fragment_and_check(&scratch, &image, tree, rng);
    Ok(())
}

/// Removes files and writes others into the gaps by debugfs, then compares again, with debugfs's own map too.
fn fragment_and_check(scratch: &Scratch, image: &str, mut tree: Tree, rng: &mut Rng) {
    let files: Vec<_> =
        tree.iter().filter(|(_, n)| matches!(n, Node::File(_))).map(|(p, _)| p.clone()).collect();
    let mut script = String::new();
    for path in files.iter().filter(|p| p.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'/')) {
        if rng.chance(50) {
            script += &format!("rm \"{}\"\n", String::from_utf8_lossy(path));
            tree.remove(path);
        }
    }
    for i in 0..8 {
        let len = rng.size(600_000) as usize;
        let bytes = [file(rng, len), vec![1]].concat();
        let from = scratch.path(&format!("extra{i}"));
        plant(
            &Tree::from([(format!("extra{i}").into_bytes(), Node::File(bytes.clone()))]),
            &scratch.path(""),
        );
        script += &format!("write {} extra{i}\n", from.display());
        tree.insert(format!("extra{i}").into_bytes(), Node::File(bytes));
    }
    debugfs(image, &script);
    fsck(image);
    let volume = open(image);
    assert_same(&without_lost_found(harvest(&volume, image)), &tree);
    for i in 0..8 {
        let file = volume.lookup(format!("/extra{i}")).unwrap();
        agrees_with_bmap(&volume, &file, image, &format!("extra{i}"), rng);
    }
}

/// Compares our extents with debugfs, block by block.
fn agrees_with_bmap(volume: &Volume, file: &File, image: &str, name: &str, rng: &mut Rng) {
    let stats = run("debugfs", &["-R", "stats -h", image]);
    let block: u64 =
        stats.lines().find_map(|l| l.strip_prefix("Block size:")).unwrap().trim().parse().unwrap();
    let blocks = file.size().div_ceil(block);
    let extents = volume.extents(file).unwrap();
    if matches!(extents, [e] if matches!(e.place, Place::Inline(_))) || blocks == 0 {
        return;
    }
    let picks: Vec<u64> = (0..40).map(|_| rng.below(blocks)).collect();
    let script: String = picks.iter().map(|b| format!("bmap {name} {b}\n")).collect();
    let out = run_with("debugfs", &["-f", "-", image], &script);
    let answers = out.lines().filter(|l| !l.starts_with("debugfs"));
    for (pick, answer) in picks.iter().zip(answers) {
        let at = pick * block;
        let extent = extents.iter().find(|e| at >= e.offset && at < e.offset + e.len).unwrap();
        let ours = match extent.place {
            Place::Drive(start) => format!("{}", (start + at - extent.offset) / block),
            _ if answer.contains("uninit") => answer.to_owned(),
            _ => "0".to_owned(),
        };
        assert_eq!(ours, answer, "{name}, block {pick}");
    }
}

/// Every block size, and every feature that affects layout or checksums.
const KINDS: &[&str] = &[
    "-t ext2 -b 1024",
    "-t ext2 -b 4096 -r 0",
    "-t ext2 -b 2048 -O ^filetype,^dir_index,^sparse_super,^resize_inode",
    "-t ext3 -b 1024 -I 128",
    "-t ext4 -b 1024",
    "-t ext4 -b 1024 -I 128",
    "-t ext4 -b 1024 -O ^filetype",
    "-t ext4 -b 2048 -O inline_data",
    "-t ext4 -b 4096",
    "-t ext4 -b 8192 -O ^64bit",
    "-t ext4 -b 16384 -O ^extents,^64bit",
    "-t ext4 -b 65536 -O inline_data",
    "-t ext4 -b 1024 -g 256 -O ^resize_inode,meta_bg",
    "-t ext4 -b 4096 -g 1024 -O ^resize_inode,meta_bg,^64bit,^metadata_csum",
    "-t ext4 -b 1024 -g 2048 -O ^metadata_csum,uninit_bg",
    "-t ext4 -b 1024 -g 1024 -O ^metadata_csum,uninit_bg,64bit,^flex_bg",
    "-t ext4 -b 1024 -O bigalloc -C 16384",
    "-t ext4 -b 4096 -O bigalloc,inline_data -C 65536",
    "-t ext4 -b 4096 -O inline_data -I 1024",
    "-t ext4 -b 1024 -g 1024 -O sparse_super2,^resize_inode",
    "-t ext4 -b 4096 -O quota,project -I 256",
    "-t ext4 -b 4096 -O mmp,ea_inode,large_dir",
    "-t ext4 -b 4096 -O metadata_csum_seed,encrypt,verity,stable_inodes",
    "-t ext4 -b 4096 -O casefold -E encoding=utf8,nodiscard",
    "-t ext4 -b 1024 -O orphan_file -J size=1",
    "-t ext4 -b 4096 -O inline_data,^extents,^64bit -I 512",
];

#[test]
fn every_kind_of_file_system_reads_as_it_was_written() {
    if !have(&TOOLS) {
        return;
    }
    let mut rng = Rng::new();
    for kind in KINDS {
        check(kind, &mut rng, if kind.contains("65536") { 64 << 20 } else { 16 << 20 });
    }
    for _ in 0..if large() { 60 } else { 2 } {
        check_any(&mut rng);
    }
    if large() {
        for _ in 0..8 {
            for kind in KINDS {
                check(kind, &mut rng, 96 << 20);
            }
        }
    }
}

/// A random combination of options that mke2fs takes. Some it takes for an empty file system only: writing files with `-d`
/// then stops, "Inode checksum does not match inode while creating orphan file" for example.
fn check_any(rng: &mut Rng) {
    const FEATURES: [&str; 26] = [
        "extents",
        "64bit",
        "flex_bg",
        "meta_bg",
        "resize_inode",
        "sparse_super",
        "sparse_super2",
        "inline_data",
        "bigalloc",
        "metadata_csum",
        "metadata_csum_seed",
        "uninit_bg",
        "orphan_file",
        "has_journal",
        "fast_commit",
        "large_dir",
        "ea_inode",
        "quota",
        "project",
        "mmp",
        "encrypt",
        "verity",
        "casefold",
        "dir_index",
        "filetype",
        "huge_file",
    ];
    loop {
        let block = 1024_u64 << rng.below(7);
        let inode = (128_u64 << rng.below(4)).min(block);
        let mut features = Vec::new();
        for feature in FEATURES {
            if !rng.chance(30) {
                continue;
            }
            features.push(format!("{}{feature}", if rng.chance(40) { "^" } else { "" }));
        }
        let mut options =
            format!("-t {} -b {block} -I {inode}", ["ext2", "ext3", "ext4"][rng.below(3) as usize]);
        if !features.is_empty() {
            options += &format!(" -O {}", features.join(","));
        }
        let mut size = 24 << 20;
        if features.iter().any(|f| f == "bigalloc") {
            let cluster = (block << (1 + rng.below(5))).min(131_072);
            options += &format!(" -C {cluster}");
            // Every file takes at least one cluster.
            size = size.max(cluster << 10);
        }
        if rng.chance(30) {
            options += &format!(" -g {}", (8 + 8 * rng.below(64)) * 8);
        }
        if rng.chance(30) {
            options += &format!(" -E stride={},stripe_width={}", 1 << rng.below(6), 64);
        }
        if rng.chance(20) {
            options += &format!(" -G {}", 1 << rng.below(7));
        }
        if rng.chance(20) {
            options += &format!(" -J size={}", 1 + rng.below(8));
        }
        let scratch = Scratch::new();
        let image = scratch.image("empty", size, 0xA5);
        let args: Vec<_> = ["-q", "-F"].into_iter().chain(options.split(' ')).chain([&image[..]]).collect();
        let (taken, _) = try_run("mke2fs", &args, "");
        let sound = try_run("e2fsck", &["-f", "-n", &image], "").0;
        if taken && sound {
            match try_check(&options, rng, size) {
                Ok(()) => return,
                Err(why) => println!("mke2fs {options} writes no files: {why}"),
            }
        }
    }
}
