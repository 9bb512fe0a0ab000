//! FAT12, FAT16 and FAT32, as dosfstools and mtools write them.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use onehop_files::{Error, Image, Volume, Which};

use crate::support::{
    Node, Rng, Scratch, Tree, assert_same, contents, harvest, have, large, open, plant, run,
};

const TOOLS: [&str; 6] = ["mkfs.vfat", "fsck.fat", "mcopy", "mdel", "mmd", "mformat"];

/// Names of every kind: short ones in both cases, long ones, with blanks, dots and non-ASCII characters.
fn name(rng: &mut Rng, i: u64) -> String {
    match rng.below(7) {
        0 => format!("UPPER{i}.TXT"),
        1 => format!("lower{i}.bin"),
        2 => format!("a long name with blanks {i}.safetensors"),
        3 => format!("{i}{}", "x".repeat(rng.below(110) as usize)),
        4 => format!("Größe-Жук-{i}.ä"),
        5 => format!("{i}.many.dots.here"),
        // Multiples of thirteen characters: long names without a terminator.
        _ => format!("{i:013}"),
    }
}

pub fn random_tree(rng: &mut Rng, budget: u64, count: u64) -> Tree {
    let mut tree = Tree::new();
    let mut dirs = vec![String::new()];
    let mut left = budget;
    for i in 0..count {
        let parent = dirs[rng.below(dirs.len() as u64) as usize].clone();
        let path = format!("{parent}{}", name(rng, i));
        if path.len() > 600 {
            continue;
        }
        let node = if rng.chance(20) {
            dirs.push(format!("{path}/"));
            Node::Directory
        } else {
            let len = if rng.chance(10) { 0 } else { rng.size((left / 4).clamp(1, 1 << 20)) };
            left = left.saturating_sub(len);
            Node::File(rng.bytes(len as usize))
        };
        tree.insert(path.into_bytes(), node);
    }
    tree
}

fn mcopy(scratch: &Scratch, image: &str, tree: &Tree) {
    let from = scratch.path("tree");
    plant(tree, &from);
    let tops: Vec<_> = std::fs::read_dir(&from).unwrap().map(|e| e.unwrap().path()).collect();
    let mut args = vec!["-s", "-Q", "-o", "-i", image];
    args.extend(tops.iter().map(|p| p.to_str().unwrap()));
    args.push("::");
    run("mcopy", &args);
    std::fs::remove_dir_all(&from).unwrap();
}

const KINDS: &[(&str, u64, &str)] = &[
    ("-F 12 -s 8", 8, "FAT12"),
    ("-F 16 -s 2", 16, "FAT16"),
    ("-F 16 -S 4096 -s 1", 24, "FAT16"),
    ("-F 32 -s 1", 40, "FAT32"),
    ("-F 32 -s 2 -f 1 -R 64", 72, "FAT32"),
    ("-F 32 -S 2048 -s 1", 136, "FAT32"),
];

#[test]
fn every_kind_of_fat_reads_as_it_was_written() {
    if !have(&TOOLS) {
        return;
    }
    let mut rng = Rng::new();
    for round in 0..if large() { 15 } else { 1 } {
        for (options, mib, fs) in KINDS.iter().filter(|(_, mib, _)| large() || *mib < 100) {
            println!("{round}: mkfs.vfat {options}");
            check(&mut rng, options, mib << 20, fs);
        }
        check_any(&mut rng);
    }
}

/// Random combinations of options.
fn check_any(rng: &mut Rng) {
    let fat32 = large() && rng.chance(30);
    let (fs, least, most) = match fat32 {
        true => ("FAT32", 66_000, 70_000),
        false if rng.chance(50) => ("FAT12", 500, 4_084),
        false => ("FAT16", 4_200, 65_524),
    };
    let sector = 512 << if fat32 { rng.below(2) } else { rng.below(4) };
    let mut per_cluster = 1 << rng.below(8);
    while per_cluster > 1 && least * sector * per_cluster > 48 << 20 {
        per_cluster /= 2;
    }
    // The file system may need less space for metadata than is reserved; the rest becomes clusters, too.
    let spare = 1 << 20;
    let most = most - spare / (sector * per_cluster);
    let clusters = (least + rng.below(most - least)).min((64 << 20) / (sector * per_cluster)).max(least);
    let mut options = format!("-F {} -S {sector} -s {per_cluster} -f {}", &fs[3..], 1 + rng.below(2));
    if rng.chance(50) {
        options += &format!(" -R {}", 32 + rng.below(100));
    }
    if rng.chance(50) && !fat32 {
        options += &format!(" -r {}", 512 * (1 + rng.below(4)));
    }
    if rng.chance(30) {
        options += " -a";
    }
    if rng.chance(30) {
        options += " -M 0xf0";
    }
    println!("mkfs.vfat {options}, {clusters} clusters");
    check(rng, &options, clusters * sector * per_cluster + spare, fs);
}

