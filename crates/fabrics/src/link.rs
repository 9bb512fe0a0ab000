//! A queue with its connection and its memory. A thread receives; the submitting thread sends what the socket accepts.

use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::{HostMem, StopSignal};
use onehop_proto::sgl::Descriptor;
use onehop_proto::{Cqe, Sqe, Status};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::ahead::ReadAhead;
use crate::connect::{STOP_POLL_INTERVAL, left};
use crate::digest::DigestBuffer;
use crate::health::LinkHealth;
use crate::pdu::Digests;
use crate::queue::{CapsuleQueue, Data, DataPart, QueueEvent, Send, Want};
use crate::ring::RingPair;
use crate::space::MemorySpace;
use crate::{Error, Result, patch};

/// How long an answer may take after a request to stop: a working target needs less.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum receive steps while other threads wait.
const STEPS: usize = 32;
/// How long the receiving thread leaves the connection to a polling thread.
const YIELD_TIME: Duration = Duration::from_millis(5);

/// A thread's wait for an answer.
#[derive(Default)]
struct Waiter {
    answer: Mutex<Option<Result<Cqe>>>,
    came: Condvar,
}

impl Waiter {
    fn put(&self, answer: Result<Cqe>) {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(answer);
        self.came.notify_all();
    }

    /// The answer; `None` on a time-out. A request to stop shortens the wait.
    fn wait(&self, limit: Duration, stop: &StopSignal) -> Option<Result<Cqe>> {
        let (mut due, mut is_shortened) = (Instant::now() + limit, false);
        loop {
            if stop.is_set() && !is_shortened {
                (due, is_shortened) = (due.min(Instant::now() + STOP_TIMEOUT), true);
            }
            let left = due.saturating_duration_since(Instant::now());
            let answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
            let pause = left.min(STOP_POLL_INTERVAL);
            let guard = self.came.wait_timeout_while(answer, pause, |answer| answer.is_none());
            let answer = guard.unwrap_or_else(PoisonError::into_inner).0.take();
            if answer.is_some() || left.is_zero() {
                return answer;
            }
        }
    }
}

/// The recipient of a completion.
enum CompletionOwner {
    /// The driver, under its own identifier.
    Ring {
        cid: u16,
        patch: patch::Patch,
    },
    Waiter(Arc<Waiter>),
}

struct Pending {
    memory: Option<(HostMem, usize)>,
    owner: CompletionOwner,
}

struct LinkState {
    queue: CapsuleQueue,
    ahead: ReadAhead,
    digests: DigestBuffer,
    pending: Vec<Option<Pending>>,
    ring: Option<RingPair>,
    failed: Option<Error>,
    health: Option<Arc<LinkHealth>>,
    /// The socket's buffer is full.
    is_blocked: bool,
}

impl LinkState {
    /// The socket events to wait for.
    fn events(&self) -> PollFlags {
        if self.is_blocked { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }
}

/// A queue and its connection.
pub(crate) struct QueueLink {
    stream: TcpStream,
    wake: OwnedFd,
    label: String,
    state: Mutex<LinkState>,
    /// The driver's thread has polled, and received what there was.
    is_polled: AtomicBool,
    /// Maximum data in a command's capsule.
    capsule: u32,
    stop: StopSignal,
}

/// A link and the thread that receives for it; the connection is closed on drop.
pub(crate) struct LinkHandle {
    link: Arc<QueueLink>,
    thread: Option<JoinHandle<()>>,
}

impl std::ops::Deref for LinkHandle {
    type Target = Arc<QueueLink>;

