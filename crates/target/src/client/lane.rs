//! One connection to a target, and the requests that are under way on it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::options::StopLimit;
use crate::handshake;
use crate::lock;
use crate::transport::{Link, Outgoing, Stretch, checksum_for};
use crate::wire::{FrameKind, Head, Reply, unpack};
use crate::{Error, Result};

/// How often the reader looks whether the lane was given up.
const TICK: Duration = Duration::from_millis(100);
/// Requests under way on a lane at most, whatever the target says: those that are given up hold their place until it answers.
const MOST_CREDITS: u32 = 4096;

/// A request that is under way.
pub(super) struct PendingCall {
    state: Mutex<CallState>,
    woken: Condvar,
}

enum CallState {
    /// Where its answer's data goes.
    Waiting(Option<Stretch>),
    /// The reader writes data there.
    Receiving,
    Over(Reply, usize),
    /// Nobody waits any more: its answer and the data are thrown away.
    GivenUp,
    /// The connection has ended before the answer came.
    Lost,
}

/// How a request ended on this lane.
pub(super) enum Ended {
    /// With an answer, and so many bytes of data.
    Answered(Reply, usize),
    /// The lane has ended; the server may have it.
    Lost,
    /// Its time was up. What comes of it later is thrown away.
    GaveUp,
}

