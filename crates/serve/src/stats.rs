//! What was done, and which way it went.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

/// A way that bytes went.
#[derive(Default)]
pub(crate) struct Way {
    transfers: AtomicU64,
    bytes: AtomicU64,
}

impl Way {
    pub fn count(&self, bytes: u64) {
        self.transfers.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn document(&self, route: &str, to: &str, direction: &str, simulated: &[&str]) -> Value {
        json!({
            "route": route, "memory": to, "direction": direction, "simulated": simulated,
            "transfers": self.transfers.load(Ordering::Relaxed), "bytes": self.bytes.load(Ordering::Relaxed),
        })
    }
}

/// The daemon's account of itself since it began.
#[derive(Default)]
pub struct Stats {
    /// To host memory, at once.
    pub(crate) host_now: Way,
    /// To host memory, by a thread that waited for the disk.
    pub(crate) host_waited: Way,
    pub(crate) host_written: Way,
    /// To GPU memory, out of the page cache; the second of each pair is the emulated GPU's.
    pub(crate) gpu_cached: [Way; 2],
    /// To GPU memory, past it.
    pub(crate) gpu_pinned: [Way; 2],
    pub(crate) gpu_written: [Way; 2],
    /// Zeroes behind a file's end, in bytes of host memory and of GPU memory.
    pub(crate) zeroed: [Way; 2],
    /// What was refused because it made no sense, or was not allowed.
    pub(crate) refused: AtomicU64,
    /// What failed though it was right.
    pub(crate) failed: AtomicU64,
    /// Rings whose marks were impossible, or whose memory went.
    pub(crate) broken_rings: AtomicU64,
}

impl Stats {
    /// As it stands in `3fs-virt/onehop/stats`.
    pub(crate) fn document(&self) -> Value {
        let mut ways = vec![
            self.host_now.document("cpu/cached", "host", "read", &[]),
            self.host_waited.document("cpu/waited", "host", "read", &[]),
            self.host_written.document("cpu/cached", "host", "write", &[]),
            self.zeroed[0].document("cpu/zeroed", "host", "read", &[]),
            self.zeroed[1].document("gpu/zeroed", "vram", "read", &[]),
        ];
        for (place, simulated) in [(0, &[][..]), (1, &["gpu"][..])] {
            ways.push(self.gpu_cached[place].document("cpu/cached", "vram", "read", simulated));
            ways.push(self.gpu_pinned[place].document("cpu/pinned", "vram", "read", simulated));
            ways.push(self.gpu_written[place].document("cpu/cached", "vram", "write", simulated));
        }
        ways.retain(|way| way["transfers"] != 0);
        json!({
            "ways": ways,
            "refused": self.refused.load(Ordering::Relaxed),
            "failed": self.failed.load(Ordering::Relaxed),
            "broken_rings": self.broken_rings.load(Ordering::Relaxed),
        })
    }
}
