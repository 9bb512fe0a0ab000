//! A remote controller as the driver sees controllers: registers, rings in memory, doorbells.
//!
//! A message-based controller has no rings, so this host keeps them. Doorbells send the driver's entries, and answers
//! become completions in its rings. The admin queue's registers are kept here; the others are properties of the
//! controller. Creating and deleting a queue connects and disconnects it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use onehop_os::{FunctionReset, Registers, StopSignal};
use onehop_proto::admin::{self, Abort, CreateCq, CreateSq, deleted_queue, opcode};
use onehop_proto::regs::{Aqa, Cap, Cc, Csts, doorbell, doorbell_of, offset};
use onehop_proto::{Sqe, Status};

use crate::association::{ADMIN_ENTRIES, Association, CONNECT_TIMEOUT};
use crate::link::{LinkHandle, QueueLink};
use crate::queue::MAX_DEPTH;
use crate::ring::{RingAt, RingPair};
use crate::space::MemorySpace;
use crate::{Error, Host, Result, SubsystemAddress};

/// Maximum number of I/O queues.
const MAX_QUEUES: u16 = 128;
/// The first pause before reconnecting, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

type Links = RwLock<BTreeMap<u16, Arc<QueueLink>>>;

/// The controller.
pub(crate) struct RemoteController {
    target: Arc<SubsystemAddress>,
    host: Arc<Host>,
    pub(crate) space: Arc<MemorySpace>,
    cap: Cap,
    version: u32,
    cc: AtomicU32,
    csts: AtomicU32,
    aqa: AtomicU32,
    asq: [AtomicU32; 2],
    acq: [AtomicU32; 2],
    /// The queues that may be rung.
    links: Links,
    state: Mutex<RemoteState>,
    /// Why the controller last failed, or refused a queue.
    failure: Mutex<Option<Error>>,
    stop: StopSignal,
}

#[derive(Default)]
struct RemoteState {
    queues: BTreeMap<u16, LinkHandle>,
    completion_rings: BTreeMap<u16, RingAt>,
    association: Option<Arc<Association>>,
    /// The controller was enabled, so this connection cannot be reused.
    was_enabled: bool,
    /// The last one; it outlasts its connections.
    outage: Option<Outage>,
}

/// The time from a controller reset until the controller is usable again. The driver tries it by one controller reset, and
/// then by function resets.
#[derive(Clone, Copy)]
struct Outage {
    since: Instant,
    tries: u32,
    /// The pause before the next try.
    pause: Duration,
    /// A function reset has connected, and the driver enables the controller next.
    is_connected: bool,
}

impl Outage {
    fn begin() -> Self {
        Self { since: Instant::now(), tries: 1, pause: Duration::ZERO, is_connected: false }
    }

    /// Which address of the host the try starts with: another one may lead to the controller that was there before.
    fn turn(&self) -> u32 {
        self.tries - 1
    }

    /// The pause before the next try; `None` when the time for tries is over.
    fn next_pause(&mut self, limit: Duration) -> Option<Duration> {
        let left = Some(limit.saturating_sub(self.since.elapsed())).filter(|left| !left.is_zero())?;
        let pause = self.pause.min(left);
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.tries += 1;
        Some(pause)
    }
}

impl RemoteController {
    /// Connects to a controller.
    pub(crate) fn connect(target: SubsystemAddress, host: Host, stop: StopSignal) -> Result<Arc<Self>> {
        let (target, host) = (Arc::new(target), Arc::new(host));
        let association = Association::connect(target.clone(), host.clone(), 0, stop.clone())?;
        let theirs = association.cap;
        if theirs.mpsmin() > 0 {
            return Err(Error::Unsupported(format!(
                "its smallest memory page has {} KiB, this host's have 4",
                4u64 << theirs.mpsmin()
            )));
        }
        // Omitted is what belongs to a bus: strides, resets and memory of the controller.
        let cap = Cap(0)
            // A ring holds one command fewer than it has entries.
            .with_mqes_z(theirs.mqes_z().min(MAX_DEPTH - 1))
            .with_cqr(true)
            .with_to(theirs.to())
            .with_css(theirs.css());
        let version = association.version.0;
        let state = RemoteState { association: Some(Arc::new(association)), ..RemoteState::default() };
        Ok(Arc::new(Self {
            space: Arc::new(MemorySpace::new(target.to_string())),
            target,
            host,
            cap,
            version,
            cc: AtomicU32::new(0),
            csts: AtomicU32::new(0),
            aqa: AtomicU32::new(0),
            asq: Default::default(),
            acq: Default::default(),
            links: RwLock::default(),
            state: Mutex::new(state),
            failure: Mutex::default(),
            stop,
        }))
    }

