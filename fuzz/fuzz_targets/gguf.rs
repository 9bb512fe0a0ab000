//! GGUF headers: an error, or a header whose tensors are within the file, disjoint and aligned.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onehop_fuzz::model;
use onehop_load::formats::gguf::{Error, parse};

fuzz_target!(|input: (u32, &[u8])| {
    let (behind, bytes) = input;
    let length = bytes.len() as u64 + u64::from(behind);
    match parse(bytes, length) {
        Err(Error::More { given, needed }) => {
            assert!(given == bytes.len() as u64 && needed > given && needed <= length);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(header) => {
            assert!(header.data <= length);
            let mut end = header.data;
            for tensor in &header.tensors {
                assert!(
                    tensor.offset >= end && (tensor.offset - header.data).is_multiple_of(header.alignment)
                );
                end = tensor.offset + tensor.bytes;
            }
            assert!(end <= length);
            model::walk(header.tensors, length);
        }
    }
});
