//! Buffers and rings that programs told of: whose they are, and when their program is gone.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, SystemTime};

use onehop_gpu::Region;
use onehop_os::HostMem;
use onehop_usrbio::gpu::Offer;
use onehop_usrbio::{Id, Name, SHM};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::io::gpu::Engine;
use crate::workers::{MOST_GROUPS, Ring};
use crate::{lock, read, write};

/// Links of one user, and of all: a mapping each, and the system has some 65 thousand for a process.
const MOST_OF_A_USER: usize = 8192;
const MOST: usize = 32_768;
/// Rings of one user, and of all, among them: a guard each, and a second mapping when a part of its memory is cut off.
const MOST_RINGS_OF_A_USER: usize = 1024;
const MOST_RINGS: usize = 16_384;
/// Bytes of addresses that the memory of one user takes, and that of all: files in `/dev/shm` may have holes, and a process has 128 TiB.
const MOST_MAPPED_OF_A_USER: u64 = 4 << 40;
const MOST_MAPPED: u64 = 32 << 40;
// Semaphores have guards too, and so have rings that are on their way here or from here.
const _: () = assert!(MOST_RINGS + MOST_GROUPS + MOST_RINGS_OF_A_USER < onehop_os::Guard::MOST);

/// Who told of something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owner {
    pub uid: u32,
    pub gid: u32,
    pub pid: u32,
}

/// GPU memory of a program.
pub(crate) struct GpuMemory {
    pub region: Region,
    pub engine: Arc<Engine>,
    pub device: u32,
    pub secret: [u8; 16],
    /// For who imports it.
    pub offer: Offer,
}

/// What is behind a link.
pub(crate) enum What {
    Host(HostMem),
    Gpu(Box<GpuMemory>),
    Ring(Arc<Ring>),
}

/// A link of a program.
pub(crate) struct Buffer {
    pub name: Name,
    /// The name as its program wrote it.
    pub link: String,
    pub target: PathBuf,
    pub owner: Owner,
    pub inode: u64,
    pub made: SystemTime,
    pub what: What,
    gone: AtomicBool,
}

impl Buffer {
    /// Whether a user may know of it.
    pub fn is_seen_by(&self, uid: u32) -> bool {
        self.owner.uid == uid || uid == 0
    }

    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    fn is_ring(&self) -> bool {
        matches!(self.what, What::Ring(_))
    }

    /// Bytes of this process's addresses that it takes.
    fn mapped(&self) -> u64 {
        match &self.what {
            What::Host(mem) => mem.len() as u64,
            What::Ring(ring) => ring.server.memory_len() as u64,
            // Of the GPU's addresses, mostly; and it is not longer than a GPU has memory.
            What::Gpu(_) => 0,
        }
    }

    /// Its memory's length.
    pub fn len(&self) -> u64 {
        match &self.what {
            What::Host(mem) => mem.len() as u64,
            What::Gpu(gpu) => gpu.region.len() as u64,
            What::Ring(_) => 0,
        }
    }
}

/// A program, as far as it matters when it is gone.
#[derive(Default)]
struct Process {
    /// Tells that it has ended; none where the system does not show it to us.
    alive: Option<OwnedFd>,
    /// How often it, or a child that inherited it, has the folder of links open.
    folders: u32,
}

/// All links.
#[derive(Default)]
pub(crate) struct Table {
    by_id: RwLock<HashMap<Id, Arc<Buffer>>>,
    /// What memory of each user takes.
    mapped: Mutex<HashMap<u32, u64>>,
    processes: Mutex<HashMap<u32, Process>>,
    next: AtomicU64,
}

