//! One connection to a target, and its requests in flight.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::options::StopLimit;
use crate::handshake;
use crate::lock;
use crate::transport::{Link, MemoryRange, Outgoing, checksum_for};
use crate::wire::{FrameKind, Head, Reply, unpack};
use crate::{Error, Result};

/// How often the reader checks whether the lane was closed.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Requests in flight on a lane, whatever the target allows. Cancelled ones count until the target answers.
const MAX_CREDITS: u32 = 4096;

/// A request in flight.
pub(super) struct PendingCall {
    state: Mutex<CallState>,
    woken: Condvar,
}

enum CallState {
    /// Waiting for the answer; its data goes here.
    Waiting(Option<MemoryRange>),
    /// The reader is writing data there.
    Receiving,
    Over(Reply, usize),
    /// Nobody waits any more; the answer is discarded.
    Cancelled,
    /// The connection ended before the answer.
    Lost,
}

/// How a request ended on this lane.
pub(super) enum CallEnd {
    /// With an answer, and this many bytes of data.
    Answered(Reply, usize),
    /// The lane has ended; the server may have received the request.
    Lost,
    /// It timed out. A later answer is discarded.
    Cancelled,
}

/// A connection.
pub(super) struct Lane {
    pub link: Box<dyn Link>,
    credits: usize,
    stall: Duration,
    stop: Arc<StopLimit>,
    calls: Mutex<HashMap<u64, Arc<PendingCall>>>,
    dead: AtomicBool,
    /// When the last frame arrived, and when the last ping was sent, in milliseconds since `start`.
    last_received: AtomicU64,
    last_ping: AtomicU64,
    start: Instant,
    /// Notified when the lane ends or has room.
    changed: Arc<Condvar>,
    /// Counts lanes that ended because a frame was not authentic.
    forged: Arc<AtomicU64>,
}

impl Lane {
    pub fn new(
        link: Box<dyn Link>,
        credits: u32,
        stall: Duration,
        stop: Arc<StopLimit>,
        changed: Arc<Condvar>,
        forged: Arc<AtomicU64>,
    ) -> Arc<Self> {
        Arc::new(Self {
            link,
            credits: credits.clamp(1, MAX_CREDITS) as usize,
            stall,
            stop,
            calls: Mutex::default(),
            dead: AtomicBool::new(false),
            last_received: AtomicU64::new(0),
            last_ping: AtomicU64::new(0),
            start: Instant::now(),
            changed,
            forged,
        })
    }

    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Closes the lane. Waiting requests end once the reader no longer writes to their memory.
    pub fn kill(&self) {
        self.dead.store(true, Ordering::Release);
        self.link.close();
        self.changed.notify_all();
    }

