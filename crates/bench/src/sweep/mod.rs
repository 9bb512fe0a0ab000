//! The sweep: every route of blocks between a drive or a file and GPU memory, over sizes, depths and threads.
//!
//! A [`SweepTarget`] opens a [`PreparedRoute`] for a [`Cell`]; [`measure`](Sweep::cell) warms it up, repeats it, and
//! compares the bytes that arrived with an independent read. Every row is checked like that.

mod drive;
mod file;
mod measure;
mod order;
mod remote;

use std::ops::Range;
use std::time::Duration;

use onehop_gpu::Region;
use onehop_os::StopSignal;

use crate::results::{IoType, Measured, RateLimit, SweepRow};
use crate::stats::Quantiles;
use crate::{Clock, Error, Result};

pub use drive::{DrivePlan, DriveTarget};
pub use file::FileTarget;
pub use remote::RemoteTarget;

/// The parameters of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cell {
    /// The operation.
    pub io: IoType,
    /// Bytes of a block.
    pub block: u64,
    /// Blocks in flight for each thread.
    pub depth: u32,
    /// Threads.
    pub threads: u32,
}

/// How long a row is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Effort {
    /// Bytes of a pass at most.
    pub bytes: u64,
    /// Blocks of a pass at most.
    pub ops: u64,
    /// Time of a repeat, about; a pass is never cut short.
    pub time: Duration,
    /// Repeats; the result is their median.
    pub repeats: u32,
}

/// A block's move: from its place on the drive or in the file to its slot in memory; for writes the other way round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Move {
    pub(crate) at: u64,
    pub(crate) slot: u64,
}

/// The work of one thread.
pub(crate) trait SweepLane: Send {
    /// Moves all of these, and records the cycles that each took, if it can.
    fn pass(&mut self, moves: &[Move], times: &mut Quantiles) -> Result<()>;
    /// The same, but slower, with times: for lanes whose passes record none.
    fn timed_pass(&mut self, moves: &[Move], times: &mut Quantiles, _: &Clock) -> Result<()> {
        self.pass(moves, times)
    }
}

/// A route that was made ready for a cell.
pub struct PreparedRoute {
    pub(crate) lanes: Vec<Box<dyn SweepLane>>,
    /// Where the bytes land, or come from.
    pub(crate) memory: Region,
    /// The real threads and depth: routes that wait for each block have more threads instead of depth.
    pub(crate) threads: u32,
    pub(crate) depth: u32,
    pub(crate) note: Option<String>,
}

/// Why a route cannot be measured here.
pub struct NotMeasurable(pub String);

/// A drive or file that blocks are moved from and to.
pub trait SweepTarget {
    /// Bytes that may be used.
    fn bytes(&self) -> u64;
    /// Blocks are multiples of this.
    fn unit(&self) -> u64;
    /// Its routes, the most direct first.
    fn routes(&self) -> &'static [&'static str];
    /// Prepares a route, with memory for a pass of this many bytes.
    ///
    /// # Errors
    /// When the drive or the GPU failed; a route that is not possible is not a failure.
    fn open(
        &self,
        route: &str,
        cell: &Cell,
        bytes: u64,
    ) -> Result<std::result::Result<PreparedRoute, NotMeasurable>>;
    /// Reads bytes by a route that shares only the drive itself with those that are measured.
    ///
    /// # Errors
    /// When they cannot be read.
    fn read(&self, at: u64, out: &mut [u8]) -> Result<()>;
}

/// gdsio's name for the most similar transfers.
#[must_use]
pub fn xfer_type(route: &str) -> &'static str {
    match route {
        "gpu/tier1" => "CPUONLY",
        "cpu/pinned" => "CPU_ASYNC_GPU",
        "cpu/memcpy" => "CPU_GPU",
        "cpu/cached" => "CPU_CACHED_GPU",
        // Host memory at both ends.
        "tcp/host" | "rdma/host" => "CPUONLY",
        _ => "GPUD",
    }
}

