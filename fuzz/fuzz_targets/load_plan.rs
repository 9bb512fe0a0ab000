//! Plans of arbitrary tensors and options: executed chunk by chunk, every byte ends up in its place.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use onehop_fuzz::model::{self, Asked};
use onehop_load::{Dtype, TensorInfo};

/// Bytes of the file: enough for many blocks of each size, and few enough for many files per second.
const MOST: u64 = 64 << 10;

#[derive(Arbitrary, Debug)]
struct Input {
    header: u16,
    tensors: Vec<(u8, [u8; 3], u8)>,
    asked: Asked,
}

fuzz_target!(|input: Input| {
    let mut at = u64::from(input.header);
    let mut tensors = Vec::new();
    for (i, (dtype, dims, hole)) in input.tensors.iter().take(40).enumerate() {
        let dtype = Dtype::ALL[usize::from(*dtype) % Dtype::ALL.len()];
        let (count, block) = dtype.block();
        let mut shape: Vec<u64> = dims.iter().map(|d| u64::from(d % 20)).collect();
        let bytes = shape.iter().product::<u64>() * block;
        shape[2] *= count;
        let offset = at + u64::from(*hole) * u64::from(hole % 3 == 0);
        at = offset + bytes;
        if at > MOST {
            break;
        }
        tensors.push(TensorInfo { name: i.to_string(), dtype, shape, offset, bytes });
    }
    model::carry_out(tensors, at.min(MOST), &input.asked);
});
