//! A folder of another machine.
//!
//! ```text
//! options  how a client goes about it
//! lane     a connection, and what is under way on it
//! tree     the folder, and how files are found again when the server forgot them
//! known    which files these are: numbers, places, and what the server calls them
//! root     what is known of its root, though the target may not answer
//! file     an open file
//! numbers  of requests, and what the target may forget of them
//! chores   requests that nobody waits for
//! ```
//! Connections come and go; what is under way is sent again over another one. A *session* is what the server knows of us. When it is
//! lost (the server was started anew) a new one begins, which is another *epoch* here: numbers of the old one mean nothing any more.

mod chores;
mod file;
mod known;
mod lane;
mod numbers;
mod options;
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
use crate::transport::{Connector, Exposed, Link, Shareable, Stretch};
use crate::tree::Via;
use crate::wire::{FULL, Join, MountId, Reply, Request, SessionId, Welcome, pack};
use crate::{Error, Result, handshake, lock, panic_text};
use chores::Chores;
use lane::{Ended, Lane};
use numbers::Outstanding;
pub use options::ClientOptions;
use options::StopLimit;
pub(crate) use threads::ClientThreads;
pub use tree::RemoteTree;

/// How often lanes are looked after.
const TICK: Duration = Duration::from_millis(50);
/// How long it is waited until a connection is tried again, at first and at most.
const AGAIN: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// How long a request waits until it is tried again that found no buffer at the target, at first and at most.
const FULL_PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// How long a request waits for a target that has been gone for long: until a connection is tried again.
const PATIENCE: Duration = Duration::from_secs(2);

/// A session, as far as requests need to know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionView {
    /// Counted from 1.
    pub epoch: u64,
    /// The server machine's run.
    pub boot: [u8; 16],
}

/// Why a request did not come to an end in its session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Trouble {
    /// Linux's word for it.
    Errno(Errno),
    /// The session is gone; perhaps it was done before.
    Gone { perhaps_done: bool },
}

impl From<Errno> for Trouble {
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
    /// How many of them are for data. A request that moves none would wait behind it.
    for_data: usize,
    /// Since when there has been no connection.
    cut: Option<Instant>,
    /// When the last request is to have been answered.
    ends: Option<Instant>,
    read_only: bool,
    /// Why there is no connection.
    why: String,
}

impl ClientState {
    /// The lane with the most room, if any has room.
    fn lane(&self, moves_data: bool) -> Option<&Arc<Lane>> {
        let most_room = |lanes: &'_ [Option<Arc<Lane>>]| {
            let all =
                lanes.iter().enumerate().filter_map(|(place, lane)| Some((lane.as_ref()?.room(), place)));
            all.max_by_key(|(room, _)| *room).filter(|(room, _)| *room > 0).map(|(_, place)| place)
        };
        let (for_data, others) = self.lanes.split_at(self.for_data);
        let other = || most_room(others).map(|place| place + self.for_data);
        let place = if !moves_data {
            other().or_else(|| most_room(for_data))
        } else if for_data.iter().flatten().all(|lane| lane.is_dead()) {
            other()
        } else {
            most_room(for_data)
        };
        self.lanes[place?].as_ref()
    }
}

/// What can be asked of a target.
pub(crate) struct Client {
    connector: Box<dyn Connector>,
    pub mount: MountId,
    options: ClientOptions,
    state: Mutex<ClientState>,
    changed: Arc<Condvar>,
    outstanding: Mutex<Outstanding>,
    answered: Condvar,
    /// Wakes the thread that reports them to the target.
    news: Condvar,
    buffers: Arc<Buffers>,
    /// For whom a buffer counts that a user takes.
    payer: OnceLock<Payer<u32>>,
    chores: Chores,
    reconnects: AtomicU64,
    repeated: AtomicU64,
    forged: Arc<AtomicU64>,
    over: AtomicBool,
    stop: Arc<StopLimit>,
}

/// What became of the connections of a mount.
#[derive(Clone, Debug, serde::Serialize)]
pub struct MountReport {
    /// The target.
    pub target: String,
    /// How bytes come from there.
    pub transport: &'static str,
    /// What is encrypted and authenticated on the way: `all`, `frames` (but not data that RDMA carries), `nothing`.
    pub encrypted: &'static str,
    /// Connections now.
    pub connections: usize,
    /// Connections that had to be made again.
    pub reconnects: u64,
    /// Requests that were sent again.
    pub repeated: u64,
    /// Connections that were closed because somebody on the way changed what was sent.
    pub forged: u64,
    /// Sessions that the target lost.
    pub sessions_lost: u64,
    /// Whether the target refuses all changes.
    pub read_only: bool,
    /// Why there is no connection now.
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
            news: Condvar::new(),
            buffers: Buffers::new(options.buffers),
            payer: OnceLock::new(),
            chores: Chores::default(),
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

