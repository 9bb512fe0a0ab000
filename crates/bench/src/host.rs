//! Null controllers on CPU threads, for rings and doorbells in host memory. A controller on the GPU must read those over
//! the bus. A CPU has them in its caches, which is closer to a drive that reads host memory.
//!
//! They do what the one on the GPU does: check each entry's seal, complete all that the doorbell covers and the
//! completion queue has room for, in order or last command first, and count.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_controller::{Report, Rule, Violation, is_sealed};
use onehop_os::{DmaMemory, HostMem};
use onehop_proto::{Cqe, Sqe};

use crate::bed::wrong;
use crate::{Error, Result};

/// Commands of a turn at most, as on the GPU.
const BATCH: u32 = 128;
/// Turns between two readings of the clock.
const POLL_TURNS: u32 = 4096;

/// One queue pair, by the places of its parts in host memory.
pub(crate) struct HostPair {
    pub(crate) sqs: HostMem,
    pub(crate) cqs: HostMem,
    pub(crate) doors: HostMem,
    pub(crate) sq: usize,
    pub(crate) cq: usize,
    pub(crate) sq_door: usize,
    pub(crate) cq_door: usize,
    pub(crate) entries: u32,
    pub(crate) sqid: u16,
}

/// Their settings.
#[derive(Clone, Copy)]
pub(crate) struct ServeOptions {
    /// Complete each batch last command first.
    pub(crate) reverse: bool,
    /// Ignore doorbells and serve full queues for ever, to measure the controller's own limit.
    pub(crate) feed: bool,
    /// For how long at most.
    pub(crate) limit: Duration,
}

/// What the controller of one queue saw.
pub(crate) struct ServedQueue {
    pub(crate) index: usize,
    pub(crate) report: Report,
    /// The first broken rule that it found.
    pub(crate) first: Option<Violation>,
}

/// The running threads.
pub(crate) struct HostControllers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<Vec<ServedQueue>>>>,
}

impl HostControllers {
    /// Starts one thread for each CPU, or for each queue if those are fewer.
    pub(crate) fn start(pairs: Vec<HostPair>, options: ServeOptions) -> Result<Self> {
        let count = std::thread::available_parallelism().map_or(1, usize::from).min(pairs.len()).max(1);
        let mut shares: Vec<Vec<PairServer>> = (0..count).map(|_| Vec::new()).collect();
        for (index, pair) in pairs.into_iter().enumerate() {
            shares[index % count].push(PairServer::new(index, pair, options.reverse));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let mut running = Self { stop: stop.clone(), threads: Vec::new() };
        for share in shares {
            let stop = stop.clone();
            let thread = std::thread::Builder::new()
                .name("null controller".into())
                .spawn(move || serve(share, options, &stop))
                .map_err(|e| Error::Setup(format!("no thread for a controller could be started: {e}")))?;
            running.threads.push(thread);
        }
        Ok(running)
    }

    /// Waits for their end: at once after a request to stop, otherwise at their time limit.
    pub(crate) fn join(mut self, stop: bool) -> Result<Vec<ServedQueue>> {
        self.stop.fetch_or(stop, Ordering::Relaxed);
        let mut all = Vec::new();
        for thread in self.threads.drain(..) {
            all.extend(thread.join().map_err(|_| wrong("a controller's thread panicked"))??);
        }
        Ok(all)
    }
}

impl Drop for HostControllers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve(mut share: Vec<PairServer>, options: ServeOptions, stop: &AtomicBool) -> Result<Vec<ServedQueue>> {
    let start = Instant::now();
    let mut turns = 0_u32;
    while !stop.load(Ordering::Relaxed) {
        for server in &mut share {
            server.turn(options.feed)?;
        }
        turns = turns.wrapping_add(1);
        if turns.is_multiple_of(POLL_TURNS) && start.elapsed() >= options.limit {
            break;
        }
    }
    let elapsed = start.elapsed().as_nanos() as u64;
    Ok(share.into_iter().map(|server| server.end(elapsed)).collect())
}

/// One queue pair, and the positions in its rings.
struct PairServer {
    index: usize,
    pair: HostPair,
    reverse: bool,
    head: u32,
    cq_tail: u32,
    phase: bool,
    report: Report,
    first: Option<Violation>,
}

impl PairServer {
    fn new(index: usize, pair: HostPair, reverse: bool) -> Self {
        let (report, first) = (Report::default(), None);
        Self { index, pair, reverse, head: 0, cq_tail: 0, phase: true, report, first }
    }

