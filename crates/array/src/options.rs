//! How an array is cached, and how long things may take.

use std::time::Duration;

use onehop_drive::Placement;

/// How an array is cached, and how long things may take.
#[derive(Clone, Debug)]
pub struct ArrayOptions {
    /// Bytes of a page: a power of two from 512 B to 64 KiB, and a multiple of the drive's block.
    pub page_bytes: u32,
    /// Bytes of all pages of the cache. What does not fill a set of eight pages is not used, unless it is all there is.
    /// Memory is taken for eight pages at least.
    pub cache_bytes: u64,
    /// Whether kernels may write.
    pub writable: bool,
    /// Where queue and pages lie.
    pub placement: Placement,
    /// Commands in flight.
    pub depth: u32,
    /// When a command counts as lost, and the drive is recovered.
    pub stall: Duration,
    /// How long a command may take, with retries and recoveries.
    pub limit: Duration,
    /// How long a thread waits for other threads: for a page that another reads, or for one that is not pinned.
    pub patience: Duration,
}

impl ArrayOptions {
    /// Pages of 4 KiB in a cache of so many bytes, for reading.
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