/// Rows of a target.
pub struct Sweep<'a> {
    target: &'a dyn SweepTarget,
    effort: Effort,
    clock: Clock,
    /// The limit or reference for a row of this route and kind.
    limit: &'a dyn Fn(&str, IoType) -> Option<RateLimit>,
    stop: StopSignal,
}

impl<'a> Sweep<'a> {
    /// A sweep of a target.
    pub fn new(
        target: &'a dyn SweepTarget,
        effort: Effort,
        limit: &'a dyn Fn(&str, IoType) -> Option<RateLimit>,
    ) -> Self {
        Self { target, effort, clock: Clock::calibrate(), limit, stop: StopSignal::default() }
    }

    /// The same, which ends within a row once `stop` is set.
    #[must_use]
    pub fn stopped_by(self, stop: StopSignal) -> Self {
        Self { stop, ..self }
    }

    /// The rows of a cell, one for each of these routes.
    ///
    /// # Errors
    /// When a drive or a GPU fails, wrong bytes arrive, or the caller asked for an end.
    pub fn cell(
        &self,
        cell: &Cell,
        routes: &[&str],
        each: &mut dyn FnMut(&SweepRow) -> bool,
    ) -> Result<Vec<SweepRow>> {
        let order = match order::Order::new(cell, self.target.bytes(), self.target.unit(), &self.effort) {
            Ok(order) => order,
            Err(why) => return Ok(routes.iter().map(|route| unmeasured(route, cell, why.clone())).collect()),
        };
        let mut data = measure::Data::new(self.target, &order, cell.io)?;
        let mut rows = Vec::new();
        for route in routes {
            let row = match self.target.open(route, cell, order.bytes())? {
                Err(NotMeasurable(why)) => unmeasured(route, cell, why),
                Ok(way) => self.row(route, cell, way, &order, &mut data)?,
            };
            let go_on = each(&row);
            rows.push(row);
            if !go_on {
                break;
            }
        }
        Ok(rows)
    }

    fn row(
        &self,
        route: &str,
        cell: &Cell,
        way: PreparedRoute,
        order: &order::Order,
        data: &mut measure::Data<'_>,
    ) -> Result<SweepRow> {
        let (threads, depth, note) = (way.threads, way.depth, way.note.clone());
        let mut measured = measure::measure(way, order, data, (&self.effort, &self.stop), &self.clock)
            .map_err(|error| {
                let what = format!(
                    "{route}, {}, blocks of {} bytes, depth {depth}, {threads} threads",
                    cell.io.name(),
                    cell.block
                );
                Error::Row { what, why: Box::new(error) }
            })?;
        measured.limit = (self.limit)(route, cell.io);
        measured.of_limit = measured.limit.as_ref().map(|limit| measured.gbps / limit.gbps);
        Ok(SweepRow { threads, depth, result: Some(measured), note, ..unmeasured(route, cell, "") })
    }
}

/// A row without results.
#[must_use]
pub fn unmeasured(route: &str, cell: &Cell, why: impl Into<String>) -> SweepRow {
    SweepRow {
        route: route.to_owned(),
        io: cell.io,
        xfer_type: xfer_type(route).to_owned(),
        threads: cell.threads,
        depth: cell.depth,
        block: cell.block,
        result: None,
        note: Some(why.into()),
    }
}

/// Rows that are faster than their link: each is a mistake in the measurement, or in the stated rate of the link.
#[must_use]
pub fn impossible(rows: &[SweepRow]) -> Vec<&SweepRow> {
    rows.iter().filter(|row| row.result.as_ref().is_some_and(Measured::is_impossible)).collect()
}

