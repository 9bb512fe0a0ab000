//! The memory that a load fills.

use std::ops::Range;
use std::slice;

use onehop_gpu::{Gpu, Region};

use crate::error::{Error, Result};
use crate::plan::Plan;

/// More pieces than this take longer to zero one by one.
const FEW: usize = 64;

/// GPU memory for what a plan loads, with zeros where no tensor comes to lie: for [`Prepared::into_arenas`](super::Prepared::into_arenas).
///
/// A driver may take some milliseconds for the first call after a pause, so a program whose GPU is up has this made by one
/// thread while another prepares the load.
#[derive(Debug)]
pub struct Arena(Region);

impl Arena {
    /// New memory.
    ///
    /// # Errors
    /// When the GPU has no room.
    pub fn new(gpu: &dyn Gpu, plan: &Plan) -> Result<Self> {
        let bytes = usize::try_from(plan.gpu_bytes.max(1)).unwrap_or(usize::MAX);
        Ok(Self(match gaps(plan) {
            Some(gaps) => gpu.arena_to_fill(bytes, &gaps)?,
            None => gpu.arena(bytes)?,
        }))
    }

    /// Memory that is there already, of an earlier load to the same GPU.
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

    /// The memory, if it is large enough and lies well.
    pub(super) fn region_for(self, plan: &Plan) -> Result<Region> {
        let (bytes, align) = (plan.gpu_bytes, plan.arena_align());
        let (there, at) = (self.0.len() as u64, self.0.addr().0);
        if there < bytes || !at.is_multiple_of(align) {
            return Err(Error::Arena { bytes, align, there, at });
        }
        Ok(self.0)
    }
}

/// What tensors leave free, unless those are many pieces.
fn gaps(plan: &Plan) -> Option<Vec<Range<usize>>> {
    let gaps: Vec<_> = plan.gaps().iter().map(|gap| gap.start as usize..gap.end as usize).collect();
    (gaps.len() <= FEW).then_some(gaps)
}
