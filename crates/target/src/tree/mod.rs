//! The seam between who asks for files and who has them: a folder of this machine ([`Folder`]), or of another
//! ([`crate::client::RemoteTree`]).
//!
//! Files are known by numbers, which are told by `lookup`, `make` and `create`, and stay good until they are forgotten as often.

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
use rustix::io::Errno;

pub use folder::{Folder, FolderRules};
pub use local::Local;
pub use nodes::Forgotten;

use crate::transport::Shareable;
use crate::wire::{Attr, AttrChange, Caller, FileKind, FsSpace, Make, Name, OpenMode, Xattr};

/// What came of it, or why not, as Linux says it.
pub type TreeResult<T> = Result<T, Errno>;

/// Numbers from here on are given to files of other file systems below the root, whose own numbers may be taken.
pub const FOREIGN: u64 = 1 << 48;

/// Some names in a folder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FolderNames {
    /// Number in its file system, kind, where to go on behind it, and name.
    pub names: Vec<(u64, FileKind, u64, Vec<u8>)>,
    /// Where to go on; none at the end.
    pub next: Option<u64>,
}

/// Memory for a transfer.
#[derive(Clone, Copy)]
pub struct TransferMemory<'a> {
    /// The memory.
    pub mem: &'a HostMem,
    /// Where in it.
    pub at: usize,
    /// How long.
    pub len: usize,
    /// Whether others may write it, or cut it short, at any moment.
    pub shared: bool,
}

/// Which way bytes come to this machine, and why not a straighter one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Via {
    /// `tcp`, `rdma`.
    pub transport: &'static str,
    /// Why they go through host memory; empty where they need not.
    pub why: String,
    /// What would change that.
    pub fix: String,
}