/// How `moves` moves are divided among `lanes` lanes.
pub(crate) fn shares(moves: usize, lanes: usize) -> Vec<Range<usize>> {
    let lanes = lanes.max(1);
    (0..lanes).map(|i| moves * i / lanes..moves * (i + 1) / lanes).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use onehop_gpu::{Emulated, Gpu, Place};

    use super::*;

    /// What the lanes of a fake target do.
    #[derive(Clone, Copy, PartialEq)]
    enum Manner {
        Right,
        /// Moves nothing.
        Idle,
        /// Always delivers the bytes of the first pass.
        Stale,
        /// Leaves out the last byte of one block.
        Short,
    }

    struct FakeTarget(Manner);

    fn byte(at: u64) -> u8 {
        (at.wrapping_mul(0x9e37_79b9) >> 13) as u8
    }

    impl SweepTarget for FakeTarget {
        fn bytes(&self) -> u64 {
            1 << 20
        }

        fn unit(&self) -> u64 {
            512
        }

        fn routes(&self) -> &'static [&'static str] {
            &["cpu/direct"]
        }

        fn open(
            &self,
            _: &str,
            cell: &Cell,
            bytes: u64,
        ) -> Result<std::result::Result<PreparedRoute, NotMeasurable>> {
            let memory = Emulated::new().alloc(Place::Vram, bytes as usize)?;
            let lane = |_| {
                let (memory, block) = (memory.clone(), cell.block as usize);
                Box::new(MadeLane { memory, block, manner: self.0, first: Vec::new() }) as Box<dyn SweepLane>
            };
            let lanes = (0..cell.threads).map(lane).collect();
            Ok(Ok(PreparedRoute { lanes, memory, threads: cell.threads, depth: cell.depth, note: None }))
        }

        fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
            out.iter_mut().enumerate().for_each(|(i, to)| *to = byte(at + i as u64));
            Ok(())
        }
    }

    struct MadeLane {
        memory: Region,
        block: usize,
        manner: Manner,
        first: Vec<Move>,
    }

    impl SweepLane for MadeLane {
        fn pass(&mut self, moves: &[Move], times: &mut Quantiles) -> Result<()> {
            if self.first.is_empty() {
                self.first = moves.to_vec();
            }
            let moves = if self.manner == Manner::Stale { &self.first } else { moves };
            for Move { at, slot } in moves.iter().filter(|_| self.manner != Manner::Idle) {
                let bytes: Vec<u8> = (0..self.block as u64).map(|i| byte(at + i)).collect();
                let short = self.manner == Manner::Short && *slot == 0;
                self.memory.write(*slot as usize, &bytes[..self.block - usize::from(short)])?;
                times.add(1000);
            }
            Ok(())
        }
    }

    fn rows(manner: Manner, io: IoType, threads: u32) -> Result<Vec<SweepRow>> {
        let effort = Effort { bytes: 64 << 10, ops: 64, time: Duration::from_millis(3), repeats: 3 };
        let limit = |_: &str, _| Some(RateLimit { what: "a link".into(), gbps: 1e6, hard: true });
        let (target, cell) = (FakeTarget(manner), Cell { io, block: 4096, depth: 1, threads });
        Sweep::new(&target, effort, &limit).cell(&cell, target.routes(), &mut |_| true)
    }

    #[test]
    fn missing_bytes_are_noticed() {
        for (io, threads) in [(IoType::Read, 1), (IoType::RandRead, 3)] {
            let row = rows(Manner::Right, io, threads).unwrap().remove(0);
            let measured = row.result.unwrap();
            assert!(measured.verified && measured.gbps_each.len() == 3 && measured.p50_us.is_some());
            for manner in [Manner::Idle, Manner::Stale, Manner::Short] {
                let error = rows(manner, io, threads).unwrap_err();
                assert!(
                    matches!(error, Error::Row { ref why, .. } if matches!(**why, Error::WrongBytes { .. }))
                );
            }
        }
        // What was to be written is not what is read back.
        assert!(rows(Manner::Right, IoType::Write, 1).is_err());
    }
}
