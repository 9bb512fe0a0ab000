//! Keeps a ring between loads. Allocating and registering it takes as long as loading a gigabyte.

use std::sync::Mutex;

use onehop_gpu::Region;
use onehop_os::HostMem;

/// Larger rings are freed: they were requested for one load.
const LARGEST: usize = 256 << 20;

/// Keeps a ring for the next load to the same GPU: [`Prepared::with_ring_cache`](super::Prepared::with_ring_cache).
#[derive(Default)]
pub struct RingCache(Mutex<Option<CachedRing>>);

struct CachedRing {
    /// A forked child has a copy of the memory, but its GPU does not know it.
    process: u32,
    ring: RegisteredRing,
}

/// The ring, and its registration with the GPU, if any.
pub(super) struct RegisteredRing {
    pub(super) memory: HostMem,
    pub(super) known: Option<Region>,
}

impl RingCache {
    /// The cached ring, if it has this size.
    pub(super) fn take(&self, bytes: usize) -> Option<RegisteredRing> {
        // Another load uses the cache; do not wait for it.
        let CachedRing { process, ring } = self.0.try_lock().ok()?.take()?;
        if process != std::process::id() {
            // Dropping it would call the driver, which only the parent has opened.
            std::mem::forget(ring);
            return None;
        }
        (ring.memory.len() >= bytes).then_some(ring)
    }

    /// Caches a ring that is no longer in use, unless a larger one is cached.
    pub(super) fn put(&self, ring: RegisteredRing) {
        let Ok(mut kept) = self.0.try_lock() else { return };
        let larger = kept.as_ref().is_none_or(|kept| kept.ring.memory.len() < ring.memory.len());
        if larger && ring.memory.len() <= LARGEST {
            *kept = Some(CachedRing { process: std::process::id(), ring });
        }
    }
}
