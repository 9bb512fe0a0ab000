//! Options of an array: cache size and time limits.

use std::time::Duration;

use onehop_drive::Placement;

/// Options of an array: cache size and time limits.
#[derive(Clone, Debug)]
pub struct ArrayOptions {
    /// Bytes of a page: a power of two from 512 B to 64 KiB, and a multiple of the drive's block.
    pub page_bytes: u32,
    /// Bytes of all pages of the cache. A remainder that does not fill a set of eight pages is not used, unless it is
    /// all there is. Memory for at least eight pages is allocated.
    pub cache_bytes: u64,
    /// Whether kernels may write.
    pub writable: bool,
    /// Where queue and pages are.
    pub placement: Placement,
    /// Commands in flight.
    pub depth: u32,
    /// Time after which a command counts as lost, and the drive is recovered.
    pub stall: Duration,
    /// Time limit of a command, including retries and recoveries.
    pub limit: Duration,
    /// How long a thread waits for other threads: until one has read a page, or has unpinned one. The host waits as
    /// long for the pages of an array that it closes.
    pub patience: Duration,
}

impl ArrayOptions {
    /// Options for a read-only cache of `cache_bytes`, in pages of 4 KiB.
    #[must_use]
    pub fn new(placement: Placement, cache_bytes: u64) -> Self {
        Self {
            page_bytes: 4096,
            cache_bytes,
            writable: false,
            placement,
            depth: 1023,
            stall: Duration::from_secs(5),
            limit: Duration::from_secs(60),
            patience: Duration::from_secs(10),
        }
    }
}
