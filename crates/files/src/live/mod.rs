//! Files of a mounted file system: where the kernel has placed them on the drive, and whether they are still there.
//!
//! A file system may move a file between the lookup of its place and the read. [`LiveFile::recheck`] after the read
//! detects this; [`Rung`] says how much stronger a guarantee the file's state gives. `docs/files.md` describes the
//! ladder.

mod chain;
mod mount;
mod places;
mod swap;
mod system;

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use onehop_os::file::{self as ioctls, oddity};
use rustix::fs::{AtFlags, OFlags, Statx, StatxAttributes, StatxFlags};

use crate::volume::FileId;
use crate::{Error, Extent, ExtentMap, MappedFile, Result};
use chain::Chain;
pub use chain::Disk;
use mount::Mount;
pub use system::System;

/// How reliable a file's places are, from weakest to strongest. The third rung, a frozen file system, is never
/// reported: it cannot be detected from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rung {
    /// Looked up before and after the read. Detects every change that is not deliberately hidden.
    Rechecked = 1,
    /// The file cannot be written: it is immutable, or has fs-verity.
    Unchangeable = 2,
    /// The whole file system is mounted read-only.
    ReadOnly = 4,
    /// Not mounted; read by [`crate::Volume`].
    Unmounted = 5,
}

impl Rung {
    /// The rung's number.
    #[must_use]
    pub fn number(self) -> u8 {
        self as u8
    }

    /// What it means.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Rechecked => "mounted read-write: extents are checked before and after reading",
            Self::Unchangeable => "mounted read-write, but the file is immutable or has fs-verity",
            Self::ReadOnly => "mounted read-only",
            Self::Unmounted => "not mounted: onehop reads the file system",
        }
    }
}

/// Bytes of a live file on one of its drives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveExtent {
    /// Index into [`LiveFile::disks`]; meaningless for zeros.
    pub disk: usize,
    /// The bytes, and their place on that drive.
    pub extent: Extent,
}

/// An open file of a mounted file system, with the places of its bytes.
#[derive(Debug)]
pub struct LiveFile {
    path: PathBuf,
    file: File,
    system: System,
    fs_uuid: String,
    state: FileState,
}

/// The state that a recheck compares.
#[derive(Debug, PartialEq, Eq)]
struct FileState {
    id: FileId,
    device: (u32, u32),
    mount: Mount,
    disks: Vec<Disk>,
    extents: Vec<LiveExtent>,
    rung: Rung,
}

