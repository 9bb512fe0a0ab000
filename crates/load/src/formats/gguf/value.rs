//! The values of GGUF's keys. Memory is only allocated for elements that are in the file.

use super::read::Reader;
use super::{Error, MAX_DEPTH, Text};

macro_rules! values {
    ($($(#[$doc:meta])* $name:ident($type:ty) = $number:literal, $least:literal: $read:expr;)*) => {
        /// The value of a key.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Value {
            $($(#[$doc])* $name($type),)*
            /// Several values of one type.
            Array(Array),
        }

        /// Several values of one type.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Array {
            $($(#[$doc])* $name(Vec<$type>),)*
            /// Arrays, each with a type of its own.
            Array(Vec<Array>),
        }

        impl Value {
            /// Reads a type and a value of that type.
            pub(super) fn read(from: &mut Reader<'_>, key: &str) -> Result<Self, Error> {
                match from.u32(key)? {
                    $($number => $read(from, key).map(Self::$name),)*
                    ARRAY => Array::read(from, key, MAX_DEPTH).map(Self::Array),
                    number => Err(Error::ValueType { key: key.into(), number }),
                }
            }
        }

        impl Array {
            /// Reads the elements' type, their number, and the elements.
            fn read(from: &mut Reader<'_>, key: &str, depth: u32) -> Result<Self, Error> {
                if depth == 0 {
                    return Err(Error::Depth(key.into()));
                }
                let number = from.u32(key)?;
                let count = from.u64(key)?;
                match number {
                    $($number => {
                        from.check_count("elements of an array", count, $least)?;
                        many(count, || $read(from, key)).map(Self::$name)
                    })*
                    ARRAY => {
                        from.check_count("elements of an array", count, 12)?;
                        many(count, || Self::read(from, key, depth - 1)).map(Self::Array)
                    }
                    number => Err(Error::ValueType { key: key.into(), number }),
                }
            }

            /// Number of elements.
            #[must_use]
            pub fn len(&self) -> usize {
                match self {
                    $(Self::$name(list) => list.len(),)*
                    Self::Array(list) => list.len(),
                }
            }

            /// Whether it is empty.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }
        }
    };
}

const ARRAY: u32 = 9;

values! {
    /// 8 bits.
    U8(u8) = 0, 1: |from: &mut Reader<'_>, key| from.word(key).map(u8::from_le_bytes);
    /// 8 bits, signed.
    I8(i8) = 1, 1: |from: &mut Reader<'_>, key| from.word(key).map(i8::from_le_bytes);
    /// 16 bits.
    U16(u16) = 2, 2: |from: &mut Reader<'_>, key| from.word(key).map(u16::from_le_bytes);
    /// 16 bits, signed.
    I16(i16) = 3, 2: |from: &mut Reader<'_>, key| from.word(key).map(i16::from_le_bytes);
    /// 32 bits.
    U32(u32) = 4, 4: |from: &mut Reader<'_>, key| from.word(key).map(u32::from_le_bytes);
    /// 32 bits, signed.
    I32(i32) = 5, 4: |from: &mut Reader<'_>, key| from.word(key).map(i32::from_le_bytes);
    /// Single precision.
    F32(f32) = 6, 4: |from: &mut Reader<'_>, key| from.word(key).map(f32::from_le_bytes);
    /// True or false: any byte but 0 is true.
    Bool(bool) = 7, 1: |from: &mut Reader<'_>, key| from.word(key).map(|[byte]: [u8; 1]| byte != 0);
    /// Text, which need not be UTF-8.
    Text(Text) = 8, 8: |from: &mut Reader<'_>, key: &str| from.bytes(key).map(Text::from);
    /// 64 bits.
    U64(u64) = 10, 8: |from: &mut Reader<'_>, key| from.word(key).map(u64::from_le_bytes);
    /// 64 bits, signed.
    I64(i64) = 11, 8: |from: &mut Reader<'_>, key| from.word(key).map(i64::from_le_bytes);
    /// Double precision.
    F64(f64) = 12, 8: |from: &mut Reader<'_>, key| from.word(key).map(f64::from_le_bytes);
}

fn many<T>(count: u64, read: impl FnMut() -> Result<T, Error>) -> Result<Vec<T>, Error> {
    // Grown with the elements: the stated count is not trusted.
    std::iter::repeat_with(read).take(usize::try_from(count).unwrap_or(usize::MAX)).collect()
}

impl Value {
    /// The value as an unsigned integer, if it is one.
    #[must_use]
    pub fn whole(&self) -> Option<u64> {
        match *self {
            Self::U8(n) => Some(n.into()),
            Self::U16(n) => Some(n.into()),
            Self::U32(n) => Some(n.into()),
            Self::U64(n) => Some(n),
            Self::I8(n) => n.try_into().ok(),
            Self::I16(n) => n.try_into().ok(),
            Self::I32(n) => n.try_into().ok(),
            Self::I64(n) => n.try_into().ok(),
            _ => None,
        }
    }

    /// The value for messages, shortened to a line.
    pub(crate) fn brief(&self) -> String {
        match self {
            Self::Array(array) => format!("an array of {}", array.len()),
            other => format!("{other:?}").chars().take(60).collect(),
        }
    }
}
