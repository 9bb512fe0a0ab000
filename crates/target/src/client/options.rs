//! How a client goes about it, and when it ends on request.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use onehop_os::StopSignal;

use crate::auth::Key;

/// How long requests may go on after a request to stop, all together: for what has to be undone at a target that answers.
const STOP_PATIENCE: Duration = Duration::from_secs(1);

/// How a client goes about it.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The shared secret, where there is one.
    pub key: Option<Key>,
    /// Connections for data at once. Where there are several, one more is for requests that move none.
    pub lanes: usize,
    /// A connection is there.
    pub connect: Duration,
    /// The server says something, or takes something, or the connection is given up.
    pub stall: Duration,
    /// What was asked for is done, over however many connections, or fails.
    pub give_up: Duration,
    /// Buffers of 4 MiB for data on its way. A user has half of them at most, for either way. There are half as many more, for those
    /// who come when others have these: one each.
    pub buffers: usize,
    /// Once it is set, requests and connections that are being made have one second left, all together; then they fail, and
    /// connections end.
    pub stop: StopSignal,
}

impl ClientOptions {
    /// With a key or without.
    #[must_use]
    pub fn new(key: Option<Key>) -> Self {
        Self {
            key,
            lanes: 4,
            connect: Duration::from_secs(3),
            stall: Duration::from_secs(10),
            give_up: Duration::from_secs(60),
            buffers: 64,
            stop: StopSignal::default(),
        }
    }
}

/// The end of all waits after a request to stop.
pub(super) struct StopLimit {
    stop: StopSignal,
    end: OnceLock<Instant>,
}

impl StopLimit {
    pub(super) fn new(stop: &StopSignal) -> Self {
        Self { stop: stop.clone(), end: OnceLock::new() }
    }

    /// When a wait ends that would end at `until`.
    pub(super) fn at(&self, until: Instant) -> Instant {
        match self.stop.is_set() {
            true => until.min(*self.end.get_or_init(|| Instant::now() + STOP_PATIENCE)),
            false => until,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        let now = Instant::now();
        self.stop.is_set() && self.at(now + STOP_PATIENCE) <= now
    }
}
