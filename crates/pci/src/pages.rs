//! Rounds memory to the whole pages that devices are given.

use onehop_os::{BusRange, HostMem};

pub(crate) const PAGE: usize = 4096;

/// The whole pages around some memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PageSpan {
    /// Their address in this process.
    pub(crate) start: usize,
    /// Their length.
    pub(crate) len: usize,
    /// Bytes in front of the memory.
    pub(crate) skip: usize,
}

impl PageSpan {
    pub(crate) fn of(memory: &HostMem) -> Self {
        let start = memory.host_ptr() as usize / PAGE * PAGE;
        let skip = memory.host_ptr() as usize - start;
        Self { start, len: (skip + memory.len()).next_multiple_of(PAGE), skip }
    }
}

/// Removes what was only added for whole pages.
pub(crate) fn trim(runs: &mut Vec<BusRange>, skip: u64, bytes: u64) {
    if let Some(first) = runs.first_mut() {
        first.addr = first.addr.plus(skip);
        first.len -= skip;
    }
    let mut left = bytes;
    for run in runs.iter_mut() {
        run.len = run.len.min(left);
        left -= run.len;
    }
    runs.retain(|run| run.len > 0);
}
