//! A folder of another machine.
//!
//! ```text
//! options   timeouts, limits, and the end on request
//! lane      a connection and its requests in flight
//! tree      the folder; finds files again after the server has lost them
//! known     files by number, with their places and the server's numbers
//! root      cached attributes of the root, for when the target does not answer
//! file      an open file
//! numbers   request numbers, and which of them the target may forget
//! releases  requests that nobody waits for
//! ```
//! Connections come and go; requests in flight are repeated over another one. A *session* is the server's state for us.
//! When it is lost, because the server was restarted, a new one begins, which is a new *epoch* here: numbers of the old
//! one are no longer valid.

mod file;
mod known;
mod lane;
mod numbers;
mod options;
mod releases;
mod root;
mod threads;
mod tree;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::buffers::{Buffers, DataFlow, PooledBuffer};
use crate::shares::Payer;
use crate::transport::{Connector, Exposed, Link, MemoryRange, Shareable};
use crate::tree::Via;
use crate::wire::{FULL, Join, MountId, Reply, Request, SessionId, Welcome, pack};
use crate::{Error, Result, handshake, lock, panic_text};
use lane::{CallEnd, Lane};
use numbers::Outstanding;
pub use options::ClientOptions;
use options::StopLimit;
use releases::Releases;
pub(crate) use threads::ClientThreads;
pub use tree::RemoteTree;

/// How often lanes are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The first and the longest delay before a connection is retried.
const RECONNECT_DELAYS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// The first and the longest delay before a request is retried that found no buffer at the target.
const FULL_DELAYS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// How long a request waits for a connection when the target has been gone for longer than the request timeout.
const OUTAGE_WAIT: Duration = Duration::from_secs(2);

/// A session, as requests see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionView {
    /// Counted from 1.
    pub epoch: u64,
    /// The boot ID of the server.
    pub boot: [u8; 16],
}

/// Why a request failed in its session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RequestError {
    /// The target's error, or a local one.
    Errno(Errno),
    /// The session was lost. The request may have been executed before.
    SessionLost { may_be_done: bool },
}

impl From<Errno> for RequestError {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

#[derive(Default)]
struct ClientState {
    session: Option<SessionId>,
    boot: [u8; 16],
    epoch: u64,
    lanes: Vec<Option<Arc<Lane>>>,
    /// How many of them carry data. A separate lane serves requests without data, which would wait behind it.
    for_data: usize,
    /// Since when there is no connection.
    down_since: Option<Instant>,
    /// When all requests must have ended.
    deadline: Option<Instant>,
    read_only: bool,
    /// Why there is no connection.
    why: String,
}

impl ClientState {
    /// The lane with the most room, or `None` if all are full.
    fn lane(&self, moves_data: bool) -> Option<&Arc<Lane>> {
        let best = |lanes: &'_ [Option<Arc<Lane>>]| {
            let all =
                lanes.iter().enumerate().filter_map(|(place, lane)| Some((lane.as_ref()?.room(), place)));
            all.max_by_key(|(room, _)| *room).filter(|(room, _)| *room > 0).map(|(_, place)| place)
        };
        let (for_data, others) = self.lanes.split_at(self.for_data);
        let other = || best(others).map(|place| place + self.for_data);
        let place = if !moves_data {
            other().or_else(|| best(for_data))
        } else if for_data.iter().flatten().all(|lane| lane.is_dead()) {
            other()
        } else {
            best(for_data)
        };
        self.lanes[place?].as_ref()
    }
}

/// The client of a target.
pub(crate) struct Client {
    connector: Box<dyn Connector>,
    pub mount: MountId,
    options: ClientOptions,
    state: Mutex<ClientState>,
    changed: Arc<Condvar>,
    outstanding: Mutex<Outstanding>,
    answered: Condvar,
    /// Wakes the thread that reports outstanding requests to the target.
    report_due: Condvar,
    buffers: Arc<Buffers>,
    /// Maps users to those for whom their buffers count.
    payer: OnceLock<Payer<u32>>,
    releases: Releases,
    reconnects: AtomicU64,
    repeated: AtomicU64,
    forged: Arc<AtomicU64>,
    over: AtomicBool,
    stop: Arc<StopLimit>,
}

