//! GGUF: a count of tensors and of keys, the keys with their values, the tensors' descriptions, and their bytes.
//!
//! Versions 2 and 3, little-endian. Where llama.cpp asks for more (the tensors one behind the other in the order of
//! their descriptions), holes and any order are accepted, because the format's text allows them. Values are taken as `gguf-py`
//! takes them: text is kept byte for byte, because tokens of some vocabularies are not UTF-8, and any truth value but 0 is
//! true. Names of keys and tensors have to be UTF-8, there and here.

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

/// What every GGUF file begins with.
pub const MAGIC: &[u8; 4] = b"GGUF";
/// Most dimensions of a tensor.
pub const MAX_RANK: u32 = 4;
/// How deep arrays of arrays may go.
pub const MAX_DEPTH: u32 = 8;
/// What tensors are aligned to where the file does not say.
const ALIGNMENT: u64 = 32;
/// The key that says it.
const ALIGNMENT_KEY: &str = "general.alignment";
/// How much is read at first of a header whose length nothing tells.
const FIRST: u64 = 1 << 20;

/// What a header says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Header {
    /// The version of the format.
    pub version: u32,
    /// The tensors, in the order of their bytes.
    pub tensors: Vec<TensorInfo>,
    /// The keys and their values, in the order of the file.
    pub metadata: Vec<(String, Value)>,
    /// What the tensors' offsets are multiples of.
    pub alignment: u64,
    /// Where the tensors' bytes begin in the file.
    pub data: u64,
}

impl Header {
    /// The value of a key.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }
}

/// The rule that a file breaks.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another format.
    #[error("it does not begin with 'GGUF'")]
    Magic,
    /// Big-endian files are rare, and nothing on the way to a GPU turns bytes round.
    #[error(
        "it is big-endian (its version is {0:#010x}); convert it, for example with gguf_convert_endian.py"
    )]
    BigEndian(u32),
    /// The first version has other widths; nobody writes it.
    #[error("it is of version 1, which is no longer read; write it again with llama.cpp's tools")]
    Version1,
    /// A version to come.
    #[error("it is of version {0}; versions 2 and 3 are known")]
    Version(u32),
    /// More bytes are needed than were given; the file has them.
    #[error("its header goes on beyond the first {given} bytes, to byte {needed} at least")]
    More {
        /// What was given.
        given: u64,
        /// What is needed for the next step.
        needed: u64,
    },
    /// The file ends within the header.
    #[error("the file of {length} bytes ends within {what}, which reaches to byte {needed}")]
    Truncated {
        /// What was being read.
        what: String,
        /// Where it would end.
        needed: u64,
        /// Where the file does.
        length: u64,
    },
    /// A header that is not believed.
    #[error("its header is longer than {MAX_HEADER} bytes")]
    HeaderTooLong,
    /// A count that the file's length contradicts.
    #[error(
        "it is said to hold {count} {what}, which take at least {least} bytes each; the file has {length}"
    )]
    Count {
        /// Of what.
        what: &'static str,
        /// How many.
        count: u64,
        /// The smallest there are.
        least: u64,
        /// The length of the file.
        length: u64,
    },
    /// A name that is not text.
    #[error("{0} is not UTF-8")]
    NotText(String),
    /// A type of values that nobody knows.
    #[error("the value of {key:?} is of the unknown type {number}")]
    ValueType {
        /// Whose.
        key: String,
        /// The type's number.
        number: u32,
    },
    /// Arrays in arrays in arrays.
    #[error("the value of {0:?} is nested deeper than {MAX_DEPTH} arrays")]
    Depth(String),
    /// A key that comes twice.
    #[error("the key {0:?} comes twice")]
    KeyTwice(String),
    /// A tensor that comes twice.
    #[error("the tensor {0:?} is described twice")]
    Twice(String),
    /// A name that no C string can hold.
    #[error("the tensor name {0:?} holds a NUL")]
    NulInName(String),
    /// `general.alignment` is not what it must be.
    #[error("{ALIGNMENT_KEY} is {0}; a 32-bit power of two is expected")]
    Alignment(String),
    /// Too many dimensions.
    #[error("the tensor {tensor:?} has {rank} dimensions; {MAX_RANK} is the most")]
    Rank {
        /// Which tensor.
        tensor: String,
        /// How many.
        rank: u32,
    },
    /// A type of elements that was taken out of the format.
    #[error("the tensor {tensor:?} is of type {number} ({name}), which is no longer part of the format")]
    RemovedType {
        /// Which tensor.
        tensor: String,
        /// The type's number.
        number: u32,
        /// Its name.
        name: &'static str,
    },
    /// A type of elements that nobody knows.
    #[error("the tensor {tensor:?} is of the unknown type {number}")]
    UnknownType {
        /// Which tensor.
        tensor: String,
        /// The type's number.
        number: u32,
    },
    /// The dimension that varies fastest is not made of whole blocks.
    #[error("the rows of the tensor {tensor:?} have {columns} elements; {dtype} comes in blocks of {block}")]
    Block {
        /// Which tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// The elements of a row.
        columns: u64,
        /// The elements of a block.
        block: u64,
    },
    /// The number of bytes cannot be written down.
    #[error("the tensor {tensor:?} is {dtype} {shape:?}, more than 2^64 bytes")]
    Overflow {
        /// Which tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its dimensions, slowest first.
        shape: Vec<u64>,
    },
    /// A tensor that is not where it may be.
    #[error("the tensor {tensor:?} starts at {offset} of the data, no multiple of the alignment {alignment}")]
    Unaligned {
        /// Which tensor.
        tensor: String,
        /// Its offset from the start of the data.
        offset: u64,
        /// What it has to be a multiple of.
        alignment: u64,
    },
    /// The tensor's bytes are not all in the file.
    #[error(
        "the {bytes} bytes at {offset} of the data, of the tensor {tensor:?}, reach beyond the data's {length}"
    )]
    OutOfRange {
        /// Which tensor.
        tensor: String,
        /// Its offset from the start of the data.
        offset: u64,
        /// Its size.
        bytes: u64,
        /// The size of the data.
        length: u64,
    },
    /// Two tensors share bytes.
    #[error(
        "the tensor {tensor:?} starts at byte {offset} of the file, within {other:?}, which ends at {end}"
    )]
    Overlap {
        /// The one that starts later.
        tensor: String,
        /// Where.
        offset: u64,
        /// The other one.
        other: String,
        /// Where it ends.
        end: u64,
    },
}

