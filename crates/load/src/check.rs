//! Verifies a load: compares GPU memory with the files, and computes checksums.

mod verdict;

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use onehop_gpu::{Gpu, Region, Sums};

use crate::error::{Error, Result};
use crate::manifest::Manifest;
use crate::model::Model;
use crate::plan::{Chunk, Plan};
use crate::source::Source;

pub use verdict::{BY_FILES, Verdict};

/// Bytes compared at a time.
const PART: u64 = 4 << 20;
/// Upper limit of threads.
const MOST_THREADS: usize = 8;

/// The first difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Offset in the arena.
    pub at: u64,
    /// The tensor at that place.
    pub tensor: String,
}

/// Reads the files again and compares every byte of the tensors in the arena; returns the first difference. `go_on` is
/// called regularly.
///
/// # Errors
/// When a file or the GPU's memory cannot be read.
pub fn compare(
    plan: &Plan,
    files: &[Box<dyn Source>],
    arena: &Region,
    go_on: &(dyn Fn() -> bool + Sync),
) -> Result<Option<Difference>> {
    let chunks: Vec<Chunk> = plan.chunks(PART)?.collect();
    let first = Mutex::new(None::<u64>);
    spread(chunks.len(), go_on, &|i| {
        let chunk = &chunks[i];
        let Some(file) = files.get(chunk.file) else { return Ok(()) };
        let mut slot = vec![0; chunk.bytes() as usize];
        for read in &chunk.reads {
            let from = read.slot as usize;
            file.read_at(read.offset, &mut slot[from..from + read.valid as usize])?;
        }
        for copy in &chunk.copies {
            let mut there = vec![0; copy.bytes() as usize];
            arena.read(copy.to as usize, &mut there)?;
            for row in 0..copy.rows {
                let (from, to) = ((copy.slot + row * copy.step) as usize, (row * copy.row) as usize);
                let (want, got) = (&slot[from..from + copy.row as usize], &there[to..to + copy.row as usize]);
                if let Some(differs) = want.iter().zip(got).position(|(a, b)| a != b) {
                    let at = copy.to + (to + differs) as u64;
                    let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
                    *first = Some(first.map_or(at, |other| other.min(at)));
                    return Ok(());
                }
            }
        }
        Ok(())
    })?;
    let first = first.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(first.map(|at| {
        let tensor = plan.tensors.iter().find(|t| t.at <= at && at < t.at + t.bytes);
        Difference { at, tensor: tensor.map(|t| t.name.clone()).unwrap_or_default() }
    }))
}

/// The CRC32C of each tensor in GPU memory, in the plan's order. A GPU sums its own memory; that of an emulated GPU is
/// summed by CPU threads, which is faster than emulation.
///
/// # Errors
/// When the GPU's memory cannot be read.
pub fn check_sums(
    plan: &Plan,
    gpu: &dyn Gpu,
    arena: &Region,
    go_on: &(dyn Fn() -> bool + Sync),
) -> Result<Vec<u32>> {
    if gpu.simulated() {
        return by_threads(plan, arena, go_on);
    }
    let ranges: Vec<_> = plan.tensors.iter().map(|tensor| (tensor.at, tensor.bytes)).collect();
    Sums::new(gpu)?.crc32c(gpu, arena, &ranges, go_on)?.ok_or(Error::Cancelled)
}

