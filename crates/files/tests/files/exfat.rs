//! exFAT, as written by our own maker (checked by `fsck.exfat`) and by the FUSE driver.

use std::path::Path;
use std::sync::Arc;

use onehop_files::{Error, File, Image, Volume, Which};

use crate::exfat_image::{Item, Maker};
use crate::fat::random_tree;
use crate::mounted::{in_time, unmount};
use crate::support::{
    Node, Rng, Scratch, Tree, assert_same, contents, harvest, have, large, open, plant, run, skip, try_run,
};

/// A random directory, and what reading it must return.
fn directory(
    rng: &mut Rng,
    tree: &mut Tree,
    prefix: &str,
    budget: usize,
    depth: usize,
) -> Vec<(String, Item)> {
    let mut items = Vec::new();
    for i in 0..rng.below(25) {
        let name = match rng.below(3) {
            0 => format!("File {i}.bin"),
            1 => format!("{i}-{}", "ü€Ж".repeat(rng.below(80) as usize)),
            _ => format!("{i:015}"),
        };
        let path = format!("{prefix}{name}");
        if depth > 0 && rng.chance(15) {
            let inner = directory(rng, tree, &format!("{path}/"), budget / 10, depth - 1);
            tree.insert(path.into_bytes(), Node::Directory);
            items.push((name, Item::Dir(inner)));
            continue;
        }
        let len = if rng.chance(10) { 0 } else { rng.size(budget as u64 / 30) as usize };
        let valid = if rng.chance(25) { rng.below(len as u64 + 1) as usize } else { len };
        let mut bytes = rng.bytes(len);
        bytes[valid..].fill(0);
        tree.insert(path.into_bytes(), Node::File(bytes.clone()));
        items.push((name, Item::File { bytes, valid, row: rng.chance(40) }));
    }
    items
}

#[test]
fn our_volumes_are_sound_and_read_back() {
    if !have(&["fsck.exfat"]) {
        return;
    }
    let mut rng = Rng::new();
    for round in 0..if large() { 200 } else { 8 } {
        let scratch = Scratch::new();
        let shifts = ([9, 12][round % 2], [0, 3, 5][round % 3]);
        let cluster = 1 << (shifts.0 + shifts.1);
        let mut maker = Maker::new(shifts.0, shifts.1, 4000);
        maker.step = [1, 2, 7, 101][round % 4];
        let mut tree = Tree::new();
        let root = directory(&mut rng, &mut tree, "", 1 << 20, 5);
        let image = scratch.image("image", 0, 0);
        std::fs::write(&image, maker.build("WEIGHTS", &root)).unwrap();
        // fsck.exfat 1.2 loses entry sets that are longer than a cluster.
        if cluster >= 1024 {
            run("fsck.exfat", &["-n", &image]);
        }
        let volume = open(&image);
        let about = (volume.fs_name(), volume.label(), volume.uuid(), volume.notes().len());
        assert_eq!(about, ("exFAT", "WEIGHTS".to_owned(), "CAFE-1234".to_owned(), 0));
        assert_same(&harvest(&volume, &image), &tree);
    }
}

#[test]
fn the_fuse_driver_agrees() {
    if !have(&["mkfs.exfat", "mount.exfat-fuse", "losetup", "umount", "fsck.exfat"]) {
        return;
    }
    let mut rng = Rng::new();
    for options in ["-c 512", "-c 4K -b 64K", "-c 128K", "-c 32K -b 4M --pack-bitmap", "-c 1K -b 1K"] {
        let scratch = Scratch::new();
        let image = scratch.image("image", if large() { 320 } else { 64 } << 20, 0xA5);
        run("mkfs.exfat", &options.split(' ').chain(["-L", "Label", &image]).collect::<Vec<_>>());
        let at = scratch.path("mounted");
        std::fs::create_dir_all(&at).unwrap();
        let Some(mounted) = Mounted::new(&image, &at) else { return };
        let tree = random_tree(&mut rng, 8 << 20, if large() { 1000 } else { 100 });
        let tree = write_fragmented(&mut rng, &at, tree);
        drop(mounted);
        run("fsck.exfat", &["-n", &image]);
        let volume = open(&image);
        assert_eq!(volume.label(), "Label");
        assert_same(&harvest(&volume, &image), &tree);
        // The real up-case table has more than ASCII.
        assert!(tree.keys().all(|p| volume.lookup(p.as_slice()).is_ok()));
        // An upper case of several characters counts as none: `ß` does not become `SS`.
        let upper = |c: char| if c == 'ß' { 'ß' } else { c.to_uppercase().next().unwrap() };
        let shouted = |p: &Vec<u8>| String::from_utf8_lossy(p).chars().map(upper).collect::<String>();
        assert!(tree.keys().all(|p| volume.lookup(shouted(p)).is_ok()));
    }
}

/// An image that is mounted through FUSE until this is dropped. The driver wants a block device.
struct Mounted<'a> {
    at: &'a Path,
    device: String,
}

impl<'a> Mounted<'a> {
    /// `None`, with a message, if mounting is not allowed.
    fn new(image: &str, at: &'a Path) -> Option<Self> {
        let skip_because =
            |said: &str| skip(&format!("exFAT cannot be mounted through FUSE here: {}", said.trim()));
        let (good, device) = try_run("losetup", &["-f", "--show", image], "");
        if !good {
            skip_because(&device.replace(image, "IMAGE"));
            return None;
        }
        let device = device.trim().to_owned();
        let (good, said) = try_run("mount.exfat-fuse", &[&device, at.to_str().unwrap()], "");
        if !good {
            run("losetup", &["-d", &device]);
            skip_because(&said);
        }
        good.then_some(Self { at, device })
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        unmount(self.at);
        wait_until_free(&self.device);
        run("sync", &[&self.device]);
        run("losetup", &["-d", &self.device]);
    }
}

