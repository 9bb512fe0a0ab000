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

/// A request that is under way.
pub(super) struct PendingCall {
    /// Where its answer's data goes.
    to: Option<Stretch>,
    state: Mutex<CallState>,
    woken: Condvar,
}

enum CallState {
    Waiting,
    Over(Reply, usize),
    /// The connection has ended before the answer came.
    Lost,
}

/// How a request ended on this lane.
pub(super) enum Ended {
    /// With an answer, and so many bytes of data.
    Answered(Reply, usize),
    /// The lane has ended; the server may have it.
    Lost,
    /// Its time was up, and the lane was ended for it.
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
            credits: credits.max(1) as usize,
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
        let call =
            PendingCall { to: to.cloned(), state: Mutex::new(CallState::Waiting), woken: Condvar::new() };
        let call = Arc::new(call);
        let mut calls = lock(&self.calls);
        // The reader drains them after it has marked the lane dead, under the same lock.
        if self.is_dead() || calls.len() >= self.credits || calls.contains_key(&id) {
            return None;
        }
        calls.insert(id, call.clone());
        Some(call)
    }

    /// Sends a request that was taken up, and waits for its answer.
    pub fn exchange(
        &self,
        call: &PendingCall,
        (id, done): (u64, u64),
        body: &[u8],
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
                CallState::Waiting => {}
            }
            let left = self.stop.at(until).saturating_duration_since(Instant::now());
            if left.is_zero() && !gave_up {
                gave_up = true;
                drop(state);
                // The reader may be writing into our memory; it stops, and says so.
                self.die();
                state = lock(&call.state);
                continue;
            }
            let left = if gave_up { TICK } else { left.min(TICK) };
            state = call.woken.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
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
                match call.and_then(|call| call.to.clone()) {
                    Some(to) if head.kind == FrameKind::Reply && to.len >= head.data as usize => Ok(Some(to)),
                    _ => Err(Error::protocol(peer, "data that nobody asked for")),
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
