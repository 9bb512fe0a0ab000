//! What can go wrong between a path and the places of its bytes.

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a file, a file system or a table could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The drive or the image could not be read.
    #[error("reading {len} bytes at byte {offset}: {source}")]
    Read {
        /// Where on the drive.
        offset: u64,
        /// How much.
        len: usize,
        /// What the drive said.
        source: std::io::Error,
    },
    /// Something on the drive contradicts its own rules.
    #[error("the {what} is damaged: {why}")]
    Damaged {
        /// Which table or file system.
        what: &'static str,
        /// Where, and which rule.
        why: String,
    },
    /// Something on the drive that is not read here.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// The feature or file system, by its name.
        what: String,
        /// The reason, with what to do instead.
        why: String,
    },
    /// The file system has changes that are not where they belong yet.
    #[error("the {what} was not left clean: {why}")]
    Dirty {
        /// Which file system.
        what: &'static str,
        /// What was seen, with what would mend it.
        why: String,
    },
    /// Neither a file system nor a partition table that is known.
    #[error("no file system found: {0}")]
    NoFileSystem(String),
    /// The partition that was asked for is not there, or none was named and there are several.
    #[error("which partition? {0}")]
    WhichPartition(String),
    /// There is nothing of this name.
    #[error("{path}: there is no `{name}` on the {fs} volume")]
    NotFound {
        /// The whole path.
        path: String,
        /// The name in it that was not found.
        name: String,
        /// Which file system.
        fs: &'static str,
    },
    /// Something else was wanted at this path.
    #[error("{path} is a {is}, not a {wanted}")]
    WrongKind {
        /// The path.
        path: String,
        /// What it is.
        is: &'static str,
        /// What was wanted.
        wanted: &'static str,
    },
    /// A file or drive is another one than before, or was changed.
    #[error("{what} is not as it was: {why}")]
    Changed {
        /// What has changed.
        what: String,
        /// How it is now, and how it was.
        why: String,
    },
    /// A system call or a file of the system failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The kernel did not tell something of a file or device.
    #[error("{path}: {source}")]
    Kernel {
        /// The file.
        path: String,
        /// Which call failed, and how.
        source: onehop_os::Error,
    },
    /// A live file that cannot be read by its blocks.
    #[error("{path} cannot be read by its blocks: {why}")]
    NotByBlocks {
        /// The file.
        path: String,
        /// The reason, with what would change it.
        why: String,
    },
    /// A file that no whole blocks of the drive hold.
    #[error(
        "the file's bytes from {first} on start at byte {position} of the drive, within a block of {block}: use a drive \
         whose blocks are no larger than the file system's"
    )]
    WithinBlock {
        /// The byte of the file.
        first: u64,
        /// Where it is on the drive.
        position: u64,
        /// Bytes of the drive's blocks.
        block: u64,
    },
    /// Symbolic links that lead in a circle, or nearly.
    #[error("{path}: more than {most} symbolic links to follow")]
    TooManyLinks {
        /// The path.
        path: String,
        /// How many are followed.
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
