//! The interface between those who access files and those who serve them: a local folder ([`Folder`]), or one of
//! another machine ([`crate::client::RemoteTree`]).
//!
//! Files have numbers, which `lookup`, `make` and `create` return. A number stays valid until it is forgotten as often
//! as it was returned.

mod crossing;
mod folder;
mod local;
mod nodes;
mod xattrs;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use onehop_os::HostMem;
use onehop_os::file_writes::{FileSource, MappingBudget, WriteRoutes};
use rustix::io::Errno;
use serde::Serialize;

pub use folder::{Folder, FolderRules};
pub use local::Local;
pub use nodes::Forgotten;

use crate::shares::Shares;
use crate::transport::Shareable;
use crate::wire::{Attr, AttrChange, Caller, FileKind, FsSpace, Make, Name, OpenMode, Xattr};

/// The result, or Linux's error number.
pub type TreeResult<T> = Result<T, Errno>;

/// Numbers from here on are assigned to files of other file systems below the root, whose inode numbers may collide.
pub const FOREIGN: u64 = 1 << 48;

/// A part of the names in a folder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FolderNames {
    /// Inode number, type, offset of the next entry, and name.
    pub names: Vec<(u64, FileKind, u64, Vec<u8>)>,
    /// The offset of the rest; `None` at the end.
    pub next: Option<u64>,
}

/// Memory for a transfer.
#[derive(Clone, Copy)]
pub struct TransferMemory<'a> {
    /// The memory.
    pub mem: &'a HostMem,
    /// The offset in it.
    pub at: usize,
    /// The length.
    pub len: usize,
    /// Whether other processes may write or truncate it at any time.
    pub shared: bool,
}

impl<'a> TransferMemory<'a> {
    fn source(&self) -> FileSource<'a> {
        FileSource { mem: self.mem, at: self.at, len: self.len }
    }
}

/// Writes of files by one route.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct WrittenSum {
    /// `mapping`, or `pwrite`.
    pub by: &'static str,
    /// Why not through a mapping.
    pub why: Option<&'static str>,
    /// How many there were.
    pub writes: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// The routes by which files were written.
#[must_use]
pub fn written_sums(routes: &WriteRoutes) -> Vec<WrittenSum> {
    let sums = routes.sums().into_iter();
    sums.map(|sum| WrittenSum { by: sum.by(), why: sum.why, writes: sum.writes, bytes: sum.bytes }).collect()
}

/// A budget for mapped bytes that users share.
#[must_use]
pub fn mapping_budget(shares: Shares) -> MappingBudget {
    let shares = Arc::new(shares);
    Box::new(move |user, bytes| Some(Box::new(shares.acquire(user, bytes)?)))
}

/// The route by which data arrives on this machine, and why there is no faster one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Via {
    /// `tcp`, `rdma`.
    pub transport: &'static str,
    /// Why data goes through host memory; empty if it need not.
    pub why: String,
    /// How to fix that.
    pub fix: String,
}

/// An open file. Others may write a transfer's memory at the same time, so it is never accessed through slices.
pub trait OpenFile: Send + Sync {
    /// Whether it has a name; on a target, whether it had one when it was opened. A cached name may lead to a file that
    /// has none.
    fn has_name(&self) -> bool;