    fn deref(&self) -> &Arc<QueueLink> {
        &self.link
    }
}

impl Drop for LinkHandle {
    fn drop(&mut self) {
        self.link.close();
        if let Some(thread) = self.thread.take() {
            // It has ended, or ends now; its panic was reported.
            let _ = thread.join();
        }
    }
}

/// Parameters of a new link.
pub(crate) struct LinkSetup {
    pub(crate) stream: TcpStream,
    /// The queue's name in errors.
    pub(crate) label: String,
    pub(crate) depth: u16,
    pub(crate) digests: Digests,
    /// Maximum data in a command's capsule.
    pub(crate) capsule: u32,
    /// What is lost with this link; `None` for an I/O queue that is not connected yet.
    pub(crate) health: Option<Arc<LinkHealth>>,
    /// When the connection's parameters must be negotiated.
    pub(crate) due: Instant,
    /// Ends the negotiation, and soon waits for answers.
    pub(crate) stop: StopSignal,
}

impl QueueLink {
    /// Negotiates the connection's parameters.
    pub(crate) fn open(setup: LinkSetup) -> Result<LinkHandle> {
        let (stream, due) = (setup.stream, setup.due);
        let broken = |source| Error::Io { queue: setup.label.clone(), source: Arc::new(source) };
        stream.set_nodelay(true).map_err(broken)?;
        stream.set_nonblocking(true).map_err(broken)?;
        let wake =
            eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(|e| broken(e.into()))?;
        let queue = CapsuleQueue::new(setup.depth, setup.digests);
        let pending = (0..setup.depth).map(|_| None).collect();
        let (ahead, digests) = (ReadAhead::new(), DigestBuffer::new());
        let state = LinkState {
            queue,
            ahead,
            digests,
            pending,
            ring: None,
            failed: None,
            health: setup.health,
            is_blocked: false,
        };
        let link = Arc::new(Self {
            stream,
            wake,
            label: setup.label,
            state: Mutex::new(state),
            is_polled: AtomicBool::new(false),
            capsule: setup.capsule,
            stop: setup.stop,
        });
        link.negotiate(due)?;
        let (receiver, name) = (link.clone(), format!("nvme-tcp {}", link.label));
        let spawned = std::thread::Builder::new().name(name).spawn(move || receiver.receive());
        let thread =
            spawned.map_err(|source| Error::Io { queue: link.label.clone(), source: Arc::new(source) })?;
        Ok(LinkHandle { link, thread: Some(thread) })
    }

    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn negotiate(&self, due: Instant) -> Result<()> {
        let start = Instant::now();
        loop {
            let mut state = self.lock();
            self.pump(&mut state);
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if state.queue.is_open() {
                return Ok(());
            }
            let events = state.events();
            drop(state);
            if self.stop.is_set() {
                return Err(Error::Interrupted);
            }
            let left = left(due);
            if left.is_zero() {
                let (queue, waited) = (self.label.clone(), start.elapsed());
                return Err(Error::Silent { queue, what: "the connection request", waited });
            }
            self.wait(events, Some(left.min(STOP_POLL_INTERVAL)));
        }
    }

    /// The receiving thread's loop: until the link is closed or fails.
    fn receive(&self) {
        loop {
            // A thread that polls continuously receives answers before this one could wake.
            let limit = self.is_polled.swap(false, Ordering::Relaxed).then_some(YIELD_TIME);
            let mut state = self.lock();
            if limit.is_none() {
                self.pump(&mut state);
            }
            if state.failed.is_some() {
                return;
            }
            let events = if limit.is_some() { PollFlags::empty() } else { state.events() };
            drop(state);
            self.wait(events, limit);
        }
    }

    /// Polls for answers on the driver's thread: if data is small, that thread receives it.
    pub(crate) fn poll_answers(&self) {
        let mut state = self.lock();
        if !state.ahead.is_small() {
            return;
        }
        self.pump(&mut state);
        let goes_on = state.ahead.is_small() && !state.is_blocked && state.failed.is_none();
        self.is_polled.store(goes_on, Ordering::Relaxed);
        if !goes_on {
            self.wake();
        }
    }

