//! safetensors: eight bytes of length, a JSON header, and the tensors' bytes without gaps.
//!
//! Accepts what the reference (the `safetensors` crate, 0.8) accepts, except for ambiguous headers: a duplicate tensor
//! name or metadata key (the reference keeps the last), a tensor's description as a JSON list (an accident of the
//! reference), a NUL in a name, and more than [`MAX_RANK`] dimensions.

use serde::de::{DeserializeSeed, Deserializer, MapAccess};

use super::{MAX_HEADER, TensorInfo, fetch, first_duplicate, other};
use crate::dtype::{Dtype, SizeError};
use crate::json::{self, Each, Object, Skip, StoredError, StringPairs, UnsignedList};
use crate::source::Source;

/// Most dimensions of a tensor: the limit of torch and NumPy.
pub const MAX_RANK: usize = json::KEPT;
/// Bytes before the JSON.
const PREFIX: u64 = 8;

/// The contents of a header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// The tensors, in the order of their bytes.
    pub tensors: Vec<TensorInfo>,
    /// `__metadata__`, in the order of the file.
    pub metadata: Vec<(String, String)>,
    /// Offset of the tensors' bytes in the file.
    pub data: u64,
}

/// The rule that a file violates.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Shorter than the eight bytes of the length.
    #[error("its {0} bytes are too few to hold the length of a header")]
    NoLength(u64),
    /// Too short for a JSON object.
    #[error("its header is {0} bytes long, too short for any JSON object")]
    HeaderTooShort(u64),
    /// Too long.
    #[error("its header is stated to be {0} bytes long; the format's limit is {MAX_HEADER}")]
    HeaderTooLong(u64),
    /// Another kind of file.
    #[error("it is {0}")]
    Other(&'static str),
    /// The file ends within the header.
    #[error("its header is stated to be {said} bytes long, but the file ends {left} bytes after the length")]
    Truncated {
        /// The stated length.
        said: u64,
        /// The bytes behind it.
        left: u64,
    },
    /// Not JSON, or not in the form of a header.
    #[error("its header is not the JSON that is expected: {0}")]
    Json(serde_json::Error),
    /// A duplicate tensor name.
    #[error("its header describes the tensor {0:?} twice")]
    Twice(String),
    /// A duplicate key in the metadata or a tensor's description.
    #[error("its header has the key {key:?} twice in {within}")]
    KeyTwice {
        /// The key.
        key: String,
        /// The object that contains it.
        within: String,
    },
    /// A name that a C string cannot hold.
    #[error("the tensor name {0:?} holds a NUL")]
    NulInName(String),
    /// An incomplete description.
    #[error("the tensor {tensor:?} has no {key}")]
    Missing {
        /// The tensor.
        tensor: String,
        /// The missing key.
        key: &'static str,
    },
    /// An unknown element type.
    #[error("the tensor {tensor:?} has elements of the unknown type {dtype:?}")]
    UnknownDtype {
        /// The tensor.
        tensor: String,
        /// The type.
        dtype: String,
    },
    /// A negative, fractional or too large number.
    #[error("the tensor {tensor:?} has {number} in its {key}: a whole number from 0 to 2^64 - 1 is expected")]
    NotWhole {
        /// The tensor.
        tensor: String,
        /// The key of the number.
        key: &'static str,
        /// The number.
        number: String,
    },
    /// Not exactly two offsets.
    #[error("the tensor {tensor:?} has {count} data_offsets: two are expected")]
    Offsets {
        /// The tensor.
        tensor: String,
        /// Number of offsets.
        count: usize,
    },
    /// Too many dimensions.
    #[error("the tensor {0:?} has more than {MAX_RANK} dimensions")]
    Rank(String),
    /// The end is before the start.
    #[error("the bytes {from} to {to} of the tensor {tensor:?} end before they start")]
    Backwards {
        /// The tensor.
        tensor: String,
        /// Start.
        from: u64,
        /// End.
        to: u64,
    },
    /// The tensor exceeds the file.
    #[error(
        "the bytes {from} to {to} of the tensor {tensor:?} reach beyond the file's {length} bytes of data"
    )]
    OutOfRange {
        /// The tensor.
        tensor: String,
        /// Start.
        from: u64,
        /// End.
        to: u64,
        /// Length of the data.
        length: u64,
    },
    /// Tensors overlap.
    #[error("the tensor {tensor:?} starts at byte {from}, within the bytes of {other:?}, which end at {end}")]
    Overlap {
        /// The one that starts later.
        tensor: String,
        /// Its start.
        from: u64,
        /// The other one.
        other: String,
        /// Its end.
        end: u64,
    },
    /// A gap before a tensor.
    #[error(
        "no tensor owns the bytes {from} to {to}, before the tensor {tensor:?}; the format allows no holes"
    )]
    Hole {
        /// The tensor behind the gap.
        tensor: String,
        /// Start of the gap.
        from: u64,
        /// End of the gap.
        to: u64,
    },
    /// Bytes behind the last tensor.
    #[error("the tensors end at byte {end} of {length}; the format allows nothing behind them")]
    Trailing {
        /// End of the last tensor.
        end: u64,
        /// End of the file.
        length: u64,
    },
    /// The size does not match shape and type.
    #[error("the tensor {tensor:?} is {dtype} {shape:?}, which takes {needs} bytes, but it has {has}")]
    Size {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its dimensions.
        shape: Vec<u64>,
        /// Size by shape and type.
        needs: u64,
        /// Size by the offsets.
        has: u64,
    },
    /// The size exceeds 64 bits.
    #[error("the tensor {tensor:?} is {dtype} {shape:?}, more than 2^64 bytes")]
    Overflow {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its dimensions.
        shape: Vec<u64>,
    },
    /// Packed elements do not fill whole bytes.
    #[error("the tensor {tensor:?} is {dtype} {shape:?}, which ends within a byte")]
    PartOfByte {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its dimensions.
        shape: Vec<u64>,
    },
}

