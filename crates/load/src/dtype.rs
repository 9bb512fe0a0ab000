//! Types of tensor elements: those of safetensors and of GGML, which packs some into blocks with scales.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident $text:literal: $elements:literal in $bytes:literal;)*) => {
        /// The type of a tensor's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Dtype {
            $($(#[$doc])* $name,)*
        }

        impl Dtype {
            /// All types.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The name used by the formats.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// The smallest number of elements that fill whole bytes, and those bytes.
            #[must_use]
            pub fn block(self) -> (u64, u64) {
                match self { $(Self::$name => ($elements, $bytes),)* }
            }
        }
    };
}

dtypes! {
    /// A boolean in one byte.
    Bool "BOOL": 1 in 1;
    /// 4 bits, E2M1 of the OCP microscaling formats, two in a byte.
    F4 "F4": 2 in 1;
    /// 6 bits, E2M3, four in three bytes.
    F6E2M3 "F6_E2M3": 4 in 3;
    /// 6 bits, E3M2, four in three bytes.
    F6E3M2 "F6_E3M2": 4 in 3;
    /// A byte.
    U8 "U8": 1 in 1;
    /// A signed byte.
    I8 "I8": 1 in 1;
    /// 8 bits, E5M2.
    F8E5M2 "F8_E5M2": 1 in 1;
    /// 8 bits, E4M3 without infinities.
    F8E4M3 "F8_E4M3": 1 in 1;
    /// 8 bits, only an exponent: scales of the microscaling formats.
    F8E8M0 "F8_E8M0": 1 in 1;
    /// 8 bits, E4M3 without infinities and negative zero.
    F8E4M3Fnuz "F8_E4M3FNUZ": 1 in 1;
    /// 8 bits, E5M2 without infinities and negative zero.
    F8E5M2Fnuz "F8_E5M2FNUZ": 1 in 1;
    /// 16 bits, signed.
    I16 "I16": 1 in 2;
    /// 16 bits.
    U16 "U16": 1 in 2;
    /// IEEE half precision.
    F16 "F16": 1 in 2;
    /// The upper half of an F32.
    Bf16 "BF16": 1 in 2;
    /// 32 bits, signed.
    I32 "I32": 1 in 4;
    /// 32 bits.
    U32 "U32": 1 in 4;
    /// IEEE single precision.
    F32 "F32": 1 in 4;
    /// Two F32: a complex number.
    C64 "C64": 1 in 8;
    /// IEEE double precision.
    F64 "F64": 1 in 8;
    /// 64 bits, signed.
    I64 "I64": 1 in 8;
    /// 64 bits.
    U64 "U64": 1 in 8;
    /// GGML: 4 bits and a scale.
    Q4_0 "Q4_0": 32 in 18;
    /// GGML: 4 bits, a scale and a minimum.
    Q4_1 "Q4_1": 32 in 20;
    /// GGML: 5 bits and a scale.
    Q5_0 "Q5_0": 32 in 22;
    /// GGML: 5 bits, a scale and a minimum.
    Q5_1 "Q5_1": 32 in 24;
    /// GGML: 8 bits and a scale.
    Q8_0 "Q8_0": 32 in 34;
    /// GGML: 8 bits, a scale and a sum.
    Q8_1 "Q8_1": 32 in 40;
    /// GGML: 2 bits in super-blocks.
    Q2K "Q2_K": 256 in 84;
    /// GGML: 3 bits in super-blocks.
    Q3K "Q3_K": 256 in 110;
    /// GGML: 4 bits in super-blocks.
    Q4K "Q4_K": 256 in 144;
    /// GGML: 5 bits in super-blocks.
    Q5K "Q5_K": 256 in 176;
    /// GGML: 6 bits in super-blocks.
    Q6K "Q6_K": 256 in 210;
    /// GGML: 8 bits in super-blocks.
    Q8K "Q8_K": 256 in 292;
    /// GGML: 2.06 bits, from a table.
    Iq2Xxs "IQ2_XXS": 256 in 66;
    /// GGML: 2.31 bits, from a table.
    Iq2Xs "IQ2_XS": 256 in 74;
    /// GGML: 3.06 bits, from a table.
    Iq3Xxs "IQ3_XXS": 256 in 98;
    /// GGML: 1.56 bits, from a table.
    Iq1S "IQ1_S": 256 in 50;
    /// GGML: 4 bits, non-linear.
    Iq4Nl "IQ4_NL": 32 in 18;
    /// GGML: 3.44 bits, from a table.
    Iq3S "IQ3_S": 256 in 110;
    /// GGML: 2.5 bits, from a table.
    Iq2S "IQ2_S": 256 in 82;
    /// GGML: 4.25 bits, non-linear.
    Iq4Xs "IQ4_XS": 256 in 136;
    /// GGML: 1.75 bits, from a table.
    Iq1M "IQ1_M": 256 in 56;
    /// GGML: ternary, 1.69 bits.
    Tq1_0 "TQ1_0": 256 in 54;
    /// GGML: ternary, 2.06 bits.
    Tq2_0 "TQ2_0": 256 in 66;
    /// GGML: OCP MXFP4, a scale per 32 elements.
    Mxfp4 "MXFP4": 32 in 17;
    /// GGML: NVFP4, a scale per 16 elements.
    Nvfp4 "NVFP4": 64 in 36;
    /// GGML: one bit and a scale.
    Q1_0 "Q1_0": 128 in 18;
    /// GGML: 2 bits and a scale.
    Q2_0 "Q2_0": 64 in 18;
}

/// Why the size of a shape cannot be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SizeError {
    /// It exceeds 2⁶⁴ bytes.
    Overflow,
    /// The elements do not fill whole blocks.
    Part,
}

impl Dtype {
    /// Bytes of this many elements.
    pub(crate) fn bytes(self, elements: u64) -> Result<u64, SizeError> {
        let (count, bytes) = self.block();
        if !elements.is_multiple_of(count) {
            return Err(SizeError::Part);
        }
        (elements / count).checked_mul(bytes).ok_or(SizeError::Overflow)
    }

    /// Bytes of a packed tensor of this shape.
    pub(crate) fn size(self, shape: &[u64]) -> Result<u64, SizeError> {
        let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).ok_or(SizeError::Overflow)?;
        self.bytes(elements)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// An unknown name of a type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an element type that onehop knows, such as BF16, F8_E4M3 or Q4_K")]
pub struct UnknownDtype(pub String);

impl FromStr for Dtype {
    type Err = UnknownDtype;

    fn from_str(name: &str) -> Result<Self, UnknownDtype> {
        Self::ALL.iter().copied().find(|d| d.name() == name).ok_or_else(|| UnknownDtype(name.into()))
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.name())
    }
}
