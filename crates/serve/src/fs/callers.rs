//! With whose rights requests are done.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use fuser::Request;
use onehop_os::identity::groups_of;
use onehop_target::wire::Caller;

use crate::lock;
use crate::table::Owner;

/// How long a thread's groups are remembered: to read them takes longer than most requests. A thread needs a capability to change
/// them, its number is not used again so soon, and the kernel that asks has checked the request with the groups of now.
const REMEMBER: Duration = Duration::from_millis(100);
/// How many are remembered.
const MOST: usize = 1024;

/// A thread, its user and its group.
type Who = (u32, u32, u32);

/// The groups of threads that have asked for something lately, by thread, user and group.
#[derive(Default)]
pub(super) struct Callers {
    known: Mutex<HashMap<Who, (Instant, Vec<u32>)>>,
}

impl Callers {
    /// Who makes a request.
    pub fn of(&self, request: &Request, umask: u32) -> Caller {
        let (uid, gid) = (request.uid(), request.gid());
        // The kernel does not send groups. Root needs none.
        let groups = if uid == 0 { Vec::new() } else { self.groups((request.pid(), uid, gid)) };
        Caller { uid, gid, groups, umask }
    }

    /// The groups of a thread; none of one that cannot be seen from here.
    fn groups(&self, who: Who) -> Vec<u32> {
        if let Some((since, groups)) = lock(&self.known).get(&who)
            && since.elapsed() < REMEMBER
        {
            return groups.clone();
        }
        let groups = groups_of(who.0, who.1, who.2).unwrap_or_default();
        let mut known = lock(&self.known);
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(who, (Instant::now(), groups.clone()));
        groups
    }
}

/// Who makes a request, and the process that it is of.
pub(super) fn owner(request: &Request) -> Owner {
    Owner { uid: request.uid(), gid: request.gid(), pid: process_of(request.pid()) }
}

/// FUSE tells the thread that asks; what ends as one is its process.
pub(super) fn process_of(thread: u32) -> u32 {
    // Its beginning is enough, and one read is quicker than the many of a whole file.
    let mut begin = [0; 512];
    let read = File::open(format!("/proc/{thread}/status")).and_then(|mut file| file.read(&mut begin));
    let status = String::from_utf8_lossy(&begin[..read.unwrap_or(0)]);
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(thread)
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
        assert_eq!(callers.groups((me, uid, gid)), wanted);
        // Another user's are others, on the same thread.
        assert!(callers.groups((me, uid + 1, gid)).is_empty());
        let other = (Instant::now(), vec![7]);
        lock(&callers.known).insert((me, uid, gid), other);
        assert_eq!(callers.groups((me, uid, gid)), [7]);
        std::thread::sleep(REMEMBER);
        assert_eq!(callers.groups((me, uid, gid)), wanted);
        (0..3 * MOST as u32).for_each(|user| drop(callers.groups((me, user, 1))));
        assert!(lock(&callers.known).len() <= MOST);
    }
}
