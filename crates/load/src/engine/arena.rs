//! The arena: GPU memory that a load fills.

use std::ops::Range;
use std::slice;

use onehop_gpu::{Gpu, Region};

use crate::error::{Error, Result};
use crate::plan::Plan;

/// Zeroing more gaps than this one by one takes longer than zeroing everything.
const FEW: usize = 64;

/// GPU memory for a plan's tensors, with zeros in the gaps: see
/// [`Prepared::into_arenas`](super::Prepared::into_arenas).
///
/// A driver may take some milliseconds for the first call after a pause, so a program with an open GPU allocates this
/// in one thread while another prepares the load.
#[derive(Debug)]
pub struct Arena(Region);

impl Arena {
    /// Allocates memory.
    ///
    /// # Errors
    /// When the GPU's memory is full.
    pub fn new(gpu: &dyn Gpu, plan: &Plan) -> Result<Self> {
        let bytes = usize::try_from(plan.gpu_bytes.max(1)).unwrap_or(usize::MAX);
        Ok(Self(match gaps(plan) {
            Some(gaps) => gpu.arena_to_fill(bytes, &gaps)?,
            None => gpu.arena(bytes)?,
        }))
    }

    /// Allocates memory that other processes of a group can open.
    ///
    /// # Errors
    /// When the GPU's memory is full.
    pub fn shared(gpu: &dyn Gpu, plan: &Plan) -> Result<Self> {
        let Ok(peers) = gpu.peers() else { return Self::new(gpu, plan) };
        let bytes = usize::try_from(plan.gpu_bytes.max(1)).unwrap_or(usize::MAX);
        let all = 0..bytes;
        let gaps = gaps(plan);
        Ok(Self(peers.alloc_shared(bytes, gaps.as_deref().unwrap_or(slice::from_ref(&all)))?))
    }

    /// Reuses memory of an earlier load to the same GPU.
    ///
    /// # Errors
    /// When the tensors do not fit, or the GPU failed.
    pub fn again(there: Region, plan: &Plan) -> Result<Self> {
        let there = Self(there).region_for(plan)?;
        let bytes = there.len();
        for gap in gaps(plan).as_deref().unwrap_or(slice::from_ref(&(0..bytes))) {
            let start = gap.start.min(bytes);
            there.fill(start, gap.end.min(bytes) - start, 0)?;
        }
        Ok(Self(there))
    }

    /// The memory, if size and alignment suit the plan.
    pub(super) fn region_for(self, plan: &Plan) -> Result<Region> {
        let (bytes, align) = (plan.gpu_bytes, plan.arena_align());
        let (there, at) = (self.0.len() as u64, self.0.addr().0);
        if there < bytes || !at.is_multiple_of(align) {
            return Err(Error::Arena { bytes, align, there, at });
        }
        Ok(self.0)
    }
}

/// The gaps between tensors; `None` if there are too many.
fn gaps(plan: &Plan) -> Option<Vec<Range<usize>>> {
    let gaps: Vec<_> = plan.gaps().iter().map(|gap| gap.start as usize..gap.end as usize).collect();
    (gaps.len() <= FEW).then_some(gaps)
}
