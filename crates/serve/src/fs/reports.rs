//! Statistics that programs have open.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use onehop_target::shares::Shares;
use rustix::io::Errno;

use crate::lock;
use crate::persons::Persons;

/// Reports that may be open at once.
const MAX_REPORTS: u64 = 1024;

/// A report as it was when it was opened.
struct OpenReport {
    text: Arc<Vec<u8>>,
    uid: u32,
}

/// All open reports, by handle.
pub(super) struct OpenReports {
    all: Mutex<HashMap<u64, OpenReport>>,
    shares: Shares,
}

impl OpenReports {
    pub fn new(persons: &Persons) -> Self {
        Self { all: Mutex::default(), shares: persons.shares(MAX_REPORTS) }
    }

    /// # Errors
    /// `EMFILE` when the user has too many open.
    pub fn open(&self, handle: u64, uid: u32, text: impl FnOnce() -> Vec<u8>) -> Result<(), Errno> {
        if !self.shares.take(uid, 1) {
            return Err(Errno::MFILE);
        }
        let text = Arc::new(text());
        lock(&self.all).insert(handle, OpenReport { text, uid });
        Ok(())
    }

    /// The report of a handle.
    pub fn text(&self, handle: u64) -> Arc<Vec<u8>> {
        lock(&self.all).get(&handle).map(|report| report.text.clone()).unwrap_or_default()
    }

    pub fn close(&self, handle: u64) {
        if let Some(report) = lock(&self.all).remove(&handle) {
            self.shares.put_back(report.uid, 1);
        }
    }
}
