//! safetensors headers: what is accepted keeps every promise, the reference accepts it too, and its plan can be walked.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onehop_fuzz::model;
use onehop_load::formats::safetensors::{header_bytes, parse};

fuzz_target!(|input: (u16, &[u8])| {
    let (data, json) = input;
    let length = 8 + json.len() as u64 + u64::from(data);
    if let Some(Ok(bytes)) = json.first_chunk().map(|prefix| header_bytes(*prefix, length)) {
        assert!((10..=length).contains(&bytes));
    }
    match parse(json, length) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(header) => {
            let mut end = header.data;
            for tensor in &header.tensors {
                assert_eq!(tensor.offset, end, "a hole or an overlap");
                end += tensor.bytes;
            }
            assert_eq!(end, length);
            let mut file = (json.len() as u64).to_le_bytes().to_vec();
            file.extend(json);
            file.resize(length as usize, 0);
            let (_, theirs) =
                safetensors::SafeTensors::read_metadata(&file).expect("the reference accepts it");
            assert_eq!(theirs.tensors().len(), header.tensors.len());
            model::walk(header.tensors, length);
        }
    }
});