    /// Waits for one of these events on the socket, a wake-up, or the time limit.
    fn wait(&self, events: PollFlags, limit: Option<Duration>) {
        let mut fds = [PollFd::new(&self.stream, events), PollFd::new(&self.wake, PollFlags::IN)];
        let from = usize::from(events.is_empty());
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        // An interrupted wait just ends early.
        let _ = poll(&mut fds[from..], limit.as_ref());
        if fds[1].revents().contains(PollFlags::IN) {
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Closes the connection. No memory is received into after this.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        if state.failed.is_none() {
            self.end(&mut state, Error::Over { queue: self.label.clone() });
        }
        drop(state);
        self.wake();
    }

    /// The connection is unusable: fails everything on it.
    fn fail(&self, state: &mut LinkState, why: Error) {
        if state.failed.is_some() {
            return;
        }
        if let Error::Protocol { source, .. } = &why
            && let Some(last) = state.queue.last_words(source)
        {
            // A courtesy; the connection is closed in any case.
            let _ = (&self.stream).write(&last);
        }
        if let Some(health) = &state.health {
            health.lose(&why);
        }
        self.end(state, why);
    }

    fn end(&self, state: &mut LinkState, why: Error) {
        let _ = self.stream.shutdown(Shutdown::Both);
        for pending in state.pending.iter_mut().filter_map(Option::take) {
            if let CompletionOwner::Waiter(waiter) = pending.owner {
                waiter.put(Err(why.clone()));
            }
        }
        state.failed = Some(why);
    }

    /// Receives and sends as much as possible without waiting.
    fn pump(&self, state: &mut LinkState) {
        if state.failed.is_some() {
            return;
        }
        let pumped = self.pump_in(state).and_then(|()| self.pump_out(state));
        if let Err(error) = pumped {
            self.fail(state, error);
        }
    }

    fn pump_in(&self, state: &mut LinkState) -> Result<()> {
        let mut steps = 0;
        // Bytes received ahead are processed now: the socket will not announce them again.
        while steps < STEPS || !state.ahead.is_empty() {
            steps += 1;
            let is_early = !state.queue.is_open();
            let count = match self.take_in(state) {
                Ok(0) => return Err(Error::Closed { queue: self.label.clone(), is_early }),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.broken(error)),
            };
            let event = state.queue.got(count);
            match event.map_err(|source| Error::Protocol { queue: self.label.clone(), source })? {
                Some(QueueEvent::Done { slot, cqe }) => self.complete(state, slot, &cqe),
                Some(QueueEvent::Opened) | None => {}
            }
        }
        // There may be more: the next wait returns at once.
        Ok(())
    }

    /// Moves received bytes to the queue's destination, and returns their number; `None` when the other side has
    /// closed.
    fn take_in(&self, state: &mut LinkState) -> std::io::Result<usize> {
        let LinkState { queue, ahead, digests, pending, .. } = state;
        match queue.want() {
            Want::Bytes(room) => {
                ahead.expect_header();
                if ahead.is_empty() && !ahead.fill(&self.stream)? {
                    return Ok(0);
                }
                let bytes = ahead.take(room.len());
                room[..bytes.len()].copy_from_slice(bytes);
                Ok(bytes.len())
            }
            Want::Data(extent) => {
                let without = || std::io::Error::other("data for a command without memory");
                let (memory, at) = data_of(pending, &extent).ok_or_else(without)?;
                let bytes = extent.bytes as usize;
                ahead.expect(bytes);
                if !ahead.is_empty() {
                    let bytes = ahead.take(bytes);
                    memory.write(at, bytes).map_err(into_io)?;
                    if queue.checks_data() {
                        queue.check(bytes);
                    }
                    return Ok(bytes.len());
                }
                let count = ahead.receive(&self.stream, memory, at, bytes)?;
                if queue.checks_data() {
                    digests.each(memory, at, count, |chunk| queue.check(chunk))?;
                }
                Ok(count)
            }
        }
    }

