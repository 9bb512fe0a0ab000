//! Whether a controller is still reachable.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::Error;

/// Whether a controller is still reachable.
#[derive(Default)]
pub(crate) struct LinkHealth {
    lost: Mutex<Option<Error>>,
    changed: Condvar,
}

impl LinkHealth {
    fn lock(&self) -> MutexGuard<'_, Option<Error>> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why it is not reachable; `None` if it is.
    pub(crate) fn lost(&self) -> Option<Error> {
        self.lock().clone()
    }

    /// Records the first reason.
    pub(crate) fn lose(&self, why: &Error) {
        self.lock().get_or_insert_with(|| why.clone());
        self.changed.notify_all();
    }

    /// Waits at most `limit` until it is lost; returns whether it is.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let guard = self.changed.wait_timeout_while(self.lock(), limit, |lost| lost.is_none());
        guard.unwrap_or_else(PoisonError::into_inner).0.is_some()
    }
}