impl LiveFile {
    /// Opens a file and looks up its places.
    ///
    /// # Errors
    /// When it is not a regular file, its file system does not report physical places, or a device below transforms the
    /// bytes.
    pub fn open(path: impl AsRef<Path>, system: &System) -> Result<Self> {
        let path = path.as_ref();
        // Opening a pipe must not wait for a writer.
        let mut options = File::options();
        options.read(true).custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32);
        let shown = path.display().to_string();
        let file = options
            .open(path)
            .map_err(|source| Error::System { what: format!("opening {shown}"), source })?;
        let about = stat(&file, &shown)?;
        let refuse = |why: String| Error::NotByBlocks { path: shown.clone(), why };
        if let Some(why) = unreadable(&about) {
            return Err(refuse(why));
        }
        mount::check_magic(&file, &shown)?;
        let state = FileState::read(&file, &about, &shown, system)?;
        let fs_uuid = ioctls::fs_uuid(&file).map(|uuid| crate::bytes::uuid_text(&uuid));
        let fs_uuid = fs_uuid.unwrap_or_else(|_| system.uuid_by_link(state.device));
        Ok(Self { path: path.to_owned(), file, system: system.clone(), fs_uuid, state })
    }

    /// The file's metadata.
    #[must_use]
    pub fn id(&self) -> FileId {
        self.state.id
    }

    /// Length in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.state.id.len
    }

    /// The file system's name, as in the mount table.
    #[must_use]
    pub fn fs_name(&self) -> &str {
        &self.state.mount.fs
    }

    /// The file system's identifier; empty if the kernel does not report it.
    #[must_use]
    pub fn fs_uuid(&self) -> &str {
        &self.fs_uuid
    }

    /// The drives that hold it.
    #[must_use]
    pub fn disks(&self) -> &[Disk] {
        &self.state.disks
    }

    /// The open file, for reads through the kernel.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// How reliable the places are.
    #[must_use]
    pub fn rung(&self) -> Rung {
        self.state.rung
    }

    /// All extents, in the file's order.
    #[must_use]
    pub fn extents(&self) -> &[LiveExtent] {
        &self.state.extents
    }

    /// The drive and extents of a file that is on one drive only.
    ///
    /// # Errors
    /// When it is on several.
    pub fn on_one_drive(&self) -> Result<(&Disk, Vec<Extent>)> {
        match &self.state.disks[..] {
            [disk] => Ok((disk, self.state.extents.iter().map(|e| e.extent.clone()).collect())),
            disks => Err(Error::NotByBlocks {
                path: self.path.display().to_string(),
                why: format!("it is on {} drives", disks.len()),
            }),
        }
    }

    /// Looks everything up again. Call it after the bytes were read, and before they are used.
    ///
    /// # Errors
    /// When anything has changed since the file was opened; the bytes are then void.
    pub fn recheck(&self) -> Result<()> {
        let shown = self.path.display().to_string();
        let FileState { id, mount, .. } = &self.state;
        let now = FileState::read(&self.file, &stat(&self.file, &shown)?, &shown, &self.system)?;
        if now == self.state {
            return Ok(());
        }
        let why = if now.id != *id {
            format!("it was {id:?} and is now {:?}", now.id)
        } else if now.mount != *mount {
            "its mount options have changed".to_owned()
        } else {
            "the file system or a device below has moved it".to_owned()
        };
        Err(Error::Changed { what: shown, why })
    }

    /// Makes an extent map. Reads the file through the kernel for its checksums, then rechecks its places.
    ///
    /// # Errors
    /// When it is on several drives, cannot be read, or has changed meanwhile.
    pub fn map(&self) -> Result<ExtentMap> {
        let (disk, extents) = self.on_one_drive()?;
        let about = MappedFile {
            path: self.path.clone(),
            fs: self.state.mount.fs.clone(),
            fs_uuid: self.fs_uuid.clone(),
            id: self.state.id,
        };
        let map = ExtentMap::make(about, disk.id.clone(), &extents, |offset, out| {
            let len = out.len();
            self.file.read_exact_at(out, offset).map_err(|source| Error::Read { offset, len, source })
        })?;
        self.recheck()?;
        Ok(map)
    }
}

impl FileState {
    fn read(file: &File, about: &Statx, shown: &str, system: &System) -> Result<Self> {
        let refuse = |why: String| Error::NotByBlocks { path: shown.to_owned(), why };
        let device = (about.stx_dev_major, about.stx_dev_minor);
        let mount = Mount::find(system, device)?.ok_or_else(|| {
            refuse(format!("its device {}:{} is not in the mount table", device.0, device.1))
        })?;
        mount.check(file).map_err(refuse)?;
        if let Some(why) = swap::in_use(system, file, shown)? {
            return Err(refuse(why));
        }
        let chain = Chain::resolve(system, device).map_err(refuse)?;
        // Without generations, a reused inode number shows only in the times.
        let generation = ioctls::generation(file).unwrap_or(0);
        let time = |t: rustix::fs::StatxTimestamp| (t.tv_sec, t.tv_nsec);
        let id = FileId {
            ino: about.stx_ino,
            generation,
            len: about.stx_size,
            mtime: time(about.stx_mtime),
            ctime: time(about.stx_ctime),
        };
        let extents = chain.extents(&places::read(file, id.len, shown)?, id.len).map_err(refuse)?;
        let unchangeable =
            about.stx_attributes.intersects(StatxAttributes::IMMUTABLE | StatxAttributes::VERITY);
        let rung = match (mount.read_only, unchangeable) {
            (true, _) => Rung::ReadOnly,
            (false, true) => Rung::Unchangeable,
            (false, false) => Rung::Rechecked,
        };
        Ok(Self { id, device, mount, disks: chain.disks, extents, rung })
    }
}

fn stat(file: &File, shown: &str) -> Result<Statx> {
    rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
        .map_err(|e| Error::System { what: format!("statx of {shown}"), source: e.into() })
}

fn unreadable(about: &Statx) -> Option<String> {
    let kind = rustix::fs::FileType::from_raw_mode(about.stx_mode.into());
    if kind != rustix::fs::FileType::RegularFile {
        return Some(format!("it is not a regular file but {}", oddity(kind)));
    }
    // The compressed flag is ignored: ext sets it for `chattr +c` without effect, and file systems that do compress are
    // refused by their magic.
    let encrypted = about.stx_attributes.contains(StatxAttributes::ENCRYPTED);
    encrypted.then(|| "it is encrypted, and only the kernel can decrypt it".to_owned())
}
