//! The credentials with which requests are executed.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use fuser::Request;
use onehop_os::identity::groups_of;
use onehop_target::wire::Caller;
use rustix::fs::{CWD, Mode, OFlags, RawDir, openat};
use rustix::io::Errno;

use crate::lock;
use crate::table::Owner;

/// How long a thread's groups are cached: reading them takes longer than most requests. This is safe. A thread needs a
/// capability to change its groups, its ID is not reused this soon, and the kernel has checked the request with the
/// current groups.
const GROUPS_CACHE_TIME: Duration = Duration::from_millis(100);
/// Cached threads.
const MAX_CACHED: usize = 1024;
/// Larger group lists are not cached. Reading and setting 65 536 groups, the maximum, takes a CPU some ten
/// milliseconds.
const MANY_GROUPS: usize = 1024;
/// How long a person counts as having threads with many groups.
const MANY_GROUPS_TIME: Duration = Duration::from_secs(10);

/// Thread, user and group.
type CallerKey = (u32, u32, u32);

/// The caller of a request, as far as the kernel reports it. The supplementary groups are read when the request is
/// executed.
#[derive(Clone, Copy)]
pub(super) struct Requester {
    pub uid: u32,
    pub gid: u32,
    pub thread: u32,
    pub umask: u32,
}

impl Requester {
    /// The caller of a FUSE request.
    pub fn of(request: &Request, umask: u32) -> Self {
        Self { uid: request.uid(), gid: request.gid(), thread: request.pid(), umask }
    }
}

/// Cached groups of threads.
#[derive(Default)]
pub(super) struct Callers {
    /// By thread, user and group.
    known: Mutex<HashMap<CallerKey, (Instant, Vec<u32>)>>,
    /// Persons with threads that have many groups, and when this was seen last.
    with_many: Mutex<HashMap<u32, Instant>>,
}

impl Callers {
    /// The credentials for a request. May block: not for session threads that other users need.
    ///
    /// # Errors
    /// When the groups cannot be read now. Without them, permissions would be missing.
    pub fn caller(&self, requester: Requester, person: u32) -> Result<Caller, Errno> {
        let Requester { uid, gid, thread, umask } = requester;
        // FUSE does not send groups. Root needs none.
        let groups = if uid == 0 { Vec::new() } else { self.groups((thread, uid, gid), person)? };
        Ok(Caller { uid, gid, groups, umask })
    }

    /// Whether a thread of this person had many groups recently.
    pub fn has_many(&self, person: u32) -> bool {
        lock(&self.with_many).get(&person).is_some_and(|seen| seen.elapsed() < MANY_GROUPS_TIME)
    }

    /// The groups of a thread; empty if it is not visible from here.
    fn groups(&self, who: CallerKey, person: u32) -> Result<Vec<u32>, Errno> {
        if let Some((since, groups)) = lock(&self.known).get(&who)
            && since.elapsed() < GROUPS_CACHE_TIME
        {
            return Ok(groups.clone());
        }
        let groups = groups_of(who.0, who.1, who.2)?.unwrap_or_default();
        if groups.len() > MANY_GROUPS {
            self.note_many(person);
            return Ok(groups);
        }
        let mut known = lock(&self.known);
        if known.len() >= MAX_CACHED {
            known.clear();
        }
        known.insert(who, (Instant::now(), groups.clone()));
        Ok(groups)
    }

    pub(super) fn note_many(&self, person: u32) {
        let mut with_many = lock(&self.with_many);
        if with_many.len() >= MAX_CACHED {
            with_many.retain(|_, seen| seen.elapsed() < MANY_GROUPS_TIME);
        }
        with_many.insert(person, Instant::now());
    }
}

/// The process that made a request, with its user and group.
pub(super) fn owner(request: &Request) -> Owner {
    Owner { uid: request.uid(), gid: request.gid(), pid: process_of(request.pid()) }
}