/// Reads and parses the header of a file.
///
/// # Errors
/// When it cannot be read, or violates a rule.
pub fn read(file: &dyn Source) -> crate::Result<Header> {
    let refused = |why| crate::Error::Safetensors { file: file.name().into(), why };
    let mut prefix = [0; PREFIX as usize];
    if file.bytes() < PREFIX {
        return Err(refused(Error::NoLength(file.bytes())));
    }
    file.read_at(0, &mut prefix)?;
    let bytes = match header_bytes(prefix, file.bytes()) {
        Ok(bytes) => bytes,
        Err(why) => return Err(refused(other::kind(file)?.map_or(why, Error::Other))),
    };
    parse(&fetch(file, PREFIX, bytes - PREFIX)?, file.bytes()).map_err(refused)
}

/// How many bytes precede the tensors in a file of `length` bytes, from its first eight bytes.
///
/// # Errors
/// When the stated length is impossible.
pub fn header_bytes(prefix: [u8; 8], length: u64) -> Result<u64, Error> {
    let said = u64::from_le_bytes(prefix);
    let left = length.checked_sub(PREFIX).ok_or(Error::NoLength(length))?;
    match said {
        0 | 1 => Err(Error::HeaderTooShort(said)),
        _ if said > MAX_HEADER => Err(Error::HeaderTooLong(said)),
        _ if said > left => Err(Error::Truncated { said, left }),
        _ => Ok(said + PREFIX),
    }
}

/// Parses the JSON of a header: the bytes between the first eight and the tensors of a file of `length` bytes.
///
/// # Errors
/// When it violates a rule.
pub fn parse(json: &[u8], length: u64) -> Result<Header, Error> {
    let fault = StoredError::new();
    let mut raw = RawHeader { tensors: Vec::new(), metadata: None, fault: &fault };
    let parsed = json::parse(json, Object("an object of tensors", &mut raw));
    let (tensors, metadata) = (raw.tensors, raw.metadata);
    fault.settle(parsed, Error::Json)?;
    let data = PREFIX + json.len() as u64;
    let length =
        length.checked_sub(data).ok_or(Error::Truncated { said: json.len() as u64, left: length })?;
    if let Some(name) = first_duplicate(tensors.iter().map(|t| t.name.as_str())) {
        return Err(Error::Twice(name.into()));
    }
    let tensors = place(tensors, data, length)?;
    let metadata = metadata.unwrap_or_default();
    if let Some(key) = first_duplicate(metadata.iter().map(|(key, _)| key.as_str())) {
        return Err(Error::KeyTwice { key: key.into(), within: METADATA.into() });
    }
    Ok(Header { tensors, metadata, data })
}

/// The key that is not a tensor.
const METADATA: &str = "__metadata__";

/// A tensor with its stated, unchecked offsets from the start of the data.
struct DeclaredTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    from: u64,
    to: u64,
}

/// Checks the stated offsets against each other and the `length` bytes of data, which start at byte `data` of the file.
fn place(mut claims: Vec<DeclaredTensor>, data: u64, length: u64) -> Result<Vec<TensorInfo>, Error> {
    claims.sort_by_key(|c| (c.from, c.to));
    let mut tensors: Vec<TensorInfo> = Vec::with_capacity(claims.len());
    let mut end = 0;
    for claim in claims {
        let DeclaredTensor { name: tensor, dtype, shape, from, to } = claim;
        if to < from {
            return Err(Error::Backwards { tensor, from, to });
        } else if to > length {
            return Err(Error::OutOfRange { tensor, from, to, length });
        } else if from > end {
            return Err(Error::Hole { tensor, from: end, to: from });
        } else if from < end {
            // The one that has the last byte; without gaps, that is the last non-empty one.
            let other = tensors.pop().map(|t| t.name).unwrap_or_default();
            return Err(Error::Overlap { tensor, from, other, end });
        }
        match dtype.size(&shape) {
            Ok(needs) if needs == to - from => {}
            Ok(needs) => return Err(Error::Size { tensor, dtype, shape, needs, has: to - from }),
            Err(SizeError::Overflow) => return Err(Error::Overflow { tensor, dtype, shape }),
            Err(SizeError::Part) => return Err(Error::PartOfByte { tensor, dtype, shape }),
        }
        end = to;
        tensors.push(TensorInfo { name: tensor, dtype, shape, offset: data + from, bytes: to - from });
    }
    if end == length { Ok(tensors) } else { Err(Error::Trailing { end, length }) }
}