/// A connection.
pub(super) struct Lane {
    pub link: Box<dyn Link>,
    credits: usize,
    stall: Duration,
    stop: Arc<StopLimit>,
    calls: Mutex<HashMap<u64, Arc<PendingCall>>>,
    dead: AtomicBool,
    /// When it was heard of last, in milliseconds since `start`, and when it was asked whether it is there.
    heard: AtomicU64,
    asked: AtomicU64,
    start: Instant,
    /// Told when the lane ends, or has room.
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
            credits: credits.clamp(1, MOST_CREDITS) as usize,
            stall,
            stop,
            calls: Mutex::default(),
            dead: AtomicBool::new(false),
            heard: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            start: Instant::now(),
            changed,
            forged,
        })
    }

    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Ends it. Who waits for an answer learns it from the reader, once that touches their memory no more.
    pub fn die(&self) {
        self.dead.store(true, Ordering::Release);
        self.link.close();
        self.changed.notify_all();
    }

    /// How many more requests it takes, where it takes any.
    pub fn room(&self) -> usize {
        if self.is_dead() { 0 } else { self.credits.saturating_sub(lock(&self.calls).len()) }
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// Asks whether it is there, now and then; ends it when there was no word for too long.
    pub fn look_after(&self) {
        let (now, stall) = (self.now(), self.stall.as_millis() as u64);
        let silent = now.saturating_sub(self.heard.load(Ordering::Acquire));
        if self.is_dead() {
            return;
        }
        if silent > stall {
            return self.die();
        }
        if silent > stall / 3 && now.saturating_sub(self.asked.load(Ordering::Acquire)) > stall / 3 {
            self.asked.store(now, Ordering::Release);
            if handshake::send(&*self.link, FrameKind::Ping, b"", self.stall).is_err() {
                self.die();
            }
        }
    }

    /// Takes up a request; none where the lane has no room any more.
    pub fn take(&self, id: u64, to: Option<&Stretch>) -> Option<Arc<PendingCall>> {
        let state = Mutex::new(CallState::Waiting(to.cloned()));
        let call = Arc::new(PendingCall { state, woken: Condvar::new() });
        let mut calls = lock(&self.calls);
        // The reader drains them after it has marked the lane dead, under the same lock.
        if self.is_dead() || calls.len() >= self.credits || calls.contains_key(&id) {
            return None;
        }
        calls.insert(id, call.clone());
        Some(call)
    }

    /// Sends a request that was taken up, and waits for its answer. Where the target `reaches` memory by itself, only the end of the
    /// lane keeps it from there; else a request that is given up leaves the lane to others. It may take longer than `until`, by what
    /// sending a frame may take, and those of others before it, or receiving one that has begun to come (`stall` each, and a second
    /// for each MiB).
    pub fn exchange(
        &self,
        call: &PendingCall,
        (id, done): (u64, u64),
        (body, reaches): (&[u8], bool),
        data: Option<&Stretch>,
        until: Instant,
    ) -> Ended {
        let mut head = Head::new(FrameKind::Request, id, body);
        head.done = done;
        let sent = data.map_or(Ok(()), |data| {
            head.data = data.len as u32;
            head.data_crc = checksum_for(&*self.link, data)?;
            Ok(())
        });
        if sent.and_then(|()| self.link.send(&Outgoing { head, body, data }, self.stall)).is_err() {
            self.die();
        }
        let mut gave_up = false;
        let mut state = lock(&call.state);
        loop {
            match &*state {
                CallState::Over(reply, bytes) => return Ended::Answered(reply.clone(), *bytes),
                CallState::Lost => return if gave_up { Ended::GaveUp } else { Ended::Lost },
                CallState::Waiting(_) | CallState::Receiving | CallState::GivenUp => {}
            }
            let left = self.stop.at(until).saturating_duration_since(Instant::now());
            gave_up |= left.is_zero();
            if gave_up {
                let ends = reaches || self.stop.is_over();
                if !ends && matches!(*state, CallState::Waiting(_)) {
                    *state = CallState::GivenUp;
                    drop(state);
                    self.check_given_up();
                    return Ended::GaveUp;
                }
                if ends && !self.is_dead() {
                    drop(state);
                    // The reader or the target may be writing into our memory; they stop, and the reader says so.
                    self.die();
                    state = lock(&call.state);
                    continue;
                }
                // Otherwise the data is coming. It is all there soon, or the reader ends the lane.
            }
            let left = if gave_up { TICK } else { left.min(TICK) };
            state = call.woken.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Requests that are given up hold their credits until the target answers. A target that answers none would let nobody ask for
    /// anything more, so the lane is made anew where they hold more than half of the credits.
    fn check_given_up(&self) {
        let is_given_up = |call: &&Arc<PendingCall>| matches!(*lock(&call.state), CallState::GivenUp);
        let given_up = lock(&self.calls).values().filter(is_given_up).count();
        if given_up * 2 > self.credits {
            self.die();
        }
    }

    /// Reads answers until the lane ends.
    pub fn listen(&self) {
        // Other reasons are of no use to anybody: requests go on elsewhere, and a connection that cannot be had says why.
        if matches!(self.answers(), Err(Error::Forged { .. })) {
            self.forged.fetch_add(1, Ordering::Relaxed);
        }
        self.die();
        for (_, call) in lock(&self.calls).drain() {
            *lock(&call.state) = CallState::Lost;
            call.woken.notify_all();
        }
        self.changed.notify_all();
    }

    fn answers(&self) -> Result<()> {
        let peer = self.link.peer();
        loop {
            let mut place = |head: &Head, _: &[u8]| {
                let call = lock(&self.calls).get(&head.id).cloned();
                let unasked = || Error::protocol(peer, "data that nobody asked for");
                let call = call.filter(|_| head.kind == FrameKind::Reply).ok_or_else(unasked)?;
                let mut state = lock(&call.state);
                match &*state {
                    CallState::GivenUp => Ok(None),
                    CallState::Waiting(Some(to)) if to.len >= head.data as usize => {
                        let to = to.clone();
                        *state = CallState::Receiving;
                        Ok(Some(to))
                    }
                    _ => Err(unasked()),
                }
            };
            let frame = self.link.receive(TICK, self.stall, &mut place)?;
            // The keeper may be held up by one that sends.
            if self.is_dead() || self.stop.is_over() {
                return Err(Error::Closed { peer: peer.to_owned() });
            }
            let Some(frame) = frame else { continue };
            self.heard.store(self.now(), Ordering::Release);
            match frame.head.kind {
                FrameKind::Pong => {}
                FrameKind::Reply => {
                    let reply = unpack(&frame.body, peer)?;
                    let call = lock(&self.calls).remove(&frame.head.id);
                    let Some(call) = call else { return Err(Error::protocol(peer, "an answer to nothing")) };
                    *lock(&call.state) = CallState::Over(reply, frame.head.data as usize);
                    call.woken.notify_all();
                    self.changed.notify_all();
                }
                // What is under way is done again elsewhere, or told when it comes back.
                FrameKind::Goodbye => return Err(handshake::refusal(peer, &frame.body)),
                other => return Err(Error::protocol(peer, format!("{other:?} in the place of an answer"))),
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

    /// A lane, and its other end.
    fn lane(credits: u32) -> (Arc<Lane>, Box<dyn Link>) {
        let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
        let connector = TcpConnector::new(&acceptor.local().unwrap().to_string()).unwrap();
        let link = connector.connect(0, LONG).unwrap();
        let stop = Arc::new(StopLimit::new(&StopSignal::default()));
        let lane = Lane::new(link, credits, LONG, stop, Arc::default(), Arc::default());
        (lane, acceptor.accept(LONG).unwrap().unwrap())
    }

    #[test]
    fn a_target_does_not_have_any_number_of_requests_kept() {
        assert_eq!([0, 7, u32::MAX].map(|credits| lane(credits).0.room()), [1, 7, MOST_CREDITS as usize]);
    }

    #[test]
    fn a_lane_ends_when_most_of_its_credits_are_held_by_what_was_given_up() {
        let (lane, _target) = lane(4);
        let give_up = |id| {
            let call = lane.take(id, None).unwrap();
            lane.exchange(&call, (id, 0), (b"", false), None, Instant::now())
        };
        for id in 0..2 {
            assert!(matches!(give_up(id), Ended::GaveUp) && !lane.is_dead());
        }
        assert_eq!(lane.room(), 2);
        assert!(matches!(give_up(2), Ended::GaveUp) && lane.is_dead());
    }
}
