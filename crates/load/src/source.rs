//! The source of a model's bytes: the seam to local files, drives and servers.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use onehop_files::Extent;

use crate::error::Result;
use crate::identity::{Change, Identity};
use crate::local::LocalFile;

/// A file that can be read at any offset.
pub trait Source: Send + Sync {
    /// Its name in messages.
    fn name(&self) -> &str;

    /// Its length.
    fn bytes(&self) -> u64;

    /// Fills `buffer` with the bytes from `offset` on.
    ///
    /// # Errors
    /// When they cannot be read, or the file ends before the buffer is full.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()>;

    /// The local file, for routes that open it themselves.
    fn local(&self) -> Option<&LocalFile> {
        None
    }

    /// Its extents on a drive, for routes that drive it.
    fn extents(&self) -> Option<&[Extent]> {
        None
    }

    /// Reads from a server, for routes that fill their own memory.
    fn fetch(&self) -> Option<Arc<dyn Fetch>> {
        None
    }

    /// Its state, to be compared later, if the source has one.
    fn identity(&self) -> Option<Identity> {
        None
    }

    /// Checks that its bytes have not changed since it was opened, and returns any other change.
    ///
    /// # Errors
    /// When they have changed, or that can no longer be determined.
    fn still_same(&self) -> Result<Option<Change>> {
        Ok(None)
    }
}

/// A file on a server.
pub trait Fetch: Send + Sync {
    /// Reads `bytes` bytes from `offset` on, and passes them to `take` as they arrive, with their offset among these
    /// bytes. Returns the number of retries. `go_on` is called regularly.
    ///
    /// # Errors
    /// When they do not arrive in time, or the file has changed.
    fn fetch(
        &self,
        offset: u64,
        bytes: u64,
        go_on: &dyn Fn() -> bool,
        take: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<u64>;
}

/// The kind of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file.
    File,
    /// A directory.
    Directory,
}

/// Files by path: the local file system, a drive's, or a server.
pub trait Store {
    /// The kind of `path`.
    ///
    /// # Errors
    /// When it does not exist, or cannot hold a model.
    fn kind(&self, path: &Path) -> Result<Kind>;

    /// The names in a directory, which may be any bytes.
    ///
    /// # Errors
    /// When it cannot be read.
    fn names(&self, path: &Path) -> Result<Vec<OsString>>;

    /// Opens a file for reading.
    ///
    /// # Errors
    /// When it does not exist, or cannot be opened.
    fn open(&self, path: &Path) -> Result<Box<dyn Source>>;
}