    fn distance(&self, from: u32, to: u32) -> u32 {
        (to + self.pair.entries - from) % self.pair.entries
    }

    fn door(&self, at: usize) -> Result<u32> {
        Ok(self.pair.doors.word(at).map_err(memory_error)?.load(Ordering::Acquire))
    }

    /// Serves the commands that are ready.
    fn turn(&mut self, feed: bool) -> Result<()> {
        let count = if feed { BATCH.min(self.pair.entries - 1) } else { self.pending()? };
        if count == 0 {
            return Ok(());
        }
        let mut cids = [0; BATCH as usize];
        let cids = &mut cids[..count as usize];
        // All identifiers first: entries that a device has written are not in the cache, and these loads overlap.
        let first = self.head;
        for cid in cids.iter_mut() {
            *cid = (self.entry(self.head)?.load(Ordering::Relaxed) >> 16) as u16;
            self.head = self.after(self.head);
        }
        self.check_seals(first, count)?;
        if self.reverse {
            cids.reverse();
        }
        for cid in cids {
            self.complete(*cid)?;
        }
        self.report.commands += u64::from(count);
        Ok(())
    }

    /// How many commands can be served now.
    fn pending(&mut self) -> Result<u32> {
        let tail = self.door(self.pair.sq_door)?;
        if tail == self.head {
            return Ok(0);
        }
        let cq_head = self.door(self.pair.cq_door)?;
        if tail >= self.pair.entries || cq_head >= self.pair.entries {
            self.note(Rule::DoorbellValue, u64::from(tail) << 32 | u64::from(cq_head));
            return Ok(0);
        }
        let room = self.pair.entries - 1 - self.distance(cq_head, self.cq_tail);
        Ok(self.distance(self.head, tail).min(room).min(BATCH))
    }

    /// The entry's first word, the upper half of which is its identifier.
    fn entry(&self, slot: u32) -> Result<&AtomicU32> {
        self.pair.sqs.word(self.pair.sq + slot as usize * Sqe::BYTES).map_err(memory_error)
    }

    fn check_seals(&mut self, first: u32, count: u32) -> Result<()> {
        let mut slot = first;
        for _ in 0..count {
            let at = self.pair.sq + slot as usize * Sqe::BYTES;
            let sqe = Sqe { dw: self.pair.sqs.read_words(at).map_err(memory_error)? };
            if !is_sealed(&sqe) {
                self.note(Rule::Seal, u64::from(slot) << 32 | u64::from(sqe.cid()));
            }
            slot = self.after(slot);
        }
        Ok(())
    }

    /// The next position. Without a division, which would cost more than everything else.
    fn after(&self, slot: u32) -> u32 {
        if slot + 1 == self.pair.entries { 0 } else { slot + 1 }
    }

    fn complete(&mut self, cid: u16) -> Result<()> {
        let at = self.pair.cq + self.cq_tail as usize * Cqe::BYTES;
        let memory = &self.pair.cqs;
        let dw2 = self.head | u32::from(self.pair.sqid) << 16;
        let dw3 = u32::from(cid) | u32::from(self.phase) << 16;
        memory.word(at + 8).map_err(memory_error)?.store(dw2, Ordering::Relaxed);
        memory.word(at + 12).map_err(memory_error)?.store(dw3, Ordering::Release);
        self.cq_tail += 1;
        if self.cq_tail == self.pair.entries {
            (self.cq_tail, self.phase) = (0, !self.phase);
        }
        Ok(())
    }

    fn note(&mut self, rule: Rule, detail: u64) {
        self.report.violations = self.report.violations.saturating_add(1);
        self.first = self.first.or(Some(Violation { rule: rule as u32, cid: u32::MAX, detail }));
    }

