//! How values lie in bits and bytes: fields of registers, and fields of records in memory.

use core::fmt;

/// Number fields of a newtype: a getter and a `with_*` for each. `get with lowest-bit bits type`.
macro_rules! bits {
    ($raw:ty; $($(#[$doc:meta])* $get:ident $with:ident $lo:literal $len:literal $t:ty;)*) => { $(
        $(#[$doc])*
        #[inline(always)]
        #[must_use]
        pub const fn $get(self) -> $t {
            (self.0 >> $lo & ((1 << $len) - 1)) as $t
        }
        #[doc = concat!("The same value with `", stringify!($get), "` set; excess bits are dropped.")]
        #[inline(always)]
        #[must_use]
        pub const fn $with(self, v: $t) -> Self {
            let mask: $raw = ((1 << $len) - 1) << $lo;
            Self(self.0 & !mask | (v as $raw) << $lo & mask)
        }
    )* };
}

/// One-bit fields of a newtype: a getter and a `with_*` for each. `get with bit`.
macro_rules! flags {
    ($raw:ty; $($(#[$doc:meta])* $get:ident $with:ident $bit:literal;)*) => { $(
        $(#[$doc])*
        #[inline(always)]
        #[must_use]
        pub const fn $get(self) -> bool {
            self.0 >> $bit & 1 != 0
        }
        #[doc = concat!("The same value with `", stringify!($get), "` set or cleared.")]
        #[inline(always)]
        #[must_use]
        pub const fn $with(self, v: bool) -> Self {
            Self(self.0 & !(1 << $bit) | (v as $raw) << $bit)
        }
    )* };
}

/// A block of bytes that should hold a record is too short.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooShort {
    /// Bytes of the record.
    pub need: usize,
    /// Bytes that are there.
    pub have: usize,
}

impl fmt::Display for TooShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes are too few for a record of {}", self.have, self.need)
    }
}

impl core::error::Error for TooShort {}

/// A value that travels as little-endian bytes.
pub trait Wire: Copy {
    /// The value at a byte offset; zero past the end.
    fn get(bytes: &[u8], at: usize) -> Self;
    /// Writes the value at a byte offset; nothing past the end.
    fn put(self, bytes: &mut [u8], at: usize);
}

impl<const N: usize> Wire for [u8; N] {
    fn get(bytes: &[u8], at: usize) -> Self {
        bytes.get(at..).and_then(|from| from.first_chunk()).copied().unwrap_or([0; N])
    }

    fn put(self, bytes: &mut [u8], at: usize) {
        if let Some(to) = bytes.get_mut(at..).and_then(|from| from.first_chunk_mut()) {
            *to = self;
        }
    }
}

macro_rules! wire_numbers {
    ($($t:ty)*) => { $(
        impl Wire for $t {
            fn get(bytes: &[u8], at: usize) -> Self {
                Self::from_le_bytes(Wire::get(bytes, at))
            }

            fn put(self, bytes: &mut [u8], at: usize) {
                self.to_le_bytes().put(bytes, at);
            }
        }
    )* };
}
wire_numbers! { u8 u16 u32 u64 u128 }

/// Lets newtypes of numbers be fields of records.
macro_rules! wire_newtypes {
    ($($t:ty)*) => { $(
        impl $crate::wire::Wire for $t {
            fn get(bytes: &[u8], at: usize) -> Self {
                Self($crate::wire::Wire::get(bytes, at))
            }

            fn put(self, bytes: &mut [u8], at: usize) {
                self.0.put(bytes, at);
            }
        }
    )* };
}
wire_newtypes! {
    crate::regs::Version
    crate::sgl::Support
    crate::format::Flbas
    crate::format::LbaFormat
}

/// A record in memory: a view, and a builder that writes the same fields; `@text` fields are padded ASCII.
macro_rules! record {
    (
        $(#[$doc:meta])* $view:ident, $build:ident, $bytes:literal;
        $($(#[$fdoc:meta])* $name:ident $at:literal $t:ty;)*
        $(@text: $($(#[$tdoc:meta])* $text:ident $tat:literal $tlen:literal;)*)?
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $view<'a>(&'a [u8; $bytes]);

        impl<'a> $view<'a> {
            /// Bytes of the record.
            pub const BYTES: usize = $bytes;

            /// A view of the record.
            #[must_use]
            pub const fn new(bytes: &'a [u8; $bytes]) -> Self {
                Self(bytes)
            }

            /// A view of the record at the start of some bytes.
            pub fn parse(bytes: &'a [u8]) -> Result<Self, $crate::wire::TooShort> {
                match bytes.first_chunk() {
                    Some(bytes) => Ok(Self(bytes)),
                    None => Err($crate::wire::TooShort { need: $bytes, have: bytes.len() }),
                }
            }

            /// The bytes of the record.
            #[must_use]
            pub const fn bytes(&self) -> &'a [u8; $bytes] {
                self.0
            }

            $(
                $(#[$fdoc])*
                #[must_use]
                pub fn $name(&self) -> $t {
                    $crate::wire::Wire::get(self.0, $at)
                }
            )*
            $($(
                $(#[$tdoc])*
                #[must_use]
                pub fn $text(&self) -> $crate::wire::Text<'a> {
                    $crate::wire::Text::in_record(self.0, $tat, $tlen)
                }
            )*)?
        }

        #[doc = concat!("Writes the fields that [`", stringify!($view), "`] reads; what is not set stays as it was.")]
        pub struct $build<'a>(&'a mut [u8; $bytes]);

        impl<'a> $build<'a> {
            /// A builder in these bytes.
            #[must_use]
            pub const fn new(bytes: &'a mut [u8; $bytes]) -> Self {
                Self(bytes)
            }

            $(
                $(#[$fdoc])*
                pub fn $name(self, v: $t) -> Self {
                    $crate::wire::Wire::put(v, self.0, $at);
                    self
                }
            )*
            $($(
                $(#[$tdoc])*
                pub fn $text(self, v: &str) -> Self {
                    $crate::wire::put_text(self.0, $tat, $tlen, v);
                    self
                }
            )*)?
        }
    };
}

pub(crate) use {bits, flags, record, wire_newtypes};

/// Text of a fixed width, padded with blanks or zeros, which need not be ASCII.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Text<'a>(&'a [u8]);

impl<'a> Text<'a> {
    /// The text in these bytes, without the padding around it.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
        Self(bytes.get(..end).unwrap_or(bytes).trim_ascii())
    }

    /// The text at an offset of a record.
    pub(crate) fn in_record(bytes: &'a [u8], at: usize, len: usize) -> Self {
        Self::new(bytes.get(at..at.saturating_add(len)).unwrap_or(&[]))
    }

    /// The raw bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.0
    }

    /// The text, if every byte is printable ASCII.
    #[must_use]
    pub fn as_str(&self) -> Option<&'a str> {
        let printable = self.0.iter().all(|b| (0x20..0x7f).contains(b));
        if printable { core::str::from_utf8(self.0).ok() } else { None }
    }
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        if let Some(text) = self.as_str() {
            return f.pad(text);
        }
        for &b in self.0 {
            f.write_char(if (0x20..0x7f).contains(&b) { b as char } else { char::REPLACEMENT_CHARACTER })?;
        }
        Ok(())
    }
}

impl fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl PartialEq<str> for Text<'_> {
    fn eq(&self, other: &str) -> bool {
        self.0 == other.as_bytes()
    }
}

impl PartialEq<&str> for Text<'_> {
    fn eq(&self, other: &&str) -> bool {
        self.0 == other.as_bytes()
    }
}

/// Writes text padded with blanks; cuts what does not fit.
pub(crate) fn put_text(bytes: &mut [u8], at: usize, len: usize, text: &str) {
    if let Some(to) = bytes.get_mut(at..at.saturating_add(len)) {
        to.fill(b' ');
        to.iter_mut().zip(text.bytes()).for_each(|(to, b)| *to = b);
    }
}
