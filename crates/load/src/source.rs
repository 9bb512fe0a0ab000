//! Where the bytes of a model come from: the seam behind which local files, drives and servers stand.

use std::path::Path;

use onehop_files::Extent;

use crate::error::Result;
use crate::identity::Identity;
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

    /// What a later look is compared with, where the source can tell.
    fn identity(&self) -> Option<Identity> {
        None
    }

    /// Whether it is still what it was when it was opened.
    ///
    /// # Errors
    /// When it is not, with what has changed, or when nobody can tell any more.
    fn still_same(&self) -> Result<()> {
        Ok(())
    }
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

    /// The names in a directory.
    ///
    /// # Errors
    /// When it cannot be read.
    fn names(&self, path: &Path) -> Result<Vec<String>>;

    /// Opens a file to be read.
    ///
    /// # Errors
    /// When there is none, or it cannot be opened.
    fn open(&self, path: &Path) -> Result<Box<dyn Source>>;
}
