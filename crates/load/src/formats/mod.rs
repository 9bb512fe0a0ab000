//! The formats of model files, and what they have in common.

pub mod gguf;
pub mod index;
mod other;
pub mod safetensors;

use std::collections::HashSet;

use serde::Serialize;

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::source::Source;

/// Size limit of a header in bytes: that of the safetensors reference, used for GGUF and indexes as well.
pub const MAX_HEADER: u64 = 100_000_000;

/// A tensor as described by its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorInfo {
    /// Its name, unique in the model.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its dimensions, slowest first, in all formats.
    pub shape: Vec<u64>,
    /// Offset of its first byte in the file.
    pub offset: u64,
    /// Its size.
    pub bytes: u64,
}

/// The rest of a header, in the order of the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Metadata {
    /// Text values by name.
    Safetensors(Vec<(String, String)>),
    /// Values by name.
    Gguf(Vec<(String, gguf::Value)>),
}

/// A file's tensors and metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Contents {
    /// A safetensors file.
    Safetensors(safetensors::Header),
    /// A GGUF file.
    Gguf(gguf::Header),
}

impl Contents {
    /// Reads the header of `file`, whose first bytes decide the format.
    ///
    /// # Errors
    /// When the file cannot be read, or its header is refused.
    pub fn read(file: &dyn Source) -> Result<Self> {
        let mut magic = [0; 4];
        if file.bytes() >= 4 {
            file.read_at(0, &mut magic)?;
        }
        if magic == *gguf::MAGIC {
            gguf::read(file).map(Self::Gguf)
        } else {
            safetensors::read(file).map(Self::Safetensors)
        }
    }

    /// The name of the format.
    #[must_use]
    pub fn format(&self) -> &'static str {
        match self {
            Self::Safetensors(_) => "safetensors",
            Self::Gguf(_) => "gguf",
        }
    }

    /// The tensors, in the order of their bytes.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        match self {
            Self::Safetensors(header) => &header.tensors,
            Self::Gguf(header) => &header.tensors,
        }
    }

    pub(crate) fn into_parts(self) -> (Vec<TensorInfo>, Metadata) {
        match self {
            Self::Safetensors(header) => (header.tensors, Metadata::Safetensors(header.metadata)),
            Self::Gguf(header) => (header.tensors, Metadata::Gguf(header.metadata)),
        }
    }
}

/// Reads `bytes` bytes at `offset`. The caller has checked them against the length of the file and a limit.
fn fetch(file: &dyn Source, offset: u64, bytes: u64) -> Result<Vec<u8>> {
    let room = usize::try_from(bytes).ok().filter(|n| *n as u64 <= MAX_HEADER + 8);
    let mut buffer = vec![0; room.ok_or_else(|| Error::too_long(file.name(), bytes, MAX_HEADER))?];
    file.read_at(offset, &mut buffer)?;
    Ok(buffer)
}

/// The first name that occurs twice.
fn first_duplicate<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut seen = HashSet::new();
    names.into_iter().find(|name| !seen.insert(*name))
}
