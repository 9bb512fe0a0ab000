//! The queue pairs of one GPU on the drive: created, deleted by resets, created again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use onehop_gpu::{Doorbells, Gpu, KernelQueue, Place, Region};
use onehop_proto::kernel::{MAX_WINDOW, scratch_bytes};
use onehop_proto::queue::SharedLayout;
use onehop_proto::regs::doorbell;
use onehop_proto::{Cqe, GpuAddr, Sqe, Status};

use super::gate::HostGate;
use super::memory::RingMemory;
use super::{GpuMode, GpuSetup, poison};
use crate::admin::Admin;
use crate::core::AdminState;
use crate::drive::DriveInner;
use crate::ladder::Participant;
use crate::ring::{PairHalf, PairMemory, check_doorbells};
use crate::{Error, Namespace, Recovery, Result};

/// How long a poisoned launch may take to end before a reset proceeds without it. Launches poll the word all the time;
/// this is for a machine that is very busy.
const POISON_PATIENCE: Duration = Duration::from_secs(10);

/// Entries of an owner's rings, if the controller allows it: a window of one command has room to write the next entry
/// ahead.
const LEAST_ENTRIES: u32 = 16;

/// Why a controller is reset although it has no commands left.
pub(crate) const UNSEEN: &str = "a GPU-driven command whose completion no thread has seen";

pub(crate) struct GpuCell {
    pairs: Mutex<GpuPairs>,
    poison: Region,
    doorbells: Doorbells,
    pub(crate) running: AtomicBool,
    mode: GpuMode,
    /// The gate for other people's kernels, while the queue is exported.
    gate: Mutex<Option<Arc<HostGate>>>,
    /// Threads may ring the doorbells at any time from now on: the queues' numbers are never given to others.
    abandoned: AtomicBool,
}

struct GpuPairs {
    list: Vec<GpuPair>,
    /// Why the controller does not have them; none while it has them.
    taken: Option<TakenBy>,
    dead: Option<Error>,
}

/// Why the controller does not have a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TakenBy {
    /// It was never created, or was deleted. The controller has let go of its commands, but data of reads that it
    /// completed may still be on its way.
    Deletion,
    /// The controller was reset. It has let go of everything.
    Reset,
}

struct GpuPair {
    qid: u16,
    sq: RingMemory,
    cq: RingMemory,
    control: Region,
    queue: KernelQueue,
}

impl GpuCell {
    pub(crate) fn create(drive: &Arc<DriveInner>, gpu: &dyn Gpu, setup: &GpuSetup) -> Result<Arc<Self>> {
        let poison = gpu.alloc(Place::PinnedHost, 4096)?;
        let doorbells = gpu.map_registers(drive.control.port.regs.clone())?;
        let mut state = drive.alive()?;
        let queues = if matches!(setup.mode, GpuMode::Owner) { setup.queues } else { 1 };
        let mut list = Vec::new();
        for _ in 0..queues {
            let made = state.take_qid(drive.name()).and_then(|qid| {
                GpuPair::alloc(drive, &mut state, gpu, setup, qid, &doorbells)
                    .inspect_err(|_| state.give_qid(qid))
            });
            match made {
                Ok(pair) => list.push(pair),
                Err(error) => {
                    list.iter().for_each(|pair: &GpuPair| state.give_qid(pair.qid));
                    return Err(error);
                }
            }
        }
        let pairs = Mutex::new(GpuPairs { list, taken: Some(TakenBy::Deletion), dead: None });
        let cell = Arc::new(Self {
            pairs,
            poison,
            doorbells,
            running: AtomicBool::new(false),
            mode: setup.mode,
            gate: Mutex::default(),
            abandoned: AtomicBool::new(false),
        });
        state.participants.push(cell.clone());
        Ok(cell)
    }

    fn lock(&self) -> MutexGuard<'_, GpuPairs> {
        self.pairs.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(crate) fn poison(&self, code: u32) {
        // The region is a page: the word is always there.
        let _ = self.poison.signal(0, code);
    }

    pub(crate) fn poison_addr(&self) -> GpuAddr {
        self.poison.addr()
    }

    /// The words by which host and threads signal each other; the first is the poison word.
    pub(crate) fn signals(&self) -> &Region {
        &self.poison
    }

