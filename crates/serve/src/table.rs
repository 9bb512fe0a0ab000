//! Buffers and rings that programs have registered, and their removal when the program ends.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, SystemTime};

use onehop_gpu::Region;
use onehop_os::HostMem;
use onehop_target::shares::Shares;
use onehop_usrbio::gpu::Offer;
use onehop_usrbio::{Id, Name};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::{Value, json};

use crate::io::gpu::GpuLanes;
use crate::persons::Persons;
use crate::supplies::{LinkNeeds, Supplies, SupplyShare};
use crate::workers::ServedRing;
use crate::{lock, read, write};

/// Entries of a ring. Each costs the daemon some hundred bytes.
const MAX_ENTRIES: i32 = 1 << 16;
/// The process that registered something, and its user.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owner {
    pub uid: u32,
    pub gid: u32,
    pub pid: u32,
}

/// GPU memory of a program.
pub(crate) struct GpuMemory {
    pub region: Region,
    pub engine: Arc<GpuLanes>,
    pub device: u32,
    pub secret: [u8; 16],
    /// For programs that import it.
    pub offer: Offer,
}

/// The memory of a link.
pub(crate) enum LinkContent {
    Host(HostMem),
    Gpu(Box<GpuMemory>),
    Ring(Arc<ServedRing>),
}

impl LinkContent {
    /// What it takes of the budgets.
    fn needs(&self) -> LinkNeeds {
        let (mut mapped, mut rings, mut descriptors) = (0, 0, 0);
        match self {
            Self::Host(mem) => mapped = mem.len() as u64,
            Self::Ring(ring) => (mapped, rings) = (ring.server.memory_len() as u64, 1),
            Self::Gpu(gpu) => {
                descriptors = gpu.offer.descriptors();
                // Memory of the emulated GPU is a mapped file. A real GPU's is not mapped here, and not longer than its
                // memory.
                if gpu.engine.device.gpu().simulated() {
                    mapped = gpu.region.len() as u64;
                }
            }
        }
        LinkNeeds { mapped, rings, descriptors }
    }
}

/// A link of a program.
pub(crate) struct LinkedBuffer {
    pub name: Name,
    /// The name as the program wrote it.
    pub link: String,
    pub target: PathBuf,
    pub owner: Owner,
    pub inode: u64,
    pub made: SystemTime,
    pub what: LinkContent,
    gone: AtomicBool,
    _share: Arc<SupplyShare>,
}

impl LinkedBuffer {
    /// Whether a user may see it.
    pub fn is_seen_by(&self, uid: u32) -> bool {
        self.owner.uid == uid || uid == 0
    }

    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    fn is_ring(&self) -> bool {
        matches!(self.what, LinkContent::Ring(_))
    }

    /// The length of its memory; 0 for rings.
    pub fn len(&self) -> u64 {
        match &self.what {
            LinkContent::Host(mem) => mem.len() as u64,
            LinkContent::Gpu(gpu) => gpu.region.len() as u64,
            LinkContent::Ring(_) => 0,
        }
    }
}

/// A program that is watched for its end.
#[derive(Default)]
struct Process {
    /// Signals its end; `None` if the process is not visible from here.
    alive: Option<OwnedFd>,
    /// The user for whom the descriptor counts.
    uid: u32,
    /// How often the program, or a child that inherited it, has the folder of links open.
    folders: u32,
    /// Its links.
    links: usize,
}

impl Process {
    /// Whether its links may be removed. A child that inherited the open folder keeps them.
    fn is_over(&self) -> bool {
        // A program without links and open folders needs no descriptor any more.
        self.folders == 0 && (self.links == 0 || self.alive.as_ref().is_none_or(has_ended))
    }
}

#[derive(Default)]
struct Links {
    by_id: HashMap<Id, Arc<LinkedBuffer>>,
    /// The kernel asks by inode number, on threads that must not block.
    by_inode: HashMap<u64, Id>,
    rings: usize,
}