    fn pump_out(&self, state: &mut LinkState) -> Result<()> {
        state.is_blocked = false;
        loop {
            let sent = match state.queue.send() {
                Send::Nothing => return Ok(()),
                Send::Bytes(bytes) => (&self.stream).write(bytes),
                Send::Data(front, extent) => {
                    let Some((memory, at)) = data_of(&state.pending, &extent) else {
                        return Err(Error::Memory("data of a command without memory".into()));
                    };
                    memory.send(&self.stream, front, at, extent.bytes as usize).map_err(into_io)
                }
                Send::Digest(extent) => {
                    let mut crc = 0;
                    let LinkState { queue, digests, pending, .. } = state;
                    if let Some((memory, at)) = data_of(pending, &extent) {
                        let add = |chunk: &[u8]| crc = crc32c::crc32c_append(crc, chunk);
                        digests.each(memory, at, extent.bytes as usize, add).map_err(|e| self.broken(e))?;
                    }
                    queue.digest_of_data(crc);
                    continue;
                }
            };
            match sent {
                Ok(count) => state.queue.sent(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    state.is_blocked = true;
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken(error)),
            }
        }
    }

    fn broken(&self, source: std::io::Error) -> Error {
        Error::Io { queue: self.label.clone(), source: Arc::new(source) }
    }

    fn complete(&self, state: &mut LinkState, slot: u16, cqe: &Cqe) {
        let Some(pending) = state.pending.get_mut(usize::from(slot)).and_then(Option::take) else { return };
        match pending.owner {
            CompletionOwner::Waiter(waiter) => waiter.put(Ok(*cqe)),
            CompletionOwner::Ring { cid, patch } => {
                if let (true, Some((memory, at))) = (cqe.status().is_ok(), &pending.memory) {
                    patch.apply(memory, *at);
                }
                if let Some(ring) = &mut state.ring {
                    ring.complete(cid, [cqe.dw[0], cqe.dw[1]], cqe.status());
                }
            }
        }
    }

    /// Sends what was submitted; the receiving thread continues once the socket is full.
    fn push(&self, state: &mut LinkState) {
        if state.failed.is_none()
            && let Err(error) = self.pump_out(state)
        {
            self.fail(state, error);
        }
        if state.is_blocked || state.failed.is_some() {
            self.wake();
        }
    }

    /// Runs a command and waits for its answer. Its memory is free afterwards: a time-out ends the connection.
    pub(crate) fn exchange(
        &self,
        what: &'static str,
        sqe: &Sqe,
        data: Data,
        memory: Option<&HostMem>,
        limit: Duration,
    ) -> Result<Cqe> {
        let waiter = Arc::new(Waiter::default());
        let silent = || {
            if self.stop.is_set() {
                return Error::Interrupted;
            }
            Error::Silent { queue: self.label.clone(), what, waited: limit }
        };
        let mut state = self.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let Some(slot) = state.queue.submit(sqe, data) else {
            // All slots are in use.
            self.fail(&mut state, silent());
            return Err(silent());
        };
        state.pending[usize::from(slot)] = Some(Pending {
            memory: memory.map(|memory| (memory.clone(), 0)),
            owner: CompletionOwner::Waiter(waiter.clone()),
        });
        self.push(&mut state);
        drop(state);
        waiter.wait(limit, &self.stop).unwrap_or_else(|| {
            self.fail(&mut self.lock(), silent());
            self.wake();
            Err(silent())
        })
    }

    /// Attaches the driver's rings to this queue.
    pub(crate) fn set_ring(&self, ring: RingPair) {
        self.lock().ring = Some(ring);
    }

    /// From now on this is lost with the link.
    pub(crate) fn watch(&self, health: &Arc<LinkHealth>) {
        let mut state = self.lock();
        if let Some(why) = &state.failed {
            health.lose(why);
        }
        state.health = Some(health.clone());
    }

