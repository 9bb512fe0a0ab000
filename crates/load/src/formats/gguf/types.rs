//! GGML's numbers of element types.

use crate::dtype::Dtype;

/// The type with this number.
///
/// # Errors
/// When there is none, with the name of a removed type that had it.
pub fn ggml_type(number: u32) -> Result<Dtype, Option<&'static str>> {
    Ok(match number {
        0 => Dtype::F32,
        1 => Dtype::F16,
        2 => Dtype::Q4_0,
        3 => Dtype::Q4_1,
        6 => Dtype::Q5_0,
        7 => Dtype::Q5_1,
        8 => Dtype::Q8_0,
        9 => Dtype::Q8_1,
        10 => Dtype::Q2K,
        11 => Dtype::Q3K,
        12 => Dtype::Q4K,
        13 => Dtype::Q5K,
        14 => Dtype::Q6K,
        15 => Dtype::Q8K,
        16 => Dtype::Iq2Xxs,
        17 => Dtype::Iq2Xs,
        18 => Dtype::Iq3Xxs,
        19 => Dtype::Iq1S,
        20 => Dtype::Iq4Nl,
        21 => Dtype::Iq3S,
        22 => Dtype::Iq2S,
        23 => Dtype::Iq4Xs,
        24 => Dtype::I8,
        25 => Dtype::I16,
        26 => Dtype::I32,
        27 => Dtype::I64,
        28 => Dtype::F64,
        29 => Dtype::Iq1M,
        30 => Dtype::Bf16,
        34 => Dtype::Tq1_0,
        35 => Dtype::Tq2_0,
        39 => Dtype::Mxfp4,
        40 => Dtype::Nvfp4,
        41 => Dtype::Q1_0,
        42 => Dtype::Q2_0,
        4 => return Err(Some("Q4_2")),
        5 => return Err(Some("Q4_3")),
        31 => return Err(Some("Q4_0_4_4")),
        32 => return Err(Some("Q4_0_4_8")),
        33 => return Err(Some("Q4_0_8_8")),
        36 => return Err(Some("IQ4_NL_4_4")),
        37 => return Err(Some("IQ4_NL_4_8")),
        38 => return Err(Some("IQ4_NL_8_8")),
        _ => return Err(None),
    })
}
