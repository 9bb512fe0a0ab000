//! Errors of combining files to a model.

use std::path::Path;

/// Why files are not one model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No file was named.
    #[error("no file was named")]
    Nothing,
    /// A directory without a model.
    #[error("{directory} holds no *.safetensors.index.json, no *.safetensors and no *.gguf{instead}")]
    Empty {
        /// The directory.
        directory: String,
        /// What it contains instead, and what to do.
        instead: String,
    },
    /// A directory with several models.
    #[error("{directory} holds several models ({}); name one of them", names.join(", "))]
    Several {
        /// The directory.
        directory: String,
        /// Some of their names.
        names: Vec<String>,
    },
    /// A directory whose files may be several models, judging by their names.
    #[error("{directory} may contain several models ({}); name the files to load", choices.join(", "))]
    Apart {
        /// The directory.
        directory: String,
        /// Some of the possible models.
        choices: Vec<String>,
    },
    /// A tensor in two files.
    #[error("the tensor {tensor:?} is in {} and in {}; name the files that belong together", files[0], files[1])]
    TwoFiles {
        /// The tensor.
        tensor: String,
        /// The files.
        files: [String; 2],
    },
    /// Files of different formats.
    #[error("{file} is {other}, but the files before it are {format}")]
    Mixed {
        /// The format of the first file.
        format: &'static str,
        /// The file that differs.
        file: String,
        /// Its format.
        other: &'static str,
    },
    /// A part of a split file is missing.
    #[error("the model is split into {count} parts, but {why}")]
    MissingPart {
        /// The part.
        part: String,
        /// Number of parts.
        count: u64,
        /// Why it cannot be opened.
        why: Box<crate::Error>,
    },
    /// The parts have too few or too many tensors.
    #[error(
        "the parts of the model hold {found} tensors together, but {part} has {said} for its split.tensors.count"
    )]
    TensorsMissing {
        /// The part that states another number.
        part: String,
        /// What it states.
        said: String,
        /// The actual number.
        found: u64,
    },
    /// A part of a split file without a part's name, so the other parts are unknown.
    #[error(
        "{part} is one of {count} parts by its split.count, and should be named like NAME-00001-of-{count:05}.gguf"
    )]
    LonePart {
        /// The part.
        part: String,
        /// Number of parts.
        count: u64,
    },
    /// A part of another format.
    #[error("{part} is named like a part of a split GGUF file, but is not one")]
    NoGguf {
        /// The part.
        part: String,
    },
    /// A part that contradicts its name.
    #[error("{part} should be part {no} of {count} by its name (from 0), but its split.no is {} and its split.count {}", said_as(said.0), said_as(said.1))]
    WrongPart {
        /// The part.
        part: String,
        /// Its number according to its name.
        no: u64,
        /// Number of parts according to its name.
        count: u64,
        /// What it states.
        said: (Option<u64>, Option<u64>),
    },
}

impl Error {
    pub(super) fn apart(directory: &Path, choices: impl IntoIterator<Item = String>) -> Self {
        let choices = choices.into_iter().take(8).collect();
        Self::Apart { directory: directory.display().to_string(), choices }
    }
}

fn said_as(n: Option<u64>) -> String {
    n.map_or("missing".into(), |n| n.to_string())
}