fn check(rng: &mut Rng, options: &str, size: u64, fs: &str) {
    let scratch = Scratch::new();
    let image = scratch.image("image", size, 0xA5);
    let args: Vec<_> = options.split(' ').chain(["-n", "LABEL1", "-i", "CAFE1234", &image]).collect();
    run("mkfs.vfat", &args);
    // The root of FAT12 and FAT16 has few entries.
    let mut tree = random_tree(rng, size / 3, if large() && fs == "FAT32" { 400 } else { 120 });
    mcopy(&scratch, &image, &tree);
    let volume = open(&image);
    assert_eq!((volume.fs_name(), &volume.uuid()[..], &volume.label()[..]), (fs, "CAFE-1234", "LABEL1"));
    assert_same(&harvest(&volume, &image), &tree);
    // Files written into the holes of the table are fragmented.
    let gone: Vec<_> = tree.keys().filter(|_| rng.chance(40)).cloned().collect();
    for path in gone {
        if let Some(Node::File(bytes)) = tree.get(&path)
            && !bytes.is_empty()
        {
            run("mdel", &["-i", &image, &format!("::{}", String::from_utf8_lossy(&path))]);
            tree.remove(&path);
        }
    }
    let more: Tree =
        (0..6).map(|i| (format!("piece{i}.bin").into(), Node::File(rng.bytes(size as usize / 40)))).collect();
    mcopy(&scratch, &image, &more);
    tree.extend(more);
    run("fsck.fat", &["-n", &image]);
    assert_same(&harvest(&open(&image), &image), &tree);
}

fn written(scratch: &Scratch, options: &str, size: u64, tree: &Tree) -> String {
    let image = scratch.image("image", size, 0);
    run("mkfs.vfat", &options.split(' ').chain([&image[..]]).collect::<Vec<_>>());
    mcopy(scratch, &image, tree);
    image
}

fn patch(image: &str, at: u64, bytes: &[u8]) {
    std::fs::OpenOptions::new().write(true).open(image).unwrap().write_all_at(bytes, at).unwrap();
}

