//! Where the bytes of a model come from: the seam behind which local files, drives and servers stand.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use onehop_files::Extent;

use crate::error::Result;
use crate::identity::{Change, Identity};
use crate::local::LocalFile;

/// One file that can be read at any place.
pub trait Source: Send + Sync {
    /// What people know it by.
    fn name(&self) -> &str;

    /// How long it is.
    fn bytes(&self) -> u64;

    /// Fills `buffer` with the bytes from `offset` on.
    ///
    /// # Errors
    /// When they cannot be read, and when the file ends before the buffer is full.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()>;

    /// The file of this machine that it is, for routes that open it in their own way.
    fn local(&self) -> Option<&LocalFile> {
        None
    }

    /// Where its bytes are on the drive that holds it, for routes on which that drive is commanded.
    fn extents(&self) -> Option<&[Extent]> {
        None
    }

    /// What reads it from the server that has it, for routes that fill their own memory.
    fn fetch(&self) -> Option<Arc<dyn Fetch>> {
        None
    }

    /// What a later look is compared with, where the source can tell.
    fn identity(&self) -> Option<Identity> {
        None
    }

    /// Whether its bytes are still those that it had when it was opened, and what else has changed since.
    ///
    /// # Errors
    /// When they are not, with what has changed, or when nobody can tell any more.
    fn still_same(&self) -> Result<Option<Change>> {
        Ok(None)
    }
}

/// A file on a server.
pub trait Fetch: Send + Sync {
    /// Reads `bytes` bytes from `offset` on, and gives them to `take` as they come, with their place among these bytes. Tells
    /// how often something had to be tried again. `go_on` is asked now and then.
    ///
    /// # Errors
    /// When they cannot be had in time, or are not the file's any more.
    fn fetch(
        &self,
        offset: u64,
        bytes: u64,
        go_on: &dyn Fn() -> bool,
        take: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<u64>;
}

/// What a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file with bytes.
    File,
    /// A directory.
    Directory,
}

/// Files by path: the local file system, or that of a drive.
pub trait Store {
    /// What `path` leads to.
    ///
    /// # Errors
    /// When there is nothing, or something that no model is kept in.
    fn kind(&self, path: &Path) -> Result<Kind>;

    /// The names in a directory, which may be any bytes.
    ///
    /// # Errors
    /// When it cannot be read.
    fn names(&self, path: &Path) -> Result<Vec<OsString>>;

    /// Opens a file to be read.
    ///
    /// # Errors
    /// When there is none, or it cannot be opened.
    fn open(&self, path: &Path) -> Result<Box<dyn Source>>;
}
