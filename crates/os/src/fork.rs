//! A library's locks when its process forks.
//!
//! A child has one thread, the one that forked. A lock that another thread held at that moment stays locked in the
//! child. So the forking thread takes all locks of the library before, and releases them in both processes.

use std::cell::UnsafeCell;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{Error, Result, this_thread};

/// The locks of a library that no other thread may hold during a fork.
///
/// Its functions must not panic: C calls them.
pub trait ForkLocks: Sized + 'static {
    /// A static of the library.
    fn place() -> &'static HeldInFork<Self>;

    /// Takes all locks, in the order in which calls take them.
    fn take() -> Self;

    /// In the child, invalidates the parent's objects. The locks are released afterwards.
    fn disown(&mut self) {}
}

/// Holds the locks while a thread forks. It is a static, as a thread that forks at its end has no thread-local values
/// left.
pub struct HeldInFork<L> {
    is_watched: AtomicBool,
    /// Held by the forking thread: a second one waits.
    turn: Mutex<()>,
    /// The thread that holds the turn; 0 for none.
    forker: AtomicUsize,
    /// Used by the thread that holds the turn. The locks are released before the turn.
    held: UnsafeCell<Option<(L, MutexGuard<'static, ()>)>>,
}

// SAFETY: only the thread that holds the turn accesses the cell. It takes out what it has put there, so that guards of
// locks are dropped by the thread that made them; in a child that is the copy of this thread.
unsafe impl<L> Sync for HeldInFork<L> {}

impl<L> Default for HeldInFork<L> {
    fn default() -> Self {
        Self::new()
    }
}

impl<L> HeldInFork<L> {
    /// No locks yet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            is_watched: AtomicBool::new(false),
            turn: Mutex::new(()),
            forker: AtomicUsize::new(0),
            held: UnsafeCell::new(None),
        }
    }

    fn put(&'static self, take: fn() -> L) {
        // Two threads that register at the same time may both have registered the functions.
        if self.forker.load(Ordering::Relaxed) == this_thread() {
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.forker.store(this_thread(), Ordering::Relaxed);
        let locks = take();
        // SAFETY: this thread has the turn.
        unsafe { *self.held.get() = Some((locks, turn)) };
    }

    fn remove(&'static self) -> Option<(L, MutexGuard<'static, ()>)> {
        if self.forker.load(Ordering::Relaxed) != this_thread() {
            return None;
        }
        // SAFETY: this thread wrote its number when it had the turn, which it still has: the guard is in the cell.
        let held = unsafe { (*self.held.get()).take() };
        self.forker.store(0, Ordering::Relaxed);
        held
    }
}

/// From now on, holds a library's locks during every fork of this process, except for programs that are started by
/// `posix_spawn` or `vfork`. Every call of the library begins with this, before it takes a lock.
///
/// # Errors
/// When memory is short.
pub fn watch_forks<L: ForkLocks>() -> Result<()> {
    extern "C" fn before<L: ForkLocks>() {
        L::place().put(L::take);
    }
    extern "C" fn after<L: ForkLocks>() {
        drop(L::place().remove());
    }
    extern "C" fn in_child<L: ForkLocks>() {
        // In one binding: two would be dropped in reverse order, the turn first.
        if let Some(mut held) = L::place().remove() {
            held.0.disown();
        }
    }
    let is_watched = &L::place().is_watched;
    if is_watched.load(Ordering::Acquire) {
        return Ok(());
    }
    // SAFETY: the functions are safe to call on any thread. The C library forgets them when the library that contains
    // them, which is the one that this call is linked into, is unloaded.
    let error = unsafe { libc::pthread_atfork(Some(before::<L>), Some(after::<L>), Some(in_child::<L>)) };
    if error != 0 {
        return Err(Error::system("pthread_atfork", std::io::Error::from_raw_os_error(error)));
    }
    is_watched.store(true, Ordering::Release);
    Ok(())
}

/// Writes to stderr without a lock: another thread may hold that of [`std::io::stderr`] during a fork.
///
/// # Errors
/// When stderr is closed or full.
pub fn write_to_stderr(mut bytes: &[u8]) -> std::io::Result<()> {
    // SAFETY: stderr stays open for the process, or is closed, which the call below reports.
    let stderr = unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) };
    while !bytes.is_empty() {
        match rustix::io::write(stderr, bytes) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
