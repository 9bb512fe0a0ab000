//! The text of a manifest.

use serde::de::MapAccess;
use serde::{Serialize, Serializer};

use super::{Entry, Error, Manifest, VERSION};
use crate::dtype::Dtype;
use crate::json::{self, Each, KEPT, Object, StoredError, UnsignedList, Whole};

/// The keys of the file.
const FORM: &str = "onehop_manifest";
const TENSORS: &str = "tensors";

/// A checksum as eight digits.
pub(super) fn hex<S: Serializer>(crc: &u32, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{crc:08x}"))
}

/// Serializes it.
pub(super) fn write(manifest: &Manifest) -> String {
    #[derive(Serialize)]
    struct File<'a> {
        onehop_manifest: u64,
        tensors: &'a std::collections::BTreeMap<String, Entry>,
    }
    let file = File { onehop_manifest: VERSION, tensors: &manifest.tensors };
    // Serializing maps with text keys cannot fail.
    serde_json::to_string_pretty(&file).unwrap_or_default() + "\n"
}

/// Parses it.
pub(super) fn parse(text: &[u8]) -> Result<Manifest, Error> {
    let fault = StoredError::new();
    let mut raw = RawManifest { version: None, tensors: None, fault: &fault };
    let parsed = json::parse(text, Object("a manifest", &mut raw));
    let (version, tensors) = (raw.version, raw.tensors);
    fault.settle(parsed, Error::Json)?;
    let missing = |key| Error::Missing { within: "the manifest".into(), key };
    version.ok_or_else(|| missing(FORM))?;
    Ok(Manifest { tensors: tensors.ok_or_else(|| missing(TENSORS))? })
}

struct RawManifest<'f> {
    version: Option<()>,
    tensors: Option<std::collections::BTreeMap<String, Entry>>,
    fault: &'f StoredError<Error>,
}

impl<'de> Each<'de> for RawManifest<'_> {
    fn take<A: MapAccess<'de>>(&mut self, key: String, map: &mut A) -> Result<(), A::Error> {
        let within = || "the manifest".to_owned();
        match key.as_str() {
            FORM if self.version.is_none() => match map.next_value::<Whole>()?.0 {
                Ok(VERSION) => self.version = Some(()),
                Ok(other) => return Err(self.fault.raise(Error::Version(other.to_string()))),
                Err(other) => return Err(self.fault.raise(Error::Version(other))),
            },
            TENSORS if self.tensors.is_none() => {
                let mut tensors = Tensors { map: Default::default(), fault: self.fault };
                map.next_value_seed(Object("an object of tensors", &mut tensors))?;
                self.tensors = Some(tensors.map);
            }
            FORM | TENSORS => return Err(self.fault.raise(Error::Twice { within: within(), key })),
            _ => return Err(self.fault.raise(Error::Unknown { within: within(), key })),
        }
        Ok(())
    }
}

struct Tensors<'f> {
    map: std::collections::BTreeMap<String, Entry>,
    fault: &'f StoredError<Error>,
}

impl<'de> Each<'de> for Tensors<'_> {
    fn take<A: MapAccess<'de>>(&mut self, key: String, map: &mut A) -> Result<(), A::Error> {
        if self.map.contains_key(&key) {
            return Err(self.fault.raise(Error::Twice { within: "the manifest".into(), key }));
        }
        let mut one =
            One { tensor: key, dtype: None, shape: None, bytes: None, crc32c: None, fault: self.fault };
        map.next_value_seed(Object("a tensor's dtype, shape, bytes and crc32c", &mut one))?;
        let (tensor, entry) = one.entry()?;
        self.map.insert(tensor, entry);
        Ok(())
    }
}

/// A tensor's description.
struct One<'f> {
    tensor: String,
    dtype: Option<Dtype>,
    shape: Option<Vec<u64>>,
    bytes: Option<u64>,
    crc32c: Option<u32>,
    fault: &'f StoredError<Error>,
}

impl<'de> Each<'de> for One<'_> {
    fn take<A: MapAccess<'de>>(&mut self, key: String, map: &mut A) -> Result<(), A::Error> {
        match key.as_str() {
            "dtype" if self.dtype.is_none() => {
                let name: String = map.next_value()?;
                self.dtype = Some(name.parse().map_err(|_| self.wrong("dtype", name, "a type of elements"))?);
            }
            "shape" if self.shape.is_none() => {
                let list: UnsignedList = map.next_value()?;
                if let Some(invalid) = list.invalid {
                    return Err(self.wrong("shape", invalid, "a whole number from 0 on"));
                } else if list.count > KEPT {
                    return Err(self.wrong("shape", format!("{} long", list.count), "64 dimensions at most"));
                }
                self.shape = Some(list.first);
            }
            "bytes" if self.bytes.is_none() => {
                let number = map.next_value::<Whole>()?.0;
                self.bytes =
                    Some(number.map_err(|invalid| self.wrong("bytes", invalid, "a whole number from 0 on"))?);
            }
            "crc32c" if self.crc32c.is_none() => {
                let text: String = map.next_value()?;
                let digits = text.len() == 8 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
                let crc = u32::from_str_radix(&text, 16).ok().filter(|_| digits);
                self.crc32c = Some(crc.ok_or_else(|| self.wrong("crc32c", text, "eight digits 0-9, a-f"))?);
            }
            "dtype" | "shape" | "bytes" | "crc32c" => {
                return Err(self.fault.raise(Error::Twice { within: self.within(), key }));
            }
            _ => return Err(self.fault.raise(Error::Unknown { within: self.within(), key })),
        }
        Ok(())
    }
}

impl One<'_> {
    fn within(&self) -> String {
        format!("the tensor {:?}", self.tensor)
    }

    fn wrong<E: serde::de::Error>(&self, key: &'static str, value: String, expected: &'static str) -> E {
        self.fault.raise(Error::Value { tensor: self.tensor.clone(), key, value, expected })
    }

    /// The entry; its size is that of its shape.
    fn entry<E: serde::de::Error>(self) -> Result<(String, Entry), E> {
        let missing = |key| self.fault.raise(Error::Missing { within: self.within(), key });
        let dtype = self.dtype.ok_or_else(|| missing("dtype"))?;
        let shape = self.shape.clone().ok_or_else(|| missing("shape"))?;
        let bytes = self.bytes.ok_or_else(|| missing("bytes"))?;
        let crc32c = self.crc32c.ok_or_else(|| missing("crc32c"))?;
        if dtype.size(&shape) != Ok(bytes) {
            return Err(self.wrong("bytes", bytes.to_string(), "what type and shape take"));
        }
        Ok((self.tensor, Entry { dtype, shape, bytes, crc32c }))
    }
}
