//! The thread that executes commands, if the drive has one.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::this_thread;

use crate::core::Core;
use crate::{Error, Result};

/// Units of work before the lock is released, so that register accesses get their turn.
const BATCH: usize = 16;
/// Shorter waits spin, because sleeping takes longer.
const SPIN: Duration = Duration::from_micros(60);
/// How long it polls the mailbox before it sleeps.
const LINGER: Duration = Duration::from_micros(20);

/// The running thread; stopped and joined on drop.
pub(crate) struct Worker {
    core: Arc<Core>,
    thread: Option<JoinHandle<()>>,
    /// The thread's number, once it runs.
    number: Arc<AtomicUsize>,
}

impl Worker {
    pub(crate) fn start(core: Arc<Core>) -> Result<Self> {
        let (shared, number) = (core.clone(), Arc::<AtomicUsize>::default());
        let of_thread = number.clone();
        let thread = std::thread::Builder::new()
            .name("onehop-sim".into())
            .spawn(move || {
                of_thread.store(this_thread(), Release);
                work(&shared);
            })
            .map_err(Error::Worker)?;
        Ok(Self { core, thread: Some(thread), number })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.core.stop.store(true, SeqCst);
        self.core.wake();
        if let Some(thread) = self.thread.take()
            // An interrupt handler may drop the last handle: a thread cannot join itself.
            && self.number.load(Acquire) != this_thread()
        {
            let _ = thread.join();
        }
    }
}

fn work(core: &Core) {
    while !core.stop.load(Acquire) {
        match core.work(BATCH) {
            Some(wait) if wait.is_zero() => {}
            Some(wait) if wait < SPIN => linger(core, wait),
            wait => {
                linger(core, LINGER);
                if !core.has_mail() {
                    core.sleep(wait.map(|w| w.saturating_sub(LINGER)));
                }
            }
        }
    }
}

/// Polls the mailbox for a short time.
fn linger(core: &Core, time: Duration) {
    let end = Instant::now() + time;
    while !core.has_mail() && !core.stop.load(Acquire) && Instant::now() < end {
        std::thread::yield_now();
    }
}