/// The connections of a mount.
#[derive(Clone, Debug, serde::Serialize)]
pub struct MountReport {
    /// The target.
    pub target: String,
    /// The transport by which bytes arrive.
    pub transport: &'static str,
    /// What is encrypted and authenticated: `all`, `frames` (but not data transferred by RDMA), `nothing`.
    pub encrypted: &'static str,
    /// Open connections.
    pub connections: usize,
    /// Connections that were made again.
    pub reconnects: u64,
    /// Requests that were repeated.
    pub repeated: u64,
    /// Connections that were closed because a frame was changed in transit.
    pub forged: u64,
    /// Sessions that the target lost.
    pub sessions_lost: u64,
    /// Whether the target refuses all changes.
    pub read_only: bool,
    /// Why there is no connection.
    pub why: Option<String>,
}

impl Client {
    pub fn new(connector: Box<dyn Connector>, mount: MountId, options: ClientOptions) -> Arc<Self> {
        let for_data = options.lanes.max(1);
        let lanes = vec![None; if for_data > 1 { for_data + 1 } else { 1 }];
        let state = ClientState { lanes, for_data, ..ClientState::default() };
        Arc::new(Self {
            connector,
            mount,
            state: Mutex::new(state),
            changed: Arc::default(),
            outstanding: Mutex::default(),
            answered: Condvar::new(),
            report_due: Condvar::new(),
            buffers: Buffers::new(options.buffers),
            payer: OnceLock::new(),
            releases: Releases::default(),
            reconnects: AtomicU64::new(0),
            repeated: AtomicU64::new(0),
            forged: Arc::default(),
            over: AtomicBool::new(false),
            stop: Arc::new(StopLimit::new(&options.stop)),
            options,
        })
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire) || self.stop.is_over()
    }

    /// Makes a connection on another thread, and waits for it. A request to stop ends the wait; the thread then closes
    /// what it has made.
    fn connect_in_thread(self: &Arc<Self>, number: usize) -> Result<(Box<dyn Link>, Welcome)> {
        let (sender, made) = channel();
        let client = self.clone();
        let greet = move || {
            let options = &client.options;
            let link = client.connector.connect(number, options.connect)?;
            let join = Join { session: lock(&client.state).session, mount: client.mount };
            let welcome = handshake::greet(&*link, options.key.as_ref(), &join, options.connect)?;
            Ok((link, welcome))
        };
        let thread = std::thread::Builder::new()
            .name("target connects".into())
            .spawn(move || drop(sender.send(greet())))
            .map_err(|e| Error::io("a thread for", "a connection", e))?;
        let peer = self.connector.peer();
        loop {
            match made.recv_timeout(POLL_INTERVAL) {
                Ok(met) => return met,
                Err(RecvTimeoutError::Timeout) if !self.stop.is_over() => {}
                Err(RecvTimeoutError::Timeout) => return Err(Error::Stopped { peer: peer.to_owned() }),
                Err(RecvTimeoutError::Disconnected) => {
                    let why = thread.join().err().map_or_else(String::new, |panic| panic_text(&*panic));
                    let panic = std::io::Error::other(format!("its thread panicked: {why}"));
                    return Err(Error::io("connect to", peer, panic));
                }
            }
        }
    }

    /// Makes one connection. This may start a new session.
    fn connect(self: &Arc<Self>, number: usize) -> Result<()> {
        let (link, welcome) = self.connect_in_thread(number)?;
        let options = &self.options;
        let mut state = lock(&self.state);
        if state.session != Some(welcome.session) {
            for lane in state.lanes.iter_mut().filter_map(Option::take) {
                lane.kill();
            }
            state.session = Some(welcome.session);
            state.epoch += 1;
            *lock(&self.outstanding) = Outstanding::of(state.epoch);
        }
        state.boot = welcome.boot;
        state.read_only = welcome.read_only;
        state.why.clear();
        state.down_since = None;
        let (changed, forged) = (self.changed.clone(), self.forged.clone());
        let lane = Lane::new(link, welcome.credits, options.stall, self.stop.clone(), changed, forged);
        let reader = lane.clone();
        std::thread::Builder::new()
            .name("target answers".into())
            .spawn(move || reader.listen())
            .map_err(|e| Error::io("a thread for", "a connection", e))?;
        state.lanes[number] = Some(lane);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Maintains the connections until the client ends.
    fn maintain(self: &Arc<Self>) {
        let mut wait = RECONNECT_DELAYS.0;
        let mut next = Instant::now();
        while !self.is_over() {
            let lanes = {
                let mut state = lock(&self.state);
                if state.lanes.iter().flatten().all(|lane| lane.is_dead()) {
                    state.down_since.get_or_insert_with(Instant::now);
                }
                state.lanes.clone()
            };
            let mut missing = None;
            for (number, lane) in lanes.iter().enumerate() {
                match lane {
                    Some(lane) if !lane.is_dead() => lane.check_health(),
                    _ => missing = missing.or(Some(number)),
                }
            }
            if let Some(number) = missing
                && Instant::now() >= next
            {
                if lanes[number].is_some() {
                    self.reconnects.fetch_add(1, Ordering::Relaxed);
                    lock(&self.state).lanes[number] = None;
                }
                match self.connect(number) {
                    Ok(()) => {
                        wait = RECONNECT_DELAYS.0;
                        continue;
                    }
                    Err(error) => {
                        lock(&self.state).why = error.to_string();
                        self.changed.notify_all();
                        next = Instant::now() + wait;
                        wait = (wait * 2).min(RECONNECT_DELAYS.1);
                    }
                }
            }
            self.wait(POLL_INTERVAL.min(wait));
        }
        for lane in lock(&self.state).lanes.iter_mut().filter_map(Option::take) {
            lane.kill();
        }
    }

    fn wait(&self, time: Duration) {
        let state = lock(&self.state);
        drop(self.changed.wait_timeout(state, time));
    }

    /// Sets the function that maps users to those for whom their buffers count. Later calls have no effect.
    pub fn set_payer(&self, payer: Payer<u32>) {
        let _ = self.payer.set(payer);
    }

    /// Waits for a buffer for a user's data in one direction; `None` on a timeout.
    pub fn buffer(&self, uid: u32, flow: DataFlow) -> Result<Option<PooledBuffer>> {
        let deadline =
            lock(&self.state).deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let limit = deadline.map_or(self.options.give_up, |deadline| deadline.min(self.options.give_up));
        let uid = self.payer.get().map_or(uid, |payer| payer(uid));
        self.buffers.take(((0, uid), flow), limit)
    }

    /// Waits for a session.
    pub fn view(&self, until: Instant) -> std::result::Result<SessionView, Errno> {
        self.lane(None, false, until).map(|(_, view)| view).map_err(|error| match error {
            RequestError::Errno(errno) => errno,
            RequestError::SessionLost { .. } => Errno::IO,
        })
    }

    /// Waits for the lane with the most room, of one epoch or of any.
    fn lane(
        &self,
        epoch: Option<u64>,
        moves_data: bool,
        until: Instant,
    ) -> std::result::Result<(Arc<Lane>, SessionView), RequestError> {
        let soonest = Instant::now() + OUTAGE_WAIT;
        let mut state = lock(&self.state);
        loop {
            let view = SessionView { epoch: state.epoch, boot: state.boot };
            if epoch.is_some_and(|epoch| epoch != view.epoch) {
                return Err(RequestError::SessionLost { may_be_done: false });
            }
            if let Some(lane) = state.lane(moves_data) {
                return Ok((lane.clone(), view));
            }
            // Requests made while the target is gone wait hardly longer than those in flight when it went.
            let gone = state.down_since.map(|down_since| soonest.max(down_since + self.options.give_up));
            let until = [gone, state.deadline].into_iter().flatten().fold(self.stop.at(until), Instant::min);
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_over() {
                return Err(Errno::TIMEDOUT.into());
            }
            state = self
                .changed
                .wait_timeout(state, left.min(POLL_INTERVAL))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Sends a request in a session, over as many connections as it takes. The answer's data goes to `to`.
    pub fn call(
        &self,
        epoch: u64,
        request: &Request,
        data: Option<&MemoryRange>,
        to: Option<&MemoryRange>,
        until: Instant,
    ) -> std::result::Result<(Reply, usize), RequestError> {
        let body = pack(request).map_err(|_| Errno::INVAL)?;
        let id = self.number(epoch, request.changes(), until)?;
        let ended = self.until_answered(
            (epoch, id, request.moves_data()),
            (&body, request.reaches()),
            data,
            to,
            until,
        );
        self.ended(epoch, id, Some(request).filter(|_| ended.is_err()));
        match ended? {
            (Reply::Failed { errno }, _) => Err(Errno::from_raw_os_error(errno.clamp(1, 4095)).into()),
            other => Ok(other),
        }
    }

    fn until_answered(
        &self,
        (epoch, id, moves_data): (u64, u64, bool),
        body: (&[u8], bool),
        data: Option<&MemoryRange>,
        to: Option<&MemoryRange>,
        until: Instant,
    ) -> std::result::Result<(Reply, usize), RequestError> {
        let mut sent = false;
        loop {
            let (lane, _) = self.lane(Some(epoch), moves_data, until).map_err(|error| match error {
                RequestError::SessionLost { .. } => RequestError::SessionLost { may_be_done: sent },
                other => other,
            })?;
            // A cancelled request must not be sent.
            if Instant::now() >= self.stop.at(until) {
                return Err(Errno::TIMEDOUT.into());
            }
            let Some(call) = lane.register(id, to) else { continue };
            if sent {
                self.repeated.fetch_add(1, Ordering::Relaxed);
            }
            sent = true;
            let done = self.done();
            match lane.exchange(&call, (id, done), body, data, until) {
                CallEnd::Answered(reply, bytes) => return Ok((reply, bytes)),
                CallEnd::Lost => {}
                CallEnd::Cancelled => return Err(Errno::TIMEDOUT.into()),
            }
        }
    }

    /// Runs `ask` in the current session. It is run again if the session is lost, provided that it is repeatable or was
    /// certainly not executed. It is also run again if the target had no buffer for this user.
    pub fn ask<T>(
        &self,
        repeatable: bool,
        ask: impl Fn(SessionView, Instant) -> std::result::Result<T, RequestError>,
    ) -> std::result::Result<T, Errno> {
        let until = Instant::now() + self.options.give_up;
        let mut pause = FULL_DELAYS.0;
        loop {
            match ask(self.view(until)?, until) {
                Ok(done) => return Ok(done),
                Err(RequestError::Errno(FULL)) if Instant::now() + pause < until && self.pause(pause) => {
                    pause = (2 * pause).min(FULL_DELAYS.1);
                }
                Err(RequestError::Errno(errno)) => return Err(errno),
                Err(RequestError::SessionLost { may_be_done }) if repeatable || !may_be_done => {}
                // It may have been executed, and repeating it may have another effect.
                Err(RequestError::SessionLost { .. }) => return Err(Errno::IO),
            }
        }
    }

    /// Waits for `time`. Returns false if the client ends meanwhile.
    fn pause(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = lock(&self.state);
        loop {
            let now = Instant::now();
            if self.is_over() || state.deadline.is_some_and(|deadline| deadline <= now) {
                return false;
            }
            let left = state.deadline.unwrap_or(until).min(until).saturating_duration_since(now);
            if left.is_zero() {
                return true;
            }
            state = self
                .changed
                .wait_timeout(state, left.min(POLL_INTERVAL))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Whether there is no connection.
    pub fn is_disconnected(&self) -> bool {
        lock(&self.state).down_since.is_some()
    }

    /// From now on, requests wait at most this long.
    pub fn end_within(&self, time: Duration) {
        lock(&self.state).deadline = Some(Instant::now() + time);
        self.changed.notify_all();
    }

    /// Exposes memory to the target, if the transport can.
    pub fn expose(&self, memory: &Shareable, range: Range<usize>) -> Option<Exposed> {
        self.connector.expose(memory, range)
    }

    /// Releases exposed memory.
    pub fn forget_memory(&self, memory: &Shareable) {
        self.connector.forget(memory);
    }

    /// The route of data.
    pub fn via(&self) -> Via {
        let lane = lock(&self.state).lanes.iter().flatten().next().cloned();
        let (why, fix) = lane.map_or_else(
            || ("there is no connection".into(), "Check the target".into()),
            |lane| lane.link.why_inline(),
        );
        Via { transport: self.connector.transport(), why, fix }
    }

    pub fn report(&self) -> MountReport {
        let state = lock(&self.state);
        MountReport {
            target: self.connector.peer().to_owned(),
            transport: self.connector.transport(),
            encrypted: match (&self.options.key, self.connector.transport()) {
                (None, _) => "nothing",
                (Some(_), "rdma") => "frames",
                (Some(_), _) => "all",
            },
            connections: state.lanes.iter().flatten().filter(|lane| !lane.is_dead()).count(),
            reconnects: self.reconnects.load(Ordering::Relaxed),
            repeated: self.repeated.load(Ordering::Relaxed),
            forged: self.forged.load(Ordering::Relaxed),
            sessions_lost: state.epoch.saturating_sub(1),
            read_only: state.read_only,
            why: Some(state.why.clone()).filter(|why| !why.is_empty()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::{ServerOptions, Target};
    use crate::tcp::{TcpAcceptor, TcpConnector};

    const LONG: Duration = Duration::from_secs(60);

    /// A transport that panics.
    struct Defective;

    impl Connector for Defective {
        fn transport(&self) -> &'static str {
            "none"
        }
        fn peer(&self) -> &str {
            "nowhere"
        }
        fn connect(&self, _lane: usize, _limit: Duration) -> Result<Box<dyn Link>> {
            panic!("a defect of the test")
        }
    }

    #[test]
    fn a_panic_while_connecting_is_reported() {
        let client = Client::new(Box::new(Defective), [7; 16], ClientOptions::new(None));
        let error = client.connect(0).unwrap_err().to_string();
        assert!(error.contains("nowhere") && error.contains("panicked: a defect of the test"), "{error}");
    }

    #[test]
    fn a_request_past_its_deadline_is_not_sent() {
        let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
        let connector = TcpConnector::new(&acceptor.local().unwrap().to_string()).unwrap();
        let options = ServerOptions::new(&std::env::temp_dir(), None);
        let target = Target::start(options, vec![Box::new(acceptor)]).unwrap();
        let options = ClientOptions { lanes: 1, connect: LONG, stall: LONG, ..ClientOptions::new(None) };
        let client = Client::new(Box::new(connector), [7; 16], options);
        let _threads = ClientThreads::start(&client).unwrap();
        let id = client.number(1, false, Instant::now() + LONG).unwrap();
        let body = pack(&Request::Space { uid: 0 }).unwrap();
        let late = client.until_answered((1, id, false), (&body, false), None, None, Instant::now());
        assert_eq!(late, Err(Errno::TIMEDOUT.into()));
        client.ended(1, id, None);
        // There is one connection, so the late request would have arrived first.
        client.call(1, &Request::Space { uid: 0 }, None, None, Instant::now() + LONG).unwrap();
        assert_eq!(target.report().requests, 1);
    }
}
