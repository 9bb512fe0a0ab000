//! The DLPack types of the types of model files.

use onehop_load::{Dtype, TensorInfo};

use crate::dlpack::DataType;

/// The codes of DLPack.
const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const COMPLEX: u8 = 5;
const BOOL: u8 = 6;
const F8_E4M3FN: u8 = 10;
const F8_E4M3FNUZ: u8 = 11;
const F8_E5M2: u8 = 12;
const F8_E5M2FNUZ: u8 = 13;
const F8_E8M0: u8 = 14;

/// The DLPack type; for elements that share bytes, that of their bytes.
pub(crate) fn data_type(dtype: Dtype) -> DataType {
    let (code, bits) = match dtype {
        Dtype::Bool => (BOOL, 8),
        Dtype::I8 => (INT, 8),
        Dtype::I16 => (INT, 16),
        Dtype::I32 => (INT, 32),
        Dtype::I64 => (INT, 64),
        Dtype::U16 => (UINT, 16),
        Dtype::U32 => (UINT, 32),
        Dtype::U64 => (UINT, 64),
        Dtype::F16 => (FLOAT, 16),
        Dtype::F32 => (FLOAT, 32),
        Dtype::F64 => (FLOAT, 64),
        Dtype::Bf16 => (BFLOAT, 16),
        Dtype::C64 => (COMPLEX, 64),
        Dtype::F8E4M3 => (F8_E4M3FN, 8),
        Dtype::F8E4M3Fnuz => (F8_E4M3FNUZ, 8),
        Dtype::F8E5M2 => (F8_E5M2, 8),
        Dtype::F8E5M2Fnuz => (F8_E5M2FNUZ, 8),
        Dtype::F8E8M0 => (F8_E8M0, 8),
        _ => (UINT, 8),
    };
    DataType { code, bits, lanes: 1 }
}

/// Whether elements share bytes with others, or with a scale.
pub(crate) fn is_packed(dtype: Dtype) -> bool {
    dtype.block().0 > 1
}

/// The tensor as it is exported: packed elements become bytes, with those of a row in the last dimension. If rows do
/// not end at whole bytes, it has one dimension.
pub(crate) fn exported(tensor: &TensorInfo) -> TensorInfo {
    if !is_packed(tensor.dtype) {
        return tensor.clone();
    }
    let mut shape = tensor.shape.clone();
    let (elements, bytes) = tensor.dtype.block();
    match shape.last_mut() {
        Some(last) if last.is_multiple_of(elements) => *last = *last / elements * bytes,
        _ => shape = vec![tensor.bytes],
    }
    TensorInfo { dtype: Dtype::U8, shape, ..tensor.clone() }
}
