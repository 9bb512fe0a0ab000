//! GGUF: the number of tensors and keys, the keys with their values, the tensors' descriptions, and their bytes.
//!
//! Versions 2 and 3, little-endian. llama.cpp requires contiguous tensors in the order of their descriptions; gaps and
//! any order are accepted here, because the specification allows them. Values are read as by `gguf-py`: text is kept
//! byte for byte, because tokens of some vocabularies are not UTF-8, and any boolean byte but 0 is true. Names of keys
//! and tensors must be UTF-8, there and here.

mod read;
mod text;
mod types;
mod value;

pub use text::Text;
pub use types::ggml_type;
pub use value::{Array, Value};

use read::Reader;

use super::{MAX_HEADER, TensorInfo, fetch, first_duplicate};
use crate::dtype::{Dtype, SizeError};
use crate::source::Source;

/// The first bytes of every GGUF file.
pub const MAGIC: &[u8; 4] = b"GGUF";
/// Most dimensions of a tensor.
pub const MAX_RANK: u32 = 4;
/// Deepest nesting of arrays.
pub const MAX_DEPTH: u32 = 8;
/// Default alignment of tensors.
const ALIGNMENT: u64 = 32;
/// The key that overrides it.
const ALIGNMENT_KEY: &str = "general.alignment";
/// Bytes to read first, because the header's length is not stated.
const FIRST: u64 = 1 << 20;

/// The contents of a header.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Header {
    /// The version of the format.
    pub version: u32,
    /// The tensors, in the order of their bytes.
    pub tensors: Vec<TensorInfo>,
    /// The keys and their values, in the order of the file.
    pub metadata: Vec<(String, Value)>,
    /// Alignment of the tensors' offsets.
    pub alignment: u64,
    /// Offset of the tensors' bytes in the file.
    pub data: u64,
}

impl Header {
    /// The value of a key.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }
}