impl Links {
    fn remove(&mut self, this: &LinkedBuffer) {
        self.by_id.remove(&this.name.id);
        self.by_inode.remove(&this.inode);
        self.rings -= usize::from(this.is_ring());
        this.gone.store(true, Ordering::Release);
    }
}

/// All links.
pub(crate) struct LinkTable {
    all: RwLock<Links>,
    supplies: Supplies,
    /// When both are locked, `all` is locked first.
    processes: Mutex<HashMap<u32, Process>>,
    /// Counts watched programs, which take a descriptor each.
    watched: Shares,
    next: AtomicU64,
}

impl LinkTable {
    /// For the links of this many programs, and as many descriptors of GPU memory.
    pub fn new(most_programs: usize, persons: &Persons) -> Self {
        Self {
            all: RwLock::default(),
            supplies: Supplies::new(persons, most_programs as u64),
            processes: Mutex::default(),
            watched: persons.shares(most_programs as u64),
            next: AtomicU64::new(0),
        }
    }

    /// Adds a link.
    pub fn add(
        &self,
        name: Name,
        link: &str,
        target: &Path,
        owner: Owner,
        what: LinkContent,
    ) -> Result<Arc<LinkedBuffer>, Errno> {
        let mut all = write(&self.all);
        if all.by_id.contains_key(&name.id) {
            return Err(Errno::EXIST);
        }
        let share = self.supplies.take(owner.uid, &what.needs())?;
        // Watched only now, because it takes a descriptor.
        self.watch(&mut lock(&self.processes), owner.pid, owner.uid)?.links += 1;
        let share = Arc::new(share);
        if let LinkContent::Ring(ring) = &what {
            ring.keep(share.clone());
        }
        let buffer = Arc::new(LinkedBuffer {
            name,
            link: link.to_owned(),
            target: target.to_owned(),
            owner,
            inode: self.next.fetch_add(1, Ordering::Relaxed),
            made: SystemTime::now(),
            what,
            gone: AtomicBool::new(false),
            _share: share,
        });
        all.by_id.insert(name.id, buffer.clone());
        all.by_inode.insert(buffer.inode, name.id);
        all.rings += usize::from(buffer.is_ring());
        Ok(buffer)
    }

    /// Bytes that a user may still map.
    pub fn room(&self, uid: u32) -> u64 {
        self.supplies.mapped.room(uid)
    }

    /// A user's shares of all budgets.
    pub fn of_user(&self, uid: u32) -> Value {
        let mut shares = self.supplies.of_user(uid);
        shares["programs"] = json!({ "taken": self.watched.taken_by(uid), "left": self.watched.room(uid) });
        shares
    }

    pub fn get(&self, id: Id) -> Option<Arc<LinkedBuffer>> {
        read(&self.all).by_id.get(&id).cloned()
    }

    /// The buffer of a link's name.
    pub fn link(&self, link: &str) -> Option<Arc<LinkedBuffer>> {
        let name = Name::parse(link).ok()?;
        self.get(name.id).filter(|buffer| buffer.link == link)
    }

    /// The buffer of an inode number.
    pub fn inode(&self, inode: u64) -> Option<Arc<LinkedBuffer>> {
        let all = read(&self.all);
        all.by_inode.get(&inode).and_then(|id| all.by_id.get(id)).cloned()
    }

    pub fn all(&self) -> Vec<Arc<LinkedBuffer>> {
        read(&self.all).by_id.values().cloned().collect()
    }

    /// Removes a link, unless its ID belongs to another by now. Transfers in flight continue.
    pub fn remove(&self, this: &Arc<LinkedBuffer>) -> bool {
        let mut all = write(&self.all);
        let is_there = all.by_id.get(&this.name.id).is_some_and(|other| Arc::ptr_eq(this, other));
        if is_there {
            all.remove(this);
            if let Some(process) = lock(&self.processes).get_mut(&this.owner.pid) {
                process.links -= 1;
            }
        }
        is_there
    }

