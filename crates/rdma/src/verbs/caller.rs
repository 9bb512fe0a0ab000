//! The thread that makes library calls for threads that have acted as users.
//!
//! Many calls are a `write` to the device's descriptor. The kernel (`ib_safe_file_access`) refuses one from a thread
//! whose copy of the credentials is not the one with which the descriptor was opened, even if the values are equal.
//! Which calls these are depends on the provider: soft-RoCE even posts work so. So all calls on an open device are made
//! by [`Caller::run`].

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{SendError, Sender, channel};

use onehop_os::identity;

use crate::{Error, Result};

/// A call, and a value dropped once it has been made.
struct CallerJob {
    call: Box<dyn FnOnce() + Send>,
    _over: Sender<()>,
}

/// The thread, which ends when this is dropped.
pub(super) struct Caller {
    jobs: Sender<CallerJob>,
}

impl Caller {
    /// Starts it, with the credentials of this thread, which opens the device.
    pub fn start() -> Result<Self> {
        if identity::has_changed() {
            return Err(Error::ActedAsUser { what: "open an RDMA device" });
        }
        let (jobs, queue) = channel::<CallerJob>();
        let thread = std::thread::Builder::new().name("rdma verbs".into());
        let thread = thread.spawn(move || queue.into_iter().for_each(|job| (job.call)()));
        thread.map_err(|e| Error::system("starting a thread", e))?;
        Ok(Self { jobs })
    }

    /// Makes a call, here or, if this thread has acted as a user, on the other thread. Waits as long as the call takes.
    ///
    /// # Safety
    /// Any thread may make the call, and use its captures and result.
    pub unsafe fn run<T>(&self, call: impl FnOnce() -> T) -> T {
        if !identity::has_changed() {
            return call();
        }
        let mut result = None;
        let (over, wait) = channel();
        let job: Box<dyn FnOnce() + '_> = Box::new(|| result = Some(catch_unwind(AssertUnwindSafe(call))));
        // SAFETY: only the lifetime and `Send` change. The caller vouches for the latter. What the job borrows outlives it: it is
        // consumed by being run, either below or before its end of `over` is dropped, which is waited for.
        let job = unsafe { std::mem::transmute::<Box<dyn FnOnce() + '_>, Box<dyn FnOnce() + Send>>(job) };
        if let Err(SendError(job)) = self.jobs.send(CallerJob { call: job, _over: over }) {
            (job.call)();
        }
        let _ = wait.recv();
        match result {
            Some(Ok(result)) => result,
            Some(Err(panic)) => resume_unwind(panic),
            None => unreachable!("a call is made or the thread has ended"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_acted_as_users_delegate_calls() {
        let caller = Caller::start().unwrap();
        let (here, mut count) = (std::thread::current().id(), 0);
        let who = || std::thread::current().id();
        // SAFETY: any thread may ask who it is.
        assert_eq!(unsafe { caller.run(who) }, here);
        std::thread::scope(|scope| {
            let acted = scope.spawn(|| {
                identity::note_change();
                // SAFETY: as above, and numbers may be counted by any thread.
                let (there, changed) = unsafe { (caller.run(who), caller.run(identity::has_changed)) };
                // SAFETY: as above.
                (0..100).for_each(|_| unsafe { caller.run(|| count += 1) });
                assert!(there != who() && there != here && !changed);
                assert!(matches!(Caller::start(), Err(Error::ActedAsUser { .. })));
                // A panic is passed to the caller; the thread continues.
                // SAFETY: as above.
                let panicked =
                    catch_unwind(AssertUnwindSafe(|| unsafe { caller.run(|| panic!("a test's")) }));
                // SAFETY: as above.
                assert!(panicked.is_err() && unsafe { caller.run(who) } == there);
            });
            acted.join().unwrap();
        });
        assert_eq!(count, 100);
    }
}
