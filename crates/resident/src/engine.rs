//! Creates, deletes and rings queue pairs that resident warps serve.
//!
//! The warps start with the first pair and end with the last one: freed GPU memory is only released once persistent
//! kernels have ended. If data of completed reads is outstanding when the last pair is deleted, they stay until the
//! controller is reset, or a later pair has been deleted.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use onehop_controller::Fault;
use onehop_gpu::controllers::{Begin, Pairs, Table};
use onehop_gpu::{Gpu, Place, Region, Result};
use onehop_proto::identify::Oncs;
use onehop_proto::{Cqe, GpuAddr, Sqe, Status};
use onehop_sim::{Blocks, IoEngine, NewQueue, Rule, Strike, Violation};

use crate::faults::Armed;
use crate::memory::NamespaceBlocks;

/// A ring, and what keeps it reachable.
struct HeldRing {
    at: GpuAddr,
    entries: u32,
    _hold: Option<Region>,
}

/// A completion queue.
struct Completions {
    ring: HeldRing,
    taken: bool,
}

/// A submission queue, which forms a pair that a warp serves.
struct ServedPair {
    _ring: HeldRing,
    /// Its faults, by their number, and their counts at the start.
    faults: Vec<(usize, Fault)>,
    /// Whether the controller-wide effect was reported.
    reported: bool,
}

#[derive(Default)]
struct QueueSlot {
    cq: Option<Completions>,
    served: Option<ServedPair>,
    /// Number of reported violations.
    breaches: u32,
}

struct EngineState {
    slots: Vec<QueueSlot>,
    faults: Vec<Armed>,
    /// A pair that has ended took it off the bus, and `strike` has not said so.
    is_gone: bool,
    /// Completions of warps that have ended.
    completions: u64,
    breaches: Vec<Violation>,
}

/// The engine of one drive.
pub(crate) struct DriveEngine {
    gpu: Arc<dyn Gpu>,
    table: Arc<Mutex<Table>>,
    pairs: Pairs,
    namespace: Arc<NamespaceBlocks>,
    state: Mutex<EngineState>,
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A GPU failure is an internal error of the controller.
fn internal(_: onehop_gpu::Error) -> Status {
    Status::INTERNAL_ERROR
}

impl DriveEngine {
    pub(crate) fn new(
        gpu: Arc<dyn Gpu>,
        table: Arc<Mutex<Table>>,
        pairs: Pairs,
        namespace: Arc<NamespaceBlocks>,
        faults: Vec<Armed>,
    ) -> Self {
        let slots = std::iter::once(0).chain(pairs.numbers()).map(|_| QueueSlot::default()).collect();
        let state = EngineState { slots, faults, is_gone: false, completions: 0, breaches: Vec::new() };
        Self { gpu, table, pairs, namespace, state: Mutex::new(state) }
    }

    /// The address of a ring: in mapped memory, or in the controller's own buffer.
    fn ring(&self, queue: &NewQueue, entry: usize) -> std::result::Result<HeldRing, Status> {
        let bytes = u64::from(queue.entries) * entry as u64;
        if let Some(at) = locked(&self.table).find(queue.base.0, bytes) {
            return Ok(HeldRing { at, entries: queue.entries, _hold: None });
        }
        let memory = queue.memory.clone().ok_or(Status::DATA_TRANSFER_ERROR)?;
        let region = self.gpu.adopt(Place::Cmb, memory).map_err(internal)?;
        Ok(HeldRing { at: region.addr(), entries: queue.entries, _hold: Some(region) })
    }

    fn start(&self, state: &mut EngineState) -> Result<()> {
        if !self.pairs.are_started() {
            state.slots.iter_mut().for_each(|slot| slot.breaches = 0);
            self.pairs.start()?;
        }
        Ok(())
    }

    fn stop(&self, state: &mut EngineState) {
        if !self.pairs.are_started() {
            return;
        }
        let result = self.pairs.stop().and_then(|()| self.collect(state)).and_then(|()| {
            for qid in self.pairs.numbers() {
                state.completions += self.pairs.report(qid)?.completions;
            }
            Ok(())
        });
        if let Err(error) = result {
            state.record_internal_error(
                0,
                format!("the warps that served queues could not be ended: {error}"),
            );
        }
    }