    /// The driver has rung the submission doorbell. Fetches its entries, and sends those that `local` does not answer
    /// itself; `local` may modify them before.
    pub(crate) fn ring(
        &self,
        tail: u32,
        space: &MemorySpace,
        local: impl Fn(&mut Sqe) -> Option<(u32, Status)>,
    ) {
        let mut state = self.lock();
        if state.failed.is_some() || !state.ring.as_mut().is_some_and(|ring| ring.set_tail(tail)) {
            return;
        }
        while let Some(mut sqe) = state.ring.as_mut().and_then(RingPair::fetch) {
            // Unlocked: a local answer may take long, and others may complete meanwhile.
            drop(state);
            let answer = local(&mut sqe);
            state = self.lock();
            let answer = answer.or_else(|| self.forward(&mut state, &sqe, space).err().map(|s| (0, s)));
            if let (Some((result, status)), Some(ring)) = (answer, &mut state.ring) {
                ring.complete(sqe.cid(), [result, 0], status);
            }
        }
        self.push(&mut state);
    }

    /// The driver has consumed completions.
    pub(crate) fn set_cq_head(&self, head: u32) {
        if let Some(ring) = &mut self.lock().ring {
            ring.set_cq_head(head);
        }
    }

    /// The identifier of a driver's command on the wire.
    pub(crate) fn wire_cid(&self, cid: u16) -> Option<u16> {
        let state = self.lock();
        let is_it = |pending: &Option<Pending>| matches!(pending, Some(Pending { owner: CompletionOwner::Ring { cid: its, .. }, .. }) if *its == cid);
        let slot = state.pending.iter().position(is_it)?;
        state.queue.cid(slot as u16)
    }

    /// Sends a driver's command, or returns the status that it fails with.
    fn forward(
        &self,
        state: &mut LinkState,
        sqe: &Sqe,
        space: &MemorySpace,
    ) -> std::result::Result<(), Status> {
        if state.failed.is_some() {
            // Left unanswered: the driver finds that the controller has failed.
            return Ok(());
        }
        if sqe.mptr() != 0 || sqe.fuse() != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let (data, memory) = self.data(sqe, space)?;
        let owner = CompletionOwner::Ring { cid: sqe.cid(), patch: patch::Patch::of(sqe) };
        // There are as many slots as ring entries, so one is free.
        let slot = state.queue.submit(sqe, data).ok_or(Status::INTERNAL_ERROR)?;
        state.pending[usize::from(slot)] = Some(Pending { memory, owner });
        Ok(())
    }

    /// The data of a driver's command, which has one SGL descriptor.
    fn data(
        &self,
        sqe: &Sqe,
        space: &MemorySpace,
    ) -> std::result::Result<(Data, Option<(HostMem, usize)>), Status> {
        let none = (Data::None, None);
        if sqe.psdt() == 0 {
            let is_bare = sqe.prp1() == 0 && sqe.prp2() == 0;
            return if is_bare { Ok(none) } else { Err(Status::INVALID_FIELD.with_dnr()) };
        }
        let Ok(Descriptor::Data { at, len }) = Descriptor::of(sqe) else {
            return Err(Status::SGL_TYPE_INVALID.with_dnr());
        };
        if len == 0 {
            return Ok(none);
        }
        let memory = space.at(at.0, len.into()).ok_or(Status::DATA_SGL_LENGTH_INVALID.with_dnr())?;
        // The low bits of an opcode give the direction of data.
        let data = match sqe.opcode() & 3 {
            1 if len <= self.capsule => Data::InCapsule(len),
            1 => Data::Out(len),
            2 => Data::In(len),
            _ => return Err(Status::INVALID_FIELD.with_dnr()),
        };
        Ok((data, Some(memory)))
    }
}

/// The memory for a part of a command's data, and the part's offset in it.
fn data_of<'a>(pending: &'a [Option<Pending>], extent: &DataPart) -> Option<(&'a HostMem, usize)> {
    let (memory, at) = pending.get(usize::from(extent.slot))?.as_ref()?.memory.as_ref()?;
    Some((memory, at + extent.offset as usize))
}

pub(crate) fn into_io(error: onehop_os::Error) -> std::io::Error {
    error.errno().map_or_else(|| std::io::Error::other(error.to_string()), std::io::Error::from_raw_os_error)
}
