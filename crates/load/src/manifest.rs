//! Checksums of a model's tensors, in a JSON file next to it.
//!
//! CRC-32C has hardware support in CPUs and parallelises on GPUs. It detects errors of storage and transfers, but not
//! deliberate changes.

mod json;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::Result;
use crate::dtype::Dtype;
use crate::formats::{MAX_HEADER, TensorInfo};
use crate::model::Model;
use crate::source::Source;

/// The version of the format.
const VERSION: u64 = 1;
/// Bytes read at a time for a checksum on the host.
const READ_BYTES: usize = 1 << 20;

/// The checksum of a tensor, and what else must match.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// The type of its elements.
    pub dtype: Dtype,
    /// The dimensions, slowest first.
    pub shape: Vec<u64>,
    /// How many bytes.
    pub bytes: u64,
    /// CRC-32C of the bytes.
    #[serde(serialize_with = "json::hex")]
    pub crc32c: u32,
}

/// The checksums of a model, by tensor name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// The entries.
    pub tensors: BTreeMap<String, Entry>,
}

/// What is wrong with a manifest, or what it reveals.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not JSON, or not in the form of a manifest.
    #[error("it is not the JSON of a manifest: {0}")]
    Json(serde_json::Error),
    /// Something is missing.
    #[error("{within} has no {key}")]
    Missing {
        /// What it is missing in.
        within: String,
        /// What is missing.
        key: &'static str,
    },
    /// A duplicate key.
    #[error("{within} has {key:?} twice")]
    Twice {
        /// The object that contains it.
        within: String,
        /// The key.
        key: String,
    },
    /// An unknown key.
    #[error("{within} has {key:?}, which does not belong there")]
    Unknown {
        /// The object that contains it.
        within: String,
        /// The key.
        key: String,
    },
    /// Another version.
    #[error("it is of version {0}; version {VERSION} is known")]
    Version(String),
    /// An invalid value.
    #[error("{key} of the tensor {tensor:?} is {value:?}; {expected} is expected")]
    Value {
        /// The tensor.
        tensor: String,
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// What was expected.
        expected: &'static str,
    },
    /// The model has a tensor that the manifest lacks.
    #[error("it has no checksum of the tensor {0:?}")]
    NotListed(String),
    /// The manifest has a tensor that the model lacks.
    #[error("it has a checksum of the tensor {0:?}, which the model does not hold")]
    NotInModel(String),
    /// A tensor's type or shape differs.
    #[error("the tensor {tensor:?} is {is}, but was {was} when its checksum was made")]
    Other {
        /// The tensor.
        tensor: String,
        /// What it is.
        is: String,
        /// What it was.
        was: String,
    },
    /// A tensor's bytes differ.
    #[error("the tensor {tensor:?} is not what it was: its CRC-32C is {is:08x}, but was {was:08x}")]
    Differs {
        /// The tensor.
        tensor: String,
        /// What it is.
        is: u32,
        /// What it was.
        was: u32,
    },
}

impl Manifest {
    /// Makes the manifest of a model by reading all of it.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn of(model: &Model) -> Result<Self> {
        let mut manifest = Self::default();
        for tensor in &model.tensors {
            let Some(file) = model.files.get(tensor.file) else { continue };
            manifest.add(&tensor.info, crc32c(&**file, &tensor.info)?);
        }
        Ok(manifest)
    }

    /// Adds a checksum that was computed elsewhere, for example on the GPU during a load.
    pub fn add(&mut self, tensor: &TensorInfo, crc32c: u32) {
        let TensorInfo { name, dtype, shape, bytes, .. } = tensor;
        let entry = Entry { dtype: *dtype, shape: shape.clone(), bytes: *bytes, crc32c };
        self.tensors.insert(name.clone(), entry);
    }

    /// Reads a manifest.
    ///
    /// # Errors
    /// When it cannot be read, or is refused.
    pub fn read(file: &dyn Source) -> Result<Self> {
        let too_long = || crate::Error::too_long(file.name(), file.bytes(), MAX_HEADER);
        let room =
            usize::try_from(file.bytes()).ok().filter(|n| *n as u64 <= MAX_HEADER).ok_or_else(too_long)?;
        let mut text = vec![0; room];
        file.read_at(0, &mut text)?;
        Self::parse(&text).map_err(|why| crate::Error::Manifest { file: file.name().into(), why })
    }

    /// Parses a manifest.
    ///
    /// # Errors
    /// When it is not what [`Manifest::to_json`] writes, apart from white space and the order of keys.
    pub fn parse(text: &[u8]) -> Result<Self, Error> {
        json::parse(text)
    }

    /// The text of the file.
    #[must_use]
    pub fn to_json(&self) -> String {
        json::write(self)
    }

    /// Compares the checksum of a whole tensor: a rank's part of one has no entry.
    ///
    /// # Errors
    /// When it differs, or the manifest lacks this tensor.
    pub fn check(&self, tensor: &TensorInfo, crc32c: u32) -> Result<(), Error> {
        let was = self.entry(tensor)?.crc32c;
        if was == crc32c {
            Ok(())
        } else {
            Err(Error::Differs { tensor: tensor.name.clone(), is: crc32c, was })
        }
    }

    fn entry(&self, tensor: &TensorInfo) -> Result<&Entry, Error> {
        let entry = self.tensors.get(&tensor.name).ok_or_else(|| Error::NotListed(tensor.name.clone()))?;
        if (entry.dtype, &entry.shape, entry.bytes) == (tensor.dtype, &tensor.shape, tensor.bytes) {
            return Ok(entry);
        }
        Err(Error::Other {
            tensor: tensor.name.clone(),
            is: format!("{} {:?}", tensor.dtype, tensor.shape),
            was: format!("{} {:?}", entry.dtype, entry.shape),
        })
    }
}

/// CRC-32C of a tensor's bytes, read from its file.
///
/// # Errors
/// When they cannot be read.
pub fn crc32c(file: &dyn Source, tensor: &TensorInfo) -> Result<u32> {
    let mut buffer = vec![0; READ_BYTES];
    let (mut crc, mut at, end) = (0, tensor.offset, tensor.offset + tensor.bytes);
    while at < end {
        let bytes = usize::try_from(end - at).unwrap_or(READ_BYTES).min(READ_BYTES);
        let part = buffer.get_mut(..bytes).unwrap_or_default();
        file.read_at(at, part)?;
        crc = crc32c::crc32c_append(crc, part);
        at += bytes as u64;
    }
    Ok(crc)
}
