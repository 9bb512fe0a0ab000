//! safetensors headers: an accepted header keeps every guarantee, and the reference accepts it too; headers that the
//! reference accepts are accepted, except by deliberately stricter rules. The plan of an accepted header can be walked.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onehop_fuzz::model;
use onehop_load::formats::safetensors::{Error, header_bytes, parse};
use safetensors::SafeTensors;

fuzz_target!(|input: (u16, &[u8])| {
    let (data, json) = input;
    let length = 8 + json.len() as u64 + u64::from(data);
    if let Some(Ok(bytes)) = json.first_chunk().map(|prefix| header_bytes(*prefix, length)) {
        assert!((10..=length).contains(&bytes));
    }
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json);
    file.resize(length as usize, 0);
    match (parse(json, length), SafeTensors::read_metadata(&file)) {
        (Err(error), Err(_)) => assert!(!error.to_string().is_empty()),
        // We refuse a description as a list, or a type as an object.
        (
            Err(
                Error::Twice(_)
                | Error::KeyTwice { .. }
                | Error::NulInName(_)
                | Error::Rank(_)
                | Error::Json(_),
            ),
            _,
        ) => {}
        (Err(error), Ok(_)) => panic!("the reference accepts it: {error}"),
        (Ok(_), Err(error)) => panic!("the reference refuses it: {error}"),
        (Ok(header), Ok((_, theirs))) => {
            let mut end = header.data;
            for tensor in &header.tensors {
                assert_eq!(tensor.offset, end, "a hole or an overlap");
                end += tensor.bytes;
            }
            assert_eq!(end, length);
            assert_eq!(theirs.tensors().len(), header.tensors.len());
            model::walk(header.tensors, length);
        }
    }
});
