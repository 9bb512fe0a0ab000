//! Deadlines, the CPU's cycle counter, and the identity of a thread.

use std::time::{Duration, Instant};

/// A moment after which a wait must end.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Instant);

impl Deadline {
    /// `wait` from now.
    #[must_use]
    pub fn after(wait: Duration) -> Self {
        Self(Instant::now() + wait)
    }

    /// Whether it has passed.
    #[must_use]
    pub fn passed(&self) -> bool {
        Instant::now() >= self.0
    }

    /// The time that is left.
    #[must_use]
    pub fn left(&self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
}

/// A number unique to this thread while it lives; never 0. Unlike the standard library's thread identity, it works to
/// the thread's very end: in destructors of C libraries' thread-local data (`pthread_key_create`).
#[inline]
#[must_use]
pub fn this_thread() -> usize {
    thread_local!(static PLACE: u8 = const { 0 });
    PLACE.with(|place| std::ptr::from_ref(place).addr())
}

/// The CPU's time-stamp counter; nanoseconds if there is none.
#[inline]
#[must_use]
pub fn cycles() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: rdtsc reads a counter and accesses no memory; every x86-64 CPU has it.
        unsafe { core::arch::x86_64::_rdtsc() }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        use std::sync::OnceLock;
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}
