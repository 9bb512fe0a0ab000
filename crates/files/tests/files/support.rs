//! Optional tools, temporary files, and trees of files to put into images.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use onehop_files::{File, FileKind, Image, Place, Volume, Which};

/// Whether all of the tools are installed; a missing one is reported as a skip.
pub fn have(tools: &[&str]) -> bool {
    let missing: Vec<_> = tools.iter().filter(|t| path_of(t).is_none()).collect();
    for tool in &missing {
        skip(&format!("{tool} is not installed"));
    }
    missing.is_empty()
}

/// Reports why a test is skipped, bypassing the test runner's capture.
pub fn skip(why: &str) {
    let _ = std::io::stderr().write_all(format!("SKIPPED: {why}\n").as_bytes());
}

/// These tools may be outside of a user's PATH.
fn path_of(tool: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let dirs = path.split(':').chain(["/usr/sbin", "/sbin"]);
    dirs.map(|dir| Path::new(dir).join(tool)).find(|p| p.is_file())
}

/// Runs a tool that must succeed; returns what it printed.
pub fn run(tool: &str, args: &[&str]) -> String {
    run_with(tool, args, "")
}

/// As [`run`], with input.
pub fn run_with(tool: &str, args: &[&str], input: &str) -> String {
    let (good, said) = try_run(tool, args, input);
    assert!(good, "{tool} {args:?}: {said}");
    said
}

/// Runs a tool; returns whether it succeeded, and its output.
pub fn try_run(tool: &str, args: &[&str], input: &str) -> (bool, String) {
    let mut child = Command::new(path_of(tool).unwrap())
        .args(args)
        .env("MTOOLS_SKIP_CHECK", "1")
        .env("LC_ALL", "C.UTF-8")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let out = child.wait_with_output().unwrap();
    // A tool may not read its input.
    let _ = writer.join().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match out.status.success() {
        true => (true, text(&out.stdout)),
        false => (false, text(&out.stdout) + &text(&out.stderr)),
    }
}

pub fn large() -> bool {
    std::env::var_os("ONEHOP_FILES_LARGE").is_some_and(|v| v == "1")
}