/// The rule that a file violates.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another format.
    #[error("it does not begin with 'GGUF'")]
    Magic,
    /// Big-endian files are rare, and bytes are not swapped on the path to a GPU.
    #[error(
        "it is big-endian (its version is {0:#010x}); convert it, for example with gguf_convert_endian.py"
    )]
    BigEndian(u32),
    /// Version 1 has other field widths, and is obsolete.
    #[error("it is of version 1, which is no longer read; write it again with llama.cpp's tools")]
    Version1,
    /// An unknown version.
    #[error("it is of version {0}; versions 2 and 3 are known")]
    Version(u32),
    /// More bytes are needed than were passed; the file has them.
    #[error("its header goes on beyond the first {given} bytes, to byte {needed} at least")]
    More {
        /// Bytes passed.
        given: u64,
        /// Bytes needed for the next step.
        needed: u64,
    },
    /// The file ends within the header.
    #[error("the file of {length} bytes ends within {what}, which reaches to byte {needed}")]
    Truncated {
        /// The part that is truncated.
        what: String,
        /// Where it would end.
        needed: u64,
        /// Length of the file.
        length: u64,
    },
    /// The header exceeds the size limit.
    #[error("its header is longer than {MAX_HEADER} bytes")]
    HeaderTooLong,
    /// A count that exceeds the file.
    #[error("it states {count} {what}, which take at least {least} bytes each; the file has {length}")]
    Count {
        /// What is counted.
        what: &'static str,
        /// The count.
        count: u64,
        /// The minimum size of an element.
        least: u64,
        /// The length of the file.
        length: u64,
    },
    /// A name that is not UTF-8.
    #[error("{0} is not UTF-8")]
    NotText(String),
    /// An unknown value type.
    #[error("the value of {key:?} is of the unknown type {number}")]
    ValueType {
        /// The key.
        key: String,
        /// The type's number.
        number: u32,
    },
    /// Arrays are nested too deeply.
    #[error("the value of {0:?} is nested deeper than {MAX_DEPTH} arrays")]
    Depth(String),
    /// A duplicate key.
    #[error("the key {0:?} occurs twice")]
    KeyTwice(String),
    /// A duplicate tensor.
    #[error("the tensor {0:?} is described twice")]
    Twice(String),
    /// A name that a C string cannot hold.
    #[error("the tensor name {0:?} holds a NUL")]
    NulInName(String),
    /// An invalid `general.alignment`.
    #[error("{ALIGNMENT_KEY} is {0}; a 32-bit power of two is expected")]
    Alignment(String),
    /// Too many dimensions.
    #[error("the tensor {tensor:?} has {rank} dimensions; {MAX_RANK} is the most")]
    Rank {
        /// The tensor.
        tensor: String,
        /// Number of dimensions.
        rank: u32,
    },
    /// An element type that was removed from the format.
    #[error("the tensor {tensor:?} is of type {number} ({name}), which is no longer part of the format")]
    RemovedType {
        /// The tensor.
        tensor: String,
        /// The type's number.
        number: u32,
        /// Its name.
        name: &'static str,
    },
    /// An unknown element type.
    #[error("the tensor {tensor:?} is of the unknown type {number}")]
    UnknownType {
        /// The tensor.
        tensor: String,
        /// The type's number.
        number: u32,
    },
    /// The fastest dimension does not consist of whole blocks.
    #[error("the rows of the tensor {tensor:?} have {columns} elements; {dtype} comes in blocks of {block}")]
    Block {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Elements of a row.
        columns: u64,
        /// Elements of a block.
        block: u64,
    },
    /// The size exceeds 64 bits.
    #[error("the tensor {tensor:?} is {dtype} {shape:?}, more than 2^64 bytes")]
    Overflow {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its dimensions, slowest first.
        shape: Vec<u64>,
    },
    /// A misaligned tensor.
    #[error(
        "the tensor {tensor:?} starts at {offset} of the data, not a multiple of the alignment {alignment}"
    )]
    Unaligned {
        /// The tensor.
        tensor: String,
        /// Its offset from the start of the data.
        offset: u64,
        /// The required alignment.
        alignment: u64,
    },
    /// The tensor exceeds the file.
    #[error(
        "the {bytes} bytes at {offset} of the data, of the tensor {tensor:?}, reach beyond the data's {length}"
    )]
    OutOfRange {
        /// The tensor.
        tensor: String,
        /// Its offset from the start of the data.
        offset: u64,
        /// Its size.
        bytes: u64,
        /// The size of the data.
        length: u64,
    },
    /// Tensors overlap.
    #[error(
        "the tensor {tensor:?} starts at byte {offset} of the file, within {other:?}, which ends at {end}"
    )]
    Overlap {
        /// The one that starts later.
        tensor: String,
        /// Its start.
        offset: u64,
        /// The other one.
        other: String,
        /// Its end.
        end: u64,
    },
}

/// Reads and parses the header of a file.
///
/// # Errors
/// When it cannot be read, or violates a rule.
pub fn read(file: &dyn Source) -> crate::Result<Header> {
    let refused = |why| crate::Error::Gguf { file: file.name().into(), why };
    let length = file.bytes();
    let mut bytes = FIRST.min(length);
    loop {
        match parse(&fetch(file, 0, bytes)?, length) {
            Err(Error::More { .. }) if bytes >= MAX_HEADER => return Err(refused(Error::HeaderTooLong)),
            // At least doubled, so that all attempts together read little more than twice the header.
            Err(Error::More { needed, .. }) => bytes = needed.max(bytes * 2).min(length).min(MAX_HEADER),
            other => return other.map_err(refused),
        }
    }
}

/// Parses the header in the first bytes of a file of `length` bytes.
///
/// # Errors
/// When it violates a rule; [`Error::More`] when it is longer than the bytes passed.
pub fn parse(bytes: &[u8], length: u64) -> Result<Header, Error> {
    let mut from = Reader::new(bytes, length);
    let version = version(&mut from)?;
    let tensors = from.u64("the number of tensors")?;
    let keys = from.u64("the number of keys")?;
    from.check_count("tensors", tensors, 24)?;
    from.check_count("keys", keys, 13)?;
    let mut metadata = Vec::new();
    for _ in 0..keys {
        let key = from.name("a key")?;
        let value = Value::read(&mut from, &key)?;
        metadata.push((key, value));
    }
    if let Some(key) = first_duplicate(metadata.iter().map(|(key, _)| key.as_str())) {
        return Err(Error::KeyTwice(key.into()));
    }
    let alignment = alignment(&metadata)?;
    let mut claims = Vec::new();
    for _ in 0..tensors {
        claims.push(DeclaredTensor::read(&mut from)?);
    }
    if let Some(name) = first_duplicate(claims.iter().map(|c| c.name.as_str())) {
        return Err(Error::Twice(name.into()));
    }
    let end = from.at();
    // A file without tensors may omit the padding.
    let data = end.checked_next_multiple_of(alignment).filter(|d| *d <= length).unwrap_or(length);
    let tensors = place(claims, data, length, alignment)?;
    Ok(Header { version, tensors, metadata, alignment, data })
}