    /// Sets or removes the gate for other people's kernels; it counts from the next creation of the pairs on.
    pub(crate) fn set_gate(&self, gate: Option<Arc<HostGate>>) {
        *self.gate.lock().unwrap_or_else(|e| e.into_inner()) = gate;
    }

    fn gate(&self) -> Option<Arc<HostGate>> {
        self.gate.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Leaves the queues to threads that did not come out: everything that they may touch stays allocated until the
    /// process ends, and the drive stays open. No other queue of this drive gets the numbers of these queues. The
    /// controller's next owner would use them again, and a late doorbell of such a thread would hit its queue. The
    /// threads end with the process.
    pub(crate) fn abandon(self: &Arc<Self>, drive: &Arc<DriveInner>) {
        self.abandoned.store(true, Ordering::Release);
        std::mem::forget((self.clone(), drive.clone()));
    }

    /// Whether the queues are left to threads that did not come out.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    /// Whether threads may touch the queues.
    fn is_busy(&self) -> bool {
        self.running.load(Ordering::Acquire) || self.gate().is_some_and(|gate| gate.is_busy())
    }

    /// Waits until no thread may touch the queues, after a request to end. Returns whether that happened in time.
    fn is_empty_in_time(&self) -> bool {
        let start = Instant::now();
        while self.is_busy() {
            if self.is_abandoned() || start.elapsed() >= POISON_PATIENCE {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Why the controller does not have the pairs; none while it has them.
    pub(crate) fn taken_by(&self) -> Option<TakenBy> {
        self.lock().taken
    }

    /// Where the completion queues are.
    pub(crate) fn completion_queues(&self) -> Vec<GpuAddr> {
        self.lock().list.iter().map(|pair| pair.queue.cq).collect()
    }

    /// Whether threads that share a queue found completions of no command in flight.
    pub(crate) fn has_unexpected_completions(&self) -> Result<bool> {
        for pair in &self.lock().list {
            let queue = &pair.queue;
            if let (GpuMode::Shared { .. }, Some(layout)) =
                (self.mode, SharedLayout::new(queue.sq_entries, queue.cq_entries))
                && pair.control.word(layout.unexpected_completions() as usize)? > 0
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The pairs, for commands to this namespace, created on the controller if they are not there
    /// ([`DriveInner::create_with_retries`]); no try begins after `end`. When this fails, none of the pairs is there.
    pub(crate) fn ensure(
        &self,
        drive: &DriveInner,
        state: &mut AdminState,
        ns: &Namespace,
        end: Option<Instant>,
    ) -> Result<Vec<KernelQueue>> {
        drive.create_with_retries(state, end, |state| self.ensure_once(drive, state, ns))
    }

    fn ensure_once(
        &self,
        drive: &DriveInner,
        state: &mut AdminState,
        ns: &Namespace,
    ) -> Result<Vec<KernelQueue>> {
        // A reset, also one of a failed try, may have found another namespace: no command may reach that.
        ns.check(&drive.control)?;
        let (queues, taken) = {
            let pairs = self.lock();
            if let Some(error) = &pairs.dead {
                return Err(error.clone());
            }
            if self.is_abandoned() {
                let why = "its queues were left to a kernel that did not end; make new ones";
                return Err(Error::Gpu(why.into()));
            }
            (pairs.list.iter().map(|pair| pair.queue).collect::<Vec<_>>(), pairs.taken)
        };
        let gate = self.gate();
        if taken.is_some() {
            // A late thread finds the gate closed and leaves by itself.
            if gate.is_some() && !self.is_empty_in_time() {
                let why = "threads of a kernel did not leave the queue that was exported to them";
                return Err(Error::Gpu(why.into()));
            }
            let mut made = Vec::new();
            let created = self.create_all(drive, state, &mut made);
            if let Err(error) = created.and_then(|()| self.prepare(drive)) {
                self.undo(drive, state, &made);
                return Err(error);
            }
            self.lock().taken = None;
        }
        self.poison(0);
        if gate.is_some_and(|gate| !gate.open()) {
            self.poison(poison::OVER);
        }
        Ok(queues)
    }

    /// Writes the control memory of new pairs. The host does it: a kernel would have to wait for room on a GPU that other
    /// kernels fill, with the drive's lock held, and one that came late would overwrite the memory of a running job.
    fn prepare(&self, drive: &DriveInner) -> Result<()> {
        self.lock().list.iter().try_for_each(|pair| pair.initialise(drive, self.mode))
    }

    /// The controller does not have the pairs any more.
    fn mark_taken(&self, pairs: &mut GpuPairs, by: TakenBy) {
        pairs.taken = Some(by);
        if let Some(gate) = self.gate() {
            gate.next_life();
        }
    }

    /// Creates every pair, and records which were created. A creation that is not answered may lead to a reset, which
    /// takes this cell's lock: it must not be held here.
    fn create_all(&self, drive: &DriveInner, state: &mut AdminState, made: &mut Vec<u16>) -> Result<()> {
        let count = self.lock().list.len();
        for i in 0..count {
            let Some((qid, sq, cq)) = self.lock().list.get(i).map(GpuPair::renew).transpose()? else { break };
            drive.establish(state, qid, sq, cq)?;
            made.push(qid);
        }
        Ok(())
    }

    fn undo(&self, drive: &DriveInner, state: &mut AdminState, made: &[u16]) {
        for qid in made {
            let patience = drive.options.abort_wait;
            match drive.delete_pair(state, *qid, patience, || ()) {
                Ok(()) => {}
                // A controller that was reset meanwhile no longer has it.
                Err(Error::Command { status, .. }) if status.is(Status::INVALID_QUEUE_ID) => {}
                Err(_) if state.dead.is_some() => return,
                Err(_) => {
                    // How it went is in the state.
                    let _ = drive.reset(state, "GPU queues that were created in part");
                    return;
                }
            }
        }
    }

    /// Deletes the pairs; the controller then no longer uses their commands. Threads that still use them are asked to
    /// end, and waited for. Returns false if no thread has seen some completions: their data may still be on its way,
    /// and only a reset stops it.
    pub(crate) fn delete(&self, drive: &DriveInner, state: &mut AdminState) -> Result<bool> {
        self.close();
        let mut pairs = self.lock();
        let mut all_seen = true;
        if pairs.taken.is_none() {
            for pair in &pairs.list {
                let mut unseen = Ok(false);
                drive.delete_pair(state, pair.qid, drive.options.abort_wait, || {
                    unseen = pair.has_unseen(drive, self.mode);
                })?;
                all_seen &= !unseen?;
            }
            self.mark_taken(&mut pairs, TakenBy::Deletion);
        }
        Ok(all_seen)
    }

    pub(crate) fn close_for_good(self: &Arc<Self>, drive: &DriveInner) {
        let mut state = drive.state();
        let me: Arc<dyn Participant> = self.clone();
        state.participants.retain(|p| !Arc::ptr_eq(p, &me));
        if state.dead.is_none() {
            let cause = match self.delete(drive, &mut state) {
                Ok(true) => None,
                Ok(false) => Some(UNSEEN),
                Err(_) => Some("GPU queues that could not be deleted"),
            };
            // How it went is in the state.
            cause.map(|cause| drive.reset(&mut state, cause));
        }
        if !self.abandoned.load(Ordering::Acquire) {
            self.lock().list.iter().for_each(|pair| state.give_qid(pair.qid));
        }
        if state.dead.is_some() {
            drive.quarantine.keep(self.clone());
        }
    }
}

impl GpuPair {
    fn alloc(
        drive: &DriveInner,
        state: &mut AdminState,
        gpu: &dyn Gpu,
        setup: &GpuSetup,
        qid: u16,
        doorbells: &Doorbells,
    ) -> Result<Self> {
        let dstrd = drive.identity().cap.dstrd();
        check_doorbells(&drive.control.port, qid, dstrd)?;
        let most = u32::from(drive.identity().cap.mqes_z()) + 1;
        let mut entries = setup.depth.saturating_add(1).clamp(2, most);
        let shared = matches!(setup.mode, GpuMode::Shared { .. });
        let mut window = entries - 1;
        if !shared {
            window = window.min(MAX_WINDOW);
            entries = (window + 1).max(LEAST_ENTRIES).min(most);
        } else {
            // Tickets wrap at powers of two.
            entries = if entries.is_power_of_two() { entries } else { entries.next_power_of_two() };
            entries = if entries > most { 1 << most.ilog2() } else { entries }.min(1 << 15);
        }
        let mut ring = |part, place, bytes| RingMemory::alloc(drive, state, gpu, part, place, bytes);
        let mut sq = ring("sq", setup.placement.sq, entries as usize * Sqe::BYTES)?;
        let mut cq = ring("cq", setup.placement.cq, entries as usize * Cqe::BYTES)?;
        if sq.bus().is_err() || cq.bus().is_err() {
            // Bus-contiguous memory may be a single page: the ring must fit into it.
            entries = entries.min((1 << drive.control.page_shift) / Sqe::BYTES as u32);
            sq = ring("sq", setup.placement.sq, entries as usize * Sqe::BYTES)?;
            cq = ring("cq", setup.placement.cq, entries as usize * Cqe::BYTES)?;
        }
        let control_bytes = match SharedLayout::new(entries, entries) {
            Some(layout) if shared => layout.bytes(),
            _ => scratch_bytes(entries - 1),
        };
        let control = gpu.alloc(Place::Vram, control_bytes as usize)?;
        let queue = KernelQueue {
            sq: sq.region.addr(),
            cq: cq.region.addr(),
            sq_door: doorbells.at(doorbell(qid, false, dstrd)),
            cq_door: doorbells.at(doorbell(qid, true, dstrd)),
            control: control.addr(),
            sq_entries: entries,
            cq_entries: entries,
            window: window.min(entries - 1),
            zero: 0,
        };
        Ok(Self { qid, sq, cq, control, queue })
    }

    /// Initialises the control memory for a new pair, from the host.
    fn initialise(&self, drive: &DriveInner, mode: GpuMode) -> Result<()> {
        let mut bytes = vec![0; self.control.len()];
        self.control.read(0, &mut bytes)?;
        let queue = &self.queue;
        let shared = match mode {
            GpuMode::Owner => None,
            GpuMode::Shared { .. } => Some((queue.sq_entries, queue.cq_entries)),
        };
        PairMemory::initialise(drive.control.port.regs.clone(), shared, &mut bytes)?;
        Ok(self.control.write(0, &bytes)?)
    }

    /// Whether it holds completions that no thread has taken.
    fn has_unseen(&self, drive: &DriveInner, mode: GpuMode) -> Result<bool> {
        let (mut control, mut ring) = (vec![0; self.control.len()], vec![0; self.cq.region.len()]);
        self.control.read(0, &mut control)?;
        self.cq.region.read(0, &mut ring)?;
        let entries = (self.queue.sq_entries, self.queue.cq_entries);
        let is_shared = matches!(mode, GpuMode::Shared { .. });
        PairMemory::has_unseen(drive.control.port.regs.clone(), is_shared, entries, &control, &ring)
    }

    /// Prepares its memory for a new pair. Returns what the commands that create the pair need.
    fn renew(&self) -> Result<(u16, PairHalf, PairHalf)> {
        self.sq.zero()?;
        self.cq.zero()?;
        let half = |bus, entries| PairHalf { bus, entries };
        let sq = half(self.sq.bus()?, self.queue.sq_entries);
        let cq = half(self.cq.bus()?, self.queue.cq_entries);
        Ok((self.qid, sq, cq))
    }
}

impl Participant for GpuCell {
    fn close(&self) {
        if let Some(gate) = self.gate() {
            gate.close();
        }
        self.poison(poison::RESET);
        if !self.is_empty_in_time() {
            // They may ring at any time, but only doorbells of queues that the controller never has again: it ignores
            // them.
            self.abandoned.store(true, Ordering::Release);
        }
        // A late doorbell would hit the next queue with this number.
        self.doorbells.settle();
    }

    /// Only records that they are gone: [`Self::ensure`] creates them when they are needed.
    fn recreate(&self, _drive: &DriveInner, _admin: &mut Admin, _recovery: Recovery) -> Result<()> {
        self.mark_taken(&mut self.lock(), TakenBy::Reset);
        Ok(())
    }

    fn open(&self) {}

    fn fail(&self, error: &Error) {
        if let Some(gate) = self.gate() {
            gate.shut();
        }
        self.poison(poison::FAILED);
        self.lock().dead = Some(error.clone());
    }
}