/// A directory that is removed on drop.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("onehop-files-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A file of this size, full of `fill`, so that unwritten blocks do not read as zeros by luck.
    pub fn image(&self, name: &str, size: u64, fill: u8) -> String {
        let path = self.path(name);
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(size).unwrap();
        if fill != 0 {
            let block = vec![fill; 1 << 20];
            for at in (0..size).step_by(1 << 20) {
                file.write_all_at(&block[..(size - at).min(1 << 20) as usize], at).unwrap();
            }
        }
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// SplitMix64.
pub struct Rng(u64);

impl Rng {
    /// Seeded from the clock or the environment; prints the seed, so that a failure can be repeated.
    pub fn new() -> Self {
        let given = std::env::var("ONEHOP_FILES_SEED").ok().map(|s| s.parse().unwrap());
        let now = || std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
        let seed = given.unwrap_or_else(now);
        println!("ONEHOP_FILES_SEED={seed}");
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            // No zeros: a missing byte shows.
            bytes.extend((self.next() | 0x0101_0101_0101_0101).to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// Mostly small, sometimes large, often at a boundary.
    pub fn size(&mut self, most: u64) -> u64 {
        let bits = self.below(u64::from(most.max(1).ilog2()) + 1);
        let near = 1_u64 << bits;
        match self.below(4) {
            0 => near,
            1 => near - 1,
            _ => near + self.below(near),
        }
        .min(most)
    }
}

/// What is at a path.
#[derive(Clone)]
pub enum Node {
    File(Vec<u8>),
    Directory,
    Link(Vec<u8>),
}

/// Paths without a slash in front, and what is there.
pub type Tree = BTreeMap<Vec<u8>, Node>;

/// Writes a tree to a directory of this machine, holes as holes.
pub fn plant(tree: &Tree, dir: &Path) {
    std::fs::create_dir_all(dir).unwrap();
    for (path, node) in tree {
        let at = dir.join(std::ffi::OsStr::from_bytes(path));
        match node {
            Node::Directory => std::fs::create_dir_all(&at).unwrap(),
            Node::Link(target) => {
                std::os::unix::fs::symlink(std::ffi::OsStr::from_bytes(target), &at).unwrap()
            }
            Node::File(bytes) => {
                let file = std::fs::File::create(&at).unwrap();
                file.set_len(bytes.len() as u64).unwrap();
                for (i, block) in bytes.chunks(4096).enumerate().filter(|(_, b)| b.iter().any(|&b| b != 0)) {
                    file.write_all_at(block, i as u64 * 4096).unwrap();
                }
            }
        }
    }
}

/// A volume on an image file.
pub fn open(image: &str) -> Volume {
    Volume::open(Arc::new(Image::open(image).unwrap()), Which::Auto).unwrap()
}

/// Everything in a volume, read through its extents; checks that both methods of reading agree.
pub fn harvest(volume: &Volume, image: &str) -> Tree {
    let mut tree = Tree::new();
    let raw = std::fs::File::open(image).unwrap();
    let mut todo = vec![(Vec::new(), volume.root().unwrap())];
    while let Some((path, dir)) = todo.pop() {
        for entry in volume.list(&dir).unwrap() {
            let mut path: Vec<u8> = path.clone();
            path.extend_from_slice(&entry.name);
            let file = volume.file(&entry).unwrap();
            assert_eq!(file.kind, entry.kind, "{}", String::from_utf8_lossy(&path));
            let node = match file.kind {
                FileKind::Directory => {
                    todo.push(([&path[..], b"/"].concat(), file));
                    Node::Directory
                }
                FileKind::Symlink => Node::Link(volume.read_link(&file).unwrap()),
                FileKind::File => Node::File(contents(volume, &file, &raw)),
                FileKind::Special => continue,
            };
            assert!(tree.insert(path, node).is_none(), "a name is listed twice");
        }
    }
    tree
}

/// A file's bytes by its extents from the raw image, compared with what the volume reads.
pub fn contents(volume: &Volume, file: &File, raw: &std::fs::File) -> Vec<u8> {
    let mut bytes = vec![0x77; file.size() as usize];
    let mut at = 0;
    for extent in volume.extents(file).unwrap() {
        assert!(extent.offset == at && extent.len > 0, "extents have gaps: {extent:?} at {at}");
        let out = &mut bytes[at as usize..][..extent.len as usize];
        match &extent.place {
            Place::Drive(position) => raw.read_exact_at(out, *position).unwrap(),
            Place::Zeros => out.fill(0),
            Place::Inline(data) => out.copy_from_slice(data),
        }
        at += extent.len;
    }
    assert_eq!(at, file.size());
    let mut again = vec![0x78; bytes.len() + 3];
    // From the middle to the end, then the beginning: across extents both ways.
    let middle = bytes.len() / 3;
    assert_eq!(volume.read(file, middle as u64, &mut again[middle..]).unwrap(), bytes.len() - middle);
    assert_eq!(volume.read(file, 0, &mut again[..middle]).unwrap(), middle);
    assert!(again[..bytes.len()] == bytes, "reading differs from the extents");
    bytes
}

/// Asserts that two trees are equal, naming the first difference.
pub fn assert_same(have: &Tree, want: &Tree) {
    let name = |p: &[u8]| String::from_utf8_lossy(p).into_owned();
    for (path, node) in want {
        match (have.get(path), node) {
            (Some(Node::File(a)), Node::File(b)) => {
                assert_eq!(a.len(), b.len(), "length of {}", name(path));
                let at = a.iter().zip(b).position(|(x, y)| x != y);
                assert_eq!(at, None, "{} differs there", name(path));
            }
            (Some(Node::Directory), Node::Directory) => {}
            (Some(Node::Link(a)), Node::Link(b)) => assert_eq!(name(a), name(b), "link {}", name(path)),
            (None, _) => panic!("{} is missing", name(path)),
            _ => panic!("{} is of another kind", name(path)),
        }
    }
    if let Some(extra) = have.keys().find(|p| !want.contains_key(*p)) {
        panic!("{} should not exist", name(extra));
    }
}
