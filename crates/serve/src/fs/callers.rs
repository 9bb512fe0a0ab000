//! With whose rights requests are done.

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

/// How long a thread's groups are remembered: to read them takes longer than most requests. A thread needs a capability to change
/// them, its number is not used again so soon, and the kernel that asks has checked the request with the groups of now.
const REMEMBER: Duration = Duration::from_millis(100);
/// How many are remembered.
const MOST: usize = 1024;
/// More groups than this are not remembered. To read and to take on 65 536, the most there can be, takes a processor some ten
/// milliseconds.
const MANY: usize = 1024;
/// How long it is remembered that a person's threads have so many.
const REMEMBER_MANY: Duration = Duration::from_secs(10);

/// A thread, its user and its group.
type Who = (u32, u32, u32);

/// Who asks, as far as the kernel says it. Their groups are read when it is their turn.
#[derive(Clone, Copy)]
pub(super) struct Asks {
    pub uid: u32,
    pub gid: u32,
    pub thread: u32,
    pub umask: u32,
}

impl Asks {
    /// Who makes a request.
    pub fn of(request: &Request, umask: u32) -> Self {
        Self { uid: request.uid(), gid: request.gid(), thread: request.pid(), umask }
    }
}

/// The groups of threads that have asked for something lately.
#[derive(Default)]
pub(super) struct Callers {
    /// By thread, user and group.
    known: Mutex<HashMap<Who, (Instant, Vec<u32>)>>,
    /// Persons whose threads have many, and when that was seen last.
    with_many: Mutex<HashMap<u32, Instant>>,
}

impl Callers {
    /// With whose rights a person's request is done. No thread of the session that is needed by others may ask.
    ///
    /// # Errors
    /// When the groups cannot be read now. Without them, rights would be missing.
    pub fn caller(&self, asks: Asks, person: u32) -> Result<Caller, Errno> {
        let Asks { uid, gid, thread, umask } = asks;
        // The kernel does not send groups. Root needs none.
        let groups = if uid == 0 { Vec::new() } else { self.groups((thread, uid, gid), person)? };
        Ok(Caller { uid, gid, groups, umask })
    }

    /// Whether threads of a person had many groups a moment ago.
    pub fn has_many(&self, person: u32) -> bool {
        lock(&self.with_many).get(&person).is_some_and(|seen| seen.elapsed() < REMEMBER_MANY)
    }

    /// The groups of a thread; none of one that cannot be seen from here.
    fn groups(&self, who: Who, person: u32) -> Result<Vec<u32>, Errno> {
        if let Some((since, groups)) = lock(&self.known).get(&who)
            && since.elapsed() < REMEMBER
        {
            return Ok(groups.clone());
        }
        let groups = groups_of(who.0, who.1, who.2)?.unwrap_or_default();
        if groups.len() > MANY {
            self.note_many(person);
            return Ok(groups);
        }
        let mut known = lock(&self.known);
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(who, (Instant::now(), groups.clone()));
        Ok(groups)
    }

    pub(super) fn note_many(&self, person: u32) {
        let mut with_many = lock(&self.with_many);
        if with_many.len() >= MOST {
            with_many.retain(|_, seen| seen.elapsed() < REMEMBER_MANY);
        }
        with_many.insert(person, Instant::now());
    }
}

/// Who makes a request, and the process that it is of.
pub(super) fn owner(request: &Request) -> Owner {
    Owner { uid: request.uid(), gid: request.gid(), pid: process_of(request.pid()) }
}

/// FUSE tells the thread that asks; what ends as one is its process.
pub(super) fn process_of(thread: u32) -> u32 {
    // The first thread of a process is its oldest, which has its number. The status of a thread would say it, too, and takes as long
    // to read as the thread has groups.
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
    fn groups_are_remembered_for_a_moment_and_not_without_end() {
        let callers = Callers::default();
        let me = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let wanted: Vec<u32> =
            rustix::process::getgroups().unwrap().into_iter().map(rustix::process::Gid::as_raw).collect();
        let wanted = Ok(wanted);
        assert_eq!(callers.groups((me, uid, gid), uid), wanted);
        // Another user's are others, on the same thread.
        assert_eq!(callers.groups((me, uid + 1, gid), uid), Ok(Vec::new()));
        let other = (Instant::now(), vec![7]);
        lock(&callers.known).insert((me, uid, gid), other);
        assert_eq!(callers.groups((me, uid, gid), uid), Ok(vec![7]));
        std::thread::sleep(REMEMBER);
        assert_eq!(callers.groups((me, uid, gid), uid), wanted);
        (0..3 * MOST as u32).for_each(|user| drop(callers.groups((me, user, 1), user)));
        assert!(lock(&callers.known).len() <= MOST);
    }

    /// Run by [`without_descriptors_no_one_loses_their_groups`], in a process of its own.
    #[test]
    fn without_descriptors() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        if std::env::var_os("ONEHOP_TEST_NO_DESCRIPTORS").is_none() {
            return;
        }
        let (callers, before) = (Callers::default(), getrlimit(Resource::Nofile));
        let me = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let asks = Asks { uid: 1, gid: 1, thread: me, umask: 0 };
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..before }).unwrap();
        let caller = callers.caller(asks, 1).err();
        setrlimit(Resource::Nofile, before).unwrap();
        assert_eq!(caller, Some(Errno::MFILE));
        assert!(lock(&callers.known).is_empty() && callers.caller(asks, 1).is_ok());
    }

    #[test]
    fn without_descriptors_no_one_loses_their_groups() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "fs::callers::tests::without_descriptors"]);
        let output = alone.env("ONEHOP_TEST_NO_DESCRIPTORS", "yes").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    fn every_thread_has_the_number_of_its_process() {
        let thread = || process_of(rustix::thread::gettid().as_raw_nonzero().get() as u32);
        let others: Vec<_> = (0..20).map(|_| std::thread::spawn(thread)).collect();
        assert!(others.into_iter().all(|other| other.join().unwrap() == std::process::id()));
        assert_eq!((thread(), process_of(u32::MAX)), (std::process::id(), u32::MAX));
    }

    #[test]
    fn who_has_many_groups_is_known_and_they_are_not_kept() {
        if !rustix::process::geteuid().is_root() {
            return println!("SKIPPED: only root can have other groups");
        }
        std::thread::spawn(|| {
            let callers = Callers::default();
            let me = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            let asks = Asks { uid: 7, gid: 7, thread: me, umask: 0 };
            let take = |groups: usize| {
                let all: Vec<_> = (1..=groups as u32).map(rustix::thread::Gid::from_raw).collect();
                rustix::thread::set_thread_groups(&all).unwrap();
                lock(&callers.known).clear();
                let own = Asks { uid: 0, gid: 0, ..asks };
                (
                    callers.groups((me, own.uid, own.gid), 7).unwrap().len(),
                    lock(&callers.known).len(),
                    callers.has_many(7),
                )
            };
            assert_eq!([take(2), take(MANY)], [(2, 1, false), (MANY, 1, false)]);
            assert_eq!(take(MANY + 1), (MANY + 1, 0, true));
            // For a while.
            assert_eq!(take(2), (2, 1, true));
            assert!(!callers.has_many(8) && callers.caller(asks, 8).unwrap().groups.is_empty());
        })
        .join()
        .unwrap();
    }
}