    fn state(&self) -> MutexGuard<'_, RemoteState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn link(&self, qid: u16) -> Option<Arc<QueueLink>> {
        self.links.read().unwrap_or_else(PoisonError::into_inner).get(&qid).cloned()
    }

    fn set_failure(&self, why: Option<Error>) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = why;
    }

    fn fail(&self, why: Error) {
        self.set_failure(Some(why));
        self.csts.store(Csts(0).with_cfs(true).0, Ordering::Release);
    }

    /// CSTS: a controller whose connection is lost reports a fatal status.
    fn status(&self) -> Csts {
        let csts = Csts(self.csts.load(Ordering::Acquire));
        // Does not wait for a connection attempt.
        let Ok(state) = self.state.try_lock() else { return csts };
        let lost = state.association.as_ref().and_then(|association| association.health.lost());
        match lost {
            Some(why) if csts.rdy() => {
                self.set_failure(Some(why));
                csts.with_cfs(true)
            }
            _ => csts,
        }
    }

    fn configure(&self, new: Cc) {
        let old = Cc(self.cc.swap(new.0, Ordering::AcqRel));
        match (old.en(), new.en()) {
            (false, true) => self.enable(new),
            (true, false) => {
                self.disconnect(&mut self.state());
                self.csts.store(0, Ordering::Release);
            }
            (true, true) if new.shn() != Cc::SHN_NONE && old.shn() == Cc::SHN_NONE => self.shut_down(new),
            _ => {}
        }
    }

    /// Closes all connections. No memory is received into after this.
    fn disconnect(&self, state: &mut RemoteState) {
        self.links.write().unwrap_or_else(PoisonError::into_inner).clear();
        *state = RemoteState { outage: state.outage, ..RemoteState::default() };
    }

    fn enable(&self, cc: Cc) {
        let mut state = self.state();
        self.set_failure(None);
        let is_first = state.outage.is_none();
        let outage = state.outage.filter(|outage| outage.is_connected).unwrap_or_else(Outage::begin);
        state.outage = Some(Outage { is_connected: false, ..outage });
        let due = outage.since + self.target.reconnect + CONNECT_TIMEOUT;
        match self.try_enable(&mut state, cc, (!is_first).then_some(due)) {
            Ok(()) => self.csts.store(Csts(0).with_rdy(true).0, Ordering::Release),
            Err(error) => {
                self.disconnect(&mut state);
                self.fail(error);
            }
        }
    }

    fn try_enable(&self, state: &mut RemoteState, cc: Cc, due: Option<Instant>) -> Result<()> {
        let is_fresh = |association: &Arc<Association>| association.health.lost().is_none();
        if state.was_enabled || !state.association.as_ref().is_some_and(is_fresh) {
            self.disconnect(state);
            let turn = state.outage.map_or(0, |outage| outage.turn());
            let association =
                Association::connect(self.target.clone(), self.host.clone(), turn, self.stop.clone())?;
            state.association = Some(Arc::new(association));
        }
        let Some(association) = &state.association else { return Ok(()) };
        state.was_enabled = true;
        association.enable(cc, due)?;
        let aqa = Aqa(self.aqa.load(Ordering::Acquire));
        let at = |halves: &[AtomicU32; 2], entries_z: u16| RingAt {
            addr: u64::from(halves[0].load(Ordering::Acquire))
                | u64::from(halves[1].load(Ordering::Acquire)) << 32,
            entries: u32::from(entries_z) + 1,
        };
        let (sq, cq) = (at(&self.asq, aqa.asqs_z()), at(&self.acq, aqa.acqs_z()));
        let ring = RingPair::new(&self.space, 0, sq, cq).filter(|_| sq.entries <= ADMIN_ENTRIES.into());
        let ring =
            ring.ok_or_else(|| Error::Unsupported("the admin rings are not in mapped memory".into()))?;
        let admin = association.admin_link();
        admin.set_ring(ring);
        self.links.write().unwrap_or_else(PoisonError::into_inner).insert(0, admin);
        Ok(())
    }

    fn shut_down(&self, cc: Cc) {
        let association = self.state().association.clone();
        // Also disconnects a controller that does not shut down: this host sends it nothing more.
        let _ = association.map(|association| association.shut_down(cc));
        self.csts.store(Csts(0).with_rdy(true).with_shst(Csts::SHST_COMPLETE).0, Ordering::Release);
    }

    /// Executes an admin command that this host handles itself, and returns its result and status. Others are
    /// translated for the controller.
    fn answer(&self, sqe: &mut Sqe) -> Option<(u32, Status)> {
        Some(match sqe.opcode() {
            opcode::CREATE_CQ => (0, self.create_cq(&CreateCq::from(&*sqe))),
            opcode::CREATE_SQ => (0, self.create_sq(&CreateSq::from(&*sqe))),
            opcode::DELETE_SQ => (0, self.delete_sq(deleted_queue(sqe))),
            opcode::DELETE_CQ => {
                let known = self.state().completion_rings.remove(&deleted_queue(sqe));
                (0, known.map_or(Status::new(1, INVALID_QUEUE).with_dnr(), |_| Status::SUCCESS))
            }
            opcode::DOORBELL_BUFFER => (0, Status::INVALID_OPCODE.with_dnr()),
            opcode::ABORT => {
                let abort = Abort::from(&*sqe);
                let Some(cid) = self.link(abort.sqid).and_then(|link| link.wire_cid(abort.cid)) else {
                    // The command has already ended. Bit 0: it was not aborted.
                    return Some((1, Status::SUCCESS));
                };
                *sqe = admin::abort(abort.sqid, cid).with_cid(sqe.cid());
                return None;
            }
            _ => return None,
        })
    }

    fn create_cq(&self, cq: &CreateCq) -> Status {
        if !cq.contiguous
            || cq.qid == 0
            || cq.qid > MAX_QUEUES
            || u32::from(cq.size_z) > self.cap.mqes_z().into()
        {
            return Status::INVALID_FIELD.with_dnr();
        }
        let ring = RingAt { addr: cq.base.0, entries: u32::from(cq.size_z) + 1 };
        self.state().completion_rings.insert(cq.qid, ring);
        Status::SUCCESS
    }

    fn create_sq(&self, sq: &CreateSq) -> Status {
        // A driver-level status would say too little about a connection failure.
        self.set_failure(None);
        let mut state = self.state();
        let cq = state.completion_rings.get(&sq.qid).copied().filter(|_| sq.cqid == sq.qid);
        let at = RingAt { addr: sq.base.0, entries: u32::from(sq.size_z) + 1 };
        let is_possible =
            sq.contiguous && sq.size_z <= self.cap.mqes_z() && !state.queues.contains_key(&sq.qid);
        let ring = cq.filter(|_| is_possible).and_then(|cq| RingPair::new(&self.space, sq.qid, at, cq));
        let (Some(ring), Some(association)) = (ring, state.association.clone()) else {
            return Status::INVALID_FIELD.with_dnr();
        };
        let connected = association.connect_io(sq.qid, at.entries, ring);
        self.set_failure(connected.as_ref().err().cloned());
        match connected {
            Ok(link) => {
                self.links.write().unwrap_or_else(PoisonError::into_inner).insert(sq.qid, Arc::clone(&link));
                state.queues.insert(sq.qid, link);
                Status::SUCCESS
            }
            Err(error @ Error::Refused { status, .. }) => {
                if status.is(NO_SUCH_CONTROLLER) {
                    // The target has restarted, and may have lost acknowledged writes.
                    association.health.lose(&error);
                }
                status
            }
            // Other queues may work; if not, their own connections report it.
            Err(_) => Status::INTERNAL_ERROR,
        }
    }

    fn delete_sq(&self, qid: u16) -> Status {
        let mut state = self.state();
        self.links.write().unwrap_or_else(PoisonError::into_inner).remove(&qid);
        match state.queues.remove(&qid) {
            Some(_) => Status::SUCCESS,
            None => Status::new(1, INVALID_QUEUE).with_dnr(),
        }
    }
}