#[test]
fn names_are_found_in_any_case_by_both_names() {
    if !have(&TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    let file = |text: &str| Node::File(text.into());
    let tree = Tree::from([
        (b"Model Weights".to_vec(), Node::Directory),
        (b"Model Weights/first.safetensors".to_vec(), file("1")),
        ("Model Weights/Übung.txt".into(), file("2")),
        (b"readme.txt".to_vec(), file("3")),
    ]);
    let image = written(&scratch, "-F 32 -s 1", 40 << 20, &tree);
    let volume = open(&image);
    let raw = std::fs::File::open(&image).unwrap();
    for (path, text) in [
        ("/model weights/FIRST.safetensors", "1"),
        ("/MODELW~1/FIRST~1.SAF", "1"),
        ("/Model Weights/übung.TXT", "2"),
        ("README.txt", "3"),
        ("Model Weights/../readme.TXT", "3"),
    ] {
        assert_eq!(contents(&volume, &volume.lookup(path).unwrap(), &raw), text.as_bytes(), "{path}");
    }
    assert!(matches!(volume.lookup("model"), Err(Error::NotFound { .. })));
    assert!(matches!(volume.lookup("readme.txt/x"), Err(Error::WrongKind { .. })));
    assert!(volume.lookup("readme.txt").unwrap().id.mtime.0 > 1_700_000_000);
}

/// mtools and Linux see two names here; Unicode's folding makes them one.
#[test]
fn an_exact_name_comes_before_one_in_another_case() {
    if !have(&TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    let names = ["my fıle.bin", "my file.bin", "other.bin"];
    let image = written(&scratch, "-F 16 -s 4", 16 << 20, &Tree::new());
    for name in names {
        mcopy(&scratch, &image, &Tree::from([(name.into(), Node::File(name.into()))]));
    }
    let volume = open(&image);
    let raw = std::fs::File::open(&image).unwrap();
    for (path, name) in
        names.into_iter().zip(names).chain([("OTHER.bin", "other.bin"), ("MYFILE~2.BIN", names[1])])
    {
        assert_eq!(contents(&volume, &volume.lookup(path).unwrap(), &raw), name.as_bytes(), "{path}");
    }
    let error = volume.lookup("MY FILE.BIN").unwrap_err().to_string();
    assert!(names[..2].iter().all(|name| error.contains(name)), "{error}");
}

#[test]
fn the_longest_name() {
    if !have(&TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    // No trailing blank: mtools strips it.
    let name = "a-long-name-of-255-characters-".repeat(9)[..255].to_owned();
    let tree = Tree::from([(name.into_bytes(), Node::File(b"x".into()))]);
    let image = written(&scratch, "-F 16 -s 4", 16 << 20, &tree);
    assert_same(&harvest(&open(&image), &image), &tree);
}

#[test]
fn damaged_chains_are_refused() {
    if !have(&TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    let tree = Tree::from([(b"FILE.BIN".to_vec(), Node::File(Rng::new().bytes(5000)))]);
    let image = written(&scratch, "-F 32 -s 1 -f 1 -R 32", 40 << 20, &tree);
    let table = 32 * 512;
    let volume = open(&image);
    let first = match volume.extents(&volume.lookup("file.bin").unwrap()).unwrap()[0].place {
        onehop_files::Place::Drive(at) => {
            let mut raw = [0; 4];
            std::fs::File::open(&image).unwrap().read_exact_at(&mut raw, 36).unwrap();
            (at - table - u64::from(u32::from_le_bytes(raw)) * 512) / 512 + 2
        }
        _ => panic!("no data"),
    };
    let error = |value: u32| {
        patch(&image, table + 4 * (first + 3), &value.to_le_bytes());
        let volume = open(&image);
        volume.extents(&volume.lookup("file.bin").unwrap()).unwrap_err().to_string()
    };
    for (value, said) in [
        (first as u32, "loop"),
        (0x0FFF_FFFF, "has 4 clusters and should have 10"),
        (0, "marked 0x0"),
        (0x0FFF_FFF7, "marked 0xffffff7"),
        (0x0ABC_DEF0, "leads to cluster"),
    ] {
        assert!(error(value).contains(said), "{}", error(value));
    }
    // Readers disagree about where its clusters begin.
    patch(&image, 17, &[0, 2]);
    let said = Volume::open(Arc::new(Image::open(&image).unwrap()), Which::Auto).unwrap_err().to_string();
    assert!(said.contains("a root of 512 entries"), "{said}");
    patch(&image, 17, &[0, 0]);
    // Not unmounted: noted, and read.
    patch(&image, 65, &[1]);
    assert!(open(&image).notes()[0].contains("was not unmounted"));
    patch(&image, 42, &[1]);
    let said = Volume::open(Arc::new(Image::open(&image).unwrap()), Which::Auto).unwrap_err().to_string();
    assert!(said.contains("FAT32 version 0x1"), "{said}");
}

#[test]
fn volumes_of_mformat_are_not_mistaken_for_partition_tables() {
    if !have(&TOOLS) {
        return;
    }
    let scratch = Scratch::new();
    for (i, size) in ["-f1440", "-T40000", "-FT131072"].into_iter().enumerate() {
        let image = scratch.image(&format!("m{i}"), 0, 0);
        let sectors: u64 = size[2..].trim_start_matches('T').parse().unwrap();
        std::fs::File::options().write(true).open(&image).unwrap().set_len(sectors.max(2880) * 512).unwrap();
        let mut args = vec!["-i", &image];
        match size.strip_prefix("-FT") {
            Some(n) => args.extend(["-F", "-T", n]),
            None => args.push(size),
        }
        if sectors > 2880 {
            args.extend(["-h", "16", "-s", "63"]);
        }
        run("mformat", &[&args[..], &["::"]].concat());
        run("mmd", &["-i", &image, "::DIR"]);
        let names: Vec<_> = open(&image).list(&open(&image).root().unwrap()).unwrap();
        assert_eq!(names[0].name, b"DIR", "{size}");
    }
    // FAT32 with so few clusters that mtools takes it for FAT16; Linux does not.
    let image = scratch.image("few", 16 << 20, 0);
    run("mkfs.vfat", &["-F", "32", "-s", "8", &image]);
    assert_eq!(open(&image).fs_name(), "FAT32");
    assert_eq!(harvest(&open(&image), &image).len(), 0);
}
