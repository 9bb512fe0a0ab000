//! Options of a client, and its end on request.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use onehop_os::StopSignal;

use crate::auth::Key;

/// How long all requests together may take after a request to stop, to undo things at a target that answers.
const STOP_PATIENCE: Duration = Duration::from_secs(1);

/// Options of a client.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The shared secret, if there is one.
    pub key: Option<Key>,
    /// Connections for data. If there are several, one more serves requests without data.
    pub lanes: usize,
    /// The timeout for making a connection.
    pub connect: Duration,
    /// How long the server may be silent or not accept data before the connection is closed.
    pub stall: Duration,
    /// The timeout of a request, over any number of connections.
    pub give_up: Duration,
    /// Transfer buffers of 4 MiB. A user may hold half of them for each direction. Half as many more are reserved for
    /// users who find these taken, one each.
    pub buffers: usize,
    /// Once it is set, requests and pending connections have one second left, all together. Then they fail, and
    /// connections end.
    pub stop: StopSignal,
}

impl ClientOptions {
    /// The defaults, with a key or without.
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

/// Limits all waits after a request to stop.
pub(super) struct StopLimit {
    stop: StopSignal,
    end: OnceLock<Instant>,
}

impl StopLimit {
    pub(super) fn new(stop: &StopSignal) -> Self {
        Self { stop: stop.clone(), end: OnceLock::new() }
    }

    /// The deadline of a wait that would end at `until`.
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
