//! Manifests: an accepted one is written identically.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onehop_load::Manifest;

fuzz_target!(|text: &[u8]| {
    match Manifest::parse(text) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(manifest) => {
            let again = Manifest::parse(manifest.to_json().as_bytes()).expect("our own text");
            assert_eq!(again, manifest);
        }
    }
});