    /// Watches for a program's end. Without a descriptor for it, its buffers would be removed while it runs.
    fn watch<'a>(
        &self,
        all: &'a mut HashMap<u32, Process>,
        pid: u32,
        uid: u32,
    ) -> Result<&'a mut Process, Errno> {
        // If the program has ended, its process ID was reused while a child has the folder open.
        if all.get(&pid).and_then(|process| process.alive.as_ref()).is_none_or(has_ended) {
            let alive = self.descriptor(pid, uid)?;
            let process = all.entry(pid).or_default();
            if process.alive.is_some() {
                self.watched.put_back(process.uid, 1);
            }
            (process.alive, process.uid) = (alive, uid);
        }
        Ok(all.entry(pid).or_default())
    }

    /// A pidfd; `None` if the program has ended or is not visible from here.
    fn descriptor(&self, pid: u32, uid: u32) -> Result<Option<OwnedFd>, Errno> {
        if !self.watched.take(uid, 1) {
            return Err(Errno::MFILE);
        }
        let known = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let alive = known.map(|pid| pidfd_open(pid, PidfdFlags::empty())).transpose();
        let alive = alive.or_else(|error| match error {
            Errno::SRCH | Errno::INVAL => Ok(None),
            error => Err(error),
        });
        if !matches!(alive, Ok(Some(_))) {
            self.watched.put_back(uid, 1);
        }
        alive
    }

    /// A user's program has opened the folder of links.
    pub fn folder_opened(&self, pid: u32, uid: u32) {
        let mut all = lock(&self.processes);
        // On error it is watched with its first link; the open folder shows that it runs.
        let _ = self.watch(&mut all, pid, uid);
        all.entry(pid).or_default().folders += 1;
    }

    /// The folder of links was closed by the last process that had it open.
    pub fn folder_closed(&self, pid: u32) {
        if let Some(process) = lock(&self.processes).get_mut(&pid) {
            process.folders = process.folders.saturating_sub(1);
        }
    }

    /// Removes the links of programs that have ended, and returns them.
    pub fn sweep(&self) -> Vec<Arc<LinkedBuffer>> {
        if !lock(&self.processes).values().any(Process::is_over) {
            return Vec::new();
        }
        let (mut all, mut ended) = (write(&self.all), HashSet::new());
        lock(&self.processes).retain(|pid, process| {
            let is_over = process.is_over();
            if is_over && process.links > 0 {
                ended.insert(*pid);
            }
            if is_over && process.alive.is_some() {
                self.watched.put_back(process.uid, 1);
            }
            !is_over
        });
        if ended.is_empty() {
            return Vec::new();
        }
        let theirs = all.by_id.values().filter(|buffer| ended.contains(&buffer.owner.pid));
        let theirs: Vec<_> = theirs.cloned().collect();
        theirs.iter().for_each(|buffer| all.remove(buffer));
        theirs
    }

    /// The numbers of programs, buffers and rings.
    pub fn counts(&self) -> (usize, usize, usize) {
        let all = read(&self.all);
        (lock(&self.processes).len(), all.by_id.len() - all.rings, all.rings)
    }
}

fn has_ended(alive: &OwnedFd) -> bool {
    let mut fds = [rustix::event::PollFd::new(alive, rustix::event::PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1..))
}

/// How often ended programs are looked for.
pub(crate) const SWEEP: Duration = Duration::from_millis(100);

/// Whether a ring of this many bytes has too many entries.
pub(crate) fn is_too_long(bytes: usize) -> bool {
    onehop_usrbio::ring::entries(bytes) > MAX_ENTRIES
}

#[cfg(test)]
mod tests {
    use onehop_usrbio::ring::{RingServer, bytes};
    use onehop_usrbio::{Priority, RingName};

    use super::*;
    use crate::supplies::MAX_RINGS_PER_USER;

