//! A drive: opening, admin commands, queues, shutdown.

use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onehop_os::{ControllerBackend, DmaMemory, HostMem, Transport};
use onehop_proto::admin::{self as words, Select};
use onehop_proto::identify::NamespaceId;
use onehop_proto::log::{AsyncEvent, id};
use onehop_proto::{Sqe, Status};

use crate::admin::MAX_EVENT_REQUESTS;
use crate::control::Control;
use crate::core::{AdminState, Core, is_of_namespace};
use crate::ladder::{Incident, Participant, RESET_PAUSES};
use crate::queue::{IoQueue, QueueCell};
use crate::ring::PairHalf;
use crate::slots::CommandSlots;
use crate::{Buffer, Error, Identity, Namespace, Options, Recovery, Result};

/// Most events that are kept until the caller asks for them.
const MAX_EVENTS: usize = 256;
/// An event that has less than this share of its time left is handled the next time.
const LEAST_SHARE: u32 = 2 * MAX_EVENT_REQUESTS;

const LOST_DELETION: &str = "a queue whose deletion was not answered";

/// The name of a command that deletes a queue, and its entry.
type Deletion = (&'static str, Sqe);

/// The commands that delete a pair, in this order.
fn deletions(qid: u16) -> [Deletion; 2] {
    [("delete submission queue", words::delete_sq(qid)), ("delete completion queue", words::delete_cq(qid))]
}

/// A drive. Clones are the same drive; it is shut down when the last of them, and of its queues, is dropped.
#[derive(Clone)]
pub struct Drive(pub(crate) Arc<DriveInner>);

/// The state that all handles of a drive share.
pub(crate) struct DriveInner {
    core: Core,
    identity: Identity,
    pub(crate) namespaces: Arc<[Namespace]>,
    unusable: Vec<(u32, Error)>,
    /// Numbers queues, so that a token of one is not valid for another.
    serial: AtomicU32,
}

impl Deref for DriveInner {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Drive {
    /// Resets the controller, enables it and identifies it. [`Options`] says how long that may take.
    ///
    /// # Errors
    /// When an option is out of bounds, or the drive is gone, does not become ready, or is not supported.
    pub fn open(port: ControllerBackend, options: Options) -> Result<Self> {
        options.check()?;
        let (stop, drive) = (options.stop.clone(), port.name.clone());
        // A wait that was stopped reads like a missing device.
        let stopped = |error| if stop.is_set() { Error::Interrupted { drive } } else { error };
        let control = Control::new(port, &options).map_err(stopped)?;
        let core = Core::new(control, options)?;
        let mut state = core.state();
        let (identity, namespaces) = core.bring_up_from_anywhere(&mut state).map_err(|error| {
            let error = core.control.or_interrupted(error);
            if matches!(error, Error::Interrupted { .. }) {
                // It may not answer, and has no data to save: disable it without a shutdown.
                state.dead = Some(error.clone());
            }
            error
        })?;
        state.in_use = vec![false; identity.queues as usize];
        drop(state);
        Ok(Self(Arc::new(DriveInner {
            core,
            identity,
            namespaces: namespaces.usable.into(),
            unusable: namespaces.unusable,
            serial: AtomicU32::new(0),
        })))
    }

    /// Its name, for messages.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Whether it is across a network. Its data then arrives in host memory, and writes whose connection is lost end
    /// with [`Error::OutcomeUnknown`].
    #[must_use]
    pub fn is_remote(&self) -> bool {
        self.0.control.transport() == Transport::Messages
    }

    /// How many I/O queues can still be created.
    #[must_use]
    pub fn free_queues(&self) -> u32 {
        self.0.state().in_use.iter().filter(|used| !**used).count() as u32
    }

    /// Its identity.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        self.0.identity()
    }

    /// Its active namespaces that can be used.
    #[must_use]
    pub fn namespaces(&self) -> &[Namespace] {
        self.0.namespaces()
    }

    /// One of its namespaces.
    ///
    /// # Errors
    /// When it is not there, not active, or cannot be used.
    pub fn namespace(&self, nsid: u32) -> Result<&Namespace> {
        let found = self.namespaces().iter().find(|ns| ns.nsid == nsid);
        found.ok_or_else(|| {
            let why = self.0.unusable.iter().find(|(unusable, _)| *unusable == nsid);
            why.map_or_else(
                || Error::NoNamespace { drive: self.name().to_owned(), nsid },
                |(_, error)| error.clone(),
            )
        })
    }

    /// The identifiers of a namespace from the separate list (CNS 03h); none if the drive has no such list.
    ///
    /// # Errors
    /// When the drive is dead, does not answer, or cannot list them at the moment.
    pub fn namespace_ids(&self, ns: &Namespace) -> Result<Vec<NamespaceId>> {
        ns.check(&self.0.control)?;
        let mut state = self.0.alive()?;
        self.0.namespace_ids(&mut state.admin, ns.nsid, Instant::now())
    }

    /// New host memory that the drive can reach.
    ///
    /// # Errors
    /// When there is none.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer> {
        let memory = self.host_memory(bytes)?;
        self.map(memory)
    }

    /// New host memory that other devices can map as well, and that [`Self::map`] can map.
    ///
    /// # Errors
    /// When there is none.
    pub fn host_memory(&self, bytes: usize) -> Result<HostMem> {
        Ok(self.0.control.port.mapper.alloc(bytes)?)
    }

    /// Makes memory reachable for the drive.
    ///
    /// # Errors
    /// When the drive cannot reach it.
    pub fn map(&self, memory: impl DmaMemory + Send + Sync + 'static) -> Result<Buffer> {
        Buffer::new(&self.0.control, memory)
    }

    /// A queue pair for CPU threads. [`Options`] says how long its creation may take.
    ///
    /// # Errors
    /// When the controller has no more, or does not answer.
    pub fn queue(&self) -> Result<IoQueue> {
        let inner = &self.0;
        let mut state = inner.alive()?;
        let qid = state.take_qid(inner.name())?;
        let slots = CommandSlots::new(inner, qid).inspect_err(|_| state.give_qid(qid))?;
        let (sq, cq) = slots.halves();
        let created =
            inner.create_with_retries(&mut state, None, |state| inner.establish(state, qid, sq, cq));
        match created {
            Ok(()) => {
                let cell = Arc::new(QueueCell { qid, slots: Mutex::new(slots) });
                state.participants.push(cell.clone());
                Ok(IoQueue::new(cell, inner.clone()))
            }
            Err(error) => {
                state.give_qid(qid);
                if state.dead.is_some() {
                    inner.quarantine.keep(slots);
                }
                Err(error)
            }
        }
    }

    /// A log page, or its first `bytes` bytes. A page longer than 4 KiB is read in chunks where the drive allows it.
    ///
    /// # Errors
    /// When the drive does not have it.
    pub fn log_page(&self, lid: u8, nsid: u32, bytes: usize) -> Result<Vec<u8>> {
        let mut state = self.0.alive()?;
        self.0.log_page(&mut state, lid, nsid, bytes)
    }

    /// The current value of a feature.
    ///
    /// # Errors
    /// When the drive does not have it.
    pub fn feature(&self, fid: u8) -> Result<u32> {
        let what = format!("get feature {fid:02x}h");
        Ok(self.0.alive()?.admin.run(&what, &words::get_features(fid, Select::Current, 0))?.result())
    }

    /// Sets a feature that is one dword, until the next reset.
    ///
    /// # Errors
    /// When the drive was opened for reading only, or refuses it.
    pub fn set_feature(&self, fid: u8, value: u32) -> Result<()> {
        self.0.allow_writes()?;
        let what = format!("set feature {fid:02x}h");
        self.0.alive()?.admin.run(&what, &words::set_features(fid, false, value)).map(|_| ())
    }

    /// The asynchronous events since the last call; the oldest are dropped if there are too many. Reading the log pages
    /// takes at most [`Options::admin_timeout`] in all; events whose page was not returned come with a later call.
    /// Identifying namespaces may take as long again; those that the drive fails to identify count as changed.
    ///
    /// # Errors
    /// When the drive is dead, or a command is not answered.
    pub fn events(&self) -> Result<Vec<AsyncEvent>> {
        let mut state = self.0.alive()?;
        self.0.serve_events(&mut state)?;
        Ok(std::mem::take(&mut state.events))
    }

    /// The recoveries so far.
    #[must_use]
    pub fn incidents(&self) -> Vec<Incident> {
        self.0.state().incidents.clone()
    }

    /// Resets the controller now. Commands in flight are tried again.
    ///
    /// # Errors
    /// When it does not become ready again.
    pub fn reset(&self) -> Result<()> {
        let mut state = self.0.alive()?;
        self.0.reset(&mut state, "asked for").map(|_| ())
    }

    /// Bytes of BAR0 from `offset` on, as 32-bit registers; fewer where the BAR ends.
    #[must_use]
    pub fn registers(&self, offset: u32, count: u32) -> Vec<u32> {
        let regs = &self.0.control.port.regs;
        (offset..regs.size().saturating_sub(3))
            .step_by(4)
            .take(count as usize)
            .map(|at| regs.read32(at))
            .collect()
    }
}