/// The process of a thread. FUSE reports the thread's ID.
pub(super) fn process_of(thread: u32) -> u32 {
    // The first entry is the oldest thread, whose ID is that of the process. `status` has it too, but takes longer to
    // read the more groups the thread has.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(threads) = openat(CWD, format!("/proc/{thread}/task"), flags, Mode::empty()) else {
        return thread;
    };
    let mut begin = [MaybeUninit::uninit(); 256];
    let mut threads = RawDir::new(threads, &mut begin);
    while let Some(Ok(entry)) = threads.next() {
        if let Some(number) = entry.file_name().to_str().ok().and_then(|name| name.parse().ok()) {
            return number;
        }
    }
    thread
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_cached_briefly_and_bounded() {
        let callers = Callers::default();
        let me = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let wanted: Vec<u32> =
            rustix::process::getgroups().unwrap().into_iter().map(rustix::process::Gid::as_raw).collect();
        let wanted = Ok(wanted);
        assert_eq!(callers.groups((me, uid, gid), uid), wanted);
        // The key includes the user: the same thread as another user has other groups.
        assert_eq!(callers.groups((me, uid + 1, gid), uid), Ok(Vec::new()));
        let other = (Instant::now(), vec![7]);
        lock(&callers.known).insert((me, uid, gid), other);
        assert_eq!(callers.groups((me, uid, gid), uid), Ok(vec![7]));
        std::thread::sleep(GROUPS_CACHE_TIME);
        assert_eq!(callers.groups((me, uid, gid), uid), wanted);
        (0..3 * MAX_CACHED as u32).for_each(|user| drop(callers.groups((me, user, 1), user)));
        assert!(lock(&callers.known).len() <= MAX_CACHED);
    }

    /// Run by [`missing_descriptors_fail_the_call`], in a process of its own.
    #[test]
    fn without_descriptors() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        if std::env::var_os("ONEHOP_TEST_NO_DESCRIPTORS").is_none() {
            return;
        }
        let (callers, before) = (Callers::default(), getrlimit(Resource::Nofile));
        let me = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let requester = Requester { uid: 1, gid: 1, thread: me, umask: 0 };
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..before }).unwrap();
        let caller = callers.caller(requester, 1).err();
        setrlimit(Resource::Nofile, before).unwrap();
        assert_eq!(caller, Some(Errno::MFILE));
        assert!(lock(&callers.known).is_empty() && callers.caller(requester, 1).is_ok());
    }

    #[test]
    fn missing_descriptors_fail_the_call() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "fs::callers::tests::without_descriptors"]);
        let output = alone.env("ONEHOP_TEST_NO_DESCRIPTORS", "yes").output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
    }

    #[test]
    fn every_thread_has_the_number_of_its_process() {
        let thread = || process_of(rustix::thread::gettid().as_raw_nonzero().get() as u32);
        let others: Vec<_> = (0..20).map(|_| std::thread::spawn(thread)).collect();
        assert!(others.into_iter().all(|other| other.join().unwrap() == std::process::id()));
        assert_eq!((thread(), process_of(u32::MAX)), (std::process::id(), u32::MAX));
    }

    #[test]
    fn many_groups_are_remembered_but_not_cached() {
        if !rustix::process::geteuid().is_root() {
            return println!("SKIPPED: only root can have other groups");
        }
        std::thread::spawn(|| {
            let callers = Callers::default();
            let me = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            let requester = Requester { uid: 7, gid: 7, thread: me, umask: 0 };
            let take = |groups: usize| {
                let all: Vec<_> = (1..=groups as u32).map(rustix::thread::Gid::from_raw).collect();
                rustix::thread::set_thread_groups(&all).unwrap();
                lock(&callers.known).clear();
                let own = Requester { uid: 0, gid: 0, ..requester };
                (
                    callers.groups((me, own.uid, own.gid), 7).unwrap().len(),
                    lock(&callers.known).len(),
                    callers.has_many(7),
                )
            };
            assert_eq!([take(2), take(MANY_GROUPS)], [(2, 1, false), (MANY_GROUPS, 1, false)]);
            assert_eq!(take(MANY_GROUPS + 1), (MANY_GROUPS + 1, 0, true));
            // For a while.
            assert_eq!(take(2), (2, 1, true));
            assert!(!callers.has_many(8) && callers.caller(requester, 8).unwrap().groups.is_empty());
        })
        .join()
        .unwrap();
    }
}
