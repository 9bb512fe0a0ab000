//! Starts threads for threads that act as users.

use std::io::{Error, Result};
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};

use crate::identity;

type Work = Box<dyn FnOnce() + Send>;

/// A thread to be started, and its requester.
struct StartJob {
    name: String,
    work: Work,
    started: Sender<Result<JoinHandle<()>>>,
}

/// Starts threads, all with the process's own credentials.
///
/// A new thread inherits the credentials of its creator: the user's, while that one acts as a user, and later still a
/// copy of its own (see [`identity::has_changed`]). So threads that may act as users have threads started by one that
/// never does.
pub struct ThreadStarter(Sender<StartJob>);

impl ThreadStarter {
    /// Starts the thread that starts others, which ends when this is dropped.
    ///
    /// # Errors
    /// When this thread has acted as a user, or the system has no more threads.
    pub fn new() -> Result<Self> {
        if identity::has_changed() {
            return Err(Error::other("a thread that has acted as a user cannot start others"));
        }
        let (jobs, queue) = channel::<StartJob>();
        let (runs, is_running) = channel();
        let run = move || {
            let _ = runs.send(());
            for StartJob { name, work, started } in queue {
                // Without a requester the new thread runs all the same.
                let _ = started.send(Builder::new().name(name).spawn(work));
            }
        };
        Builder::new().name("thread starter".into()).spawn(run)?;
        // Until it runs it needs memory, without which the process would end.
        is_running.recv().map_err(|_| Error::other("the thread that starts others has ended"))?;
        Ok(Self(jobs))
    }

    /// Starts a thread.
    ///
    /// # Errors
    /// When the system is out of threads.
    pub fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
        if !identity::has_changed() {
            return Builder::new().name(name.into()).spawn(work);
        }
        let (started, wait) = channel();
        let over = || Error::other("the thread that starts others has ended");
        let job = StartJob { name: name.into(), work: Box::new(work), started };
        self.0.send(job).map_err(|_| over())?;
        wait.recv().map_err(|_| over())?
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::thread::{capabilities, current_timer_slack, set_current_timer_slack};

    use super::*;
    use crate::identity::{Credentials, OwnCredentials};

    #[test]
    fn settings_of_a_thread_that_acted_are_not_inherited() {
        let starter = ThreadStarter::new().unwrap();
        let slack = || {
            let (say, said) = channel();
            let work = move || say.send((current_timer_slack().unwrap(), identity::has_changed())).unwrap();
            starter.spawn("of a test", work).unwrap().join().unwrap();
            said.recv().unwrap()
        };
        let before = current_timer_slack().unwrap();
        std::thread::scope(|scope| {
            let acted = scope.spawn(|| {
                let own = before + 12_345;
                set_current_timer_slack(std::num::NonZeroU64::new(own)).unwrap();
                assert_eq!(slack(), (own, false));
                identity::note_change();
                assert_eq!(slack(), (before, false));
                assert!(ThreadStarter::new().is_err());
            });
            acted.join().unwrap();
        });
    }

    #[test]
    fn threads_started_for_a_user_belong_to_the_process() {
        let Some(own) = OwnCredentials::of_root().unwrap() else {
            let _ = writeln!(std::io::stderr(), "SKIPPED: only root can act as another user");
            return;
        };
        let (starter, before) = (ThreadStarter::new().unwrap(), capabilities(None).unwrap());
        let user = Credentials { uid: 21_001, gid: 21_002, groups: &[21_003], privileged: true };
        let _acting = own.act_as(&user).unwrap();
        let (say, said) = channel();
        let work = move || {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            say.send((capabilities(None).unwrap(), status)).unwrap();
        };
        starter.spawn("of a test", work).unwrap().join().unwrap();
        let (capabilities, status) = said.recv().unwrap();
        assert_eq!(capabilities, before);
        let has = |line: &str| status.lines().any(|of| of == line);
        assert!(
            has("Uid:\t0\t0\t0\t0") && !status.contains("21002") && !status.contains("21003"),
            "{status}"
        );
    }
}
