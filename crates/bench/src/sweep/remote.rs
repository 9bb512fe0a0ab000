//! A file of a storage service, read and written by its client into memory of this machine: the throughput of a connection, and how long
//! a block takes.

use std::sync::Arc;

use onehop_gpu::{Emulated, Gpu, Place};
use onehop_os::{DmaMemory, HostMem, cycles};
use onehop_target::tree::{OpenFile, TransferMemory};

use super::{Cell, Move, NotMeasurable, PreparedRoute, SweepLane, SweepTarget};
use crate::stats::Quantiles;
use crate::{Error, Result};

/// Requests in flight at most: each is waited for by a thread.
const MOST_THREADS: u32 = 256;

/// A file of a target.
pub struct RemoteTarget {
    tcp: std::result::Result<Arc<dyn OpenFile>, String>,
    rdma: std::result::Result<Arc<dyn OpenFile>, String>,
    /// The same file over a connection that is not measured.
    check: Arc<dyn OpenFile>,
    bytes: u64,
}

impl RemoteTarget {
    /// A file of `bytes` bytes, over TCP and by RDMA, where they work; `check` is the same file by another connection.
    #[must_use]
    pub fn new(
        tcp: std::result::Result<Arc<dyn OpenFile>, String>,
        rdma: std::result::Result<Arc<dyn OpenFile>, String>,
        check: Arc<dyn OpenFile>,
        bytes: u64,
    ) -> Self {
        Self { tcp, rdma, check, bytes }
    }
}

fn failed(call: &'static str, source: std::io::Error) -> Error {
    Error::File { call, path: "the target's file".into(), source }
}

impl SweepTarget for RemoteTarget {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn unit(&self) -> u64 {
        1
    }

    fn routes(&self) -> &'static [&'static str] {
        &["rdma/host", "tcp/host"]
    }

    fn open(
        &self,
        route: &str,
        cell: &Cell,
        bytes: u64,
    ) -> Result<std::result::Result<PreparedRoute, NotMeasurable>> {
        let file = match if route == "tcp/host" { &self.tcp } else { &self.rdma } {
            Ok(file) => file,
            Err(why) => return Ok(Err(NotMeasurable(why.clone()))),
        };
        let bytes = usize::try_from(bytes).map_err(|_| Error::Setup("a pass is too large".into()))?;
        // No GPU is involved: the memory is this machine's.
        let memory = Emulated::new().alloc(Place::PinnedHost, bytes)?;
        let host = memory.host().cloned().ok_or_else(|| Error::Setup("there is no memory".into()))?;
        let depth = cell.depth.min((MOST_THREADS / cell.threads.max(1)).max(1));
        let lane = |_| {
            let (file, host) = (file.clone(), host.clone());
            let lane = RemoteLane { file, host, block: cell.block as usize, writes: cell.io.writes() };
            Box::new(lane) as Box<dyn SweepLane>
        };
        let lanes = (0..cell.threads.saturating_mul(depth)).map(lane).collect();
        Ok(Ok(PreparedRoute { lanes, memory, threads: cell.threads, depth, note: None }))
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        match self.check.read_bytes(out, at).map_err(|e| failed("read", e))? {
            count if count == out.len() => Ok(()),
            count => Err(short(at, count, out.len())),
        }
    }
}

fn short(at: u64, got: usize, wanted: usize) -> Error {
    Error::Wrong(format!("only {got} of {wanted} bytes were moved at byte {at}"))
}

/// One request in flight after the other.
struct RemoteLane {
    file: Arc<dyn OpenFile>,
    host: HostMem,
    block: usize,
    writes: bool,
}

impl SweepLane for RemoteLane {
    fn pass(&mut self, moves: &[Move], times: &mut Quantiles) -> Result<()> {
        for Move { at, slot } in moves {
            let memory =
                TransferMemory { mem: &self.host, at: *slot as usize, len: self.block, shared: false };
            let begun = cycles();
            let done = if self.writes { self.file.write(memory, *at) } else { self.file.read(memory, *at) };
            let count = done.map_err(|e| failed(if self.writes { "write" } else { "read" }, e))?;
            times.add(cycles().saturating_sub(begun));
            if count != self.block {
                return Err(short(*at, count, self.block));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use onehop_target::tree::Local;

    use super::*;
    use crate::results::IoType;
    use crate::sweep::{Effort, Sweep};

    #[test]
    fn every_kind_is_measured_and_missing_ones_say_why() {
        let path = std::env::temp_dir().join(format!("onehop-bench-remote-{}", std::process::id()));
        std::fs::write(
            &path,
            (0..1 << 20).map(|i: u32| (i.wrapping_mul(77_777) >> 9) as u8).collect::<Vec<_>>(),
        )
        .unwrap();
        let open = || -> Arc<dyn OpenFile> {
            let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
            Arc::new(Local::new(file))
        };
        let target = RemoteTarget::new(Ok(open()), Err("there is no card".into()), open(), 1 << 20);
        let effort = Effort { bytes: 256 << 10, ops: 64, time: Duration::from_millis(2), repeats: 2 };
        let none = |_: &str, _: IoType| None;
        let sweep = Sweep::new(&target, effort, &none);
        for io in [IoType::Read, IoType::RandRead, IoType::Write, IoType::RandWrite] {
            let cell = Cell { io, block: 4096, depth: 3, threads: 1 };
            let rows = sweep.cell(&cell, target.routes(), &mut |_| true).unwrap();
            assert_eq!((rows[0].result.is_none(), rows[0].note.as_deref()), (true, Some("there is no card")));
            let measured = rows[1].result.as_ref().unwrap();
            assert!(measured.verified && measured.p50_us.is_some() && rows[1].depth == 3, "{measured:?}");
            assert_eq!(measured.latency_samples, measured.ops);
        }
        std::fs::remove_file(&path).unwrap();
    }
}