    /// Fetches new violations.
    fn collect(&self, state: &mut EngineState) -> Result<()> {
        for qid in self.pairs.numbers() {
            let slot = &mut state.slots[usize::from(qid)];
            let (found, count) = self.pairs.violations(qid, slot.breaches)?;
            slot.breaches = count;
            state.breaches.extend(found.iter().map(|found| violation(qid, found)));
        }
        Ok(())
    }

    /// Ends a pair: abandons its commands, and keeps its faults' counts.
    fn end(&self, state: &mut EngineState, qid: u16) {
        let Some(served) = state.slots.get_mut(usize::from(qid)).and_then(|slot| slot.served.take()) else {
            return;
        };
        match self.pairs.end(qid) {
            Ok(true) => {}
            Ok(false) => {
                let ended = self.pairs.is_over();
                state.record_internal_error(
                    qid,
                    format!("its warp did not release it (ended on its own: {ended})"),
                );
            }
            Err(error) => state.record_internal_error(qid, error.to_string()),
        }
        for (i, (number, before)) in served.faults.iter().enumerate() {
            if let (Some(armed), Ok(after)) = (state.faults.get_mut(*number), self.pairs.fault(qid, i)) {
                armed.fault.seen += after.seen.saturating_sub(before.seen);
                armed.fault.fired += after.fired.saturating_sub(before.fired);
                // A drive that has left the bus does not come back by a reset that was begun for another reason.
                let struck = after.fired > before.fired && !served.reported;
                if struck && armed.strike == Some(Strike::Gone) {
                    state.is_gone = true;
                }
            }
        }
    }

    /// Stops the warps when they are idle.
    fn stop_if_idle(&self, state: &mut EngineState) {
        let is_late = |qid| self.pairs.report(qid).is_ok_and(|report| report.waiting > 0);
        if state.slots.iter().all(|slot| slot.served.is_none()) && !self.pairs.numbers().any(is_late) {
            self.stop(state);
        }
    }
}

impl EngineState {
    /// Records an internal error as a violation, so that a test that checks violations sees it.
    fn record_internal_error(&mut self, qid: u16, detail: String) {
        self.breaches.push(Violation { rule: Rule::DmaUnmapped, queue: Some(qid), detail });
    }
}

/// Converts a violation to the simulator's type.
fn violation(qid: u16, found: &onehop_controller::Violation) -> Violation {
    let name = found.rule().map_or("", onehop_controller::Rule::name);
    let rule = Rule::ALL.iter().find(|rule| rule.name() == name).copied().unwrap_or(Rule::ReservedField);
    let detail = format!("{name}: identifier {:#x}, detail {:#x}", found.cid, found.detail);
    Violation { rule, queue: Some(qid), detail }
}

impl IoEngine for DriveEngine {
    fn create_cq(&self, cq: &NewQueue) -> std::result::Result<(), Status> {
        let ring = self.ring(cq, Cqe::BYTES)?;
        let mut state = locked(&self.state);
        let slot = state.slots.get_mut(usize::from(cq.qid)).ok_or(Status::INVALID_QUEUE_ID)?;
        slot.cq = Some(Completions { ring, taken: false });
        Ok(())
    }

