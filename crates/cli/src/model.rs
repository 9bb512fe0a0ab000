//! A small safetensors model out of a seed, and the plan to load it from the blocks of a drive.

use std::collections::{BTreeMap, HashMap};

use onehop_drive::GpuJob;
use onehop_files::Extent;
use onehop_load::formats::{Metadata, safetensors as format};
use onehop_load::model::Tensor;
use onehop_load::plan::Options;
use onehop_load::{Model, Plan, Selection, Source};
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize};

use crate::error::{CliError, Result};
use crate::volume::Span;

/// Columns of the large tensors.
const COLUMNS: usize = 1024;
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

/// A model on a drive, as its header tells.
pub(crate) struct Described {
    /// The model; its file knows no more than the header.
    pub model: Model,
    /// The check sums that the model itself states, by the tensors' names.
    pub hashes: BTreeMap<String, String>,
}

/// Bytes of a file of `length` bytes up to the first tensor, from the file's first eight.
pub(crate) fn header_bytes(first: &[u8], length: u64) -> Result<u64> {
    let prefix = first.first_chunk().copied().ok_or(format::Error::NoLength(first.len() as u64));
    prefix.and_then(|prefix| format::header_bytes(prefix, length)).map_err(refused)
}

/// What a header tells of a file of `length` bytes.
pub(crate) fn parse(header: Vec<u8>, length: u64) -> Result<Described> {
    let parsed = format::parse(header.get(8..).unwrap_or_default(), length).map_err(refused)?;
    let hashes = match parsed.metadata.iter().find(|(key, _)| key == HASHES) {
        Some((_, json)) => serde_json::from_str(json)
            .map_err(|e| CliError::Failed(format!("the safetensors header: {HASHES}: {e}")))?,
        None => BTreeMap::new(),
    };
    let tensors = parsed.tensors.into_iter().map(|info| Tensor { info, file: 0 }).collect();
    let metadata = vec![Metadata::Safetensors(parsed.metadata)];
    let file: Box<dyn Source> = Box::new(HeaderOnly { header, length });
    let model = Model { files: vec![file], metadata, tensors, format: "safetensors" };
    Ok(Described { model, hashes })
}

fn refused(why: format::Error) -> CliError {
    CliError::Load(onehop_load::Error::Safetensors { file: NAME.into(), why })
}

/// The name of a file that has none.
const NAME: &str = "the model on the drive";

/// A file of which only the header has been read.
struct HeaderOnly {
    header: Vec<u8>,
    length: u64,
}

impl Source for HeaderOnly {
    fn name(&self) -> &str {
        NAME
    }

    fn bytes(&self) -> u64 {
        self.length
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> onehop_load::Result<()> {
        let bytes = buffer.len() as u64;
        let from = usize::try_from(offset).ok().and_then(|at| self.header.get(at..)?.get(..buffer.len()));
        let length = self.header.len() as u64;
        let ended = || onehop_load::Error::Ended { file: NAME.into(), offset, bytes, length };
        buffer.copy_from_slice(from.ok_or_else(ended)?);
        Ok(())
    }
}

/// The plan to read a whole model in blocks of `block` bytes.
pub(crate) fn plan(model: &Model, block: u64) -> Result<Plan> {
    // The model is small: gaps for all of its runs, however long the blocks are.
    let options = Options { block, slack: 64 * block, ..Options::default() };
    Plan::new(model, &Selection::default(), options).map_err(|e| CliError::Load(e.into()))
}

/// The commands of a plan for a file with these extents: whole blocks, each straight to where it belongs.
pub(crate) fn jobs(plan: &Plan, extents: &[Extent], size: u64) -> Result<Vec<GpuJob>> {
    let block = plan.options.block;
    let mut jobs = Vec::new();
    for chunk in plan.chunks(u64::MAX).map_err(|e| CliError::Load(e.into()))? {
        let (Some(at), [read]) = (chunk.direct, chunk.reads.as_slice()) else {
            return Err(CliError::Failed(
                "the model's tensors do not start at multiples of 4 bytes: no drive puts them where they belong"
                    .into(),
            ));
        };
        let span = Span::new(extents, size, read.offset, Some(read.valid), block)?;
        if span.zeros > 0 || !span.inline.is_empty() {
            return Err(CliError::Failed("the model's file has holes".into()));
        }
        jobs.extend(span.jobs.iter().map(|job| GpuJob { offset: at + job.offset, ..*job }));
    }
    Ok(jobs)
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
    use onehop_files::Place;

    use super::*;

    #[test]
    fn a_model_parses_back_and_its_plan_covers_it() {
        for (bytes, block) in [(64 << 10, 512), (1 << 20, 4096), (5_000_000, 65536)] {
            let file = make(bytes, 3).unwrap();
            let length = file.len() as u64;
            let header = header_bytes(&file, length).unwrap() as usize;
            let described = parse(file[..header].to_vec(), length).unwrap();
            let plan = plan(&described.model, block).unwrap();
            assert_eq!(plan.tensors.len(), LARGE.len() + SMALL.len());
            let mut arena = vec![0; plan.gpu_bytes as usize];
            // In two pieces: the second half comes first on the drive.
            let half = length / 2 / block * block;
            let piece = |offset, len, at| Extent { offset, len, place: Place::Drive(at) };
            let extents = [piece(0, half, length.next_multiple_of(block)), piece(half, length - half, 0)];
            for job in jobs(&plan, &extents, length).unwrap() {
                let place = job.lba * block;
                let from = if place < length.next_multiple_of(block) {
                    place + half
                } else {
                    place - length.next_multiple_of(block)
                } as usize;
                let mut part = file[from..file.len().min(from + (job.blocks * block) as usize)].to_vec();
                part.resize((job.blocks * block) as usize, 0);
                arena[job.offset as usize..][..part.len()].copy_from_slice(&part);
            }
            for tensor in &plan.tensors {
                let data = &arena[tensor.at as usize..][..tensor.bytes as usize];
                assert_eq!(tensor.at % 256, 0);
                assert_eq!(described.hashes[&tensor.name], hash(crc32c::crc32c(data)));
            }
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for header in
            [&[][..], &[0; 7], &[0; 8], &[0xff; 8], b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0\xff\xff"]
        {
            let length = header.len() as u64;
            let parsed =
                header_bytes(header, length).and_then(|_| parse(header.to_vec(), length).map(|_| ()));
            assert!(parsed.is_err(), "{header:?}");
        }
    }

    #[test]
    fn what_no_drive_can_place_is_refused() {
        let json = br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        let header = [&(json.len() as u64).to_le_bytes(), &json[..]].concat();
        assert_ne!(header.len() % 4, 0);
        let length = header.len() as u64 + 1;
        let plan = plan(&parse(header, length).unwrap().model, 512).unwrap();
        let extents = [Extent { offset: 0, len: length, place: Place::Drive(0) }];
        assert!(jobs(&plan, &extents, length).is_err());
    }
}
