//! The one door: a volume of any file system that is known, and the way from a path to extents.

use std::sync::{Arc, OnceLock};

use crate::clusters::FatNode;
use crate::detect::{self, Detected};
use crate::exfat::Exfat;
use crate::ext::Ext;
use crate::extent;
use crate::fat::Fat;
use crate::members;
use crate::partitions::{self, Partition, TableKind};
use crate::window::Window;
use crate::{Blocks, Error, Extent, Result};

/// As many as Linux follows.
const MOST_LINKS: u32 = 40;
/// As long as Linux takes them.
const LONGEST_PATH: usize = 4096;

/// A file system that can be read.
pub struct Volume {
    fs: Box<dyn FileSystem>,
    notes: Vec<String>,
}

/// What a reader of a file system gives.
pub(crate) trait FileSystem: Send + Sync {
    fn name(&self) -> &'static str;
    fn uuid(&self) -> String;
    fn label(&self) -> String;
    fn window(&self) -> &Window;
    fn notes(&self) -> Vec<String>;
    fn root(&self) -> Node;
    fn file(&self, node: &Node) -> Result<File>;
    fn list(&self, dir: &Node) -> Result<Vec<Entry>>;
    fn find(&self, dir: &Node, name: &[u8]) -> Result<Option<Node>>;
    fn extents(&self, file: &Node) -> Result<Vec<Extent>>;
    fn read_link(&self, link: &Node) -> Result<Vec<u8>>;
}

/// Which part of a drive to look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Which {
    /// The whole drive if it has no partition table, else the only partition that holds a known file system.
    #[default]
    Auto,
    /// The whole drive, whatever looks like a partition table.
    Whole,
    /// The partition of this number.
    Partition(u32),
}

/// What kind of thing has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// Bytes.
    File,
    /// Names of others.
    Directory,
    /// Another path.
    Symlink,
    /// A device, socket or pipe: nothing to read.
    Special,
}

/// What is known of a file besides its bytes; two looks at an unchanged file give the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FileId {
    /// Its number. On FAT and exFAT: where its directory entry is, in bytes from the volume's start.
    pub ino: u64,
    /// Which file of that number it is; 0 where the file system does not count.
    pub generation: u32,
    /// Bytes.
    pub len: u64,
    /// When its bytes were changed last, in seconds since 1970 and nanoseconds.
    pub mtime: (i64, u32),
    /// When anything about it was changed last; on FAT and exFAT, which do not say, the same as `mtime`.
    pub ctime: (i64, u32),
}

/// A file, directory or link that was looked up.
#[derive(Debug, Clone)]
pub struct File {
    /// What it is.
    pub kind: FileKind,
    /// Which one it is.
    pub id: FileId,
    node: Node,
    extents: OnceLock<Arc<[Extent]>>,
}

/// A name in a directory.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The name; on ext any bytes but `/` and zero, elsewhere UTF-8.
    pub name: Vec<u8>,
    /// What it names.
    pub kind: FileKind,
    pub(crate) node: Node,
}

/// How a file system finds a file again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Node {
    /// An inode's number.
    Ext(u32),
    /// What the directory entry says.
    Fat(FatNode),
}

fn not_read(name: &str) -> Error {
    Error::unsupported(
        name,
        "ext2, ext3, ext4, FAT and exFAT are read here; mount it, or copy the file to one of those \
         (where it is what is left of an old one, `wipefs` takes it away)",
    )
}

/// A file that was looked up on a volume of another kind.
pub(crate) fn foreign() -> Error {
    Error::unsupported("a file of another volume", "look it up on this one")
}

impl FileKind {
    /// As a noun.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Directory => "directory",
            Self::Symlink => "symbolic link",
            Self::Special => "device, socket or pipe",
        }
    }
}

impl File {
    pub(crate) fn new(kind: FileKind, id: FileId, node: Node) -> Self {
        Self { kind, id, node, extents: OnceLock::new() }
    }

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.id.len
    }
}

