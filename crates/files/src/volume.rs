//! Volumes of any supported file system: from a path to extents.

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

/// Linux's limit.
const MOST_LINKS: u32 = 40;
/// Linux's limit.
const LONGEST_PATH: usize = 4096;

/// A file system that onehop reads.
pub struct Volume {
    fs: Box<dyn FileSystem>,
    notes: Vec<String>,
}

/// What a reader of a file system implements.
pub(crate) trait FileSystem: Send + Sync {
    fn name(&self) -> &'static str;
    fn uuid(&self) -> String;
    fn label(&self) -> String;
    fn window(&self) -> &Window;
    fn notes(&self) -> Vec<String>;
    fn root(&self) -> FsNode;
    fn file(&self, node: &FsNode) -> Result<File>;
    fn list(&self, dir: &FsNode) -> Result<Vec<Entry>>;
    fn find(&self, dir: &FsNode, name: &[u8]) -> Result<Option<FsNode>>;
    fn extents(&self, file: &FsNode) -> Result<Vec<Extent>>;
    fn read_link(&self, link: &FsNode) -> Result<Vec<u8>>;
}

/// Selects the part of a drive that holds the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Which {
    /// The whole drive if it has no partition table; otherwise the only partition with a supported file system.
    #[default]
    Auto,
    /// The whole drive, even if it seems to have a partition table.
    Whole,
    /// The partition with this number.
    Partition(u32),
}

/// The kind of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A device, socket or pipe, which cannot be read.
    Special,
}

/// A file's metadata. Equal for two lookups of an unchanged file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FileId {
    /// The inode number. On FAT and exFAT: byte offset of the directory entry within the volume.
    pub ino: u64,
    /// The inode's generation; 0 if the file system does not count generations.
    pub generation: u32,
    /// Length in bytes.
    pub len: u64,
    /// Time of the last change of its contents, in seconds since 1970 and nanoseconds.
    pub mtime: (i64, u32),
    /// Time of the last change of its contents or metadata; equal to `mtime` on FAT and exFAT, which do not store it.
    pub ctime: (i64, u32),
}

/// A file, directory or link that was looked up.
#[derive(Debug, Clone)]
pub struct File {
    /// Its kind.
    pub kind: FileKind,
    /// Its metadata.
    pub id: FileId,
    node: FsNode,
    extents: OnceLock<Arc<[Extent]>>,
}

/// A directory entry.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The name: on ext any bytes but `/` and zero, elsewhere UTF-8.
    pub name: Vec<u8>,
    /// The kind of the file it names.
    pub kind: FileKind,
    pub(crate) node: FsNode,
}

/// How a file system finds a file again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FsNode {
    /// The inode number.
    Ext(u32),
    /// The directory entry.
    Fat(FatNode),
}

fn not_read(name: &str) -> Error {
    Error::unsupported(
        name,
        "ext2, ext3, ext4, FAT and exFAT are supported; mount it, or copy the file to one of those \
         (if it is a leftover of an old one, `wipefs` removes it)",
    )
}

/// The error for a file that was looked up on a volume of another kind.
pub(crate) fn foreign() -> Error {
    Error::unsupported("a file from another volume", "look it up on this volume")
}

impl FileKind {
    /// The kind as a noun.
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
    pub(crate) fn new(kind: FileKind, id: FileId, node: FsNode) -> Self {
        Self { kind, id, node, extents: OnceLock::new() }
    }

    /// Length in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.id.len
    }
}

impl Volume {
    /// Opens the volume that `which` selects.
    ///
    /// # Errors
    /// When it cannot be read, is damaged or not clean, uses an unsupported feature or file system, or is ambiguous.
    pub fn open(blocks: Arc<dyn Blocks>, which: Which) -> Result<Self> {
        if which == Which::Whole {
            let size = blocks.size();
            return Self::at(blocks, 0, size);
        }
        let table = partitions::read(&*blocks)?;
        // A drive that is a member as a whole has the partitions of its set. Without a table, the whole drive is
        // checked as a volume.
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
            if table.partitions.is_empty() {
                let none = "there are none: leave the choice out, or choose none for the drive as a whole";
                return Err(Error::WhichPartition(none.into()));
            }
            return Err(Error::WhichPartition(format!(
                "choose one of: {}",
                describe(&blocks, &table.partitions)
            )));
        };
        let mut volume = Self::at(blocks, part.start, part.len)?;
        volume.notes.splice(..0, table.notes);
        Ok(volume)
    }

    /// Opens the volume on `len` bytes of the drive, starting at byte `start`.
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
                    "one of them is a leftover; `wipefs` lists both and removes the old one",
                ));
            }
            Detected::Nothing => {
                return Err(Error::NoFileSystem(format!(
                    "no known file system begins at byte {start}; ext2, ext3, ext4, FAT and exFAT are supported"
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

    /// Its identifier, in the notation of `blkid`.
    #[must_use]
    pub fn uuid(&self) -> String {
        self.fs.uuid()
    }

    /// The volume label; often empty.
    #[must_use]
    pub fn label(&self) -> String {
        self.fs.label()
    }

    /// Anomalies that do not prevent reading.
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

    /// Looks up `path` from the root. Links are followed, absolute ones from this volume's root.
    ///
    /// # Errors
    /// When it does not exist, or a component is not what it should be.
    pub fn lookup(&self, path: impl AsRef<[u8]>) -> Result<File> {
        self.walk(path.as_ref(), true)
    }

    /// Like [`Volume::lookup`], but does not follow a link at the end.
    ///
    /// # Errors
    /// As for [`Volume::lookup`].
    pub fn lookup_link(&self, path: impl AsRef<[u8]>) -> Result<File> {
        self.walk(path.as_ref(), false)
    }

    /// The entries of a directory in stored order, without `.` and `..`.
    ///
    /// # Errors
    /// When it is not a directory, is damaged or cannot be read.
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

    /// The extents of a file: complete, in order, neighbours merged. Computed once per [`File`].
    ///
    /// # Errors
    /// When it is not a regular file, is damaged or encrypted, or cannot be read.
    pub fn extents<'a>(&self, file: &'a File) -> Result<&'a [Extent]> {
        wants(file, FileKind::File, "")?;
        if let Some(known) = file.extents.get() {
            return Ok(known);
        }
        let list = self.fs.extents(&file.node)?;
        Ok(file.extents.get_or_init(|| list.into()))
    }

    /// Reads from byte `offset` of a file on, until `out` is full or the file ends, and returns the number of bytes
    /// read.
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
    /// When it is not a link, is damaged or cannot be read.
    pub fn read_link(&self, link: &File) -> Result<Vec<u8>> {
        wants(link, FileKind::Symlink, "")?;
        self.fs.read_link(&link.node)
    }

    fn walk(&self, path: &[u8], follow_last: bool) -> Result<File> {
        let shown = || String::from_utf8_lossy(path).into_owned();
        let mut links = 0;
        // Components still to be resolved, the next one last; and the directories passed so far, for `..`.
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

/// The components of a path, the first one last. A trailing slash becomes `.`, so that what precedes it must be a
/// directory.
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

/// The only partition with a supported file system; `None` if there are several or none.
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