/// Reads and parses the header of a file.
///
/// # Errors
/// When it cannot be read, or breaks a rule.
pub fn read(file: &dyn Source) -> crate::Result<Header> {
    let refused = |why| crate::Error::Gguf { file: file.name().into(), why };
    let length = file.bytes();
    let mut bytes = FIRST.min(length);
    loop {
        match parse(&fetch(file, 0, bytes)?, length) {
            Err(Error::More { .. }) if bytes >= MAX_HEADER => return Err(refused(Error::HeaderTooLong)),
            // Doubled at least, so that all attempts together read little more than twice the header.
            Err(Error::More { needed, .. }) => bytes = needed.max(bytes * 2).min(length).min(MAX_HEADER),
            other => return other.map_err(refused),
        }
    }
}

/// Parses the header in the first bytes of a file of `length` bytes.
///
/// # Errors
/// When it breaks a rule, and [`Error::More`] when it is longer than what was given.
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
    // A file without tensors may leave out the padding.
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
        // As gguf-py tells: small numbers have nothing in the lower half when they are turned round.
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

/// A tensor with its offset from the start of the data, not yet held against anything but its type.
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
        // GGUF names the dimension that varies fastest first.
        shape.reverse();
        match dtype.size(&shape) {
            Ok(bytes) => Ok(Self { name: tensor, dtype, shape, offset, bytes }),
            Err(SizeError::Overflow | SizeError::Part) => Err(Error::Overflow { tensor, dtype, shape }),
        }
    }
}

/// Holds the claims against each other and the data, which reach from byte `data` of the file to byte `length`.
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
