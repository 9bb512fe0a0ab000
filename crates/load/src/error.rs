//! Errors of model files and plans.

use crate::formats::{gguf, index, safetensors};
use crate::identity::Change;
use crate::{manifest, plan};

/// The result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model cannot be loaded as requested. A variant names the file and, in its source, the violated rule.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file could not be opened.
    #[error("{file} cannot be opened: {source}")]
    Open {
        /// The file.
        file: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A loop of symbolic links.
    #[error("{file} cannot be opened: its symbolic links form a loop")]
    Loop {
        /// The file.
        file: String,
    },
    /// Not a regular file.
    #[error("{file} is {what}, not a regular file")]
    NotRegular {
        /// The file.
        file: String,
        /// Its kind.
        what: &'static str,
    },
    /// A directory with too many names.
    #[error("{directory} holds more than {most} names; name the model's file instead")]
    Crowded {
        /// The directory.
        directory: String,
        /// The limit.
        most: usize,
    },
    /// A read failed.
    #[error("{file}: reading {bytes} bytes at {offset} failed: {source}")]
    Read {
        /// The file.
        file: String,
        /// Offset.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file ended too early.
    #[error(
        "{file} ends within the {bytes} bytes at {offset}, though it was {length} bytes long when it was opened: it shrank while it was read"
    )]
    Ended {
        /// The file.
        file: String,
        /// Offset.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
        /// Its length when it was opened.
        length: u64,
    },
    /// The file has changed.
    #[error("{file} changed while it was loaded: {change}")]
    Changed {
        /// The file.
        file: String,
        /// The change.
        change: Change,
    },
    /// A JSON file or a header exceeds the size limit.
    #[error("{file}: {bytes} bytes are more than the {most} that are read of a header or an index")]
    TooLong {
        /// The file.
        file: String,
        /// Its length.
        bytes: u64,
        /// The limit.
        most: u64,
    },
    /// A safetensors header is refused.
    #[error("{file} is not a safetensors file that can be loaded: {why}")]
    Safetensors {
        /// The file.
        file: String,
        /// The violated rule.
        #[source]
        why: safetensors::Error,
    },
    /// A GGUF header is refused.
    #[error("{file} is not a GGUF file that can be loaded: {why}")]
    Gguf {
        /// The file.
        file: String,
        /// The violated rule.
        #[source]
        why: gguf::Error,
    },
    /// An index is refused, or contradicts its shards.
    #[error("{file}: {why}")]
    Index {
        /// The file.
        file: String,
        /// The violated rule.
        #[source]
        why: index::Error,
    },
    /// The files are not one model.
    #[error("{0}")]
    Model(#[from] crate::model::Error),
    /// A plan cannot be made.
    #[error("{0}")]
    Plan(#[from] plan::Error),
    /// The engine returned its last chunk, but tensors are missing.
    #[error("the engine ended before all tensors had arrived; this is a defect of onehop")]
    Incomplete,
    /// The GPU failed, or refused a request.
    #[error(transparent)]
    Gpu(#[from] onehop_gpu::Error),
    /// Neither the disk nor the GPU responded.
    #[error(
        "nothing has arrived for {waited:?}: the disk or server that has the files, or the GPU, does not answer; the kernel's log may say which"
    )]
    Stalled {
        /// How long the load waited.
        waited: std::time::Duration,
    },
    /// The given memory does not suit the tensors.
    #[error(
        "the tensors take {bytes} bytes at a multiple of {align}; the GPU memory for them is {there} bytes at {at:#x}"
    )]
    Arena {
        /// Required bytes.
        bytes: u64,
        /// Required alignment.
        align: u64,
        /// Available bytes.
        there: u64,
        /// Its address.
        at: u64,
    },
    /// The caller cancelled.
    #[error("it was cancelled before it was done")]
    Cancelled,
    /// A thread could not be started.
    #[error("no thread to read with could be started: {0}")]
    Thread(std::io::Error),
    /// Not a file of this machine.
    #[error("{file} is not a local file, which this route needs")]
    NoFile {
        /// The file.
        file: String,
    },
    /// An invalid address.
    #[error("{file}: {why}")]
    Address {
        /// The address.
        file: String,
        /// The reason.
        why: String,
    },
    /// A server did not return the data.
    #[error("{file}: the server did not return it in {tries} tries: {source}")]
    Server {
        /// The address.
        file: String,
        /// Number of attempts.
        tries: u32,
        /// The last error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A server is too slow.
    #[error("{file}: the server has not returned all of it after {waited:?}")]
    Slow {
        /// The address.
        file: String,
        /// How long the load waited.
        waited: std::time::Duration,
    },
    /// An object has changed on its server.
    #[error("{file} changed on its server while it was loaded: it was {was}, and is {now}")]
    ChangedOnServer {
        /// The address.
        file: String,
        /// Its former identity.
        was: String,
        /// Its present identity.
        now: String,
    },
    /// The file's place on a drive is unknown.
    #[error("{file} is not on a drive that onehop drives, which this route reads")]
    NoPlaces {
        /// The file.
        file: String,
    },
    /// A file on a drive does not exist, or cannot be read.
    #[error("{file}: {why}")]
    OnDrive {
        /// The file.
        file: String,
        /// The reason.
        #[source]
        why: onehop_files::Error,
    },
    /// No extent map has it.
    #[error("{file} is in none of the extent maps; map it too, while its file system is mounted")]
    NotMapped {
        /// The file.
        file: String,
    },
    /// Two extent maps are of the same file.
    #[error("two of the extent maps are of {file}")]
    MappedTwice {
        /// The file.
        file: String,
    },
    /// The file cannot be read past the page cache.
    #[error("{file} cannot be read past the page cache: {why}")]
    NotDirect {
        /// The file.
        file: String,
        /// The reason.
        why: String,
    },
    /// cuFile refused a request.
    #[error("cuFile cannot be used for {what}: {why}")]
    NotByCuFile {
        /// What it refused.
        what: String,
        /// The reason.
        why: String,
    },
    /// A group of processes did not come together.
    #[error("group {name:?}: {why}")]
    Group {
        /// Its name.
        name: String,
        /// The reason.
        why: String,
    },
    /// Another process of the group has ended the load.
    #[error("group {group:?}: rank {rank} (process {pid}): {why}")]
    Rank {
        /// The group's name.
        group: String,
        /// That process's rank.
        rank: usize,
        /// Its number.
        pid: i32,
        /// The reason.
        why: String,
    },
    /// A manifest is refused, or contradicts the model.
    #[error("{file}: {why}")]
    Manifest {
        /// The file.
        file: String,
        /// What is wrong.
        #[source]
        why: manifest::Error,
    },
}

impl Error {
    /// Whether copies by the GPU may still be under way after this.
    pub(crate) fn is_under_way(&self) -> bool {
        matches!(self, Self::Gpu(error) if error.is_under_way())
    }

    /// Whether the name does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Open { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    }

    /// Whether this process has reached its limit of open files.
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
