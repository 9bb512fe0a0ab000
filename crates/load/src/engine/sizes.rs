//! How many threads read, and into slots of which size.

use super::{LEAST_SLOT, SLOT, SLOTS};
use crate::plan::Plan;

pub(super) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// How many links must be fed by reading: one if all GPUs get the same bytes, as many as GPUs if each gets others.
pub(super) fn links(plans: &[&Plan], bytes: u64) -> usize {
    let longest = plans.iter().map(|plan| plan.read_bytes).max().unwrap_or(0);
    bytes.div_ceil(longest.max(1)).clamp(1, plans.len().max(1) as u64) as usize
}

/// How many of these CPUs read: the driver and the kernel need some.
pub(super) fn spared(cpus: usize) -> usize {
    cpus - cpus / 8
}

/// The slot size that gives each thread a few slots to fill and to copy.
pub(super) fn fitting(bytes: u64, threads: usize) -> usize {
    let share = usize::try_from(bytes / (threads * SLOTS * 2).max(1) as u64).unwrap_or(usize::MAX);
    share.clamp(LEAST_SLOT, SLOT)
}
