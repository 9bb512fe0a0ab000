//! Copies that a calling thread makes alone: of short reads, and of writes.
//!
//! The driver takes short copies one by one, whether they come in one call or in many, and each for as long as the copy
//! itself. So threads do not hand them to one another, but call the driver side by side, each with a stream of its own.

use std::sync::{Arc, Mutex, PoisonError};

use onehop_gpu::{Copier, Gpu, Region, Rows};

/// Reads of fewer bytes are copied by their caller.
pub(super) const SHORT_READ: usize = 128 << 10;
/// Streams that are kept for each direction.
const MOST_IDLE: usize = 32;

type IdleCopiers = Mutex<Vec<Box<dyn Copier>>>;

/// Streams between a ring and the memory of one GPU.
pub(super) struct OwnCopiers {
    gpu: Arc<dyn Gpu>,
    ring: Region,
    all: Region,
    into: IdleCopiers,
    out: IdleCopiers,
}

impl OwnCopiers {
    pub(super) fn new(gpu: Arc<dyn Gpu>, ring: Region, all: Region) -> Self {
        Self { gpu, ring, all, into: Mutex::default(), out: Mutex::default() }
    }

    /// Copies to an address of the GPU's memory. The copier comes with the error if the GPU may still use the ring.
    pub(super) fn copy_in(&self, from: usize, to: usize, bytes: usize) -> Result<(), FailedCopy> {
        copy(&self.into, || self.gpu.copier(&self.ring, &self.all), (from, to, bytes))
    }

    /// Copies out of the GPU's memory, likewise.
    pub(super) fn copy_out(&self, from: usize, to: usize, bytes: usize) -> Result<(), FailedCopy> {
        copy(&self.out, || self.gpu.copier(&self.all, &self.ring), (from, to, bytes))
    }
}

/// Why a copy failed, and what may still be making it.
pub(super) struct FailedCopy(pub(super) Box<onehop_gpu::Error>, pub(super) Option<Box<dyn Copier>>);

fn copy(
    idle: &IdleCopiers,
    new: impl FnOnce() -> onehop_gpu::Result<Box<dyn Copier>>,
    (from, to, bytes): (usize, usize, usize),
) -> Result<(), FailedCopy> {
    let lock = || idle.lock().unwrap_or_else(PoisonError::into_inner);
    let known = lock().pop();
    let mut copier = known.map_or_else(new, Ok).map_err(|error| FailedCopy(error.into(), None))?;
    let copied = copier.copy_now(&Rows { from, to, row: bytes, rows: 1, step: bytes });
    if let Err(error) = copied {
        let used = error.is_under_way().then_some(copier);
        return Err(FailedCopy(error.into(), used));
    }
    let mut idle = lock();
    if idle.len() < MOST_IDLE {
        idle.push(copier);
    }
    Ok(())
}
