//! Whether a flush may say that everything is durable.
//!
//! A write is acknowledged when it is in the drive's volatile cache. If the drive loses that cache before a flush (its
//! power was gone, its firmware crashed, its subsystem was reset), a later flush succeeds and says nothing about it.
//! The flush that would have covered those writes therefore fails, once, as `fsync` does.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The account of one drive.
#[derive(Default)]
pub(crate) struct Durability {
    /// Whether the drive has a volatile cache at all.
    cached: AtomicBool,
    /// Writes acknowledged so far.
    written: AtomicU64,
    /// How many of them a flush has covered.
    flushed: AtomicU64,
    lost: AtomicBool,
}

impl Durability {
    pub(crate) fn set_cached(&self, cached: bool) {
        self.cached.store(cached, Ordering::Relaxed);
    }

    /// A write was acknowledged.
    pub(crate) fn wrote(&self) {
        self.written.fetch_add(1, Ordering::SeqCst);
    }

    /// What a flush that is submitted now covers.
    pub(crate) fn mark(&self) -> u64 {
        self.written.load(Ordering::SeqCst)
    }

    /// The drive may have lost what was in its cache.
    pub(crate) fn may_be_lost(&self) {
        let written = self.mark();
        if self.cached.load(Ordering::Relaxed) && self.flushed.fetch_max(written, Ordering::SeqCst) < written
        {
            self.lost.store(true, Ordering::SeqCst);
        }
    }

    /// A flush with this mark succeeded. Whether everything that it covers is durable.
    pub(crate) fn flushed(&self, mark: u64) -> bool {
        let kept = !self.lost.swap(false, Ordering::SeqCst);
        self.flushed.fetch_max(mark, Ordering::SeqCst);
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_not_flushed_can_be_lost() {
        let account = Durability::default();
        account.set_cached(true);
        account.wrote();
        let mark = account.mark();
        account.wrote();
        assert!(account.flushed(mark));
        // The second write came after that flush was submitted.
        account.may_be_lost();
        assert!(!account.flushed(account.mark()));
        // Said once.
        assert!(account.flushed(account.mark()));
        account.may_be_lost();
        assert!(account.flushed(account.mark()));
    }

    #[test]
    fn without_a_cache_nothing_is_lost() {
        let account = Durability::default();
        account.wrote();
        account.may_be_lost();
        assert!(account.flushed(account.mark()));
    }
}
