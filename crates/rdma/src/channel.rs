//! A reliable connection: messages both ways, and bytes put into or got from the other side's memory.
//!
//! Messages have credits: a side never sends more than the other has room for. Each message, or an empty one, reports
//! how much room has become free. One credit is reserved for empty messages, so that two sides never wait for each
//! other's. A thread takes the completions, and watches the socket over which both sides met: when it closes, the other
//! side is gone.
//!
//! A connection that has failed in any way stays broken: its queue pair is destroyed, after which the device reaches no
//! memory for it, and then the waiting threads are woken. So a call's memory is free when it returns. If the device
//! refuses to destroy the pair, the memory of all work in flight is leaked, and so is all exposed memory; a pool's
//! slots are not reused, and no more memory is exposed.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;

use onehop_os::{Deadline, HostMem, identity, this_thread};

use crate::endpoint::Endpoint;
use crate::memory::RemoteMemory;
use crate::nic::{Nic, Registered};
use crate::pump;
use crate::verbs::{CompletionQueue, PairRequest, PairState, QueuePair, Registration};
use crate::{Error, Result};

/// Size of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChannelSize {
    /// Messages in flight at once, each way.
    pub room: u16,
    /// Maximum bytes of a message.
    pub message: u32,
    /// Puts and gets in flight at once.
    pub transfers: u16,
    /// This connection's index among several.
    pub lane: u8,
}

impl Default for ChannelSize {
    fn default() -> Self {
        Self { room: 32, message: 16 << 10, transfers: 64, lane: 0 }
    }
}

/// Maximum bytes of a put or get.
pub const MOST_TRANSFER: u64 = 1 << 30;
/// In a work item's number: it is a receive. The rest is the slot.
pub(crate) const RECEIVE: u64 = 1 << 63;

/// This side's end, before the other side is known.
pub struct PreparedChannel {
    end: LocalEnd,
    endpoint: Endpoint,
}

/// A port's resources for one connection.
struct LocalEnd {
    nic: Arc<Nic>,
    size: ChannelSize,
    pair: QueuePair,
    queue: Arc<CompletionQueue>,
    /// Slots for incoming messages, followed by those for outgoing ones.
    mem: HostMem,
    registered: Registered,
}

impl LocalEnd {
    fn slot(&self, number: u64) -> u64 {
        number * u64::from(self.size.message)
    }
}

/// A connection. Dropping it closes it.
pub struct Channel {
    shared: Arc<ChannelShared>,
    pump: Mutex<Option<JoinHandle<()>>>,
}

/// State shared by a connection's callers and its thread.
pub(crate) struct ChannelShared {
    nic: Arc<Nic>,
    size: ChannelSize,
    /// `None` once the connection is broken.
    pair: RwLock<Option<QueuePair>>,
    pub queue: Arc<CompletionQueue>,
    mem: HostMem,
    registered: Registered,
    /// Maximum bytes of a message that the other side accepts.
    theirs: u32,
    /// The endpoints that both sides exchanged.
    ends: [[u8; Endpoint::BYTES]; 2],
    state: Mutex<ChannelState>,
    changed: Condvar,
    /// Wakes the thread.
    pub wake: OwnedFd,
    /// The thread's number, once it runs.
    pump: AtomicUsize,
}

pub(crate) struct ChannelState {
    /// Why it is broken.
    broken: Option<String>,
    /// Messages that the other side has room for.
    credits: u32,
    /// Slots freed for the other side that were not reported yet.
    owed: u32,
    /// Free slots for outgoing messages.
    free: Vec<u64>,
    /// Received messages: slot and length.
    inbox: VecDeque<(u64, u32)>,
    /// Puts and gets in flight.
    transfers: HashMap<u64, Transfer>,
    next: u64,
}

struct Transfer {
    done: bool,
    memory: Arc<Registration>,
}

/// A received message. Dropping it frees its slot.
pub struct Message {
    shared: Arc<ChannelShared>,
    slot: u64,
    len: usize,
}

impl Message {
    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes: never true for a message that is handed out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its memory, and its offset there.
    #[must_use]
    pub fn place(&self) -> (&HostMem, usize) {
        (&self.shared.mem, self.slot as usize * self.shared.size.message as usize)
    }

    /// A copy.
    ///
    /// # Errors
    /// When the memory cannot be read.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let (mem, at) = self.place();
        Ok(mem.to_vec(at, self.len)?)
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        self.shared.repost(self.slot);
        // Without a message to carry it, only if the other side may be waiting for it.
        self.shared.settle();
    }
}

