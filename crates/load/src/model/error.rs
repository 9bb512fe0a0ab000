//! Why files do not make up a model.

use std::path::Path;

/// What does not fit together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No file at all.
    #[error("no file was named")]
    Nothing,
    /// A directory without a model.
    #[error("{directory} holds no *.safetensors.index.json, no *.safetensors and no *.gguf{instead}")]
    Empty {
        /// Which.
        directory: String,
        /// What it holds instead, and what to do.
        instead: String,
    },
    /// A directory with several models.
    #[error("{directory} holds several models ({}); name one of them", names.join(", "))]
    Several {
        /// Which.
        directory: String,
        /// Some of their names.
        names: Vec<String>,
    },
    /// A directory whose files are more than one model, as far as their names tell.
    #[error("{directory} holds files that need not belong together ({}); name those of one model", choices.join(", "))]
    Apart {
        /// Which.
        directory: String,
        /// Some of the models that they may be.
        choices: Vec<String>,
    },
    /// A tensor in two files.
    #[error("the tensor {tensor:?} is in {} and in {}; name the files that belong together", files[0], files[1])]
    TwoFiles {
        /// Which tensor.
        tensor: String,
        /// The files.
        files: [String; 2],
    },
    /// Files of two formats.
    #[error("{file} is {other}, but the files before it are {format}")]
    Mixed {
        /// The format of the first.
        format: &'static str,
        /// The one that differs.
        file: String,
        /// Its format.
        other: &'static str,
    },
    /// A part of a split file is not there.
    #[error("the model is split into {count} parts, but {why}")]
    MissingPart {
        /// Which.
        part: String,
        /// How many there are.
        count: u64,
        /// Why it cannot be opened.
        why: Box<crate::Error>,
    },
    /// The parts together have too few tensors, or too many.
    #[error(
        "the parts of the model hold {found} tensors together, but {part} has {said} for its split.tensors.count"
    )]
    TensorsMissing {
        /// The part that tells another number.
        part: String,
        /// What it says.
        said: String,
        /// What there is.
        found: u64,
    },
    /// A part of a split file that has no name of one, so that nobody knows the others.
    #[error(
        "{part} is one of {count} parts by its split.count, and should be named like NAME-00001-of-{count:05}.gguf"
    )]
    LonePart {
        /// Which.
        part: String,
        /// How many there are.
        count: u64,
    },
    /// A part of another format.
    #[error("{part} has the name of a part of a split GGUF file, but is none")]
    NoGguf {
        /// Which.
        part: String,
    },
    /// A part that is another than its name says.
    #[error("{part} should be part {no} of {count} by its name (from 0), but its split.no is {} and its split.count {}", said_as(said.0), said_as(said.1))]
    WrongPart {
        /// Which.
        part: String,
        /// Its number by its name.
        no: u64,
        /// The count by its name.
        count: u64,
        /// What it says itself.
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