/// The header's object.
struct RawHeader<'f> {
    tensors: Vec<DeclaredTensor>,
    metadata: Option<Vec<(String, String)>>,
    fault: &'f StoredError<Error>,
}

impl<'de> Each<'de> for RawHeader<'_> {
    fn take<A: MapAccess<'de>>(&mut self, key: String, map: &mut A) -> Result<(), A::Error> {
        if key == METADATA {
            if self.metadata.is_some() {
                return Err(self.fault.raise(Error::KeyTwice { key, within: "the header".into() }));
            }
            let mut pairs = StringPairs::default();
            map.next_value_seed(Nullable(&mut pairs))?;
            self.metadata = Some(pairs.0);
            return Ok(());
        }
        if key.contains('\0') {
            return Err(self.fault.raise(Error::NulInName(key)));
        }
        let mut info =
            RawTensorInfo { tensor: key, dtype: None, shape: None, offsets: None, fault: self.fault };
        map.next_value_seed(Object("a tensor's dtype, shape and data_offsets", &mut info))?;
        self.tensors.push(info.claim()?);
        Ok(())
    }
}

/// Metadata that may be `null`, as in the reference.
struct Nullable<'a>(&'a mut StringPairs);

impl<'de> DeserializeSeed<'de> for Nullable<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_option(self)
    }
}

impl<'de> serde::de::Visitor<'de> for Nullable<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_none<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        Object("an object of strings", self.0).deserialize(from)
    }
}

/// A tensor's description.
struct RawTensorInfo<'f> {
    tensor: String,
    dtype: Option<Dtype>,
    shape: Option<Vec<u64>>,
    offsets: Option<(u64, u64)>,
    fault: &'f StoredError<Error>,
}

impl<'de> Each<'de> for RawTensorInfo<'_> {
    fn take<A: MapAccess<'de>>(&mut self, key: String, map: &mut A) -> Result<(), A::Error> {
        let again = match key.as_str() {
            "dtype" => self.dtype.is_some(),
            "shape" => self.shape.is_some(),
            "data_offsets" => self.offsets.is_some(),
            _ => false,
        };
        if again {
            return Err(self
                .fault
                .raise(Error::KeyTwice { key, within: format!("tensor {:?}", self.tensor) }));
        }
        match key.as_str() {
            "dtype" => self.dtype = Some(self.dtype(map.next_value()?)?),
            "shape" => {
                let shape = self.whole("shape", map.next_value()?)?;
                if shape.count > MAX_RANK {
                    return Err(self.fault.raise(Error::Rank(self.tensor.clone())));
                }
                self.shape = Some(shape.first);
            }
            "data_offsets" => {
                let offsets = self.whole("data_offsets", map.next_value()?)?;
                let &[from, to] = offsets.first.as_slice() else {
                    let tensor = self.tensor.clone();
                    return Err(self.fault.raise(Error::Offsets { tensor, count: offsets.count }));
                };
                self.offsets = Some((from, to));
            }
            // Like the reference, ignores unknown keys.
            _ => {
                let Skip = map.next_value()?;
            }
        }
        Ok(())
    }
}

impl RawTensorInfo<'_> {
    fn dtype<E: serde::de::Error>(&self, name: String) -> Result<Dtype, E> {
        // GGML's types are not safetensors types.
        let known = name.parse::<Dtype>().ok().filter(|d| *d <= Dtype::U64);
        known
            .ok_or_else(|| self.fault.raise(Error::UnknownDtype { tensor: self.tensor.clone(), dtype: name }))
    }

    fn whole<E: serde::de::Error>(
        &self,
        key: &'static str,
        mut list: UnsignedList,
    ) -> Result<UnsignedList, E> {
        match list.invalid.take() {
            None => Ok(list),
            Some(number) => {
                Err(self.fault.raise(Error::NotWhole { tensor: self.tensor.clone(), key, number }))
            }
        }
    }

    fn claim<E: serde::de::Error>(self) -> Result<DeclaredTensor, E> {
        let fault = self.fault;
        let missing = |tensor, key| Err(fault.raise(Error::Missing { tensor, key }));
        match (self.dtype, self.shape, self.offsets) {
            (None, _, _) => missing(self.tensor, "dtype"),
            (_, None, _) => missing(self.tensor, "shape"),
            (_, _, None) => missing(self.tensor, "data_offsets"),
            (Some(dtype), Some(shape), Some((from, to))) => {
                Ok(DeclaredTensor { name: self.tensor, dtype, shape, from, to })
            }
        }
    }
}