    #[test]
    fn rings_are_limited_per_user() {
        let table = LinkTable::new(1 << 10, &Persons::default());
        let ring =
            RingName { read: true, depth: 0, priority: Priority::Normal, timeout: Duration::ZERO, flags: 0 };
        let add = |uid, rings: bool| {
            let (owner, id) = (Owner { uid, gid: uid, pid: std::process::id() }, Id::random().unwrap());
            let mem = HostMem::anonymous(bytes(1).unwrap()).unwrap();
            let what = if rings {
                LinkContent::Ring(Arc::new(ServedRing::new(RingServer::new(mem, ring).unwrap(), owner)))
            } else {
                LinkContent::Host(mem)
            };
            table.add(Name::buffer(id, 0), &id.to_string(), Path::new("/"), owner, what)
        };
        for _ in 0..MAX_RINGS_PER_USER {
            add(21_001, true).unwrap();
        }
        assert_eq!(add(21_001, true).err(), Some(Errno::MFILE));
        add(21_001, false).unwrap();
        add(21_002, true).unwrap();
        // Removing one makes room for another, once its memory is not in use.
        let one = table.all().into_iter().find(|one| one.is_ring() && one.owner.uid == 21_001).unwrap();
        assert!(Arc::ptr_eq(&table.inode(one.inode).unwrap(), &one));
        assert!(table.remove(&one) && !table.remove(&one) && table.inode(one.inode).is_none());
        assert_eq!(add(21_001, true).err(), Some(Errno::MFILE));
        drop(one);
        add(21_001, true).unwrap();
        assert_eq!(table.counts().2 as u64, MAX_RINGS_PER_USER + 1);
    }

    #[test]
    fn many_users_leave_room_for_one_more() {
        let table = LinkTable::new(1 << 10, &Persons::default());
        for uid in 1..=30 {
            assert!(table.supplies.mapped.take(uid, table.supplies.mapped.room(uid)));
        }
        assert!(table.room(31) >= 64 << 10);
        let first_ten = LinkTable::new(1 << 10, &Persons::default());
        for uid in 1..=10 {
            assert!(first_ten.supplies.mapped.take(uid, first_ten.supplies.mapped.room(uid)));
            assert!(first_ten.supplies.links.take(uid, first_ten.supplies.links.room(uid)));
            assert!(first_ten.supplies.rings.take(uid, first_ten.supplies.rings.room(uid)));
        }
        assert!(first_ten.room(11) >= 64 << 30);
        assert!(first_ten.supplies.links.room(11) >= 32 && first_ten.supplies.rings.room(11) >= 64);
    }

    fn add_of(table: &LinkTable, uid: u32, pid: u32) -> Result<Arc<LinkedBuffer>, Errno> {
        let (owner, id) = (Owner { uid, gid: uid, pid }, Id::random().unwrap());
        let what = LinkContent::Host(HostMem::anonymous(4096).unwrap());
        table.add(Name::buffer(id, 0), &id.to_string(), Path::new("/"), owner, what)
    }

    #[test]
    fn programs_without_links_are_not_watched() {
        let (table, me) = (LinkTable::new(1 << 10, &Persons::default()), std::process::id());
        assert!(table.supplies.mapped.take(21_002, table.room(21_002)));
        assert_eq!(add_of(&table, 21_002, 1).err(), Some(Errno::NOMEM));
        assert_eq!(table.counts().0, 0);
        let buffer = add_of(&table, 21_001, me).unwrap();
        assert!(table.sweep().is_empty());
        assert_eq!(table.counts(), (1, 1, 0));
        assert!(table.remove(&buffer));
        assert!(table.sweep().is_empty());
        assert_eq!(table.counts(), (0, 0, 0));
        table.folder_opened(me, 21_001);
        assert!(table.sweep().is_empty());
        assert_eq!(table.counts().0, 1);
        table.folder_closed(me);
        table.sweep();
        assert_eq!(table.counts().0, 0);
    }