    /// How many more requests it takes; 0 once it has ended.
    pub fn room(&self) -> usize {
        if self.is_dead() { 0 } else { self.credits.saturating_sub(lock(&self.calls).len()) }
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// Sends a ping after a silence, and closes the lane after a longer one.
    pub fn check_health(&self) {
        let (now, stall) = (self.now(), self.stall.as_millis() as u64);
        let silent = now.saturating_sub(self.last_received.load(Ordering::Acquire));
        if self.is_dead() {
            return;
        }
        if silent > stall {
            return self.kill();
        }
        if silent > stall / 3 && now.saturating_sub(self.last_ping.load(Ordering::Acquire)) > stall / 3 {
            self.last_ping.store(now, Ordering::Release);
            if handshake::send(&*self.link, FrameKind::Ping, b"", self.stall).is_err() {
                self.kill();
            }
        }
    }

    /// Registers a request; `None` if the lane has no room.
    pub fn register(&self, id: u64, to: Option<&MemoryRange>) -> Option<Arc<PendingCall>> {
        let state = Mutex::new(CallState::Waiting(to.cloned()));
        let call = Arc::new(PendingCall { state, woken: Condvar::new() });
        let mut calls = lock(&self.calls);
        // The reader drains `calls` after the lane is marked dead, under this lock.
        if self.is_dead() || calls.len() >= self.credits || calls.contains_key(&id) {
            return None;
        }
        calls.insert(id, call.clone());
        Some(call)
    }

    /// Sends a registered request, and waits for its answer. On a timeout the request is cancelled, and the lane stays
    /// open. But if the target `reaches` our memory itself, only closing the lane stops it. The call may exceed
    /// `until`: by the time that sending this frame and those before it takes, or receiving one that has begun to
    /// arrive (`stall` each, and a second for each MiB).
    pub fn exchange(
        &self,
        call: &PendingCall,
        (id, done): (u64, u64),
        (body, reaches): (&[u8], bool),
        data: Option<&MemoryRange>,
        until: Instant,
    ) -> CallEnd {
        let mut head = Head::new(FrameKind::Request, id, body);
        head.done = done;
        let sent = data.map_or(Ok(()), |data| {
            head.data = data.len as u32;
            head.data_crc = checksum_for(&*self.link, data)?;
            Ok(())
        });
        if sent.and_then(|()| self.link.send(&Outgoing { head, body, data }, self.stall)).is_err() {
            self.kill();
        }
        let mut is_cancelled = false;
        let mut state = lock(&call.state);
        loop {
            match &*state {
                CallState::Over(reply, bytes) => return CallEnd::Answered(reply.clone(), *bytes),
                CallState::Lost => return if is_cancelled { CallEnd::Cancelled } else { CallEnd::Lost },
                CallState::Waiting(_) | CallState::Receiving | CallState::Cancelled => {}
            }
            let left = self.stop.at(until).saturating_duration_since(Instant::now());
            is_cancelled |= left.is_zero();
            if is_cancelled {
                let must_close = reaches || self.stop.is_over();
                if !must_close && matches!(*state, CallState::Waiting(_)) {
                    *state = CallState::Cancelled;
                    drop(state);
                    self.check_cancelled();
                    return CallEnd::Cancelled;
                }
                if must_close && !self.is_dead() {
                    drop(state);
                    // The reader or the target may still be writing into our memory. Closing stops them, and the reader
                    // reports it.
                    self.kill();
                    state = lock(&call.state);
                    continue;
                }
                // Otherwise the data is arriving: it is complete soon, or the reader closes the lane.
            }
            let left = if is_cancelled { POLL_INTERVAL } else { left.min(POLL_INTERVAL) };
            state = call.woken.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Closes the lane if cancelled requests hold more than half of its credits. They hold them until the target
    /// answers, which it may never do.
    fn check_cancelled(&self) {
        let is_cancelled = |call: &&Arc<PendingCall>| matches!(*lock(&call.state), CallState::Cancelled);
        let cancelled = lock(&self.calls).values().filter(is_cancelled).count();
        if cancelled * 2 > self.credits {
            self.kill();
        }
    }

    /// Reads answers until the lane ends.
    pub fn listen(&self) {
        // Other errors are not reported: requests continue on other lanes, and reconnecting reports its own error.
        if matches!(self.read_answers(), Err(Error::Forged { .. })) {
            self.forged.fetch_add(1, Ordering::Relaxed);
        }
        self.kill();
        for (_, call) in lock(&self.calls).drain() {
            *lock(&call.state) = CallState::Lost;
            call.woken.notify_all();
        }
        self.changed.notify_all();
    }

    fn read_answers(&self) -> Result<()> {
        let peer = self.link.peer();
        loop {
            let mut place = |head: &Head, _: &[u8]| {
                let call = lock(&self.calls).get(&head.id).cloned();
                let unexpected = || Error::protocol(peer, "data that was not requested");
                let call = call.filter(|_| head.kind == FrameKind::Reply).ok_or_else(unexpected)?;
                let mut state = lock(&call.state);
                match &*state {
                    CallState::Cancelled => Ok(None),
                    CallState::Waiting(Some(to)) if to.len >= head.data as usize => {
                        let to = to.clone();
                        *state = CallState::Receiving;
                        Ok(Some(to))
                    }
                    _ => Err(unexpected()),
                }
            };
            let frame = self.link.receive(POLL_INTERVAL, self.stall, &mut place)?;
            // The maintenance thread may be blocked in a send.
            if self.is_dead() || self.stop.is_over() {
                return Err(Error::Closed { peer: peer.to_owned() });
            }
            let Some(frame) = frame else { continue };
            self.last_received.store(self.now(), Ordering::Release);
            match frame.head.kind {
                FrameKind::Pong => {}
                FrameKind::Reply => {
                    let reply = unpack(&frame.body, peer)?;
                    let call = lock(&self.calls).remove(&frame.head.id);
                    let Some(call) = call else {
                        return Err(Error::protocol(peer, "an answer to an unknown request"));
                    };
                    *lock(&call.state) = CallState::Over(reply, frame.head.data as usize);
                    call.woken.notify_all();
                    self.changed.notify_all();
                }
                // Requests in flight are repeated elsewhere, or answered when the target is back.
                FrameKind::Goodbye => return Err(handshake::refusal(peer, &frame.body)),
                other => return Err(Error::protocol(peer, format!("{other:?} instead of an answer"))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use onehop_os::StopSignal;

    use super::*;
    use crate::tcp::{TcpAcceptor, TcpConnector};
    use crate::transport::{Acceptor, Connector};

    const LONG: Duration = Duration::from_secs(30);

    /// A lane and its other end.
    fn lane(credits: u32) -> (Arc<Lane>, Box<dyn Link>) {
        let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
        let connector = TcpConnector::new(&acceptor.local().unwrap().to_string()).unwrap();
        let link = connector.connect(0, LONG).unwrap();
        let stop = Arc::new(StopLimit::new(&StopSignal::default()));
        let lane = Lane::new(link, credits, LONG, stop, Arc::default(), Arc::default());
        (lane, acceptor.accept(LONG).unwrap().unwrap())
    }

    #[test]
    fn the_credits_of_a_target_are_limited() {
        assert_eq!([0, 7, u32::MAX].map(|credits| lane(credits).0.room()), [1, 7, MAX_CREDITS as usize]);
    }

    #[test]
    fn a_lane_ends_when_cancelled_requests_hold_most_credits() {
        let (lane, _target) = lane(4);
        let give_up = |id| {
            let call = lane.register(id, None).unwrap();
            lane.exchange(&call, (id, 0), (b"", false), None, Instant::now())
        };
        for id in 0..2 {
            assert!(matches!(give_up(id), CallEnd::Cancelled) && !lane.is_dead());
        }
        assert_eq!(lane.room(), 2);
        assert!(matches!(give_up(2), CallEnd::Cancelled) && lane.is_dead());
    }
}