    /// Reads without blocking. `None` if that is not possible, or unknown.
    ///
    /// # Errors
    /// When the memory is gone, or the file cannot be read.
    fn read_now(&self, to: TransferMemory<'_>, at: u64) -> io::Result<Option<usize>>;

    /// Reads. Returns the number of bytes, which is short at the end of the file.
    ///
    /// # Errors
    /// As for [`Self::read_now`].
    fn read(&self, to: TransferMemory<'_>, at: u64) -> io::Result<usize>;

    /// Writes. Returns the number of bytes.
    ///
    /// # Errors
    /// When the memory is gone, or the file cannot be written.
    fn write(&self, from: TransferMemory<'_>, at: u64) -> io::Result<usize>;

    /// Writes without blocking, all bytes or none. `None` if that is not possible, or unknown.
    fn write_now(&self, from: TransferMemory<'_>, at: u64) -> Option<usize> {
        let _ = (from, at);
        None
    }

    /// Reads into private memory.
    ///
    /// # Errors
    /// When the file cannot be read.
    fn read_bytes(&self, to: &mut [u8], at: u64) -> io::Result<usize>;

    /// Writes from private memory.
    ///
    /// # Errors
    /// When the file cannot be written.
    fn write_bytes(&self, from: &[u8], at: u64) -> io::Result<usize>;

    /// Appends, atomically with respect to other writers.
    ///
    /// # Errors
    /// When the file cannot be written.
    fn append_bytes(&self, from: &[u8]) -> io::Result<usize>;

    /// Reads directly into memory, perhaps a GPU's, without this machine's CPU; `None` if that is not possible.
    ///
    /// # Errors
    /// As for [`Self::read_now`].
    fn read_direct(&self, to: &Shareable, range: Range<usize>, at: u64) -> io::Result<Option<usize>> {
        let _ = (to, range, at);
        Ok(None)
    }

    /// Writes directly from such memory; `None` if that is not possible.
    ///
    /// # Errors
    /// As for [`Self::write`].
    fn write_direct(&self, from: &Shareable, range: Range<usize>, at: u64) -> io::Result<Option<usize>> {
        let _ = (from, range, at);
        Ok(None)
    }

    /// Whether a range has a hole before the end of the file.
    ///
    /// # Errors
    /// When the file system does not report it.
    fn has_hole(&self, at: u64, bytes: u64) -> io::Result<bool>;

    /// Whether most of a range is not in the page cache, so that direct I/O is worth it.
    fn is_cold(&self, at: u64, bytes: u64) -> bool;

    /// Reads whole pages past the page cache, into page-aligned memory; `None` if that is not possible.
    ///
    /// # Errors
    /// As for [`Self::read_now`].
    fn read_past(&self, to: TransferMemory<'_>, at: u64) -> io::Result<Option<usize>>;

    /// Writes everything to the disk.
    ///
    /// # Errors
    /// When that failed, now or since the last call.
    fn sync(&self, data_only: bool) -> io::Result<()>;

    /// Clears set-id bits and file capabilities.
    ///
    /// # Errors
    /// When the file system refuses.
    fn drop_set_id(&self) -> io::Result<()>;

    /// Sets the length.
    ///
    /// # Errors
    /// When the file system refuses.
    fn set_len(&self, bytes: u64) -> io::Result<()>;

    /// Allocates space or punches holes; `mode` as for `fallocate`.
    ///
    /// # Errors
    /// When the file system refuses.
    fn allocate(&self, mode: u32, at: u64, bytes: u64) -> io::Result<()>;

    /// The offset of the next hole, or of the next data.
    ///
    /// # Errors
    /// When there is none, or the file system does not report it.
    fn seek(&self, at: u64, hole: bool) -> io::Result<u64>;

    /// The file itself, if it is local.
    fn local(&self) -> Option<&File> {
        None
    }

    /// The route of its data from another machine; `None` for a local file.
    fn via(&self) -> Option<Via> {
        None
    }
}

/// A folder and everything below it. Each operation runs with its caller's credentials. Operations with only a user ID
/// (`uid`) return nothing that the holder of a file's number has not been given already; they count for that user.
#[expect(clippy::missing_errors_doc, reason = "each call fails like the Linux call that does the same")]
pub trait Tree: Send + Sync {
    /// Looks a name up.
    fn lookup(&self, parent: u64, name: &Name, by: &Caller) -> TreeResult<Attr>;
    /// Forgets a number `times` times. Returns what was held for it.
    fn forget(&self, node: u64, times: u64) -> Forgotten;
    /// The attributes of a file.
    fn attr(&self, node: u64, uid: u32) -> TreeResult<Attr>;
    /// Changes attributes. An empty change is a change to the same owner: it clears set-id bits, if the caller may.
    fn change(&self, node: u64, change: &AttrChange, by: &Caller) -> TreeResult<Attr>;
    /// The target of a symbolic link.
    fn read_link(&self, node: u64, uid: u32) -> TreeResult<Vec<u8>>;
    /// Creates a folder, a node or a symbolic link.
    fn make(&self, parent: u64, name: &Name, make: &Make, by: &Caller) -> TreeResult<Attr>;
    /// Creates and opens a file. Unless it must be new (`exclusive`), an existing one is opened.
    fn create(
        &self,
        parent: u64,
        name: &Name,
        mode: u32,
        access: OpenMode,
        exclusive: bool,
        by: &Caller,
    ) -> TreeResult<(Attr, Arc<dyn OpenFile>)>;
    /// Removes a name.
    fn remove(&self, parent: u64, name: &Name, folder: bool, by: &Caller) -> TreeResult<()>;
    /// Renames; `flags` as for `renameat2`.
    fn rename(&self, from: (u64, &Name), to: (u64, &Name), flags: u32, by: &Caller) -> TreeResult<()>;
    /// Creates a hard link.
    fn link(&self, node: u64, parent: u64, name: &Name, by: &Caller) -> TreeResult<Attr>;
    /// Some of the names in a folder, from an offset on.
    fn list(&self, node: u64, from: u64, by: &Caller) -> TreeResult<FolderNames>;
    /// Writes a folder's names to the disk.
    fn sync_folder(&self, node: u64, uid: u32) -> TreeResult<()>;
    /// Executes a request about extended attributes. Returns a value, the list of names, or nothing for a change.
    fn xattr(&self, node: u64, ask: &Xattr, by: &Caller) -> TreeResult<Vec<u8>>;
    /// The space of the file system.
    fn space(&self, uid: u32) -> TreeResult<FsSpace>;
    /// Opens a file.
    fn open(&self, node: u64, access: OpenMode, by: &Caller) -> TreeResult<Arc<dyn OpenFile>>;
}

/// The error number of an I/O error.
#[must_use]
pub fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