    /// Has a thread make a connection, and waits for it. A request to stop ends the wait, and leaves the thread to itself: it
    /// closes what it has made.
    fn meet(self: &Arc<Self>, number: usize) -> Result<(Box<dyn Link>, Welcome)> {
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
            match made.recv_timeout(TICK) {
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

    /// Makes one connection; the session that comes of it may be another one.
    fn connect(self: &Arc<Self>, number: usize) -> Result<()> {
        let (link, welcome) = self.meet(number)?;
        let options = &self.options;
        let mut state = lock(&self.state);
        if state.session != Some(welcome.session) {
            for lane in state.lanes.iter_mut().filter_map(Option::take) {
                lane.die();
            }
            state.session = Some(welcome.session);
            state.epoch += 1;
            *lock(&self.outstanding) = Outstanding::of(state.epoch);
        }
        state.boot = welcome.boot;
        state.read_only = welcome.read_only;
        state.why.clear();
        state.cut = None;
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

    /// Keeps connections up, until it is over.
    fn keep(self: &Arc<Self>) {
        let mut wait = AGAIN.0;
        let mut next = Instant::now();
        while !self.is_over() {
            let lanes = {
                let mut state = lock(&self.state);
                if state.lanes.iter().flatten().all(|lane| lane.is_dead()) {
                    state.cut.get_or_insert_with(Instant::now);
                }
                state.lanes.clone()
            };
            let mut missing = None;
            for (number, lane) in lanes.iter().enumerate() {
                match lane {
                    Some(lane) if !lane.is_dead() => lane.look_after(),
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
                        wait = AGAIN.0;
                        continue;
                    }
                    Err(error) => {
                        lock(&self.state).why = error.to_string();
                        self.changed.notify_all();
                        next = Instant::now() + wait;
                        wait = (wait * 2).min(AGAIN.1);
                    }
                }
            }
            self.wait(TICK.min(wait));
        }
        for lane in lock(&self.state).lanes.iter_mut().filter_map(Option::take) {
            lane.die();
        }
    }

    fn wait(&self, time: Duration) {
        let state = lock(&self.state);
        drop(self.changed.wait_timeout(state, time));
    }

    /// Has buffers that some users take count for others; the first time it is called.
    pub fn set_payer(&self, payer: Payer<u32>) {
        let _ = self.payer.set(payer);
    }

    /// A buffer for a user's data that goes one way, waited for; none where that takes too long.
    pub fn buffer(&self, uid: u32, way: DataFlow) -> Result<Option<PooledBuffer>> {
        let ends = lock(&self.state).ends.map(|ends| ends.saturating_duration_since(Instant::now()));
        let limit = ends.map_or(self.options.give_up, |ends| ends.min(self.options.give_up));
        let uid = self.payer.get().map_or(uid, |payer| payer(uid));
        self.buffers.take(((0, uid), way), limit)
    }

    /// The session that is there, waited for.
    pub fn view(&self, until: Instant) -> std::result::Result<SessionView, Errno> {
        self.lane(None, false, until).map(|(_, view)| view).map_err(|trouble| match trouble {
            Trouble::Errno(errno) => errno,
            Trouble::Gone { .. } => Errno::IO,
        })
    }

    /// The lane with the most room, of one epoch or of any, for a request that moves data or none.
    fn lane(
        &self,
        epoch: Option<u64>,
        moves_data: bool,
        until: Instant,
    ) -> std::result::Result<(Arc<Lane>, SessionView), Trouble> {
        let soonest = Instant::now() + PATIENCE;
        let mut state = lock(&self.state);
        loop {
            let view = SessionView { epoch: state.epoch, boot: state.boot };
            if epoch.is_some_and(|epoch| epoch != view.epoch) {
                return Err(Trouble::Gone { perhaps_done: false });
            }
            if let Some(lane) = state.lane(moves_data) {
                return Ok((lane.clone(), view));
            }
            // What is asked for while the target is gone waits hardly longer than what was under way when it went.
            let gone = state.cut.map(|cut| soonest.max(cut + self.options.give_up));
            let until = [gone, state.ends].into_iter().flatten().fold(self.stop.at(until), Instant::min);
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_over() {
                return Err(Errno::TIMEDOUT.into());
            }
            state =
                self.changed.wait_timeout(state, left.min(TICK)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Asks for something in a session, over as many connections as it takes. The answer's data goes to `to`.
    pub fn call(
        &self,
        epoch: u64,
        request: &Request,
        data: Option<&Stretch>,
        to: Option<&Stretch>,
        until: Instant,
    ) -> std::result::Result<(Reply, usize), Trouble> {
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
        data: Option<&Stretch>,
        to: Option<&Stretch>,
        until: Instant,
    ) -> std::result::Result<(Reply, usize), Trouble> {
        let mut sent = false;
        loop {
            let (lane, _) = self.lane(Some(epoch), moves_data, until).map_err(|trouble| match trouble {
                Trouble::Gone { .. } => Trouble::Gone { perhaps_done: sent },
                other => other,
            })?;
            // What has been given up is not to happen.
            if Instant::now() >= self.stop.at(until) {
                return Err(Errno::TIMEDOUT.into());
            }
            let Some(call) = lane.take(id, to) else { continue };
            if sent {
                self.repeated.fetch_add(1, Ordering::Relaxed);
            }
            sent = true;
            let done = self.done();
            match lane.exchange(&call, (id, done), body, data, until) {
                Ended::Answered(reply, bytes) => return Ok((reply, bytes)),
                Ended::Lost => {}
                Ended::GaveUp => return Err(Errno::TIMEDOUT.into()),
            }
        }
    }

    /// Does something in whatever session there is; `ask` may find out what it needs first. Where the session is lost on the
    /// way it is done again, if that is as good as once, or it is sure that it was not done. It is also done again where the
    /// target had no buffer for this user.
    pub fn ask<T>(
        &self,
        repeatable: bool,
        ask: impl Fn(SessionView, Instant) -> std::result::Result<T, Trouble>,
    ) -> std::result::Result<T, Errno> {
        let until = Instant::now() + self.options.give_up;
        let mut pause = FULL_PAUSES.0;
        loop {
            match ask(self.view(until)?, until) {
                Ok(done) => return Ok(done),
                Err(Trouble::Errno(FULL)) if Instant::now() + pause < until && self.pause(pause) => {
                    pause = (2 * pause).min(FULL_PAUSES.1);
                }
                Err(Trouble::Errno(errno)) => return Err(errno),
                Err(Trouble::Gone { perhaps_done }) if repeatable || !perhaps_done => {}
                // It may have been done or not, and doing it again may do something else.
                Err(Trouble::Gone { .. }) => return Err(Errno::IO),
            }
        }
    }

    /// Waits for so long; whether the mount has not ended meanwhile.
    fn pause(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = lock(&self.state);
        loop {
            let now = Instant::now();
            if self.is_over() || state.ends.is_some_and(|ends| ends <= now) {
                return false;
            }
            let left = state.ends.unwrap_or(until).min(until).saturating_duration_since(now);
            if left.is_zero() {
                return true;
            }
            state =
                self.changed.wait_timeout(state, left.min(TICK)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether there is no connection.
    pub fn is_cut(&self) -> bool {
        lock(&self.state).cut.is_some()
    }

    /// Has requests wait for a connection for so long at most, from now on.
    pub fn end_within(&self, time: Duration) {
        lock(&self.state).ends = Some(Instant::now() + time);
        self.changed.notify_all();
    }

    /// Makes memory known to the target, where the transport can.
    pub fn expose(&self, memory: &Shareable, range: Range<usize>) -> Option<Exposed> {
        self.connector.expose(memory, range)
    }

    /// Lets go of it.
    pub fn forget_memory(&self, memory: &Shareable) {
        self.connector.forget(memory);
    }

    /// Which way bytes come.
    pub fn via(&self) -> Via {
        let lane = lock(&self.state).lanes.iter().flatten().next().cloned();
        let (why, fix) = lane.map_or_else(
            || ("there is no connection".into(), "Look at the target".into()),
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

    /// A transport with a defect.
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
    fn a_connection_whose_thread_panicked_is_no_request_to_stop() {
        let client = Client::new(Box::new(Defective), [7; 16], ClientOptions::new(None));
        let error = client.connect(0).unwrap_err().to_string();
        assert!(error.contains("nowhere") && error.contains("panicked: a defect of the test"), "{error}");
    }

    #[test]
    fn a_request_whose_time_is_up_is_not_sent() {
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
        // There is one connection, so that would have come before this.
        client.call(1, &Request::Space { uid: 0 }, None, None, Instant::now() + LONG).unwrap();
        assert_eq!(target.report().requests, 1);
    }
}