    /// Each completion queue serves one submission queue.
    fn create_sq(&self, sq: &NewQueue, cqid: u16) -> std::result::Result<(), Status> {
        let ring = self.ring(sq, Sqe::BYTES)?;
        let mut state = locked(&self.state);
        let state = &mut *state;
        if state.slots.get(usize::from(sq.qid)).is_none_or(|slot| slot.served.is_some()) {
            return Err(Status::INVALID_QUEUE_ID);
        }
        let free = state.slots.get(usize::from(cqid)).and_then(|slot| slot.cq.as_ref());
        let cq = free.filter(|cq| !cq.taken).ok_or(Status::CQ_INVALID.with_dnr())?;
        let (cq_at, cq_entries) = (cq.ring.at, cq.ring.entries);
        self.start(state).map_err(internal)?;
        let faults = state.faults.iter().enumerate().filter(|(_, armed)| armed.is_on(sq.qid));
        let faults: Vec<_> = faults.map(|(number, armed)| (number, armed.fault)).collect();
        let given: Vec<_> = faults.iter().map(|(_, fault)| *fault).collect();
        let begin = Begin {
            sq: ring.at,
            cq: cq_at,
            sq_entries: ring.entries,
            cq_entries,
            cqid,
            page_shift: sq.page_shift,
            faults: &given,
        };
        match self.pairs.begin(sq.qid, &begin) {
            Ok(true) => {}
            failed => {
                // It must not begin later, with rings that are no queue's.
                let _ = self.pairs.end(sq.qid);
                if failed.is_ok() {
                    state.record_internal_error(sq.qid, "its warp did not begin".to_owned());
                }
                self.stop_if_idle(state);
                return Err(Status::INTERNAL_ERROR);
            }
        }
        if let Some(cq) = state.slots[usize::from(cqid)].cq.as_mut() {
            cq.taken = true;
        }
        state.slots[usize::from(sq.qid)].served = Some(ServedPair { _ring: ring, faults, reported: false });
        Ok(())
    }

    fn delete_sq(&self, qid: u16) {
        let mut state = locked(&self.state);
        self.end(&mut state, qid);
        self.stop_if_idle(&mut state);
    }

    fn delete_cq(&self, qid: u16) {
        if let Some(slot) = locked(&self.state).slots.get_mut(usize::from(qid)) {
            slot.cq = None;
        }
    }

    fn clear(&self) {
        let mut state = locked(&self.state);
        for qid in self.pairs.numbers() {
            self.end(&mut state, qid);
        }
        // Nothing is written to the host's memory after a reset.
        self.stop(&mut state);
        state.slots.iter_mut().for_each(|slot| slot.cq = None);
    }

    fn ring(&self, qid: u16, is_cq: bool, value: u32) -> bool {
        let state = locked(&self.state);
        let Some(slot) = state.slots.get(usize::from(qid)) else { return false };
        let rung = match is_cq {
            true if slot.cq.as_ref().is_some_and(|cq| cq.taken) => self.pairs.ring_cq(qid, value),
            false if slot.served.is_some() => self.pairs.ring_sq(qid, value),
            _ => return false,
        };
        // A posted write that does not arrive is lost; the wait for its answer notices.
        drop(rung);
        true
    }

    fn commands(&self) -> u64 {
        let state = locked(&self.state);
        let running = self.pairs.numbers().filter(|_| self.pairs.are_started());
        let completed = running.filter_map(|qid| self.pairs.report(qid).ok()).map(|r| r.completions);
        state.completions + completed.sum::<u64>()
    }

    fn blocks(&self) -> Option<Arc<dyn Blocks>> {
        Some(self.namespace.clone())
    }

    fn optional_commands(&self, all: Oncs) -> Oncs {
        all.with_verify(false).with_write_uncorrectable(false).with_dataset_management(false)
    }

    fn strike(&self) -> Option<Strike> {
        let mut state = locked(&self.state);
        if std::mem::take(&mut state.is_gone) {
            return Some(Strike::Gone);
        }
        let EngineState { slots, faults, .. } = &mut *state;
        for (qid, slot) in (0..).zip(slots.iter_mut()) {
            let Some(served) = slot.served.as_mut().filter(|served| !served.reported) else { continue };
            for (i, (number, before)) in served.faults.iter().enumerate() {
                let Some(strike) = faults.get(*number).and_then(|armed| armed.strike) else { continue };
                let struck = self.pairs.fault(qid, i).is_ok_and(|after| after.fired > before.fired);
                if struck {
                    served.reported = true;
                    return Some(strike);
                }
            }
        }
        None
    }