impl DriveInner {
    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(crate) fn namespaces(&self) -> &[Namespace] {
        &self.namespaces
    }

    /// A number for a queue that no other queue of this drive has; never 0.
    pub(crate) fn next_serial(&self) -> u32 {
        self.serial.fetch_add(1, Ordering::Relaxed).wrapping_add(1).max(1)
    }

    pub(crate) fn allow_writes(&self) -> Result<()> {
        if self.options.writable { Ok(()) } else { Err(Error::ReadOnly { drive: self.name().to_owned() }) }
    }

    /// Returns once no reset is under way.
    pub(crate) fn wait_for_reset(&self) {
        drop(self.state());
    }

    /// Creates a pair. When this fails the controller does not have it, and will not get it: memory and number are
    /// free.
    pub(crate) fn establish(
        &self,
        state: &mut AdminState,
        qid: u16,
        sq: PairHalf,
        cq: PairHalf,
    ) -> Result<()> {
        // A request to stop does not end this at once: a creation without an answer may cost all other queues a reset.
        let patience = Some(self.options.admin_timeout);
        match self.create_pair(&mut state.admin, qid, sq, cq, patience) {
            Ok(()) => Ok(()),
            Err(refused @ (Error::Command { .. } | Error::NotConnected { .. })) => Err(refused),
            Err(error) => {
                let start = Instant::now();
                let cause = "a queue whose creation was not answered";
                if matches!(error, Error::NoAnswer { .. }) && self.undo_creation(state, qid) {
                    let (cause, recovery) = (cause.to_owned(), Recovery::Abort);
                    state.incidents.push(Incident { cause, recovery, took: start.elapsed() });
                } else {
                    self.reset(state, cause)?;
                }
                Err(error)
            }
        }
    }

