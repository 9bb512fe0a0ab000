//! A request to stop, which ends long waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often a wait checks for a request to stop.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A request to stop. Clones are the same request; it cannot be withdrawn.
#[derive(Clone, Debug, Default)]
pub struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    /// Requests a stop.
    pub fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether a stop was requested.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Sleeps, and ends early on a request to stop.
    pub fn sleep(&self, time: Duration) {
        let start = Instant::now();
        while !self.is_set() {
            let left = time.saturating_sub(start.elapsed());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(STOP_POLL_INTERVAL));
        }
    }
}

/// A flag that a signal handler sets.
impl From<Arc<AtomicBool>> for StopSignal {
    fn from(flag: Arc<AtomicBool>) -> Self {
        Self(flag)
    }
}
