//! Indexes of sharded models: no shard outside of the directory, no duplicate tensor.
#![no_main]

use std::collections::HashSet;
use std::path::{Component, Path};

use libfuzzer_sys::fuzz_target;
use onehop_load::formats::index::parse;

fuzz_target!(|text: &[u8]| {
    match parse(text) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(index) => {
            for shard in &index.shards {
                let plain = Path::new(shard).components().all(|c| matches!(c, Component::Normal(_)));
                assert!(plain && !shard.is_empty() && !shard.contains('\0'), "{shard:?}");
            }
            assert!(index.shards.is_sorted());
            let names: HashSet<_> = index.tensors.iter().map(|(name, _)| name).collect();
            assert_eq!(names.len(), index.tensors.len());
            assert!(index.tensors.iter().all(|(_, i)| *i < index.shards.len()));
        }
    }
});
