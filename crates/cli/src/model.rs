//! A small safetensors model out of a seed, and the plan to load it: which blocks hold its tensors.

use std::collections::{BTreeMap, HashMap};

use onehop_drive::GpuJob;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorView, serialize};

use crate::error::{CliError, Result};

/// Columns of the large tensors.
const COLUMNS: usize = 1024;
/// Most bytes of a header that is believed.
const MAX_HEADER: u64 = 100 << 20;
/// Under this, the model's metadata holds the check sums of its tensors by name, as JSON: one entry, because the order
/// of several would differ from run to run, and with it the file.
const HASHES: &str = "crc32c";

/// The large tensors: name, type, bytes of an element, sixteenths of the model.
const LARGE: [(&str, Dtype, usize, usize); 5] = [
    ("embed_tokens.weight", Dtype::BF16, 2, 5),
    ("layers.0.attention.weight", Dtype::F32, 4, 4),
    ("layers.0.mlp.weight", Dtype::F16, 2, 3),
    ("layers.0.mlp.quantised", Dtype::I8, 1, 2),
    ("lm_head.weight", Dtype::BF16, 2, 2),
];

/// The small ones, of odd sizes, so that what follows them starts somewhere within a block.
const SMALL: [(&str, Dtype, usize, usize); 3] = [
    ("layers.0.norm.weight", Dtype::F32, 4, 1021),
    ("positions", Dtype::I64, 8, 129),
    ("mask", Dtype::U8, 1, 777),
];

/// A tensor of a model, as its header tells.
pub(crate) struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: usize,
    /// Where it starts in the file.
    pub start: u64,
    /// The check sum that the model itself states.
    pub hash: Option<String>,
}

/// The file of a model of about `bytes` bytes, all drawn from `seed`.
pub(crate) fn make(bytes: u64, seed: u64) -> Result<Vec<u8>> {
    let mut noise = Noise(seed);
    let sixteenth = usize::try_from(bytes / 16).unwrap_or(usize::MAX);
    let mut tensors = Vec::new();
    for (name, dtype, element, share) in LARGE {
        let rows = (sixteenth.saturating_mul(share) / (COLUMNS * element)).max(1);
        tensors.push((name, dtype, vec![rows, COLUMNS], noise.bytes(rows * COLUMNS * element)));
    }
    for (name, dtype, element, count) in SMALL {
        tensors.push((name, dtype, vec![count], noise.bytes(count * element)));
    }
    let hashes: BTreeMap<_, _> =
        tensors.iter().map(|(name, .., data)| (*name, hash(crc32c::crc32c(data)))).collect();
    let metadata = HashMap::from([(HASHES.to_owned(), serde_json::json!(hashes).to_string())]);
    let wrong = |e| CliError::Failed(format!("the demo's model cannot be made: {e}"));
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| Ok((*name, TensorView::new(*dtype, shape.clone(), data)?)))
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(wrong)?;
    serialize(views, Some(metadata)).map_err(wrong)
}

/// A check sum as the model states it.
pub(crate) fn hash(crc: u32) -> String {
    format!("{crc:08x}")
}

/// Bytes of the file up to the first tensor, from the file's first eight.
pub(crate) fn header_bytes(first: &[u8]) -> Result<u64> {
    let length = first.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    length
        .filter(|n| (2..=MAX_HEADER).contains(n))
        .map(|n| n + 8)
        .ok_or_else(|| CliError::Failed("these blocks do not start with a safetensors header".into()))
}

/// The tensors that a header tells of, in the order of the file.
pub(crate) fn parse(header: &[u8]) -> Result<Vec<Tensor>> {
    let wrong = |why: String| CliError::Failed(format!("the safetensors header: {why}"));
    let json = header.get(8..).unwrap_or_default();
    let metadata: Metadata = serde_json::from_slice(json).map_err(|e| wrong(e.to_string()))?;
    let said: BTreeMap<String, String> = match metadata.metadata().as_ref().and_then(|m| m.get(HASHES)) {
        Some(json) => serde_json::from_str(json).map_err(|e| wrong(format!("{HASHES}: {e}")))?,
        None => BTreeMap::new(),
    };
    let mut tensors = Vec::new();
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        let (from, to) = info.data_offsets;
        tensors.push(Tensor {
            dtype: info.dtype.to_string(),
            shape: info.shape.clone(),
            bytes: to.saturating_sub(from),
            start: (from as u64).checked_add(header.len() as u64).ok_or_else(|| wrong("an offset".into()))?,
            hash: said.get(&name).cloned(),
            name,
        });
    }
    Ok(tensors)
}

