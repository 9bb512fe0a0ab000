//! The statistics that programs have open.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use onehop_target::shares::Shares;
use rustix::io::Errno;

use crate::lock;
use crate::persons::Persons;

/// Reports that are open at once.
const MOST_REPORTS: u64 = 1024;

/// What the statistics said when somebody opened them.
struct OpenReport {
    text: Arc<Vec<u8>>,
    uid: u32,
}

/// All of these, by their handles.
pub(super) struct OpenReports {
    all: Mutex<HashMap<u64, OpenReport>>,
    shares: Shares,
}

impl OpenReports {
    pub fn new(persons: &Persons) -> Self {
        Self { all: Mutex::default(), shares: persons.shares(MOST_REPORTS) }
    }

    /// # Errors
    /// `EMFILE` for a user who has as many as are left to others.
    pub fn open(&self, handle: u64, uid: u32, text: impl FnOnce() -> Vec<u8>) -> Result<(), Errno> {
        if !self.shares.take(uid, 1) {
            return Err(Errno::MFILE);
        }
        let text = Arc::new(text());
        lock(&self.all).insert(handle, OpenReport { text, uid });
        Ok(())
    }

    /// What a handle reads.
    pub fn text(&self, handle: u64) -> Arc<Vec<u8>> {
        lock(&self.all).get(&handle).map(|report| report.text.clone()).unwrap_or_default()
    }

    pub fn close(&self, handle: u64) {
        if let Some(report) = lock(&self.all).remove(&handle) {
            self.shares.put_back(report.uid, 1);
        }
    }
}