impl Table {
    /// Takes something up.
    pub fn add(
        &self,
        name: Name,
        link: &str,
        target: &Path,
        owner: Owner,
        what: What,
    ) -> Result<Arc<Buffer>, Errno> {
        let buffer = Arc::new(Buffer {
            name,
            link: link.to_owned(),
            target: target.to_owned(),
            owner,
            inode: self.next.fetch_add(1, Ordering::Relaxed),
            made: SystemTime::now(),
            what,
            gone: AtomicBool::new(false),
        });
        let mut all = write(&self.by_id);
        if all.contains_key(&name.id) {
            return Err(Errno::EXIST);
        }
        if all.len() >= MOST_OF_A_USER && is_full(all.values(), owner.uid, MOST, MOST_OF_A_USER) {
            return Err(Errno::MFILE);
        }
        let rings = all.values().filter(|other| other.is_ring());
        if buffer.is_ring()
            && all.len() >= MOST_RINGS_OF_A_USER
            && is_full(rings, owner.uid, MOST_RINGS, MOST_RINGS_OF_A_USER)
        {
            return Err(Errno::MFILE);
        }
        // Several may have asked at once how much room there is.
        if buffer.mapped() > self.room(owner.uid) {
            return Err(Errno::NOMEM);
        }
        // Only for what is taken up: it costs a descriptor.
        self.watch(owner.pid)?;
        *lock(&self.mapped).entry(owner.uid).or_default() += buffer.mapped();
        all.insert(name.id, buffer.clone());
        Ok(buffer)
    }

    /// Bytes of memory that a user may still have mapped.
    pub fn room(&self, uid: u32) -> u64 {
        let mapped = lock(&self.mapped);
        let (all, theirs) = (mapped.values().sum::<u64>(), mapped.get(&uid).copied().unwrap_or(0));
        MOST_MAPPED.saturating_sub(all).min(MOST_MAPPED_OF_A_USER.saturating_sub(theirs))
    }

    pub fn get(&self, id: Id) -> Option<Arc<Buffer>> {
        read(&self.by_id).get(&id).cloned()
    }

    /// The one of a link.
    pub fn link(&self, link: &str) -> Option<Arc<Buffer>> {
        let name = Name::parse(link).ok()?;
        self.get(name.id).filter(|buffer| buffer.link == link)
    }

    /// The one of an inode number.
    pub fn inode(&self, inode: u64) -> Option<Arc<Buffer>> {
        read(&self.by_id).values().find(|buffer| buffer.inode == inode).cloned()
    }

    pub fn all(&self) -> Vec<Arc<Buffer>> {
        read(&self.by_id).values().cloned().collect()
    }

    /// Forgets one; what is under way with it ends all the same.
    pub fn remove(&self, id: Id) -> Option<Arc<Buffer>> {
        let gone = write(&self.by_id).remove(&id)?;
        gone.gone.store(true, Ordering::Release);
        let mut mapped = lock(&self.mapped);
        if let Some(bytes) = mapped.get_mut(&gone.owner.uid) {
            *bytes = bytes.saturating_sub(gone.mapped());
        }
        mapped.retain(|_, bytes| *bytes > 0);
        drop(mapped);
        Some(gone)
    }

    /// Watches for a program's end. Where there is no descriptor for that, its buffers would go while it lives.
    fn watch(&self, pid: u32) -> Result<(), Errno> {
        let mut all = lock(&self.processes);
        if all.get(&pid).is_some_and(|process| process.alive.is_some()) {
            return Ok(());
        }
        let known = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let alive = match known.map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
            Some(Ok(alive)) => Some(alive),
            // It has ended, or the system does not show it to us.
            None | Some(Err(Errno::SRCH | Errno::INVAL)) => None,
            Some(Err(error)) => return Err(error),
        };
        all.entry(pid).or_default().alive = alive;
        Ok(())
    }

    /// A program opened the folder of links.
    pub fn folder_opened(&self, pid: u32) {
        // Without a descriptor it is watched when it has something, or not at all: the folder says that it lives.
        let _ = self.watch(pid);
        lock(&self.processes).entry(pid).or_default().folders += 1;
    }

    /// The last descriptor of that was closed.
    pub fn folder_closed(&self, pid: u32) {
        if let Some(process) = lock(&self.processes).get_mut(&pid) {
            process.folders = process.folders.saturating_sub(1);
        }
    }

    /// The links of programs that have ended: they are forgotten. A child that inherited the folder keeps them.
    pub fn sweep(&self) -> Vec<Arc<Buffer>> {
        let mut ended = Vec::new();
        // Locked in this order when something is taken up, too.
        let all = read(&self.by_id);
        let owners: HashSet<u32> = all.values().map(|buffer| buffer.owner.pid).collect();
        lock(&self.processes).retain(|pid, process| {
            if process.folders > 0 {
                return true;
            }
            // Nothing is known of a program that has nothing: watching it costs a descriptor.
            let has_nothing = !owners.contains(pid);
            let over = has_nothing || process.alive.as_ref().is_none_or(has_ended);
            if over {
                ended.push(*pid);
            }
            !over
        });
        drop(all);
        if ended.is_empty() {
            return Vec::new();
        }
        let theirs: Vec<Id> = read(&self.by_id)
            .values()
            .filter(|buffer| ended.contains(&buffer.owner.pid))
            .map(|buffer| buffer.name.id)
            .collect();
        theirs.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// Programs, buffers and rings.
    pub fn counts(&self) -> (usize, usize, usize) {
        let all = read(&self.by_id);
        let rings = all.values().filter(|buffer| buffer.is_ring()).count();
        (lock(&self.processes).len(), all.len() - rings, rings)
    }
}

