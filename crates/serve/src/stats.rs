//! What was done, and which way it went.

use std::sync::atomic::{AtomicU64, Ordering};

use onehop_target::tree::Via;
use serde_json::{Value, json};

/// A way that bytes went.
#[derive(Default)]
pub(crate) struct RouteCounters {
    transfers: AtomicU64,
    bytes: AtomicU64,
}

impl RouteCounters {
    pub fn count(&self, bytes: u64) {
        self.transfers.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn document(&self, (route, why): (&str, &Value), to: &str, direction: &str, simulated: &[&str]) -> Value {
        json!({
            "route": route, "memory": to, "direction": direction, "simulated": simulated, "why_not_better": why,
            "transfers": self.transfers.load(Ordering::Relaxed), "bytes": self.bytes.load(Ordering::Relaxed),
        })
    }
}

/// The daemon's account of itself since it began.
#[derive(Default)]
pub struct Stats {
    /// To host memory, at once.
    pub(crate) host_now: RouteCounters,
    /// To host memory, by a thread that waited for the disk.
    pub(crate) host_waited: RouteCounters,
    pub(crate) host_written: RouteCounters,
    /// To GPU memory, out of the page cache; the second of each pair is the emulated GPU's.
    pub(crate) gpu_cached: [RouteCounters; 2],
    /// To GPU memory, past it.
    pub(crate) gpu_pinned: [RouteCounters; 2],
    pub(crate) gpu_written: [RouteCounters; 2],
    /// Between another machine and GPU memory, through nothing of this one's.
    pub(crate) gpu_direct: [RouteCounters; 2],
    pub(crate) gpu_direct_written: [RouteCounters; 2],
    /// Zeroes behind a file's end, in bytes of host memory and of GPU memory.
    pub(crate) zeroed: [RouteCounters; 2],
    /// What was refused because it made no sense, or was not allowed.
    pub(crate) refused: AtomicU64,
    /// What failed though it was right.
    pub(crate) failed: AtomicU64,
    /// Rings whose marks were impossible, or whose memory went.
    pub(crate) broken_rings: AtomicU64,
}

impl Stats {
    /// As it stands in `3fs-virt/onehop/stats`; `via` is how bytes come from a target.
    pub(crate) fn document(&self, via: Option<&Via>) -> Value {
        let none = json!([]);
        let why = via.filter(|via| !via.why.is_empty()).map_or_else(
            || none.clone(),
            |via| json!([{ "route": "rdma/direct", "reason": via.why, "fix": via.fix }]),
        );
        // From a target, all bytes come by its transport, into host memory of ours unless they are counted as direct.
        let route = |here: &str, place: &str| {
            let there = via.map(|via| format!("{}/{place}", via.transport));
            (there.unwrap_or_else(|| here.to_owned()), if via.is_some() { &why } else { &none })
        };
        let way = |way: &RouteCounters, (route, why): (String, &Value), to, direction, simulated: &[&str]| {
            way.document((&route, why), to, direction, simulated)
        };
        let host = |here| route(here, "host");
        let here = |name: &str| (name.to_owned(), &none);
        let mut ways = vec![
            way(&self.host_now, here("cpu/cached"), "host", "read", &[]),
            way(&self.host_waited, host("cpu/waited"), "host", "read", &[]),
            way(&self.host_written, host("cpu/cached"), "host", "write", &[]),
            way(&self.zeroed[0], here("cpu/zeroed"), "host", "read", &[]),
            way(&self.zeroed[1], here("gpu/zeroed"), "vram", "read", &[]),
        ];
        for (place, simulated) in [(0, &[][..]), (1, &["gpu"][..])] {
            let vram = |here| route(here, "pinned");
            ways.push(way(&self.gpu_cached[place], vram("cpu/cached"), "vram", "read", simulated));
            ways.push(way(&self.gpu_pinned[place], here("cpu/pinned"), "vram", "read", simulated));
            ways.push(way(&self.gpu_written[place], vram("cpu/cached"), "vram", "write", simulated));
            ways.push(way(&self.gpu_direct[place], here("rdma/direct"), "vram", "read", simulated));
            ways.push(way(&self.gpu_direct_written[place], here("rdma/direct"), "vram", "write", simulated));
        }
        ways.retain(|way| way["transfers"] != 0);
        json!({
            "routes": ways,
            "refused": self.refused.load(Ordering::Relaxed),
            "failed": self.failed.load(Ordering::Relaxed),
            "broken_rings": self.broken_rings.load(Ordering::Relaxed),
        })
    }
}