    fn breaches(&self) -> Vec<Violation> {
        let mut state = locked(&self.state);
        if self.pairs.are_started()
            && let Err(error) = self.collect(&mut state)
        {
            state.record_internal_error(0, error.to_string());
        }
        std::mem::take(&mut state.breaches)
    }
}

impl Drop for DriveEngine {
    fn drop(&mut self) {
        self.stop(&mut locked(&self.state));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use onehop_controller::BusMapping;
    use onehop_gpu::Emulated;
    use onehop_gpu::controllers::Common;
    use onehop_proto::BusAddr;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn queue(base: u64) -> NewQueue {
        NewQueue { qid: 1, entries: 4, base: BusAddr(base), memory: None, page_shift: 12 }
    }

    /// An engine of one pair, with memory for its rings at the bus addresses 0x10000 and 0x20000.
    fn engine() -> (DriveEngine, Arc<Mutex<Table>>, Region) {
        let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
        let mut table = Table::new(&gpu, 1024).unwrap();
        let rings = gpu.alloc(Place::Vram, 8192).unwrap();
        table.add(place(0x10000, rings.addr())).unwrap();
        table.add(place(0x20000, rings.addr().plus(4096))).unwrap();
        let namespace = gpu.alloc(Place::Vram, 4096).unwrap();
        let common = Common {
            namespace: namespace.clone(),
            blocks: 8,
            lba_shift: 9,
            max_bytes: 4096,
            limit: LIMIT,
            flags: 0,
        };
        let table = Arc::new(Mutex::new(table));
        let pairs = Pairs::new(&gpu, common, &table, 1, 4096).unwrap();
        let namespace = Arc::new(NamespaceBlocks(namespace));
        let engine = DriveEngine::new(gpu.clone(), table.clone(), pairs, namespace, Vec::new());
        (engine, table, rings)
    }

    fn place(bus: u64, target: GpuAddr) -> BusMapping {
        BusMapping { bus, bytes: 4096, target }
    }

    #[test]
    fn a_queue_that_did_not_begin_leaves_its_completion_queue_free() {
        let (engine, ..) = engine();
        let cq_invalid = Err(Status::CQ_INVALID.with_dnr());
        assert_eq!(engine.create_sq(&queue(0x20000), 1), cq_invalid);
        assert!(!engine.pairs.are_started(), "warps of no queue");
        engine.create_cq(&queue(0x10000)).unwrap();
        // No page is that large.
        let invalid = NewQueue { page_shift: 40, ..queue(0x20000) };
        assert_eq!(engine.create_sq(&invalid, 1), Err(Status::INTERNAL_ERROR));
        assert!(!engine.pairs.are_started(), "warps of no queue");
        assert_eq!(engine.create_sq(&queue(0x20000), 1), Ok(()));
        // The completion queue, and the number, are in use.
        assert_eq!(
            engine.create_sq(&NewQueue { qid: 2, ..queue(0x20000) }, 1),
            Err(Status::INVALID_QUEUE_ID)
        );
        assert_eq!(engine.create_sq(&queue(0x20000), 1), Err(Status::INVALID_QUEUE_ID));
        assert!(engine.pairs.are_started());
        assert_eq!(engine.breaches(), []);
    }

    #[test]
    fn queues_begin_while_memory_comes_and_goes() {
        let (engine, table, rings) = engine();
        let over = AtomicBool::new(false);
        let all_begun = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut bus = 0x30000;
                while !over.load(Ordering::Relaxed) {
                    let all: Vec<_> = (0..500).map(|i| bus + (i << 12)).collect();
                    all.iter().for_each(|bus| locked(&table).add(place(*bus, rings.addr())).unwrap());
                    all.iter().rev().for_each(|bus| locked(&table).remove(*bus).unwrap());
                    bus += all.len() as u64 * 4096;
                }
            });
            let all_begun = (0..100).try_for_each(|_| {
                engine.create_cq(&queue(0x10000)).unwrap();
                let begun = engine.create_sq(&queue(0x20000), 1);
                engine.delete_sq(1);
                engine.delete_cq(1);
                begun
            });
            over.store(true, Ordering::Relaxed);
            all_begun
        });
        assert_eq!((all_begun, engine.breaches()), (Ok(()), Vec::new()));
    }
}