impl PreparedChannel {
    /// Makes this side's end of a connection.
    ///
    /// # Errors
    /// When the device has no more room, or the size is invalid.
    pub fn new(nic: &Arc<Nic>, size: ChannelSize) -> Result<Self> {
        if size.room < Endpoint::LEAST_ROOM || size.message == 0 || size.transfers == 0 {
            return Err(Error::Protocol(format!("a connection of {size:?} cannot work")));
        }
        let (room, transfers) = (u32::from(size.room), u32::from(size.transfers));
        let queue = Arc::new(CompletionQueue::new(&nic.domain, (2 * room + transfers) as usize)?);
        let pair = QueuePair::new(&queue, room + transfers, room)?;
        pair.change(&PairState::Initialised { port: nic.port })?;
        let (mem, registered) = nic.host(2 * size.room as usize * size.message as usize)?;
        let end = LocalEnd { nic: nic.clone(), size, pair, queue, mem, registered };
        for slot in 0..u64::from(size.room) {
            let (addr, _) = end.registered.local(end.slot(slot), size.message.into())?;
            end.pair.receive(RECEIVE | slot, addr, size.message, end.registered.registration())?;
        }
        let endpoint = Endpoint {
            pair: end.pair.number(),
            psn: random()? & 0xff_ffff,
            gid: nic.gid.bytes,
            lid: nic.lid,
            mtu: nic.mtu.clamp(1, 5) as u8,
            reads: nic.reads,
            room: size.room,
            message: size.message,
            lane: size.lane,
        };
        Ok(Self { end, endpoint })
    }

    /// What to send to the other side.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Connects with the other side's end. `met` is the socket over which both sides met; it stays open without further
    /// traffic, and when it closes the other side is gone.
    ///
    /// # Errors
    /// When the device refuses, or this thread has acted as a user: the connection's thread would have its credentials.
    pub fn connect(self, other: &Endpoint, met: OwnedFd) -> Result<Channel> {
        if identity::has_changed() {
            return Err(Error::ActedAsUser { what: "make a connection" });
        }
        let Self { end, endpoint } = self;
        let mtu = i32::from(endpoint.mtu.min(other.mtu));
        let reads = endpoint.reads.min(other.reads);
        let (port, gid_index) = (end.nic.port, end.nic.gid.index);
        end.pair.change(&PairState::Receives { with: other, port, gid_index, mtu, reads })?;
        end.pair.change(&PairState::Sends { psn: endpoint.psn, reads })?;
        let room = u64::from(end.size.room);
        let state = ChannelState {
            broken: None,
            credits: other.room.into(),
            owed: 0,
            free: (room..2 * room).collect(),
            inbox: VecDeque::new(),
            transfers: HashMap::new(),
            next: 0,
        };
        let wake = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
            .map_err(|e| Error::system("eventfd", e))?;
        let shared = Arc::new(ChannelShared {
            nic: end.nic,
            size: end.size,
            pair: RwLock::new(Some(end.pair)),
            queue: end.queue,
            mem: end.mem,
            registered: end.registered,
            theirs: other.message,
            ends: [endpoint.to_bytes(), other.to_bytes()],
            state: Mutex::new(state),
            changed: Condvar::new(),
            wake,
            pump: AtomicUsize::new(0),
        });
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("rdma".into());
        let thread = thread.spawn(move || {
            of_thread.pump.store(this_thread(), Ordering::Release);
            pump::run(&of_thread, &met);
        });
        let thread = thread.map_err(|e| Error::system("starting a thread", e))?;
        Ok(Channel { shared, pump: Mutex::new(Some(thread)) })
    }
}

fn random() -> Result<u32> {
    let mut bytes = [0; 4];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::system("getrandom", e))?;
    Ok(u32::from_ne_bytes(bytes))
}

impl Channel {
    /// Its port.
    #[must_use]
    pub fn nic(&self) -> &Arc<Nic> {
        &self.shared.nic
    }

    /// Maximum bytes of a message for the other side.
    #[must_use]
    pub fn most(&self) -> usize {
        self.shared.theirs.min(self.shared.size.message) as usize
    }

    /// The endpoints that both sides exchanged, the same on both. With a man in the middle, they differ.
    #[must_use]
    pub fn ends(&self) -> Vec<u8> {
        let mut ends = self.shared.ends;
        ends.sort_unstable();
        ends.concat()
    }

    /// Lets the other side access exposed memory ([`crate::Access::Exposed`]) from now on. Until then it cannot, so
    /// authenticate it first.
    ///
    /// # Errors
    /// When the connection is broken, or the device refuses.
    pub fn let_in(&self) -> Result<()> {
        let pair = self.shared.pair();
        pair.as_ref().ok_or_else(|| self.shared.broken())?.change(&PairState::LetsIn)
    }

