//! Statistics of an array's cache.

use onehop_gpu::Region;
use onehop_proto::array::counter;

use crate::Result;

/// Statistics of an array's cache since it was opened. All counts wrap at 2³².
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ArrayStats {
    /// Pages read from the drive, one command each.
    pub reads: u32,
    /// Pages written back, one command each.
    pub writes: u32,
    /// Reads that failed.
    pub failed_reads: u32,
    /// Write-backs that failed.
    pub failed_writes: u32,
    /// Pages that gathers looked up. Pages pinned by threads themselves are not counted.
    pub wanted: u32,
    /// The lookups that hit.
    pub hits: u32,
}

impl ArrayStats {
    pub(crate) fn read(counters: &Region) -> Result<Self> {
        let at = |counter: u32| counters.word(counter as usize);
        Ok(Self {
            reads: at(counter::READS)?,
            writes: at(counter::WRITES)?,
            failed_reads: at(counter::FAILED_READS)?,
            failed_writes: at(counter::FAILED_WRITES)?,
            wanted: at(counter::WANTED)?,
            hits: at(counter::HITS)?,
        })
    }
}
