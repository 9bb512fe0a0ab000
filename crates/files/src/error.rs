//! Errors of this crate.

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a file, a file system or a table could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The drive or the image could not be read.
    #[error("reading {len} bytes at byte {offset}: {source}")]
    Read {
        /// Byte offset on the drive.
        offset: u64,
        /// Number of bytes.
        len: usize,
        /// The drive's error.
        source: std::io::Error,
    },
    /// A table or file system violates its own format.
    #[error("the {what} is damaged: {why}")]
    Damaged {
        /// Which table or file system.
        what: &'static str,
        /// Where, and which rule.
        why: String,
    },
    /// The drive uses a feature or file system that onehop cannot read.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// Name of the feature or file system.
        what: String,
        /// The reason, with what to do instead.
        why: String,
    },
    /// The file system has changes that are not yet in their final place.
    #[error("the {what} was not left clean: {why}")]
    Dirty {
        /// Which file system.
        what: &'static str,
        /// What was found, and how to fix it.
        why: String,
    },
    /// Neither a known file system nor a known partition table.
    #[error("no file system found: {0}")]
    NoFileSystem(String),
    /// The requested partition does not exist, or none was requested and there are several.
    #[error("which partition? {0}")]
    WhichPartition(String),
    /// No entry of this name.
    #[error("{path}: there is no `{name}` on the {fs} volume")]
    NotFound {
        /// The whole path.
        path: String,
        /// The component that was not found.
        name: String,
        /// Which file system.
        fs: &'static str,
    },
    /// The path names a file of another kind.
    #[error("{path} is a {is}, not a {wanted}")]
    WrongKind {
        /// The path.
        path: String,
        /// What it is.
        is: &'static str,
        /// What was expected.
        wanted: &'static str,
    },
    /// A file or drive has changed, or is another one.
    #[error("{what} has changed: {why}")]
    Changed {
        /// What has changed.
        what: String,
        /// Its present and its recorded state.
        why: String,
    },
    /// A system call or a file of the system failed.
    #[error("{what}: {source}")]
    System {
        /// What failed.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The kernel did not report something about a file or device.
    #[error("{path}: {source}")]
    Kernel {
        /// The file.
        path: String,
        /// The failed call and its error.
        source: onehop_os::Error,
    },
    /// A file of a mounted file system that cannot be read block by block.
    #[error("{path} cannot be read block by block: {why}")]
    NotByBlocks {
        /// The file.
        path: String,
        /// The reason, and how to change it.
        why: String,
    },
    /// The file's bytes do not start on a block boundary of the drive.
    #[error(
        "the file's bytes from {first} on start at byte {position} of the drive, within a block of {block}: use a drive \
         whose blocks are no larger than the file system's"
    )]
    WithinBlock {
        /// Offset in the file.
        first: u64,
        /// Byte offset on the drive.
        position: u64,
        /// Block size of the drive.
        block: u64,
    },
    /// A loop of symbolic links, or too long a chain.
    #[error("{path}: more than {most} symbolic links to follow")]
    TooManyLinks {
        /// The path.
        path: String,
        /// The limit.
        most: u32,
    },
}

impl Error {
    pub(crate) fn damaged(what: &'static str, why: impl Into<String>) -> Self {
        Self::Damaged { what, why: why.into() }
    }

    pub(crate) fn unsupported(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), why: why.into() }
    }
}