    /// Sends a message of `len` bytes, which `fill` writes at the given place.
    ///
    /// # Errors
    /// When the connection is broken, or the other side makes no room in time; then the call can be repeated.
    pub fn send(
        &self,
        len: usize,
        deadline: Deadline,
        fill: impl FnOnce(&HostMem, usize) -> Result<()>,
    ) -> Result<()> {
        if len == 0 || len > self.most() {
            let (bytes, len) = (len as u64, self.most() as u64);
            return Err(Error::OutOfRange { offset: 0, bytes, len });
        }
        let shared = &self.shared;
        // The last credit is reserved for reporting new room.
        let ready = |state: &mut ChannelState| (state.credits > 1).then(|| state.free.pop()).flatten();
        let (slot, owed) = {
            let (mut state, slot) = shared.wait(deadline, "the other side's room for a message", ready)?;
            state.credits -= 1;
            (slot, std::mem::take(&mut state.owed))
        };
        let at = slot as usize * shared.size.message as usize;
        let sent = fill(&shared.mem, at).and_then(|()| shared.post_send(slot, len as u32, owed));
        sent.inspect_err(|error| shared.end(&error.to_string()))
    }

    /// The next message; `None` on a time-out.
    ///
    /// # Errors
    /// When the connection is broken; messages received before that are returned first.
    pub fn receive(&self, deadline: Deadline) -> Result<Option<Message>> {
        let mut state = self.shared.lock();
        loop {
            if let Some((slot, len)) = state.inbox.pop_front() {
                return Ok(Some(Message { shared: self.shared.clone(), slot, len: len as usize }));
            }
            if let Some(why) = &state.broken {
                return Err(Error::Broken(why.clone()));
            }
            if deadline.passed() {
                return Ok(None);
            }
            let waited = self.shared.changed.wait_timeout(state, deadline.left());
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Puts bytes of registered memory into the other side's, and waits until that is done. A message sent afterwards
    /// arrives after the bytes.
    ///
    /// # Errors
    /// When the other side has no such memory, or it takes too long; the connection is broken then.
    pub fn put(&self, from: &Registered, offset: u64, to: RemoteMemory, deadline: Deadline) -> Result<()> {
        self.transfer(&PairRequest::Write { to }, (from, offset), to, deadline)
    }

    /// Gets bytes of the other side's memory into registered memory of this side.
    ///
    /// # Errors
    /// As for [`Self::put`].
    pub fn get(&self, to: &Registered, offset: u64, from: RemoteMemory, deadline: Deadline) -> Result<()> {
        self.transfer(&PairRequest::Read { from }, (to, offset), from, deadline)
    }

    fn transfer(
        &self,
        work: &PairRequest,
        (memory, offset): (&Registered, u64),
        other: RemoteMemory,
        deadline: Deadline,
    ) -> Result<()> {
        let bytes = other.len;
        let (addr, lkey) = memory.local(offset, bytes)?;
        if bytes == 0 || bytes > MOST_TRANSFER {
            return Err(Error::OutOfRange { offset, bytes, len: MOST_TRANSFER });
        }
        let shared = &self.shared;
        let most = usize::from(shared.size.transfers);
        let ready = |state: &mut ChannelState| (state.transfers.len() < most).then_some(());
        let id = {
            let (mut state, ()) = shared.wait(deadline, "room for a transfer", ready)?;
            state.next = (state.next + 1) & !RECEIVE;
            // Slots use the low numbers.
            let id = state.next | 1 << 62;
            let memory = memory.registration().clone();
            state.transfers.insert(id, Transfer { done: false, memory });
            id
        };
        let posted = shared
            .pair()
            .as_ref()
            .ok_or_else(|| shared.broken())
            .and_then(|pair| pair.post(id, work, (addr, bytes as u32), lkey));
        let ended = posted.and_then(|()| {
            let done = |state: &mut ChannelState| {
                state.transfers.get(&id).is_some_and(|transfer| transfer.done).then_some(())
            };
            shared.wait(deadline, "a transfer", done).map(|_| ())
        });
        // Late or failed, the device may still access the memory: it must be stopped before the caller gets the memory
        // back.
        let ended = ended.inspect_err(|error| shared.end(&error.to_string()));
        shared.lock().transfers.remove(&id);
        shared.changed.notify_all();
        ended
    }

    /// Whether it can still be used.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.shared.lock().broken.is_some()
    }

    /// Breaks it, and wakes all waiting threads with the reason. When this returns, the other side reaches no memory
    /// through it.
    pub fn close(&self, why: &str) {
        self.shared.end(why);
        let pump = self.pump.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = pump.filter(|_| self.shared.pump.load(Ordering::Acquire) != this_thread()) {
            let _ = thread.join();
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.close("it was closed on this side");
    }
}

impl ChannelShared {
    fn lock(&self) -> MutexGuard<'_, ChannelState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pair(&self) -> RwLockReadGuard<'_, Option<QueuePair>> {
        self.pair.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn broken(&self) -> Error {
        Error::Broken(self.lock().broken.clone().unwrap_or_default())
    }

    pub fn is_over(&self) -> bool {
        self.lock().broken.is_some()
    }

    /// Waits until `ready` returns a value, and keeps the lock.
    fn wait<T>(
        &self,
        deadline: Deadline,
        what: &'static str,
        mut ready: impl FnMut(&mut ChannelState) -> Option<T>,
    ) -> Result<(MutexGuard<'_, ChannelState>, T)> {
        let mut state = self.lock();
        loop {
            if let Some(why) = &state.broken {
                return Err(Error::Broken(why.clone()));
            }
            if let Some(result) = ready(&mut state) {
                return Ok((state, result));
            }
            if deadline.passed() {
                return Err(Error::TimedOut(what));
            }
            let waited = self.changed.wait_timeout(state, deadline.left());
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn post_send(&self, slot: u64, len: u32, owed: u32) -> Result<()> {
        let (addr, lkey) = self.registered.local(slot * u64::from(self.size.message), len.into())?;
        let pair = self.pair();
        let pair = pair.as_ref().ok_or_else(|| self.broken())?;
        pair.post(slot, &PairRequest::Send { number: owed }, (addr, len), lkey)
    }

    /// Reposts a slot for receiving.
    fn repost(&self, slot: u64) {
        let bytes = self.size.message;
        let posted = self.registered.local(slot * u64::from(bytes), bytes.into()).and_then(|(addr, _)| {
            let pair = self.pair();
            let pair = pair.as_ref().ok_or_else(|| self.broken())?;
            pair.receive(RECEIVE | slot, addr, bytes, self.registered.registration())
        });
        match posted {
            Ok(()) => self.lock().owed += 1,
            Err(error) => self.end(&error.to_string()),
        }
    }

    /// Reports new room to the other side by an empty message, if there is much and no other message reported it.
    fn settle(&self) {
        let report = {
            let mut state = self.lock();
            let much = state.owed >= u32::from(self.size.room) / 2 && state.broken.is_none();
            if !much || state.credits == 0 {
                return;
            }
            let Some(slot) = state.free.pop() else { return };
            state.credits -= 1;
            (slot, std::mem::take(&mut state.owed))
        };
        if let Err(error) = self.post_send(report.0, 0, report.1) {
            self.end(&error.to_string());
        }
    }

    /// A work item has succeeded; `received` is the length and the immediate number of a message.
    pub fn done(&self, id: u64, received: Option<(u32, u32)>) {
        let Some((len, number)) = received else {
            if id & RECEIVE != 0 {
                return self.end("the other side used room for a message without sending one");
            }
            let mut state = self.lock();
            match state.transfers.get_mut(&id) {
                Some(transfer) => transfer.done = true,
                None if id < 1 << 62 => state.free.push(id),
                None => {}
            }
            drop(state);
            self.changed.notify_all();
            return;
        };
        let slot = id & !RECEIVE;
        let empty = len == 0;
        let overdrawn = {
            let mut state = self.lock();
            state.credits = state.credits.saturating_add(number);
            if !empty {
                state.inbox.push_back((slot, len));
            }
            state.credits > u32::from(u16::MAX)
        };
        if overdrawn {
            return self.end("the other side gives more room than there can be");
        }
        if empty {
            self.repost(slot);
        }
        self.changed.notify_all();
    }

    /// Breaks the connection: the device stops accessing memory, and then all waiting threads are woken. The first
    /// reason is kept.
    pub fn end(&self, why: &str) {
        // Held until the pair is destroyed: a second caller must not wake threads before that.
        let mut slot = self.pair.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(pair) = slot.take() {
            // Ends all work in flight; if the device refuses this, destroying the pair has to do it.
            let _ = pair.change(&PairState::Broken);
            if !pair.destroy() {
                // The device may still access the memory, so it is leaked. Exposed memory is in no transfer of this
                // side.
                self.lock().transfers.values().for_each(|transfer| transfer.memory.lose());
                self.nic.domain.lose_exposed();
            }
        }
        drop(slot);
        let mut state = self.lock();
        state.broken.get_or_insert_with(|| why.to_owned());
        drop(state);
        self.changed.notify_all();
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

#[cfg(test)]
#[path = "channel_tests.rs"]
mod tests;
