//! Whether a flush may report that everything is durable.
//!
//! A write is acknowledged when it is in the drive's volatile cache. If the drive loses that cache before a flush (its
//! power was gone, its firmware crashed, its subsystem was reset), a later flush succeeds and says nothing about it. So
//! the driver counts writes for each namespace, because a Flush command covers one namespace. Each queue reports a loss
//! once, by the next flush on it, as each open file does with `fsync`.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// The accounts of one drive.
#[derive(Default)]
pub(crate) struct Durability {
    /// Whether the drive has a volatile cache at all.
    cached: AtomicBool,
    accounts: Mutex<Vec<(u32, Arc<AcknowledgedWrites>)>>,
}

impl Durability {
    pub(crate) fn set_cached(&self, cached: bool) {
        self.cached.store(cached, Ordering::Relaxed);
    }

    /// The account of a namespace; it stays the same as long as the drive is open.
    pub(crate) fn account(&self, nsid: u32) -> Arc<AcknowledgedWrites> {
        let mut accounts = self.accounts();
        if let Some((_, account)) = accounts.iter().find(|(of, _)| *of == nsid) {
            return account.clone();
        }
        let account = Arc::<AcknowledgedWrites>::default();
        accounts.push((nsid, account.clone()));
        account
    }

    /// The drive may have lost its cache. No queue takes completions meanwhile.
    pub(crate) fn may_be_lost(&self) {
        if self.cached.load(Ordering::Relaxed) {
            self.accounts().iter().for_each(|(_, account)| account.may_be_lost());
        }
    }

    fn accounts(&self) -> MutexGuard<'_, Vec<(u32, Arc<AcknowledgedWrites>)>> {
        self.accounts.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Writes by kernels that use an exported queue: the driver does not see when they are acknowledged.
pub(crate) trait Writes: Send + Sync {
    /// Has [`AcknowledgedWrites::wrote`] called if writes were acknowledged since the last call.
    fn count(&self);
}

/// The acknowledged writes of one namespace.
#[derive(Default)]
pub(crate) struct AcknowledgedWrites {
    /// The exported queues that must be asked for writes.
    others: Mutex<Vec<Weak<dyn Writes>>>,
    /// Writes acknowledged so far; all those of a GPU job count as one, acknowledged at its end.
    written: AtomicU64,
    /// How many of them a flush has covered.
    flushed: AtomicU64,
    /// GPU jobs that are writing: any of their writes may have been acknowledged.
    writers: AtomicU32,
    /// How often acknowledged writes may have been lost.
    losses: AtomicU64,
    /// How many of these losses a flush has reported.
    reported: AtomicU64,
}

impl AcknowledgedWrites {
    /// A write was acknowledged.
    pub(crate) fn wrote(&self) {
        self.written.fetch_add(1, Ordering::SeqCst);
    }

    /// Writes will be acknowledged at unknown times, until the result is dropped.
    pub(crate) fn writing(&self) -> Writing<'_> {
        self.writers.fetch_add(1, Ordering::SeqCst);
        Writing(self)
    }

    /// Asks `writes` for writes before each flush and each loss, as long as it exists.
    pub(crate) fn ask(&self, writes: Weak<dyn Writes>) {
        self.others().push(writes);
    }

    fn others(&self) -> MutexGuard<'_, Vec<Weak<dyn Writes>>> {
        self.others.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// What a flush that is submitted now covers.
    pub(crate) fn mark(&self) -> u64 {
        self.others().retain(|writes| writes.upgrade().inspect(|writes| writes.count()).is_some());
        self.written.load(Ordering::SeqCst)
    }

    /// The losses that a new queue need not report.
    pub(crate) fn reported(&self) -> u64 {
        self.reported.load(Ordering::SeqCst)
    }

    fn may_be_lost(&self) {
        let is_writing = self.writers.load(Ordering::SeqCst) > 0;
        let written = self.mark();
        if self.flushed.fetch_max(written, Ordering::SeqCst) < written || is_writing {
            self.losses.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// A flush with this mark succeeded, on a queue that has reported `reported` losses. Whether everything that was written
    /// before it is durable.
    pub(crate) fn flushed(&self, mark: u64, reported: &mut u64) -> bool {
        self.flushed.fetch_max(mark, Ordering::SeqCst);
        let losses = self.losses.load(Ordering::SeqCst);
        self.reported.fetch_max(losses, Ordering::SeqCst);
        std::mem::replace(reported, losses) == losses
    }
}

/// A job whose writes are being acknowledged.
pub(crate) struct Writing<'a>(&'a AcknowledgedWrites);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        // Counted before the writer goes: a loss in between finds one of the two.
        self.0.wrote();
        self.0.writers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flush(account: &AcknowledgedWrites, seen: &mut u64) -> bool {
        account.flushed(account.mark(), seen)
    }

    fn cached() -> Durability {
        let drive = Durability::default();
        drive.set_cached(true);
        drive
    }

    #[test]
    fn only_what_was_not_flushed_can_be_lost() {
        let (drive, mut seen) = (cached(), 0);
        let account = drive.account(1);
        account.wrote();
        let mark = account.mark();
        account.wrote();
        assert!(account.flushed(mark, &mut seen));
        // The second write came after that flush was submitted.
        drive.may_be_lost();
        assert!(!flush(&account, &mut seen));
        // Reported once.
        assert!(flush(&account, &mut seen));
        drive.may_be_lost();
        assert!(flush(&account, &mut seen));
    }

    #[test]
    fn a_flush_of_another_namespace_covers_nothing() {
        let (drive, mut seen) = (cached(), [0; 2]);
        let (one, two) = (drive.account(1), drive.account(2));
        one.wrote();
        assert!(flush(&two, &mut seen[1]));
        drive.may_be_lost();
        assert!(flush(&two, &mut seen[1]));
        assert!(!flush(&one, &mut seen[0]));
        assert!(Arc::ptr_eq(&drive.account(1), &one));
    }

    #[test]
    fn writes_of_a_job_are_not_durable_before_a_flush_after_its_end() {
        let (drive, mut seen) = (cached(), 0);
        let account = drive.account(1);
        let job = account.writing();
        assert!(flush(&account, &mut seen));
        drive.may_be_lost();
        drop(job);
        assert!(!flush(&account, &mut seen));
        let job = account.writing();
        assert!(flush(&account, &mut seen));
        drop(job);
        drive.may_be_lost();
        assert!(!flush(&account, &mut seen));
        drop(account.writing());
        assert!(flush(&account, &mut seen));
        drive.may_be_lost();
        assert!(flush(&account, &mut seen));
    }

    #[test]
    fn every_queue_reports_a_loss() {
        let (drive, mut first, mut second) = (cached(), 0, 0);
        let account = drive.account(1);
        account.wrote();
        drive.may_be_lost();
        assert!(!flush(&account, &mut first) && !flush(&account, &mut second));
        let mut later = account.reported();
        assert!(flush(&account, &mut later) && flush(&account, &mut first));
    }

    #[test]
    fn without_a_cache_nothing_is_lost() {
        let (drive, mut seen) = (Durability::default(), 0);
        let account = drive.account(1);
        account.wrote();
        drive.may_be_lost();
        assert!(flush(&account, &mut seen));
    }
}