    /// Deletes a pair whose creation was not answered, without a reset, so that the other queues are not disturbed.
    /// Deleting it is not enough: a controller executes admin commands in any order, so the creation might follow the
    /// deletion. The creation must be completed first, as aborted or otherwise. Namespaces are compared, as in the
    /// reset that this saves.
    fn undo_creation(&self, state: &mut AdminState, qid: u16) -> bool {
        if !self.abort_unanswered(state, Duration::ZERO) {
            return false;
        }
        // An exported queue continues where it was interrupted, but not in another namespace that has the number now.
        deletions(qid).iter().all(|deletion| self.has_no_queue(state, deletion))
            && self.compare_namespaces(state).is_ok()
    }

    /// Deletes a pair. When this succeeds the controller no longer uses any of its commands. `between` is run once no
    /// completion can follow any more.
    pub(crate) fn delete_pair(
        &self,
        state: &mut AdminState,
        qid: u16,
        patience: Duration,
        between: impl FnOnce(),
    ) -> Result<()> {
        let [sq, cq] = deletions(qid);
        self.delete_queue(state, &sq, patience)?;
        between();
        self.delete_queue(state, &cq, patience)
    }

    /// A deletion that is not answered is aborted and tried once more, which does not disturb the other queues. It is
    /// unknown whether the first was executed. It must be completed before, or it might delete a later queue with this
    /// number.
    fn delete_queue(&self, state: &mut AdminState, deletion: &Deletion, patience: Duration) -> Result<()> {
        let start = Instant::now();
        match state.admin.run_within(deletion.0, &deletion.1, patience) {
            Err(error @ Error::NoAnswer { .. }) => {
                if !(self.abort_unanswered(state, Duration::ZERO) && self.has_no_queue(state, deletion)) {
                    return Err(error);
                }
                let (cause, recovery) = (LOST_DELETION.to_owned(), Recovery::Abort);
                state.incidents.push(Incident { cause, recovery, took: start.elapsed() });
                Ok(())
            }
            end => end.map(|_| ()),
        }
    }

