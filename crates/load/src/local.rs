//! Files of this machine. Opening a path never blocks, even if it is a FIFO.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf, absolute};
use std::time::{Duration, Instant};

use onehop_os::file::oddity;
use rustix::fs::{
    AtFlags, CWD, FileType, FsWord, Mode, OFlags, PROC_SUPER_MAGIC, Stat, fcntl_setfl, fstat, fstatfs, open,
    statat,
};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::error::{Error, Result};
use crate::identity::{Change, Identity};
use crate::source::{Kind, Source, Store};

/// Kernels count 100 ticks a second at least.
const LONGEST_TICK: Duration = Duration::from_millis(20);
/// Upper limit of names in a directory.
const MAX_NAMES: usize = 1 << 20;

/// The file system of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Local;

/// An open file of this machine.
#[derive(Debug)]
pub struct LocalFile {
    file: File,
    path: PathBuf,
    /// The absolute path: the working directory may change before the file is checked again.
    absolute: PathBuf,
    name: String,
    identity: Identity,
}

impl LocalFile {
    /// Opens a regular file. Refuses anything else without blocking.
    ///
    /// # Errors
    /// When the file does not exist, cannot be opened, or is not regular.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        // The kind is checked before opening, because opening a device or FIFO has side effects.
        regular(&name, kind(path)?)?;
        // If it becomes a FIFO in between, O_NONBLOCK keeps open from waiting for a writer.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = File::from(open(path, flags, Mode::empty()).map_err(|e| Error::opening(&name, e))?);
        let stat = past_state(&file).map_err(|e| Error::opening(&name, e))?;
        regular(&name, FileType::from_raw_mode(stat.st_mode))?;
        if is_pseudo_fs(fstatfs(&file).map_err(|e| Error::opening(&name, e))?.f_type) {
            return Err(Error::NotRegular { file: name, what: "made up by the kernel as it is read" });
        }
        // O_NONBLOCK has no effect on a regular file, but cuFile refuses it.
        fcntl_setfl(&file, OFlags::empty()).map_err(|e| Error::opening(&name, e))?;
        let absolute = absolute(path).map_err(|e| Error::Open { file: name.clone(), source: e })?;
        Ok(Self { file, path: path.into(), absolute, name, identity: Identity::of(&stat) })
    }

    /// The open file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The path by which it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How the path has changed since the file was opened.
    fn path_change(&self) -> Option<Change> {
        match statat(CWD, &self.absolute, AtFlags::empty()) {
            Ok(stat) => self.identity.replaced(&Identity::of(&stat)),
            Err(Errno::NOENT) => Some(Change::Removed),
            Err(error) => Some(Change::Hidden(error.raw_os_error())),
        }
    }

    /// Checks that its path still leads to this file.
    pub(crate) fn check_path(&self) -> Result<()> {
        match self.path_change() {
            Some(change @ Change::Replaced(..)) => Err(Error::Changed { file: self.name.clone(), change }),
            _ => Ok(()),
        }
    }
}

/// The state of a file, of an earlier tick of the clock that stamps writes: two writes within a tick leave the same time. Of a file
/// that is being written, or whose times are another machine's, it is the state of now in the end.
fn past_state(file: &File) -> rustix::io::Result<Stat> {
    let start = Instant::now();
    loop {
        // First: a write after this is stamped with this time or a later one.
        let now = clock_gettime(ClockId::RealtimeCoarse);
        let stat = fstat(file)?;
        let is_past = (stat.st_mtime, stat.st_mtime_nsec as i64) < (now.tv_sec, now.tv_nsec);
        if is_past || start.elapsed() > LONGEST_TICK {
            return Ok(stat);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Source for LocalFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn bytes(&self) -> u64 {
        self.identity.bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(buffer, offset).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => Error::Ended {
                file: self.name.clone(),
                offset,
                bytes: buffer.len() as u64,
                length: self.bytes(),
            },
            _ => Error::Read { file: self.name.clone(), offset, bytes: buffer.len() as u64, source: e },
        })
    }

    fn local(&self) -> Option<&LocalFile> {
        Some(self)
    }

    fn identity(&self) -> Option<Identity> {
        Some(self.identity)
    }

    /// Checks the open file, whose bytes are read, and then what its path leads to now.
    fn still_same(&self) -> Result<Option<Change>> {
        let open = Identity::of(&fstat(&self.file).map_err(|e| Error::opening(&self.name, e))?);
        let change = self.identity.change(&open);
        if let Some(change) = change.filter(Change::is_of_bytes) {
            return Err(Error::Changed { file: self.name.clone(), change });
        }
        Ok(self.path_change().or(change))
    }
}

impl Store for Local {
    fn kind(&self, path: &Path) -> Result<Kind> {
        match kind(path)? {
            FileType::RegularFile => Ok(Kind::File),
            FileType::Directory => Ok(Kind::Directory),
            other => Err(Error::NotRegular { file: path.display().to_string(), what: oddity(other) }),
        }
    }

    fn names(&self, path: &Path) -> Result<Vec<OsString>> {
        let name = path.display().to_string();
        let failed = |e: std::io::Error| Error::Open { file: name.clone(), source: e };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(path).map_err(failed)? {
            names.push(entry.map_err(failed)?.file_name());
            if names.len() > MAX_NAMES {
                return Err(Error::Crowded { directory: name, most: MAX_NAMES });
            }
        }
        Ok(names)
    }

    fn open(&self, path: &Path) -> Result<Box<dyn Source>> {
        Ok(Box::new(LocalFile::open(path)?))
    }
}

/// The kind of file that `path` leads to, through symbolic links.
fn kind(path: &Path) -> Result<FileType> {
    let stat = statat(CWD, path, AtFlags::empty());
    stat.map(|s| FileType::from_raw_mode(s.st_mode))
        .map_err(|e| Error::opening(&path.display().to_string(), e))
}

/// Whether files of this file system have no stored contents and no length, by its magic number.
fn is_pseudo_fs(magic: FsWord) -> bool {
    const SYSFS: FsWord = 0x6265_6572;
    const DEBUGFS: FsWord = 0x6462_6720;
    const TRACEFS: FsWord = 0x7472_6163;
    [PROC_SUPER_MAGIC, SYSFS, DEBUGFS, TRACEFS].contains(&magic)
}

fn regular(name: &str, kind: FileType) -> Result<()> {
    match kind {
        FileType::RegularFile => Ok(()),
        other => Err(Error::NotRegular { file: name.into(), what: oddity(other) }),
    }
}

impl Error {
    fn opening(name: &str, errno: Errno) -> Self {
        match errno {
            Errno::LOOP => Self::Loop { file: name.into() },
            _ => Self::Open { file: name.into(), source: errno.into() },
        }
    }
}