/// Which blocks to read for these tensors, where the file's first block is `first`: rounded to blocks, neighbours made
/// one, each range behind the one before it in memory. Beside it, where each tensor comes to lie.
pub(crate) fn plan(tensors: &[Tensor], first: u64, block: u64) -> (Vec<GpuJob>, Vec<u64>) {
    let mut jobs: Vec<GpuJob> = Vec::new();
    let mut places = Vec::new();
    for tensor in tensors {
        let from = first + tensor.start / block;
        let to = first + tensor.start.saturating_add(tensor.bytes as u64).div_ceil(block);
        match jobs.last_mut() {
            // The block that two tensors share is read once.
            Some(last) if (last.lba..=last.lba + last.blocks).contains(&from) => {
                last.blocks = last.blocks.max(to.saturating_sub(last.lba));
            }
            last => {
                let offset = last.map_or(0, |last| last.offset + last.blocks * block);
                jobs.push(GpuJob { lba: from, blocks: to.saturating_sub(from), offset });
            }
        }
        let range = jobs.last().map_or(0, |job| job.offset + (from - job.lba) * block);
        places.push(range + tensor.start % block);
    }
    // Tensors without elements need no blocks.
    jobs.retain(|job| job.blocks > 0);
    (jobs, places)
}

/// Bytes that nobody would write by accident (xorshift64*).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        // Zero is the one state that gives nothing but zeroes.
        let mut x = if self.0 == 0 { 0x9e37_79b9_7f4a_7c15 } else { self.0 };
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        self.0 = x;
        x.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut out = vec![0; count];
        for chunk in out.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_parses_back_and_its_plan_covers_it() {
        for (bytes, block) in [(64 << 10, 512), (1 << 20, 4096), (5_000_000, 65536)] {
            let file = make(bytes, 3).unwrap();
            let header = header_bytes(&file).unwrap() as usize;
            let tensors = parse(&file[..header]).unwrap();
            assert_eq!(tensors.len(), LARGE.len() + SMALL.len());
            let (jobs, places) = plan(&tensors, 7, block);
            let mut arena = Vec::new();
            for job in &jobs {
                assert_eq!(job.offset, arena.len() as u64);
                let from = ((job.lba - 7) * block) as usize;
                let mut part = file[from..file.len().min(from + (job.blocks * block) as usize)].to_vec();
                part.resize((job.blocks * block) as usize, 0);
                arena.extend(part);
            }
            for (tensor, place) in tensors.iter().zip(places) {
                let data = &arena[place as usize..place as usize + tensor.bytes];
                assert_eq!(data, &file[tensor.start as usize..][..tensor.bytes]);
                assert_eq!(tensor.hash.as_deref(), Some(hash(crc32c::crc32c(data)).as_str()));
            }
        }
    }

    #[test]
    fn ranges_apart_stay_apart() {
        let tensor = |start, bytes| Tensor {
            name: String::new(),
            dtype: String::new(),
            shape: Vec::new(),
            bytes,
            start,
            hash: None,
        };
        let (jobs, places) =
            plan(&[tensor(100, 50), tensor(4000, 200), tensor(50_000, 0), tensor(90_000, 9)], 1, 4096);
        let ranges: Vec<_> = jobs.iter().map(|j| (j.lba, j.blocks, j.offset)).collect();
        assert_eq!(ranges, [(1, 2, 0), (13, 1, 8192), (22, 1, 12288)]);
        assert_eq!(places, [100, 4000, 8192 + 50_000 % 4096, 12288 + 90_000 % 4096]);
    }

    #[test]
    fn nonsense_is_refused() {
        for header in
            [&[][..], &[0; 7], &[0; 8], &[0xff; 8], b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0\xff\xff"]
        {
            let parsed = header_bytes(header).and_then(|_| parse(header).map(|_| ()));
            assert!(parsed.is_err(), "{header:?}");
        }
    }
}