    /// Deletes a queue that the controller may have. Returns whether it is gone for certain.
    fn has_no_queue(&self, state: &mut AdminState, (what, sqe): &Deletion) -> bool {
        match state.admin.run_within(what, sqe, self.options.abort_wait) {
            Ok(_) => true,
            Err(Error::Command { status, .. }) => status.is(Status::INVALID_QUEUE_ID),
            Err(_) => false,
        }
    }

    /// Creates queues. If the answer to a creation was lost, or the controller did not respond for a moment, the
    /// controller has none of them ([`Self::establish`]). If the drive is alive, they are created again after each of
    /// [`RESET_PAUSES`]. No try begins after `end`.
    pub(crate) fn create_with_retries<T>(
        &self,
        state: &mut AdminState,
        end: Option<Instant>,
        mut create: impl FnMut(&mut AdminState) -> Result<T>,
    ) -> Result<T> {
        let mut created = create(state);
        for pause in RESET_PAUSES {
            let is_lost = matches!(created, Err(Error::NoAnswer { .. } | Error::Gone { .. }));
            if !is_lost || state.dead.is_some() {
                break;
            }
            self.control.stop.sleep(pause);
            let is_over = end.is_some_and(|end| Instant::now() >= end);
            if is_over || self.control.stop.is_set() {
                break;
            }
            created = create(state);
        }
        created.map_err(|error| match error {
            Error::NoAnswer { .. } => self.control.or_interrupted(error),
            other => other,
        })
    }

    pub(crate) fn close_queue(&self, cell: &Arc<QueueCell>) {
        let mut state = self.state();
        let participant: Arc<dyn Participant> = cell.clone();
        state.participants.retain(|p| !Arc::ptr_eq(p, &participant));
        // Its commands get their full time: a command that is still running is no reason to reset the controller.
        let patience = self.options.admin_timeout;
        if state.dead.is_none() {
            // A completion that nobody has seen counts as any other: the data of a read may still be on its way.
            let deleted = self.delete_pair(&mut state, cell.qid, patience, || {
                cell.lock().drain();
            });
            let cause = match (deleted, cell.lock().unexpected) {
                (Err(_), _) => Some("a queue that could not be deleted"),
                (Ok(()), Some(_)) => {
                    Some("a completion in a closed queue for a command that was not in flight")
                }
                (Ok(()), None) => None,
            };
            // The result is in the state.
            cause.map(|cause| self.reset(&mut state, cause));
        }
        let mut slots = cell.lock();
        if let Some(error) = &state.dead {
            slots.fail(error);
            self.quarantine.keep(cell.clone());
        }
        slots.keep_unsettled();
        state.give_qid(cell.qid);
    }

    pub(crate) fn log_page(
        &self,
        state: &mut AdminState,
        lid: u8,
        nsid: u32,
        bytes: usize,
    ) -> Result<Vec<u8>> {
        let in_chunks = self.identity.controller().log_offsets();
        let mut out = Vec::new();
        while out.len() < bytes && (out.is_empty() || in_chunks) {
            let chunk = (bytes - out.len()).min(4096);
            let sqe = words::get_log_page(lid, nsid, chunk as u32, out.len() as u64, false, 0);
            let what = format!("get log page {lid:02x}h");
            out.extend(state.admin.read(&self.control.port, &what, &sqe, chunk)?);
        }
        Ok(out)
    }