fn by_threads(plan: &Plan, arena: &Region, go_on: &(dyn Fn() -> bool + Sync)) -> Result<Vec<u32>> {
    // Parts of tensors, so that several threads share a large one.
    let parts: Vec<(u64, u64)> = plan
        .tensors
        .iter()
        .flat_map(|t| (0..t.bytes.div_ceil(PART)).map(|i| (t.at + i * PART, PART.min(t.bytes - i * PART))))
        .collect();
    let sums = Mutex::new(vec![0; parts.len()]);
    spread(parts.len(), go_on, &|i| {
        let (at, bytes) = parts[i];
        let mut data = vec![0; bytes as usize];
        arena.read(at as usize, &mut data)?;
        let sum = crc32c::crc32c(&data);
        sums.lock().unwrap_or_else(PoisonError::into_inner)[i] = sum;
        Ok(())
    })?;
    let mut sums = sums.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().zip(parts);
    Ok(plan
        .tensors
        .iter()
        .map(|tensor| {
            sums.by_ref()
                .take(tensor.bytes.div_ceil(PART) as usize)
                .fold(0, |all, (sum, (_, bytes))| crc32c::crc32c_combine(all, sum, bytes as usize))
        })
        .collect())
}

/// The CRC32C of all tensors concatenated in the plan's order, from the CRC32C of each.
#[must_use]
pub fn combined(plan: &Plan, sums: &[u32]) -> u32 {
    let each = plan.tensors.iter().zip(sums);
    each.fold(0, |all, (tensor, sum)| crc32c::crc32c_combine(all, *sum, tensor.bytes as usize))
}

/// How many tensors were compared with a manifest, and how many were not, because only a part of each was loaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Compared {
    /// Whole tensors.
    pub whole: usize,
    /// Parts of tensors.
    pub parts: usize,
}

impl Compared {
    /// The sum with another result.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self { whole: self.whole + other.whole, parts: self.parts + other.parts }
    }

    /// Whether every tensor was compared, and there was at least one.
    #[must_use]
    pub fn is_all(self) -> bool {
        self.whole > 0 && self.parts == 0
    }

    /// In words.
    #[must_use]
    pub fn words(self) -> String {
        let Self { whole, parts } = self;
        match parts {
            0 if whole == 0 => {
                "no tensor was loaded whole, and the manifest's checksums are of whole tensors".into()
            }
            0 => "the manifest's checksums, of the tensors as they lie in GPU memory".into(),
            _ => format!(
                "the manifest's checksums, of {whole} of {} tensors; of the others only parts were loaded",
                whole + parts
            ),
        }
    }
}

/// Compares the CRC32C of each tensor in GPU memory with a manifest, which has whole tensors only.
///
/// # Errors
/// When one differs, the manifest lacks it, or the manifest has a tensor that the model lacks, such as one of a lost
/// file.
pub fn against(
    manifest: &Manifest,
    model: &Model,
    plan: &Plan,
    sums: &[u32],
) -> Result<Compared, crate::manifest::Error> {
    let infos: HashMap<&str, _> = model.tensors.iter().map(|t| (t.info.name.as_str(), &t.info)).collect();
    if let Some(lost) = manifest.tensors.keys().find(|name| !infos.contains_key(name.as_str())) {
        return Err(crate::manifest::Error::NotInModel(lost.clone()));
    }
    let mut compared = Compared::default();
    for (placed, sum) in plan.tensors.iter().zip(sums) {
        match infos.get(placed.name.as_str()) {
            Some(info) if placed.whole => {
                manifest.check(info, *sum)?;
                compared.whole += 1;
            }
            _ => compared.parts += 1,
        }
    }
    Ok(compared)
}

/// Calls `work` for each number below `count`, on several threads.
fn spread(
    count: usize,
    go_on: &(dyn Fn() -> bool + Sync),
    work: &(dyn Fn(usize) -> Result<()> + Sync),
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS).min(count);
    let one = || -> Result<()> {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return Ok(());
            }
            let result = if go_on() { work(i) } else { Err(Error::Cancelled) };
            if result.is_err() {
                next.store(count, Ordering::Relaxed);
                return result;
            }
        }
    };
    std::thread::scope(|scope| {
        // This thread is one of them, and the only one where there can be no others.
        let start = |_| std::thread::Builder::new().spawn_scoped(scope, one).ok();
        let threads: Vec<_> = (1..threads).map_while(start).collect();
        let own = one();
        // A panic in a thread is a defect, and continues here.
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<()>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).fold(own, Result::and)
    })
}
