//! Errors of this crate.

use std::io;
use std::time::Duration;

/// Why pages were not moved.
#[derive(Debug, thiserror::Error)]
pub enum PagesError {
    /// The file could not be used.
    #[error("{0}")]
    File(#[source] io::Error),
    /// The file was opened for reading only.
    #[error("the file was opened for reading only")]
    ReadOnly,
    /// A page does not lie within its memory or the file. Nothing was moved.
    #[error("page {page} cannot be moved: {why}")]
    BadPage {
        /// Its number in the list.
        page: usize,
        /// The reason.
        why: String,
    },
    /// The file system refused a page.
    #[error("page {page}: {source}")]
    Page {
        /// Its number in the list.
        page: usize,
        /// The reason.
        source: io::Error,
    },
    /// The GPU failed.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// Nothing arrived for so long. What the disk is writing may be written later.
    #[error("no page has been moved for {0:?}: the disk that has the file, or the GPU, does not answer")]
    Stalled(Duration),
}

impl PagesError {
    /// The number of the page that it concerns, if that is known.
    #[must_use]
    pub fn page(&self) -> Option<usize> {
        match self {
            Self::BadPage { page, .. } | Self::Page { page, .. } => Some(*page),
            _ => None,
        }
    }
}