/// Status code of a queue that does not exist.
const INVALID_QUEUE: u8 = 0x01;
/// Connect names a controller that the target does not have, or parameters that it refuses.
const NO_SUCH_CONTROLLER: Status = Status::new(1, 0x82);

impl Registers for RemoteController {
    fn read32(&self, at: u32) -> u32 {
        match at {
            offset::CAP => self.cap.0 as u32,
            0x04 => (self.cap.0 >> 32) as u32,
            offset::VS => self.version,
            offset::CC => self.cc.load(Ordering::Acquire),
            offset::CSTS => self.status().0,
            offset::AQA => self.aqa.load(Ordering::Acquire),
            _ => 0,
        }
    }

    fn write32(&self, at: u32, value: u32) {
        const ASQ_HIGH: u32 = offset::ASQ + 4;
        const ACQ_HIGH: u32 = offset::ACQ + 4;
        match at {
            offset::CC => self.configure(Cc(value)),
            offset::AQA => self.aqa.store(value, Ordering::Release),
            offset::ASQ => self.asq[0].store(value, Ordering::Release),
            ASQ_HIGH => self.asq[1].store(value, Ordering::Release),
            offset::ACQ => self.acq[0].store(value, Ordering::Release),
            ACQ_HIGH => self.acq[1].store(value, Ordering::Release),
            _ => {
                let Some((qid, is_cq)) = doorbell_of(at, self.cap.dstrd()) else { return };
                let Some(link) = self.link(qid) else { return };
                match (qid, is_cq) {
                    (_, true) => link.set_cq_head(value),
                    (0, false) => link.ring(value, &self.space, |sqe| self.answer(sqe)),
                    (_, false) => link.ring(value, &self.space, |_| None),
                }
            }
        }
    }