    #[test]
    fn watched_programs_are_limited_per_user() {
        let table = LinkTable::new(4, &Persons::default());
        let mut programs: Vec<_> =
            (0..4).map(|_| std::process::Command::new("sleep").arg("600").spawn().unwrap()).collect();
        let [first, second, third, fourth] = [0, 1, 2, 3].map(|place: usize| programs[place].id());
        let add = |uid, pid| add_of(&table, uid, pid).map(drop);
        assert_eq!([add(21_001, first), add(21_001, first), add(21_001, second)], [Ok(()); 3]);
        assert_eq!(add(21_001, third), Err(Errno::MFILE));
        // A program that only opened the folder of links is not watched either, which does no harm.
        table.folder_opened(third, 21_001);
        assert_eq!((add(21_002, third), add(21_002, fourth)), (Ok(()), Err(Errno::MFILE)));
        table.folder_closed(third);
        programs.iter_mut().take(2).for_each(|program| {
            program.kill().unwrap();
            program.wait().unwrap();
        });
        assert_eq!(table.sweep().len(), 3);
        assert_eq!((add(21_002, fourth), table.watched.taken()), (Ok(()), 2));
        programs.iter_mut().skip(2).for_each(|program| {
            program.kill().unwrap();
            program.wait().unwrap();
        });
        assert_eq!((table.sweep().len(), table.watched.taken()), (2, 0));
    }

    #[test]
    fn a_sweep_does_not_remove_new_links() {
        let (table, over) = (LinkTable::new(1 << 10, &Persons::default()), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Acquire) {
                    assert!(table.sweep().is_empty(), "the program is running");
                }
            });
            for _ in 0..20_000 {
                let buffer = add_of(&table, 21_001, std::process::id()).unwrap();
                std::hint::spin_loop();
                if !table.remove(&buffer) {
                    // The other thread's assertion fails.
                    break;
                }
            }
            over.store(true, Ordering::Release);
        });
    }

    #[test]
    fn a_reused_process_id_is_watched_anew() {
        let (table, me) = (LinkTable::new(1 << 10, &Persons::default()), std::process::id());
        let mut before = std::process::Command::new("true").spawn().unwrap();
        let known = Pid::from_child(&before);
        let ended = pidfd_open(known, PidfdFlags::empty()).unwrap();
        before.wait().unwrap();
        // A child of the earlier program has the folder open.
        assert!(table.watched.take(21_001, 1));
        let process = Process { alive: Some(ended), uid: 21_001, folders: 1, links: 0 };
        lock(&table.processes).insert(me, process);
        let buffer = add_of(&table, 21_002, me).unwrap();
        assert_eq!((table.watched.taken_by(21_001), table.watched.taken_by(21_002)), (0, 1));
        table.folder_closed(me);
        assert!(table.sweep().is_empty(), "the program is running");
        assert!(table.remove(&buffer) && table.sweep().is_empty());
        assert_eq!((table.counts(), table.watched.taken()), ((0, 0, 0), 0));
    }

    /// Run in a child process by [`unwatched_programs_are_refused`].
    #[test]
    fn without_descriptors() {
        use rustix::process::{Resource, getrlimit, setrlimit};
        if std::env::var_os("ONEHOP_TEST_NO_DESCRIPTORS").is_none() {
            return;
        }
        let (table, before) = (LinkTable::new(1 << 10, &Persons::default()), getrlimit(Resource::Nofile));
        setrlimit(Resource::Nofile, rustix::process::Rlimit { current: Some(0), ..before }).unwrap();
        let refused = add_of(&table, 21_001, std::process::id()).err();
        setrlimit(Resource::Nofile, before).unwrap();
        assert_eq!((refused, table.counts()), (Some(Errno::MFILE), (0, 0, 0)));
        add_of(&table, 21_001, std::process::id()).unwrap();
        assert!(table.sweep().is_empty());
    }

    #[test]
    fn unwatched_programs_are_refused() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "table::tests::without_descriptors"]);
        let output = alone.env("ONEHOP_TEST_NO_DESCRIPTORS", "yes").output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
    }
}
