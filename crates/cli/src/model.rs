//! A small safetensors model generated from a seed, with the checksums of its tensors.

use std::collections::{BTreeMap, HashMap};

use onehop_load::Model;
use onehop_load::formats::Metadata;
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize};

use crate::error::{CliError, Result};
use crate::noise::Noise;
use crate::stop::StopFlag;

/// Bytes generated between checks for Ctrl-C, a multiple of a word.
const CHUNK: usize = 1 << 20;
/// Columns of the large tensors.
const COLUMNS: usize = 1024;
/// The metadata entry with the checksums of all tensors, as JSON. They share one entry, because the order of several
/// entries, and so the file, would differ from run to run.
const HASHES: &str = "crc32c";

/// Large tensors: name, type, bytes of an element, sixteenths of the model.
const LARGE: [(&str, Dtype, usize, usize); 5] = [
    ("embed_tokens.weight", Dtype::BF16, 2, 5),
    ("layers.0.attention.weight", Dtype::F32, 4, 4),
    ("layers.0.mlp.weight", Dtype::F16, 2, 3),
    ("layers.0.mlp.quantised", Dtype::I8, 1, 2),
    ("lm_head.weight", Dtype::BF16, 2, 2),
];

/// Small tensors of unaligned sizes, so that the tensors after them start within a block: name, type, bytes of an
/// element, elements.
const SMALL: [(&str, Dtype, usize, usize); 3] = [
    ("layers.0.norm.weight", Dtype::F32, 4, 1021),
    ("positions", Dtype::I64, 8, 129),
    ("mask", Dtype::U8, 1, 777),
];

/// Generates a model file of about `bytes` bytes from a seed.
pub(crate) fn generate(bytes: u64, seed: u64, stop: &StopFlag) -> Result<Vec<u8>> {
    let mut noise = Noise(seed);
    let mut random_bytes = |count| -> Result<Vec<u8>> {
        let mut out = vec![0; count];
        for part in out.chunks_mut(CHUNK) {
            stop.check()?;
            noise.fill(part);
        }
        Ok(out)
    };
    let sixteenth = usize::try_from(bytes / 16).unwrap_or(usize::MAX);
    let mut tensors = Vec::new();
    for (name, dtype, element, share) in LARGE {
        let rows = (sixteenth.saturating_mul(share) / (COLUMNS * element)).max(1);
        tensors.push((name, dtype, vec![rows, COLUMNS], random_bytes(rows * COLUMNS * element)?));
    }
    for (name, dtype, element, count) in SMALL {
        tensors.push((name, dtype, vec![count], random_bytes(count * element)?));
    }
    let hashes: BTreeMap<_, _> =
        tensors.iter().map(|(name, .., data)| (*name, hash(crc32c::crc32c(data)))).collect();
    let metadata = HashMap::from([(HASHES.to_owned(), serde_json::json!(hashes).to_string())]);
    let failed = |e| CliError::Failed(format!("the demo's model cannot be generated: {e}"));
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| Ok((*name, TensorView::new(*dtype, shape.clone(), data)?)))
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(failed)?;
    serialize(views, Some(metadata)).map_err(failed)
}

/// Formats a checksum as in the model's metadata.
pub(crate) fn hash(crc: u32) -> String {
    format!("{crc:08x}")
}

/// The checksums in a model's metadata, by tensor name.
pub(crate) fn hashes(model: &Model) -> Result<BTreeMap<String, String>> {
    let entries = model.metadata.iter().flat_map(|metadata| match metadata {
        Metadata::Safetensors(entries) => entries.as_slice(),
        Metadata::Gguf(_) => &[],
    });
    match entries.into_iter().find(|(key, _)| key == HASHES) {
        Some((_, json)) => serde_json::from_str(json)
            .map_err(|e| CliError::Failed(format!("the safetensors header: {HASHES}: {e}"))),
        None => Ok(BTreeMap::new()),
    }
}