    fn idle(&self, doorbell: u32) {
        let link = doorbell_of(doorbell, self.cap.dstrd()).and_then(|(qid, _)| self.link(qid));
        if let Some(link) = link {
            link.poll_answers();
        }
    }

    fn size(&self) -> u32 {
        doorbell(MAX_QUEUES, true, self.cap.dstrd()) + 4
    }

    fn failure(&self) -> Option<String> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.as_ref().map(ToString::to_string)
    }
}

/// Reconnects, in place of a function reset. All function resets of one outage share the time for reconnecting, also those
/// after which the controller was not usable yet.
pub(crate) struct Reconnect(pub(crate) Arc<RemoteController>);

impl FunctionReset for Reconnect {
    fn function_reset(&self) -> onehop_os::Result<()> {
        let controller = &self.0;
        let mut state = controller.state();
        controller.disconnect(&mut state);
        controller.cc.store(0, Ordering::Release);
        controller.csts.store(0, Ordering::Release);
        let mut outage = state.outage.unwrap_or_else(Outage::begin);
        let mut is_over = controller.stop.is_set();
        while let (false, Some(pause)) = (is_over, outage.next_pause(controller.target.reconnect)) {
            controller.stop.sleep(pause);
            let (target, host) = (controller.target.clone(), controller.host.clone());
            match Association::connect(target, host, outage.turn(), controller.stop.clone()) {
                Ok(association) => {
                    state.association = Some(Arc::new(association));
                    state.outage = Some(Outage { is_connected: true, ..outage });
                    controller.set_failure(None);
                    return Ok(());
                }
                Err(error) => {
                    is_over = is_final(&error) || controller.stop.is_set();
                    controller.set_failure(Some(error));
                }
            }
        }
        state.outage = Some(outage);
        let why = controller.failure().unwrap_or_else(|| "the target answers, but is not usable".into());
        Err(onehop_os::Error::System {
            call: format!(
                "reconnecting to {} ({} tries in {:.1?})",
                controller.target,
                outage.tries,
                outage.since.elapsed()
            ),
            source: std::io::Error::other(why),
            hint: "",
        })
    }
}

/// Whether retrying is useless. A refusal does not count: the same was accepted before, and the target may be
/// restarting.
fn is_final(error: &Error) -> bool {
    matches!(error, Error::Authentication { .. } | Error::AuthenticationFailed { .. } | Error::Unsupported(_))
}