fn version(from: &mut Reader<'_>) -> Result<u32, Error> {
    if from.take(4, "the magic")? != MAGIC {
        return Err(Error::Magic);
    }
    match from.u32("the version")? {
        1 => Err(Error::Version1),
        version @ (2 | 3) => Ok(version),
        // As in gguf-py: a small number has zeros in its lower half when byte-swapped.
        version if version & 0xffff == 0 && version != 0 => Err(Error::BigEndian(version)),
        version => Err(Error::Version(version)),
    }
}

fn alignment(metadata: &[(String, Value)]) -> Result<u64, Error> {
    match metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY) {
        None => Ok(ALIGNMENT),
        Some((_, Value::U32(n))) if n.is_power_of_two() => Ok(u64::from(*n)),
        Some((_, other)) => Err(Error::Alignment(other.brief())),
    }
}

/// A tensor with its stated offset from the start of the data; only its type was checked.
struct DeclaredTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    offset: u64,
    bytes: u64,
}

impl DeclaredTensor {
    fn read(from: &mut Reader<'_>) -> Result<Self, Error> {
        let tensor = from.name("a tensor's name")?;
        if tensor.contains('\0') {
            return Err(Error::NulInName(tensor));
        }
        let rank = from.u32("a tensor's rank")?;
        if rank > MAX_RANK {
            return Err(Error::Rank { tensor, rank });
        }
        let mut shape = (0..rank).map(|_| from.u64("a tensor's shape")).collect::<Result<Vec<_>, _>>()?;
        let number = from.u32("a tensor's type")?;
        let dtype = ggml_type(number).map_err(|removed| match removed {
            Some(name) => Error::RemovedType { tensor: tensor.clone(), number, name },
            None => Error::UnknownType { tensor: tensor.clone(), number },
        })?;
        let offset = from.u64("a tensor's offset")?;
        let (columns, block) = (shape.first().copied().unwrap_or(1), dtype.block().0);
        if !columns.is_multiple_of(block) {
            return Err(Error::Block { tensor, dtype, columns, block });
        }
        // GGUF lists the fastest dimension first.
        shape.reverse();
        match dtype.size(&shape) {
            Ok(bytes) => Ok(Self { name: tensor, dtype, shape, offset, bytes }),
            Err(SizeError::Overflow | SizeError::Part) => Err(Error::Overflow { tensor, dtype, shape }),
        }
    }
}

/// Checks the stated offsets against each other and the data, which extends from byte `data` of the file to byte
/// `length`.
fn place(
    mut claims: Vec<DeclaredTensor>,
    data: u64,
    length: u64,
    alignment: u64,
) -> Result<Vec<TensorInfo>, Error> {
    claims.sort_by_key(|c| (c.offset, c.bytes));
    let mut tensors: Vec<TensorInfo> = Vec::with_capacity(claims.len());
    for DeclaredTensor { name: tensor, dtype, shape, offset, bytes } in claims {
        if !offset.is_multiple_of(alignment) {
            return Err(Error::Unaligned { tensor, offset, alignment });
        }
        if offset.checked_add(bytes).is_none_or(|end| end > length - data) {
            return Err(Error::OutOfRange { tensor, offset, bytes, length: length - data });
        }
        let offset = data + offset;
        if let Some(last) = tensors.last().filter(|last| last.offset + last.bytes > offset) {
            let (other, end) = (last.name.clone(), last.offset + last.bytes);
            return Err(Error::Overlap { tensor, offset, other, end });
        }
        tensors.push(TensorInfo { name: tensor, dtype, shape, offset, bytes });
    }
    Ok(tensors)
}
