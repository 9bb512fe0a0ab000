//! A ring that outlives a load: to have its pages, and a GPU that knows them, takes as long as to load a gigabyte. A program
//! that loads again and again puts it here in between.

use std::sync::Mutex;

use onehop_gpu::Region;
use onehop_os::HostMem;

/// Larger rings are given back: whoever asked for them did so once.
const LARGEST: usize = 256 << 20;

/// Where loads to one GPU leave their ring for the next one: [`Prepared::with_ring_cache`](super::Prepared::with_ring_cache).
#[derive(Default)]
pub struct RingCache(Mutex<Option<CachedRing>>);

struct CachedRing {
    /// A child process has a copy of the memory and a GPU that does not know it.
    process: u32,
    ring: Ring,
}

/// The ring, and as what the GPU knows it, if it does already.
pub(super) struct Ring {
    pub(super) memory: HostMem,
    pub(super) known: Option<Region>,
}

impl RingCache {
    /// The ring that lies here, if it has as many bytes.
    pub(super) fn take(&self, bytes: usize) -> Option<Ring> {
        // Where another load is at it there is nothing to wait for.
        let CachedRing { process, ring } = self.0.try_lock().ok()?.take()?;
        if process != std::process::id() {
            // Giving it back would ask a GPU that the parent has opened.
            std::mem::forget(ring);
            return None;
        }
        (ring.memory.len() >= bytes).then_some(ring)
    }

    /// Leaves a ring of which nobody knows any more, unless there is a larger one.
    pub(super) fn put(&self, ring: Ring) {
        let Ok(mut kept) = self.0.try_lock() else { return };
        let larger = kept.as_ref().is_none_or(|kept| kept.ring.memory.len() < ring.memory.len());
        if larger && ring.memory.len() <= LARGEST {
            *kept = Some(CachedRing { process: std::process::id(), ring });
        }
    }
}