impl Volume {
    /// Opens the volume that `which` names.
    ///
    /// # Errors
    /// When it cannot be read, is damaged, not clean, of a kind or with features that are not known, or not one alone.
    pub fn open(blocks: Arc<dyn Blocks>, which: Which) -> Result<Self> {
        if which == Which::Whole {
            let size = blocks.size();
            return Self::at(blocks, 0, size);
        }
        let table = partitions::read(&*blocks)?;
        // The partitions of a drive that is a member as a whole are those of what it is a member of.
        // Where there is no table, the drive is looked at as the volume that it is.
        if which == Which::Auto && table.kind == TableKind::None {
            return Self::open(blocks, Which::Whole);
        }
        let in_partition = |at| table.partitions.iter().any(|p| (p.start..p.start + p.len).contains(&at));
        let whole = members::all(&Window::new(blocks.clone(), 0, blocks.size()))?;
        if let Some((_, name)) = whole.iter().find(|(at, _)| !in_partition(*at)) {
            return Err(not_read(name));
        }
        let part = match which {
            Which::Partition(n) => table.partitions.iter().find(|p| p.index == n),
            _ => only_known(&blocks, &table.partitions)?,
        };
        let Some(part) = part else {
            return Err(Error::WhichPartition(format!(
                "there are these: {}",
                describe(&blocks, &table.partitions)
            )));
        };
        let mut volume = Self::at(blocks, part.start, part.len)?;
        volume.notes.splice(..0, table.notes);
        Ok(volume)
    }

    /// Opens the volume on `len` bytes from byte `start` of the drive.
    ///
    /// # Errors
    /// As for [`Volume::open`].
    pub fn at(blocks: Arc<dyn Blocks>, start: u64, len: u64) -> Result<Self> {
        let window = Window::new(blocks, start, len);
        let fs: Box<dyn FileSystem> = match detect::detect(&window)? {
            Detected::Ext => Box::new(Ext::open(window)?),
            Detected::Fat => Box::new(Fat::open(window)?),
            Detected::Exfat => Box::new(Exfat::open(window)?),
            Detected::Other(name) => return Err(not_read(name)),
            Detected::Doubtful => {
                return Err(Error::unsupported(
                    "an ext and a FAT in one place",
                    "one of them was there before the other; `wipefs` shows both, and takes the old one away",
                ));
            }
            Detected::Nothing => {
                return Err(Error::NoFileSystem(format!(
                    "nothing known begins at byte {start}; ext2, ext3, ext4, FAT and exFAT are read here"
                )));
            }
        };
        let notes = fs.notes();
        Ok(Self { fs, notes })
    }