    fn end(mut self, elapsed: u64) -> ServedQueue {
        self.report.completions = self.report.commands;
        self.report.elapsed = elapsed;
        ServedQueue { index: self.index, report: self.report, first: self.first }
    }
}

fn memory_error(error: onehop_os::Error) -> Error {
    Error::Gpu(error.into())
}

/// The host memory of a region, which must have some.
pub(crate) fn host_memory(region: &onehop_gpu::Region) -> Result<HostMem> {
    region.host().cloned().ok_or_else(|| {
        Error::Setup("controllers on CPU threads need rings in host memory: --rings host".into())
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use onehop_controller::sealed;
    use onehop_proto::kernel::WorkItem;

    use super::*;

    const ENTRIES: u32 = 8;
    const CQ: usize = 4096;

    struct Bed {
        memory: HostMem,
        doors: HostMem,
    }

    impl Bed {
        fn new() -> Self {
            Self { memory: HostMem::anonymous(8192).unwrap(), doors: HostMem::anonymous(4096).unwrap() }
        }

        fn server(&self, reverse: bool) -> PairServer {
            let (memory, doors) = (self.memory.clone(), self.doors.clone());
            let pair = HostPair {
                sqs: memory.clone(),
                cqs: memory,
                doors,
                sq: 0,
                cq: CQ,
                sq_door: 0,
                cq_door: 128,
                entries: ENTRIES,
                sqid: 3,
            };
            PairServer::new(0, pair, reverse)
        }

        fn submit(&self, slot: u32, cid: u16) {
            let work = WorkItem { lba: u64::from(cid) * 8, prp1: 4096, prp2: 0, blocks: 8, control: 2 };
            let bytes: Vec<u8> =
                sealed(work, 1).command(1).with_cid(cid).dw.iter().flat_map(|dw| dw.to_le_bytes()).collect();
            self.memory.write(slot as usize * Sqe::BYTES, &bytes).unwrap();
        }

        fn ring(&self, sq: u32, cq: u32) {
            self.doors.word(0).unwrap().store(sq, Ordering::Release);
            self.doors.word(128).unwrap().store(cq, Ordering::Release);
        }

        /// Identifier, phase and SQHD of a completion.
        fn completion(&self, slot: usize) -> (u16, u32, u32) {
            let word = |at| self.memory.word(CQ + slot * Cqe::BYTES + at).unwrap().load(Ordering::Acquire);
            (word(12) as u16, word(12) >> 16, word(8) & 0xffff)
        }
    }

    #[test]
    fn completes_all_that_the_doorbell_covers_and_the_queue_has_room_for() {
        for reverse in [false, true] {
            let bed = Bed::new();
            let mut server = bed.server(reverse);
            (0..5).for_each(|i| bed.submit(i, i as u16 + 10));
            server.turn(false).unwrap();
            assert_eq!(server.report.commands, 0);
            bed.ring(5, 0);
            server.turn(false).unwrap();
            let cids: Vec<u16> = (0..5).map(|i| bed.completion(i).0).collect();
            assert_eq!(cids, if reverse { [14, 13, 12, 11, 10] } else { [10, 11, 12, 13, 14] });
            assert!((0..5).all(|i| bed.completion(i) == (cids[i], 1, 5)));
            // Seven more, of which two have room until the host has taken some.
            (5..12).for_each(|i| bed.submit(i % ENTRIES, i as u16 + 10));
            bed.ring(12 % ENTRIES, 0);
            server.turn(false).unwrap();
            assert_eq!(server.report.commands, 7);
            bed.ring(12 % ENTRIES, 5);
            server.turn(false).unwrap();
            assert_eq!((server.report.commands, server.report.violations), (12, 0));
            assert_eq!((bed.completion(7).1, bed.completion(0).1), (1, 0), "the phase turns");
        }
    }

    #[test]
    fn errors_are_noticed() {
        let bed = Bed::new();
        let mut server = bed.server(false);
        bed.submit(0, 1);
        bed.memory.write(40, &[0xff]).unwrap();
        bed.ring(1, 0);
        server.turn(false).unwrap();
        assert_eq!(server.first.unwrap().rule().unwrap().name(), "seal");
        bed.ring(ENTRIES, 0);
        server.turn(false).unwrap();
        assert_eq!((server.report.commands, server.report.violations), (1, 2));
    }

    #[test]
    fn threads_serve_until_they_are_stopped_or_their_time_is_over() {
        let bed = Bed::new();
        (0..ENTRIES).for_each(|i| bed.submit(i, i as u16));
        for (feed, stop) in [(true, false), (false, true)] {
            let pairs = (0..3).map(|_| bed.server(false).pair).collect();
            let options = ServeOptions {
                reverse: false,
                feed,
                limit: Duration::from_millis(if feed { 20 } else { 20_000 }),
            };
            let served = HostControllers::start(pairs, options).unwrap().join(stop).unwrap();
            assert_eq!(served.len(), 3);
            assert!(served.iter().all(|s| (s.report.commands > 0) == feed && s.report.violations == 0));
        }
    }
}
