//! What can go wrong with model files and plans.

use crate::formats::{gguf, index, safetensors};
use crate::identity::Change;
use crate::{manifest, plan};

/// The result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model cannot be loaded as asked. A variant names the file and, below it, the rule.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It could not be opened.
    #[error("{file} cannot be opened: {source}")]
    Open {
        /// Which.
        file: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Symbolic links lead nowhere.
    #[error("{file} cannot be opened: its symbolic links lead in a circle")]
    Loop {
        /// Which.
        file: String,
    },
    /// It is no regular file.
    #[error("{file} is {what}, not a regular file")]
    Odd {
        /// Which.
        file: String,
        /// What it is.
        what: &'static str,
    },
    /// A directory holds too much.
    #[error("{directory} holds more than {most} names; name the model's file instead")]
    Crowded {
        /// Which.
        directory: String,
        /// The limit.
        most: usize,
    },
    /// The system failed to read.
    #[error("{file}: reading {bytes} bytes at {offset} failed: {source}")]
    Read {
        /// Which.
        file: String,
        /// Where.
        offset: u64,
        /// How many.
        bytes: u64,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file ended before the bytes did.
    #[error(
        "{file} ends within the {bytes} bytes at {offset}, though it was {length} bytes long when it was opened: it shrank while it was read"
    )]
    Ended {
        /// Which.
        file: String,
        /// Where.
        offset: u64,
        /// How many.
        bytes: u64,
        /// Its length when it was opened.
        length: u64,
    },
    /// The file is not what it was.
    #[error("{file} changed while it was loaded: {change}")]
    Changed {
        /// Which.
        file: String,
        /// How.
        change: Change,
    },
    /// A JSON file or a header is longer than any that is read.
    #[error("{file}: {bytes} bytes are more than the {most} that are read of a header or an index")]
    TooLong {
        /// Which.
        file: String,
        /// How long.
        bytes: u64,
        /// The limit.
        most: u64,
    },
    /// A safetensors header is refused.
    #[error("{file} is no safetensors file that can be loaded: {why}")]
    Safetensors {
        /// Which.
        file: String,
        /// The rule that it breaks.
        #[source]
        why: safetensors::Error,
    },
    /// A GGUF header is refused.
    #[error("{file} is no GGUF file that can be loaded: {why}")]
    Gguf {
        /// Which.
        file: String,
        /// The rule that it breaks.
        #[source]
        why: gguf::Error,
    },
    /// An index is refused, or does not agree with its shards.
    #[error("{file}: {why}")]
    Index {
        /// Which.
        file: String,
        /// The rule that it breaks.
        #[source]
        why: index::Error,
    },
    /// Files that do not make up one model.
    #[error("{0}")]
    Model(#[from] crate::model::Error),
    /// A plan cannot be made.
    #[error("{0}")]
    Plan(#[from] plan::Error),
    /// The engine has no more chunks, but tensors are missing.
    #[error("the engine ended before all tensors had arrived; this is a defect of onehop")]
    Incomplete,
    /// The GPU failed, or will not have what it is given.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// Neither the disk nor the GPU answered.
    #[error(
        "nothing has arrived for {waited:?}: the disk or server that has the files, or the GPU, does not answer; the kernel's log may say which"
    )]
    Stalled {
        /// How long that was waited for.
        waited: std::time::Duration,
    },
    /// Memory that was given for the tensors does not suit them.
    #[error(
        "the tensors take {bytes} bytes at a multiple of {align}; the GPU memory that was given for them is {there} bytes at {at:#x}"
    )]
    Arena {
        /// What they take.
        bytes: u64,
        /// What its address must be a multiple of.
        align: u64,
        /// What there is.
        there: u64,
        /// Its address.
        at: u64,
    },
    /// Whoever asked for it did not want to wait any longer.
    #[error("it was given up before it was done")]
    Cancelled,
    /// The system gave no thread.
    #[error("this machine gave no thread to read with: {0}")]
    Thread(std::io::Error),
    /// It is no file of this machine.
    #[error("{file} is no file of this machine, which this route reads")]
    NoFile {
        /// Which.
        file: String,
    },
    /// An address leads nowhere.
    #[error("{file}: {why}")]
    Address {
        /// Which.
        file: String,
        /// Why not.
        why: String,
    },
    /// A server does not give what it was asked for.
    #[error("{file}: the server did not give it, in {tries} tries: {source}")]
    Server {
        /// Which.
        file: String,
        /// How often it was asked.
        tries: u32,
        /// What went wrong the last time.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A server is too slow to be waited for.
    #[error("{file}: the server has not given all of it after {waited:?}")]
    Slow {
        /// Which.
        file: String,
        /// How long that was waited for.
        waited: std::time::Duration,
    },
    /// What a server has is not what it had.
    #[error("{file} changed on its server while it was loaded: it was {was}, and is {now}")]
    ChangedOnServer {
        /// Which.
        file: String,
        /// What it was known by.
        was: String,
        /// What it is now.
        now: String,
    },
    /// Nobody knows where on a drive it is.
    #[error("{file} is not on a drive that onehop drives, which this route reads")]
    NoPlaces {
        /// Which.
        file: String,
    },
    /// A file on a drive is not there, or cannot be read.
    #[error("{file}: {why}")]
    OnDrive {
        /// Which.
        file: String,
        /// Why not.
        #[source]
        why: onehop_files::Error,
    },
    /// No extent map tells of it.
    #[error("{file} is in none of the extent maps; map it too, while its file system is mounted")]
    NotMapped {
        /// Which.
        file: String,
    },
    /// Two extent maps are of one file.
    #[error("two of the extent maps are of {file}")]
    MappedTwice {
        /// Which.
        file: String,
    },
    /// It cannot be read past the page cache.
    #[error("{file} cannot be read past the page cache: {why}")]
    NotDirect {
        /// Which.
        file: String,
        /// Why not.
        why: String,
    },
    /// NVIDIA's library will not have it.
    #[error("cuFile cannot be used for {what}: {why}")]
    NotByCuFile {
        /// What.
        what: String,
        /// Why not.
        why: String,
    },
    /// A manifest is refused, or says otherwise.
    #[error("{file}: {why}")]
    Manifest {
        /// Which.
        file: String,
        /// What is wrong.
        #[source]
        why: manifest::Error,
    },
}

impl Error {
    /// Whether it is that there is nothing of this name.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Open { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    }

    /// Whether it is that this process has as many files open as it may.
    #[must_use]
    pub fn is_out_of_descriptors(&self) -> bool {
        const EMFILE: i32 = rustix::io::Errno::MFILE.raw_os_error();
        match self {
            Self::Open { source, .. } => source.raw_os_error() == Some(EMFILE),
            Self::Index { why: index::Error::MissingShard { why, .. }, .. }
            | Self::Model(crate::model::Error::MissingPart { why, .. }) => why.is_out_of_descriptors(),
            _ => false,
        }
    }

    pub(crate) fn too_long(file: &str, bytes: u64, most: u64) -> Self {
        Self::TooLong { file: file.into(), bytes, most }
    }
}