/// A file that is open. Transfers go to and from memory that others may write at the same time, so they are never made through slices.
pub trait OpenFile: Send + Sync {
    /// Reads what can be had without waiting: none where that is nothing, or not known.
    ///
    /// # Errors
    /// When the memory is gone, or the file cannot be read.
    fn read_now(&self, to: TransferMemory<'_>, at: u64) -> io::Result<Option<usize>>;

    /// Reads; gives how many bytes there were before the file's end.
    ///
    /// # Errors
    /// As for [`Self::read_now`].
    fn read(&self, to: TransferMemory<'_>, at: u64) -> io::Result<usize>;

    /// Writes; gives how many bytes were written.
    ///
    /// # Errors
    /// When the memory is gone, or the file cannot be written.
    fn write(&self, from: TransferMemory<'_>, at: u64) -> io::Result<usize>;

    /// Reads into memory of this process.
    ///
    /// # Errors
    /// When the file cannot be read.
    fn read_bytes(&self, to: &mut [u8], at: u64) -> io::Result<usize>;

    /// Writes memory of this process.
    ///
    /// # Errors
    /// When the file cannot be written.
    fn write_bytes(&self, from: &[u8], at: u64) -> io::Result<usize>;

    /// Writes memory of this process behind the file's end, wherever that is by then, whoever else writes there.
    ///
    /// # Errors
    /// When the file cannot be written.
    fn append_bytes(&self, from: &[u8]) -> io::Result<usize>;

    /// Reads straight into memory, of a GPU perhaps, without this machine's processor. None where that cannot be.
    ///
    /// # Errors
    /// As for [`Self::read_now`].
    fn read_direct(&self, to: &Shareable, range: Range<usize>, at: u64) -> io::Result<Option<usize>> {
        let _ = (to, range, at);
        Ok(None)
    }

    /// Writes straight out of such memory. None where that cannot be.
    ///
    /// # Errors
    /// As for [`Self::write`].
    fn write_direct(&self, from: &Shareable, range: Range<usize>, at: u64) -> io::Result<Option<usize>> {
        let _ = (from, range, at);
        Ok(None)
    }

    /// Whether there is a hole in a range, before the file's end.
    ///
    /// # Errors
    /// When that cannot be told.
    fn has_hole(&self, at: u64, bytes: u64) -> io::Result<bool>;

    /// Whether reading a range past the caches of this machine is worth it, as most of it is not there.
    fn is_cold(&self, at: u64, bytes: u64) -> bool;

    /// Reads past the caches of this machine into page-aligned memory; the range is whole pages. None where that cannot be.
    ///
    /// # Errors
    /// As for [`Self::read_now`].
    fn read_past(&self, to: TransferMemory<'_>, at: u64) -> io::Result<Option<usize>>;

    /// Has what was written on the disk.
    ///
    /// # Errors
    /// When that failed, now or since it was asked for last.
    fn sync(&self, data_only: bool) -> io::Result<()>;

    /// Takes away what has it run with rights of its owner.
    ///
    /// # Errors
    /// When the file system refuses.
    fn drop_set_id(&self) -> io::Result<()>;

    /// Makes it longer or shorter.
    ///
    /// # Errors
    /// When the file system refuses.
    fn set_len(&self, bytes: u64) -> io::Result<()>;

    /// Makes room, or holes; `mode` as for `fallocate`.
    ///
    /// # Errors
    /// When the file system refuses.
    fn allocate(&self, mode: u32, at: u64, bytes: u64) -> io::Result<()>;

    /// The next hole, or the next data.
    ///
    /// # Errors
    /// When there is none, or it cannot be told.
    fn seek(&self, at: u64, hole: bool) -> io::Result<u64>;

    /// The file itself, where it is one of this machine.
    fn local(&self) -> Option<&File> {
        None
    }

    /// Which way its bytes come from another machine; none where they are of this one.
    fn via(&self) -> Option<Via> {
        None
    }
}

/// A folder and all that is below it. Each operation is done with the rights of its caller. Those that have a user's number only
/// (`uid`) give nothing away that who knows a file's number has not been given; they count for that user.
#[expect(clippy::missing_errors_doc, reason = "each call fails as the call of Linux does that does the same")]
pub trait Tree: Send + Sync {
    /// Looks a name up.
    fn lookup(&self, parent: u64, name: &Name, by: &Caller) -> TreeResult<Attr>;
    /// A number that was told so many times is not needed any more. Gives what was held for it.
    fn forget(&self, node: u64, times: u64) -> Forgotten;
    /// What is known of a file.
    fn attr(&self, node: u64, uid: u32) -> TreeResult<Attr>;
    /// Changes attributes. A change of none is one of owner to the same owner: it takes set-id bits away, if the caller may.
    fn change(&self, node: u64, change: &AttrChange, by: &Caller) -> TreeResult<Attr>;
    /// What a symbolic link says.
    fn read_link(&self, node: u64, uid: u32) -> TreeResult<Vec<u8>>;
    /// Makes something that is not opened.
    fn make(&self, parent: u64, name: &Name, make: &Make, by: &Caller) -> TreeResult<Attr>;
    /// Makes a file and opens it; unless it has to be new, one that is there is opened.
    fn create(
        &self,
        parent: u64,
        name: &Name,
        mode: u32,
        access: OpenMode,
        exclusive: bool,
        by: &Caller,
    ) -> TreeResult<(Attr, Arc<dyn OpenFile>)>;
    /// Takes a name away.
    fn remove(&self, parent: u64, name: &Name, folder: bool, by: &Caller) -> TreeResult<()>;
    /// Gives something another name; `flags` as for `renameat2`.
    fn rename(&self, from: (u64, &Name), to: (u64, &Name), flags: u32, by: &Caller) -> TreeResult<()>;
    /// Gives a file one more name.
    fn link(&self, node: u64, parent: u64, name: &Name, by: &Caller) -> TreeResult<Attr>;
    /// Some of the names in a folder, from a place on.
    fn list(&self, node: u64, from: u64, by: &Caller) -> TreeResult<FolderNames>;
    /// Has a folder's names on the disk.
    fn sync_folder(&self, node: u64, uid: u32) -> TreeResult<()>;
    /// What an extended attribute says, or the names of all; nothing where something is changed.
    fn xattr(&self, node: u64, ask: &Xattr, by: &Caller) -> TreeResult<Vec<u8>>;
    /// How much room there is.
    fn space(&self, uid: u32) -> TreeResult<FsSpace>;
    /// Opens a file.
    fn open(&self, node: u64, access: OpenMode, by: &Caller) -> TreeResult<Arc<dyn OpenFile>>;
}

/// The number for an error of a file.
#[must_use]
pub fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
