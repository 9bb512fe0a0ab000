//! Counts of transfers by route.

use std::sync::atomic::{AtomicU64, Ordering};

use onehop_target::tree::Via;
use serde_json::{Value, json};

/// Transfers by one route.
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

/// The daemon's statistics since it started.
#[derive(Default)]
pub struct Stats {
    /// To host memory, without waiting for a disk.
    pub(crate) host_now: RouteCounters,
    /// To host memory, by a thread that may block.
    pub(crate) host_waited: RouteCounters,
    pub(crate) host_written: RouteCounters,
    /// To GPU memory through the page cache. The second of each pair counts the emulated GPU's.
    pub(crate) gpu_cached: [RouteCounters; 2],
    /// To GPU memory by direct I/O.
    pub(crate) gpu_pinned: [RouteCounters; 2],
    pub(crate) gpu_written: [RouteCounters; 2],
    /// Between another machine and GPU memory, past this machine's host memory.
    pub(crate) gpu_direct: [RouteCounters; 2],
    pub(crate) gpu_direct_written: [RouteCounters; 2],
    /// Bytes zeroed behind the end of a file, in host memory and in GPU memory.
    pub(crate) zeroed: [RouteCounters; 2],
    /// Requests that were invalid or not allowed.
    pub(crate) refused: AtomicU64,
    /// Valid requests that failed.
    pub(crate) failed: AtomicU64,
    /// Rings with impossible indices, or without their memory.
    pub(crate) broken_rings: AtomicU64,
}

impl Stats {
    /// The content of `3fs-virt/onehop/stats`. `via` describes the connection to a target.
    pub(crate) fn document(&self, via: Option<&Via>) -> Value {
        let none = json!([]);
        let why = via.filter(|via| !via.why.is_empty()).map_or_else(
            || none.clone(),
            |via| json!([{ "route": "rdma/direct", "reason": via.why, "fix": via.fix }]),
        );
        // From a target, bytes arrive by its transport in our host memory, unless they are counted as direct.
        let route = |here: &str, place: &str| {
            let there = via.map(|via| format!("{}/{place}", via.transport));
            (there.unwrap_or_else(|| here.to_owned()), if via.is_some() { &why } else { &none })
        };
        let row =
            |counters: &RouteCounters, (route, why): (String, &Value), to, direction, simulated: &[&str]| {
                counters.document((&route, why), to, direction, simulated)
            };
        let host = |here| route(here, "host");
        let here = |name: &str| (name.to_owned(), &none);
        let mut rows = vec![
            row(&self.host_now, here("cpu/cached"), "host", "read", &[]),
            row(&self.host_waited, host("cpu/waited"), "host", "read", &[]),
            row(&self.host_written, host("cpu/cached"), "host", "write", &[]),
            row(&self.zeroed[0], here("cpu/zeroed"), "host", "read", &[]),
            row(&self.zeroed[1], here("gpu/zeroed"), "vram", "read", &[]),
        ];
        for (place, simulated) in [(0, &[][..]), (1, &["gpu"][..])] {
            let vram = |here| route(here, "pinned");
            rows.push(row(&self.gpu_cached[place], vram("cpu/cached"), "vram", "read", simulated));
            rows.push(row(&self.gpu_pinned[place], here("cpu/pinned"), "vram", "read", simulated));
            rows.push(row(&self.gpu_written[place], vram("cpu/cached"), "vram", "write", simulated));
            rows.push(row(&self.gpu_direct[place], here("rdma/direct"), "vram", "read", simulated));
            rows.push(row(&self.gpu_direct_written[place], here("rdma/direct"), "vram", "write", simulated));
        }
        rows.retain(|row| row["transfers"] != 0);
        json!({
            "routes": rows,
            "refused": self.refused.load(Ordering::Relaxed),
            "failed": self.failed.load(Ordering::Relaxed),
            "broken_rings": self.broken_rings.load(Ordering::Relaxed),
        })
    }
}