    /// Reads the log page of every reported event, which lets the controller report the next of its kind, and posts its
    /// request again. Events that arrive meanwhile are left for the next call. All events share the time limit of one
    /// admin command, so that unanswered ones do not delay other callers for longer. If a slow drive does not answer in
    /// an event's share of that time, the first event gets all of it in the next call.
    pub(crate) fn serve_events(&self, state: &mut AdminState) -> Result<()> {
        state.admin.look();
        // The controller may have failed event requests: without one it reports nothing.
        state.admin.post_events(self.identity.controller().aer_limit());
        let (start, limit) = (Instant::now(), self.options.admin_timeout);
        let mut failed = None;
        let mut has_all = std::mem::take(&mut state.is_slow);
        for left in (1..=state.admin.fired.len() as u32).rev() {
            let parts = if std::mem::take(&mut has_all) { 1 } else { left };
            let share = limit.saturating_sub(start.elapsed()) / parts;
            // Earlier events may have used up the time: that is no reason to drop this one.
            if share < limit / LEAST_SHARE {
                break;
            }
            let Some(event) = state.admin.fired.pop_front() else { break };
            let timeout = state.admin.set_timeout(share);
            let served = self.serve_event(state, event);
            state.admin.set_timeout(timeout);
            if let Err(error) = served {
                // The controller reports it once, and a lost answer must not hide a changed namespace: handle it in the
                // next call, after the others.
                state.admin.fired.push_back(event);
                let is_unanswered = matches!(error, Error::NoAnswer { .. });
                failed.get_or_insert(error);
                state.is_slow |= is_unanswered && parts > 1;
                // An abandoned command keeps its slot in the admin queue, and may still be answered in the rest of its
                // time.
                let patience = limit.saturating_sub(start.elapsed());
                if is_unanswered && !self.abort_unanswered(state, patience) {
                    self.reset(state, "a drive that did not answer what its event led to")?;
                    break;
                }
                continue;
            }
            if state.events.len() >= MAX_EVENTS {
                state.events.remove(0);
            }
            state.events.push(event);
            state.admin.post_events(self.identity.controller().aer_limit());
        }
        failed.map_or(Ok(()), Err)
    }

    fn serve_event(&self, state: &mut AdminState, event: AsyncEvent) -> Result<()> {
        // Linux's target gives its list of changed namespaces as a whole or not at all.
        let bytes = if event.page() == id::CHANGED_NAMESPACES { 4096 } else { 512 };
        match self.log_page(state, event.page(), u32::MAX, bytes) {
            Ok(_) | Err(Error::Command { .. }) => {}
            Err(error) => return Err(error),
        }
        if event.is(AsyncEvent::NAMESPACE_CHANGED) {
            self.compare_namespaces(state)?;
        }
        Ok(())
    }

    /// Aborts the admin commands that were not answered, within the time for an Abort, or `patience` if that is more.
    /// Returns whether none of them can be executed later.
    fn abort_unanswered(&self, state: &mut AdminState, patience: Duration) -> bool {
        // Across a network a command may be a connection, which an Abort does not reach.
        self.control.transport() != Transport::Messages
            && state.admin.abort_cancelled(self.options.abort_wait.max(patience))
    }

    /// Whether a healthy controller left a command unanswered for all of its time. A failed controller or a lost
    /// connection says nothing about the namespace of the command.
    fn is_silence(&self, error: &Error) -> bool {
        matches!(error, Error::NoAnswer { waited, .. } if *waited >= self.options.admin_timeout)
            && self.control.status().is_ok_and(|csts| csts.rdy() && !csts.cfs())
    }

    /// Finds the namespaces that have changed. One that the drive cannot identify counts as changed, so that the others
    /// can be used. It can be called again after an error.
    pub(crate) fn compare_namespaces(&self, state: &mut AdminState) -> Result<()> {
        let due = self.identify_due();
        for ns in self.namespaces().iter().filter(|ns| ns.is_valid()) {
            match self.identify_namespace(&mut state.admin, ns.nsid, due) {
                Ok(now) => ns.compare(Some(&now)),
                Err(error) if is_of_namespace(&error) => ns.compare(None),
                Err(error) => {
                    if self.is_silence(&error) {
                        ns.count_unanswered();
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}
