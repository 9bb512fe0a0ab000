//! A reliable connection: messages both ways, and bytes put into the other side's memory or got out of it.
//!
//! Messages have credits: a side sends no more of them than the other has room for, and learns with each message, or by an
//! empty one, how much room has become free. One credit is kept for such empty ones, so that two sides never wait for each
//! other's. A thread takes the completions, and looks at the socket over which both sides met: when that closes, the other
//! side has gone.
//!
//! A connection that has failed in any way is broken for good: its queue pair is destroyed, after which the device reaches no
//! memory for it, and then the waiting threads are woken. So what a call was given may be used otherwise when it has returned. Where the
//! device refuses to destroy the pair, the memory of all that was under way is left to it for good, and so is all that is exposed;
//! slots of a pool do not come back, and no more memory is exposed.

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
use crate::verbs::{PairRequest, PairState, Queue, QueuePair, Registration};
use crate::{Error, Result};

/// How large a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChannelSize {
    /// Messages that are under way at once, each way.
    pub room: u16,
    /// Bytes of a message at most.
    pub message: u32,
    /// Puts and gets that are under way at once.
    pub transfers: u16,
    /// Which connection of several it is.
    pub lane: u8,
}

impl Default for ChannelSize {
    fn default() -> Self {
        Self { room: 32, message: 16 << 10, transfers: 64, lane: 0 }
    }
}

/// Bytes of a put or get at most.
pub const MOST_TRANSFER: u64 = 1 << 30;
/// In the number of a piece of work: it is a receive. The rest is the slot.
pub(crate) const RECEIVE: u64 = 1 << 63;

/// This side's end, before it is known where the other is.
pub struct PreparedChannel {
    end: LocalEnd,
    endpoint: Endpoint,
}

/// What is made of a port for one connection.
struct LocalEnd {
    nic: Arc<Nic>,
    size: ChannelSize,
    pair: QueuePair,
    queue: Arc<Queue>,
    /// Slots that messages come in, then those that they go out from.
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

/// What the callers and the thread of a connection share.
pub(crate) struct ChannelShared {
    nic: Arc<Nic>,
    size: ChannelSize,
    /// Gone when the connection is broken.
    pair: RwLock<Option<QueuePair>>,
    pub queue: Arc<Queue>,
    mem: HostMem,
    registered: Registered,
    /// Bytes that the other side takes in a message.
    theirs: u32,
    /// What both sides told each other.
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
    /// Messages of the other side that were taken, and that it has not been told of.
    owed: u32,
    /// Slots that messages can go out from.
    free: Vec<u64>,
    /// Messages that came in: slot and length.
    inbox: VecDeque<(u64, u32)>,
    /// Puts and gets under way.
    transfers: HashMap<u64, Transfer>,
    next: u64,
}

struct Transfer {
    done: bool,
    memory: Arc<Registration>,
}

/// A message that came in. Its place is free for another when it is dropped.
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

    /// Whether it has no bytes: no message that is handed out is so.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory that it lies in, and where.
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
        self.shared.give_back(self.slot);
        // Not without a message to go with, unless the other side may be waiting for it.
        self.shared.settle();
    }
}

impl PreparedChannel {
    /// Makes this side's end of a connection.
    ///
    /// # Errors
    /// When the device has no more room, or the size is none that works.
    pub fn new(nic: &Arc<Nic>, size: ChannelSize) -> Result<Self> {
        if size.room < Endpoint::LEAST_ROOM || size.message == 0 || size.transfers == 0 {
            return Err(Error::Protocol(format!("a connection of {size:?} cannot work")));
        }
        let (room, transfers) = (u32::from(size.room), u32::from(size.transfers));
        let queue = Arc::new(Queue::new(&nic.domain, (2 * room + transfers) as usize)?);
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

    /// What to tell the other side.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Connects with the other side's end. `met` is the socket over which both sides met; it stays open, nothing is sent
    /// over it any more, and when it closes the other side has gone.
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
    /// The port that it goes by.
    #[must_use]
    pub fn nic(&self) -> &Arc<Nic> {
        &self.shared.nic
    }

    /// Bytes of a message that the other side takes, and this side can send.
    #[must_use]
    pub fn most(&self) -> usize {
        self.shared.theirs.min(self.shared.size.message) as usize
    }

    /// What both sides told each other, the same on both. Where somebody between them has a connection with each, it differs.
    #[must_use]
    pub fn ends(&self) -> Vec<u8> {
        let mut ends = self.shared.ends;
        ends.sort_unstable();
        ends.concat()
    }

    /// Lets the other side reach memory that is exposed ([`crate::Access::Exposed`]), from now on. Till then it reaches none, so
    /// find out first who it is.
    ///
    /// # Errors
    /// When the connection is broken, or the device refuses.
    pub fn let_in(&self) -> Result<()> {
        let pair = self.shared.pair();
        pair.as_ref().ok_or_else(|| self.shared.broken())?.change(&PairState::LetsIn)
    }

    /// Sends a message of `len` bytes, which `fill` puts where it is told.
    ///
    /// # Errors
    /// When the connection is broken, or the other side has made no room in time, after which it can be tried again.
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
        // The last credit is for saying that there is room again.
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

    /// The next message; none if there was none in time.
    ///
    /// # Errors
    /// When the connection is broken; messages that came before that are handed out first.
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

    /// Puts bytes of registered memory into the other side's, and waits until that is done. A message that is sent after
    /// that arrives after the bytes.
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
            // Slots have the low numbers.
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
        // Late or failed, the device may still be at the memory: it is made to let go before the caller has it back.
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

    /// Breaks it, and has everybody who waits know why. When this returns, the other side reaches no memory through it.
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

    /// Waits until `ready` gives something, and keeps the lock.
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

    /// Has a slot receive again.
    fn give_back(&self, slot: u64) {
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

    /// Tells the other side that it has room again, by an empty message, if that is much and no other message told it.
    fn settle(&self) {
        let told = {
            let mut state = self.lock();
            let much = state.owed >= u32::from(self.size.room) / 2 && state.broken.is_none();
            if !much || state.credits == 0 {
                return;
            }
            let Some(slot) = state.free.pop() else { return };
            state.credits -= 1;
            (slot, std::mem::take(&mut state.owed))
        };
        if let Err(error) = self.post_send(told.0, 0, told.1) {
            self.end(&error.to_string());
        }
    }

    /// A piece of work has ended well; `received` is the length and the number of a message that came in.
    pub fn done(&self, id: u64, received: Option<(u32, u32)>) {
        let Some((len, number)) = received else {
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
            self.give_back(slot);
        }
        self.changed.notify_all();
    }

    /// Breaks the connection: the device lets go of all memory, and then everybody who waits is told. The first reason
    /// stays.
    pub fn end(&self, why: &str) {
        // Held until the pair is destroyed: a second caller must not tell anybody before that.
        let mut slot = self.pair.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(pair) = slot.take() {
            // Whatever is under way ends; if the device does not even take this, destroying the pair has to do.
            let _ = pair.change(&PairState::Broken);
            if !pair.destroy() {
                // The device may still be at the memory: nobody has it again. What is exposed is in no transfer of this side.
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