    /// The file system's name: `ext4`, `exFAT`, `FAT32` …
    #[must_use]
    pub fn fs_name(&self) -> &'static str {
        self.fs.name()
    }

    /// Its identifier, as `blkid` writes it.
    #[must_use]
    pub fn uuid(&self) -> String {
        self.fs.uuid()
    }

    /// The name that its owner gave it; often empty.
    #[must_use]
    pub fn label(&self) -> String {
        self.fs.label()
    }

    /// What is not as it should be, though it can be read.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The root directory.
    ///
    /// # Errors
    /// When it is damaged or cannot be read.
    pub fn root(&self) -> Result<File> {
        self.fs.file(&self.fs.root())
    }

    /// The file at `path`, counted from the root; links are followed, absolute ones from this volume's root.
    ///
    /// # Errors
    /// When there is none, or something on the way is not what it should be.
    pub fn lookup(&self, path: impl AsRef<[u8]>) -> Result<File> {
        self.walk(path.as_ref(), true)
    }

    /// As [`Volume::lookup`], and a link at the end is not followed.
    ///
    /// # Errors
    /// As for [`Volume::lookup`].
    pub fn lookup_link(&self, path: impl AsRef<[u8]>) -> Result<File> {
        self.walk(path.as_ref(), false)
    }

    /// The names in a directory, as it keeps them, less `.` and `..`.
    ///
    /// # Errors
    /// When it is none, is damaged or cannot be read.
    pub fn list(&self, dir: &File) -> Result<Vec<Entry>> {
        wants(dir, FileKind::Directory, "")?;
        self.fs.list(&dir.node)
    }

    /// The file that an entry names; a link is not followed.
    ///
    /// # Errors
    /// When it is damaged or cannot be read.
    pub fn file(&self, entry: &Entry) -> Result<File> {
        self.fs.file(&entry.node)
    }

    /// Where a file's bytes are: all of them, in order, neighbours merged. Looked up once for each [`File`].
    ///
    /// # Errors
    /// When it is not a file, is damaged or encrypted, or cannot be read.
    pub fn extents<'a>(&self, file: &'a File) -> Result<&'a [Extent]> {
        wants(file, FileKind::File, "")?;
        if let Some(known) = file.extents.get() {
            return Ok(known);
        }
        let list = self.fs.extents(&file.node)?;
        Ok(file.extents.get_or_init(|| list.into()))
    }

    /// Reads from byte `offset` of a file on, until `out` is full or the file ends. Returns how much it was.
    ///
    /// # Errors
    /// As for [`Volume::extents`].
    pub fn read(&self, file: &File, offset: u64, out: &mut [u8]) -> Result<usize> {
        let extents = self.extents(file)?;
        extent::read(extents, offset, out, |at, out| self.fs.window().read_drive(at, out))
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// When it is none, is damaged or cannot be read.
    pub fn read_link(&self, link: &File) -> Result<Vec<u8>> {
        wants(link, FileKind::Symlink, "")?;
        self.fs.read_link(&link.node)
    }

    fn walk(&self, path: &[u8], follow_last: bool) -> Result<File> {
        let shown = || String::from_utf8_lossy(path).into_owned();
        let mut links = 0;
        // Names still to come, the next one last; directories on the way here, so that `..` needs no entry.
        let mut todo = parts(path);
        let mut way = vec![self.root()?];
        while let Some(name) = todo.pop() {
            let here = way.last().ok_or_else(|| Error::damaged("path", shown()))?;
            wants(here, FileKind::Directory, &shown())?;
            if name == b"." {
                continue;
            }
            if name == b".." {
                if way.len() > 1 {
                    way.pop();
                }
                continue;
            }
            let found = self.fs.find(&here.node, &name)?.ok_or_else(|| self.not_found(path, &name))?;
            let found = self.fs.file(&found)?;
            if found.kind != FileKind::Symlink || todo.is_empty() && !follow_last {
                way.push(found);
                continue;
            }
            links += 1;
            let target = self.read_link(&found)?;
            let more = parts(&target);
            if links > MOST_LINKS || todo.len() + more.len() > LONGEST_PATH {
                return Err(Error::TooManyLinks { path: shown(), most: MOST_LINKS });
            }
            if target.starts_with(b"/") {
                way.truncate(1);
            }
            todo.extend(more);
        }
        way.pop().ok_or_else(|| Error::damaged("path", shown()))
    }

    fn not_found(&self, path: &[u8], name: &[u8]) -> Error {
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        Error::NotFound { path: text(path), name: text(name), fs: self.fs_name() }
    }
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume")
            .field("fs", &self.fs_name())
            .field("uuid", &self.uuid())
            .finish_non_exhaustive()
    }
}

/// The names of a path, the first one last. A `.` at its end stands for a slash there: what is before must be a directory.
fn parts(path: &[u8]) -> Vec<Vec<u8>> {
    let mut names: Vec<_> =
        path.split(|&b| b == b'/').filter(|p| !p.is_empty()).map(<[u8]>::to_vec).collect();
    if path.ends_with(b"/") && !names.is_empty() {
        names.push(b".".to_vec());
    }
    names.reverse();
    names
}

fn wants(file: &File, kind: FileKind, path: &str) -> Result<()> {
    if file.kind == kind {
        return Ok(());
    }
    let path = if path.is_empty() { format!("file number {}", file.id.ino) } else { path.to_owned() };
    Err(Error::WrongKind { path, is: file.kind.name(), wanted: kind.name() })
}

/// The only partition with a file system that is read here; none where there are several or none.
fn only_known<'a>(blocks: &Arc<dyn Blocks>, partitions: &'a [Partition]) -> Result<Option<&'a Partition>> {
    let mut known = Vec::new();
    for part in partitions {
        let found = detect::detect(&Window::new(blocks.clone(), part.start, part.len))?;
        if matches!(found, Detected::Ext | Detected::Fat | Detected::Exfat) {
            known.push(part);
        }
    }
    Ok(if let [one] = known[..] { Some(one) } else { None })
}

fn describe(blocks: &Arc<dyn Blocks>, partitions: &[Partition]) -> String {
    let fs = |p: &Partition| match detect::detect(&Window::new(blocks.clone(), p.start, p.len)) {
        Ok(found) => found.name(),
        Err(_) => "unreadable",
    };
    let line = |p: &Partition| {
        format!(
            "{} ({} bytes, {}{}{})",
            p.index,
            p.len,
            fs(p),
            if p.name.is_empty() { "" } else { ", " },
            p.name
        )
    };
    match partitions {
        [] => "none".to_owned(),
        some => some.iter().map(line).collect::<Vec<_>>().join(", "),
    }
}