/// Whether there are as many of these as may be, or as many of a user's.
fn is_full<'a>(these: impl Iterator<Item = &'a Arc<Buffer>>, uid: u32, most: usize, of_user: usize) -> bool {
    let count = |(all, theirs), one: &Arc<Buffer>| (all + 1, theirs + usize::from(one.owner.uid == uid));
    let (all, theirs) = these.fold((0, 0), count);
    all >= most || theirs >= of_user
}

fn has_ended(alive: &OwnedFd) -> bool {
    let mut fds = [rustix::event::PollFd::new(alive, rustix::event::PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1..))
}

/// How often it is looked who has ended.
pub(crate) const SWEEP: Duration = Duration::from_millis(100);

/// Maps a file of shared memory that a link of `uid` leads to: a plain file in `/dev/shm` that is theirs. It is opened with the rights of
/// this thread, which are theirs, and has `most` bytes at most.
pub(crate) fn map_shared(target: &Path, uid: u32, most: u64) -> Result<HostMem, Errno> {
    if target.parent() != Some(Path::new(SHM)) {
        return Err(Errno::INVAL);
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::from(openat(CWD, target, flags, Mode::empty())?);
    let stat = rustix::fs::fstat(&file)?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::RegularFile {
        return Err(Errno::INVAL);
    }
    if stat.st_uid != uid && uid != 0 {
        return Err(Errno::ACCESS);
    }
    let failed = |error: onehop_os::Error| error.errno().map_or(Errno::INVAL, Errno::from_raw_os_error);
    HostMem::of_shared_within(&file, most).map_err(failed)
}

#[cfg(test)]
mod tests {
    use onehop_usrbio::ring::{Server, bytes};
    use onehop_usrbio::{Priority, RingName};

    use super::*;

    #[test]
    fn one_user_s_rings_leave_room_for_those_of_others() {
        let table = Table::default();
        let ring =
            RingName { read: true, depth: 0, priority: Priority::Normal, timeout: Duration::ZERO, flags: 0 };
        let add = |uid, rings: bool| {
            let (owner, id) = (Owner { uid, gid: uid, pid: std::process::id() }, Id::random().unwrap());
            let mem = HostMem::anonymous(bytes(1).unwrap()).unwrap();
            let what = if rings {
                What::Ring(Arc::new(Ring::new(Server::new(mem, ring).unwrap(), owner, id)))
            } else {
                What::Host(mem)
            };
            table.add(Name::buffer(id, 0), &id.to_string(), Path::new("/"), owner, what)
        };
        for _ in 0..MOST_RINGS_OF_A_USER {
            add(1000, true).unwrap();
        }
        assert_eq!(add(1000, true).err(), Some(Errno::MFILE));
        add(1000, false).unwrap();
        add(1001, true).unwrap();
        // Who lets go of one may have another.
        let one = table.all().into_iter().find(|one| one.is_ring() && one.owner.uid == 1000).unwrap();
        table.remove(one.name.id).unwrap();
        add(1000, true).unwrap();
        assert_eq!(table.counts().2, MOST_RINGS_OF_A_USER + 1);
    }
}