/// Writes a tree, removes a third of its files, and grows others into the gaps.
fn write_fragmented(rng: &mut Rng, at: &Path, mut tree: Tree) -> Tree {
    plant(&tree, at);
    let files: Vec<_> =
        tree.iter().filter(|(_, n)| matches!(n, Node::File(_))).map(|(p, _)| p.clone()).collect();
    for path in files {
        let on_disk = at.join(String::from_utf8(path.clone()).unwrap());
        if rng.chance(33) {
            std::fs::remove_file(on_disk).unwrap();
            tree.remove(&path);
        } else if rng.chance(33)
            && let Some(Node::File(bytes)) = tree.get_mut(&path)
        {
            bytes.extend(rng.bytes(50_000));
            std::fs::write(on_disk, bytes).unwrap();
        }
    }
    tree
}

/// The driver still runs for a moment after its mount point is gone.
fn wait_until_free(image: &str) {
    in_time(|| {
        let held = std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|p| std::fs::read_dir(p.ok()?.path().join("fd")).ok());
        let mut links = held.flatten().filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
        match links.any(|l| l == Path::new(image)) {
            true => Err(format!("{image} is still in use")),
            false => Ok(()),
        }
    });
}

fn small() -> (Vec<u8>, &'static str) {
    let bytes = |n: u8| Item::File { bytes: vec![n; 3000], valid: 2000, row: n == 1 };
    let root = vec![
        ("Row.bin".to_owned(), bytes(1)),
        ("chain.bin".to_owned(), bytes(2)),
        ("Dir".to_owned(), Item::Dir(vec![("inner".to_owned(), bytes(3))])),
    ];
    let mut maker = Maker::new(9, 0, 200);
    maker.step = 3;
    (maker.build("L", &root), "row.BIN")
}

fn opened(image: Vec<u8>) -> onehop_files::Result<Volume> {
    Volume::open(Arc::new(image), Which::Auto)
}

fn find(image: &[u8], what: &[u8]) -> usize {
    image.windows(what.len()).position(|w| w == what).unwrap()
}

#[test]
fn names_times_and_valid_lengths() {
    let (image, name) = small();
    let scratch = Scratch::new();
    std::fs::write(scratch.path("i"), &image).unwrap();
    let raw = std::fs::File::open(scratch.path("i")).unwrap();
    let volume = opened(image).unwrap();
    for (path, fill) in [(name, 1), ("CHAIN.bin", 2), ("dir/INNER", 3)] {
        let file: File = volume.lookup(path).unwrap();
        assert_eq!(contents(&volume, &file, &raw), [vec![fill; 2000], vec![0; 1000]].concat());
        // 12:30:10.5 an hour east of Greenwich.
        assert_eq!(file.id.mtime, (1_709_206_210, 500_000_000));
    }
    assert!(matches!(volume.lookup("dir/outer"), Err(Error::NotFound { .. })));
}

#[test]
fn damage_is_found_and_the_backup_of_the_boot_sector_used() {
    let error = |image: Vec<u8>, path: &str| {
        let volume =
            opened(image).and_then(|v| v.lookup(path).and_then(|f| v.extents(&f).map(<[_]>::to_vec)));
        volume.unwrap_err().to_string()
    };
    let spoiled = |at: usize, byte: u8| {
        let mut image = small().0;
        image[at] = byte;
        image
    };
    for at in [3, 80, 200, 511, 600, 11 * 512] {
        let volume = opened(spoiled(at, 0x5A)).unwrap();
        assert!(volume.notes()[0].contains("backup is used"), "{at}: {:?}", volume.notes());
    }
    let mut both = spoiled(200, 1);
    both[12 * 512 + 200] = 1;
    assert!(error(both, "row.bin").contains("checksum of its boot region is wrong, and so is its backup"));
    assert!(opened(spoiled(106, 2)).unwrap().notes()[0].contains("not unmounted"));
    let image = small().0;
    let row = find(&image, &[b'R', 0, b'o', 0, b'w', 0]);
    assert!(error(spoiled(row, b'r'), "row.bin").contains("wrong checksum"));
    let upcase = find(&image, &[0xFF, 0xFF, 0x61, 0]);
    assert!(error(spoiled(upcase + 6, 0), "row.bin").contains("up-case table is wrong"));
    // A chain that leads to its own start: its entry is behind the two of the media.
    let table = 24 * 512;
    let links = (2..200).map(|c| (c, u32::from_le_bytes(image[table + 4 * c..][..4].try_into().unwrap())));
    let chain: Vec<_> = links.filter(|(_, next)| (2..0xFFFF_FF00).contains(next)).collect();
    for (cluster, next) in chain {
        let mut broken = image.clone();
        broken[table + 4 * next as usize..][..4].copy_from_slice(&(cluster as u32).to_le_bytes());
        for path in ["chain.bin", "dir/inner"] {
            let result = opened(broken.clone())
                .and_then(|v| v.lookup(path).and_then(|f| v.extents(&f).map(<[_]>::len)));
            assert!(result.is_ok() || result.unwrap_err().to_string().contains("is a loop"));
        }
    }
    let scratch = Scratch::new();
    std::fs::write(scratch.path("short"), &image[..image.len() - 512]).unwrap();
    let short = Volume::open(Arc::new(Image::open(scratch.path("short")).unwrap()), Which::Auto);
    assert!(short.unwrap_err().to_string().contains("so is its backup"));
}
