//! What an array's cache has done.

use onehop_gpu::Region;
use onehop_proto::array::counter;

use crate::Result;

/// What an array's cache has done since it was opened. All counts wrap at 2³².
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ArrayStats {
    /// Pages read from the drive, a command each.
    pub reads: u32,
    /// Pages written back, a command each.
    pub writes: u32,
    /// Reads that failed.
    pub failed_reads: u32,
    /// Write-backs that failed.
    pub failed_writes: u32,
    /// Pages that gathers looked for. Threads that pin pages by themselves are not counted.
    pub wanted: u32,
    /// Those of them that were in the cache.
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
