//! Threads that wait for the submission semaphores, take requests from rings, and execute those that do not block.
//!
//! Each user has semaphores of their own, one for each priority, created on demand: a user who spoils one affects only
//! themselves. The first ring of a semaphore starts a thread or a few; further rings start none.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::{Guard, HostMem, Semaphore};
use onehop_usrbio::flag::FORBID_READ_HOLES;
use onehop_usrbio::mount::SEMAPHORE_PREFIX;
use onehop_usrbio::ring::{Done, RingServer, Submission};
use onehop_usrbio::{Id, Priority, SHM};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::io::Errno;

use crate::daemon::DaemonShared;
use crate::error::{Error, Result};
use crate::io::{self, IoStart, LastUsed, TransferJob};
use crate::persons::Persons;
use crate::supplies::SupplyShare;
use crate::table::Owner;
use crate::{lock, read, write};

/// Entries taken from a ring before the next ring is polled. Lower priorities get fewer.
const fn round_limit(priority: Priority) -> usize {
    match priority {
        Priority::High => 128,
        Priority::Normal => 64,
        Priority::Low => 16,
    }
}

/// How long a thread spins before it sleeps: waking it takes longer than most reads.
const SPIN: Duration = Duration::from_micros(20);
/// The longest sleep. Rings are polled this often even without a post.
const SLEEP: Duration = Duration::from_millis(100);
/// Semaphores at once. If there are more, the oldest without a ring is removed.
pub(crate) const MAX_GROUPS: usize = 256;
/// After this many posts in a row without a request, the thread pauses before each poll.
const MAX_EMPTY_WAKEUPS: u32 = 64;
const PENALTY: Duration = Duration::from_millis(1);

/// A ring that is served.
pub(crate) struct ServedRing {
    pub server: RingServer,
    pub owner: Owner,
    pub cache: Mutex<LastUsed>,
    is_counted: AtomicBool,
    /// Its share of the budgets, as long as anything serves the ring.
    share: OnceLock<Arc<SupplyShare>>,
}

impl ServedRing {
    pub fn new(server: RingServer, owner: Owner) -> Self {
        let (cache, is_counted, share) = (Mutex::default(), AtomicBool::new(false), OnceLock::new());
        Self { server, owner, cache, is_counted, share }
    }

    /// Whether its reads fail where the file has a hole.
    pub fn refuses_holes(&self) -> bool {
        self.server.name().read && self.server.name().flags & FORBID_READ_HOLES != 0
    }

    /// Keeps a share of the budgets.
    pub fn keep(&self, share: Arc<SupplyShare>) {
        // Called once.
        let _ = self.share.set(share);
    }
}

/// The rings of one user and one priority, and their semaphore.
pub(crate) struct RingGroup {
    semaphore: Semaphore,
    guard: Guard,
    pub path: PathBuf,
    /// Its lock shows other daemons that this one still runs.
    _file: File,
    priority: Priority,
    rings: RwLock<Vec<Arc<ServedRing>>>,
    stop: AtomicBool,
    /// Whether its threads were started.
    started: AtomicBool,
    made: Instant,
}

impl RingGroup {
    fn new(uid: u32, priority: Priority) -> Result<Self> {
        let path = Path::new(SHM).join(format!("{SEMAPHORE_PREFIX}{}", Id::random()?));
        let failed = |call| {
            let path = path.clone();
            move |e: std::io::Error| Error::file(call, &path, e)
        };
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(failed("create"))?;
        // Reserve the pages: without room, a later access would raise SIGBUS.
        let room = fallocate(&file, FallocateFlags::empty(), 0, Semaphore::BYTES as u64);
        let made = room.map_err(|e| Error::file("fallocate", &path, e)).and_then(|()| {
            let mem = HostMem::of_shared(&file)?;
            let guard = Guard::new(&mem)?;
            let semaphore = Semaphore::at(&mem, 0)?;
            semaphore.initialise()?;
            if uid != rustix::process::geteuid().as_raw() {
                fchown(&file, Some(uid), None).map_err(failed("chown"))?;
            }
            flock(&file, FlockOperation::NonBlockingLockExclusive)
                .map_err(|e| Error::file("flock", &path, e))?;
            Ok((semaphore, guard))
        });
        let (semaphore, guard) = made.inspect_err(|_: &Error| {
            let _ = std::fs::remove_file(&path);
        })?;
        let [stop, started] = [false; 2].map(AtomicBool::new);
        let (rings, made) = (RwLock::default(), Instant::now());
        Ok(Self { semaphore, guard, path, _file: file, priority, rings, stop, started, made })
    }

    /// Stops its threads. Programs see from the missing name that they need another semaphore.
    fn end(&self) {
        let _ = std::fs::remove_file(&self.path);
        self.stop.store(true, Ordering::Release);
        for _ in 0..8 {
            self.semaphore.post();
        }
    }
}

impl Drop for RingGroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

type Groups = HashMap<(u32, Priority), Arc<RingGroup>>;

/// Whether a user may add a ring to a group. A person may have rings in as many groups as remain for others.
fn may_add_ring(persons: &Persons, groups: &Groups, of: (u32, Priority)) -> bool {
    let has_rings = |group: &RingGroup| !read(&group.rings).is_empty();
    let is_privileged = of.0 == 0 || of.0 == rustix::process::geteuid().as_raw();
    if is_privileged || groups.get(&of).is_some_and(|group| has_rings(group)) {
        return true;
    }
    let busy: Vec<u32> =
        groups.iter().filter(|(_, group)| has_rings(group)).map(|((uid, _), _)| persons.of(*uid)).collect();
    let theirs = busy.iter().filter(|person| **person == persons.of(of.0)).count();
    theirs < MAX_GROUPS.saturating_sub(busy.len())
}

fn too_many() -> Error {
    Error::file("semaphores of", Path::new("another user"), Errno::USERS)
}

/// Makes room for one more group.
fn make_room(groups: &mut Groups) -> Result<()> {
    if groups.len() < MAX_GROUPS {
        return Ok(());
    }
    let idle = groups.iter().filter(|(_, group)| read(&group.rings).is_empty());
    let oldest = idle.min_by_key(|(_, group)| group.made).map(|(of, _)| *of);
    let gone = oldest.and_then(|of| groups.remove(&of));
    gone.map(|group| group.end()).ok_or_else(too_many)
}

/// All groups and their threads.
#[derive(Default)]
pub(crate) struct Workers {
    groups: Mutex<Groups>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Workers {
    /// The group of a user and a priority.
    pub fn group(&self, shared: &Arc<DaemonShared>, uid: u32, priority: Priority) -> Result<Arc<RingGroup>> {
        self.find(shared, &mut lock(&self.groups), (uid, priority))
    }

    fn find(
        &self,
        shared: &Arc<DaemonShared>,
        groups: &mut Groups,
        of: (u32, Priority),
    ) -> Result<Arc<RingGroup>> {
        // `end` stops all groups that exist by then.
        if shared.is_over() {
            return Err(Error::file("semaphores of", &shared.options.mount_point, Errno::SHUTDOWN));
        }
        // A group whose threads could not be started is stopped.
        let is_served =
            |group: &&Arc<RingGroup>| !group.guard.is_lost() && !group.stop.load(Ordering::Acquire);
        if let Some(group) = groups.get(&of).filter(is_served) {
            return Ok(group.clone());
        }
        if !groups.contains_key(&of) {
            make_room(groups)?;
        }
        let group = Arc::new(RingGroup::new(of.0, of.1)?);
        // The user has destroyed the semaphore of the previous group, so move its rings to a new one.
        let before = groups.get(&of).cloned();
        if let Some(before) = &before {
            *write(&group.rings) = read(&before.rings).clone();
            if before.started.load(Ordering::Acquire) {
                self.start(shared, &group)?;
            }
            before.end();
        }
        groups.insert(of, group.clone());
        Ok(group)
    }

    /// Starts all threads of a group, or none.
    fn start(&self, shared: &Arc<DaemonShared>, group: &Arc<RingGroup>) -> Result<()> {
        if group.started.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let mut threads = lock(&self.threads);
        // Join the threads of destroyed groups: an ended thread keeps its stack until then.
        threads.retain(|thread| !thread.is_finished());
        let count = (shared.options.threads / 2).clamp(1, 4);
        for _ in 0..count {
            let (starter, shared, of) = (&shared.starter, Arc::downgrade(shared), group.clone());
            let thread = starter.spawn("usrbio rings", move || {
                if let Some(shared) = shared.upgrade() {
                    run_worker(&shared, &of);
                }
            });
            threads.push(thread.inspect_err(|_| group.end()).map_err(Error::Thread)?);
        }
        Ok(())
    }

    pub fn add(&self, shared: &Arc<DaemonShared>, ring: &Arc<ServedRing>) -> Result<()> {
        // Locked until the group has the ring, so that the group is not removed meanwhile.
        let (mut groups, of) = (lock(&self.groups), (ring.owner.uid, ring.server.name().priority));
        if !may_add_ring(&shared.persons, &groups, of) {
            return Err(too_many());
        }
        let group = self.find(shared, &mut groups, of)?;
        self.start(shared, &group)?;
        write(&group.rings).push(ring.clone());
        Ok(())
    }

    pub fn remove(&self, ring: &ServedRing) {
        // Locked throughout: the rings of this group may be moving to another one.
        let groups = lock(&self.groups);
        if let Some(group) = groups.get(&(ring.owner.uid, ring.server.name().priority)) {
            write(&group.rings).retain(|other| !std::ptr::eq(&raw const **other, ring));
        }
    }

    /// Stops all threads, and waits for them.
    pub fn end(&self) {
        lock(&self.groups).values().for_each(|group| group.end());
        for thread in lock(&self.threads).drain(..) {
            let _ = thread.join();
        }
        lock(&self.groups).clear();
    }
}

fn run_worker(shared: &Arc<DaemonShared>, group: &RingGroup) {
    let mut entries = Vec::new();
    let mut done = Vec::new();
    let (mut sleep, mut empty_wakeups) = (SLEEP, 0_u32);
    while !group.stop.load(Ordering::Acquire) {
        let posted = spin(group) || group.semaphore.wait(sleep);
        // This poll serves whatever was posted meanwhile.
        group.semaphore.take_all();
        let found;
        (sleep, found) = poll_rings(shared, group, &mut entries, &mut done);
        empty_wakeups = if posted && !found { empty_wakeups.saturating_add(1) } else { 0 };
        if empty_wakeups > MAX_EMPTY_WAKEUPS {
            std::thread::sleep(PENALTY);
        }
    }
}

fn spin(group: &RingGroup) -> bool {
    let start = Instant::now();
    while start.elapsed() < SPIN {
        if group.semaphore.take() {
            return true;
        }
        std::hint::spin_loop();
    }
    false
}

/// Takes and serves all entries. Returns how long the rings need not be polled, and whether there were any entries.
fn poll_rings(
    shared: &Arc<DaemonShared>,
    group: &RingGroup,
    entries: &mut Vec<Submission>,
    done: &mut Vec<Done>,
) -> (Duration, bool) {
    let (mut more, mut found) = (true, false);
    let mut sleep = SLEEP;
    // A program may keep adding entries, so check for the end.
    while more && !group.stop.load(Ordering::Acquire) {
        more = false;
        let rings = read(&group.rings).clone();
        for ring in &rings {
            let now = Instant::now();
            let taken = ring.server.take(now, round_limit(group.priority), entries);
            found |= taken.count > 0;
            if taken.count > 0 {
                serve(shared, ring, entries, done);
            } else if ring.server.is_broken() && !ring.is_counted.swap(true, Ordering::AcqRel) {
                shared.stats.broken_rings.fetch_add(1, Ordering::Relaxed);
            }
            more |= taken.more;
            if let Some(due) = taken.due {
                sleep = sleep.min(due.saturating_duration_since(now));
            }
        }
    }
    (sleep, found)
}

/// The most entries for which a thread keeps capacity.
const MAX_SPARE_ENTRIES: usize = 1024;
/// Completions are published in batches of this size, so that the program can process them meanwhile.
const COMPLETION_BATCH: usize = 16;

fn serve(
    shared: &Arc<DaemonShared>,
    ring: &Arc<ServedRing>,
    entries: &mut Vec<Submission>,
    done: &mut Vec<Done>,
) {
    let (mut later, mut written) = (Vec::new(), Vec::new());
    let batch = entries.iter().filter_map(|entry| Some(entry.request?.len)).fold(0, u64::saturating_add);
    for entry in entries.drain(..) {
        let result = match io::begin(shared, ring, &entry, batch) {
            IoStart::Done(result) => result,
            IoStart::Written(request) => {
                written.push((request.inode, request.at, request.len));
                request.len as i64
            }
            IoStart::Later(job) => {
                later.push(*job);
                continue;
            }
        };
        done.push(Done { index: entry.index, userdata: entry.userdata, result });
        if done.len() >= COMPLETION_BATCH {
            shared.written(written.drain(..));
            ring.server.complete(done);
            done.clear();
        }
    }
    TransferJob::begin_all(later);
    shared.written(written);
    ring.server.complete(done);
    done.clear();
    // A batch may be as long as its ring.
    if entries.capacity() > MAX_SPARE_ENTRIES {
        entries.shrink_to(MAX_SPARE_ENTRIES);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use onehop_usrbio::RingName;
    use onehop_usrbio::gpu::{GpuChoice, Gpus, SharedGpuMemory};
    use onehop_usrbio::ring::bytes;

    use super::*;
    use crate::daemon::MountOptions;
    use crate::io::pool::SlowCall;
    use crate::waits::{Waiter, wait_threads};

    fn shared() -> Arc<DaemonShared> {
        DaemonShared::new(MountOptions::new(Path::new("/"), Path::new("/"))).unwrap()
    }

    fn user() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    /// Run by [`no_room_for_semaphores_is_an_error`], with an almost full `/dev/shm` of its own.
    #[test]
    fn in_a_small_shm() {
        if std::env::var_os("ONEHOP_TEST_SMALL_SHM").is_none() {
            return;
        }
        let (shared, filler) = (shared(), Path::new(SHM).join("filler"));
        let mut file = File::create(&filler).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
        let error = shared.workers.group(&shared, user(), Priority::Normal).err().unwrap();
        assert_eq!(error.errno(), Errno::NOSPC.raw_os_error(), "{error}");
        assert_eq!(std::fs::read_dir(SHM).unwrap().count(), 1);
        std::fs::remove_file(filler).unwrap();
        drop(file);
        shared.workers.group(&shared, user(), Priority::Normal).unwrap();
        shared.end();
    }

    #[test]
    fn no_room_for_semaphores_is_an_error() {
        let script = "mount -t tmpfs -o size=64k none /dev/shm && echo mounted && exec \"$0\" --exact \
                      workers::tests::in_a_small_shm --nocapture";
        let mut small = Command::new("unshare");
        small.args(["--mount", "sh", "-c", script]).arg(std::env::current_exe().unwrap());
        let output = small.env("ONEHOP_TEST_SMALL_SHM", "yes").output();
        let stdout =
            output.as_ref().map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
        if !stdout.starts_with("mounted") {
            let _ = writeln!(std::io::stderr(), "SKIPPED: cannot mount a /dev/shm for this test: {output:?}");
            return;
        }
        assert!(output.unwrap().status.success() && stdout.contains("1 passed"), "{stdout}");
    }

    #[test]
    fn no_semaphores_are_created_after_the_end() {
        let shared = shared();
        shared.workers.group(&shared, user(), Priority::Low).unwrap();
        shared.end();
        let error = shared.workers.group(&shared, user(), Priority::Low).err().unwrap();
        assert_eq!(error.errno(), Errno::SHUTDOWN.raw_os_error(), "{error}");
        assert!(lock(&shared.workers.groups).is_empty());
    }

    #[test]
    fn destroyed_semaphores_leave_no_threads() {
        let shared = shared();
        let group = || {
            let group = shared.workers.group(&shared, user(), Priority::Low).unwrap();
            shared.workers.start(&shared, &group).unwrap();
            group
        };
        let threads = || lock(&shared.workers.threads).len();
        let mut now = group();
        let few = 2 * threads();
        for _ in 0..5 {
            let before = now;
            File::options().write(true).open(&before.path).unwrap().set_len(0).unwrap();
            before.semaphore.post();
            assert!(before.guard.is_lost());
            now = group();
            assert!(threads() <= few && now.path != before.path);
            let start = Instant::now();
            // Its threads hold it until they end, which they do at once.
            while Arc::strong_count(&before) > 1 {
                assert!(start.elapsed() < Duration::from_secs(60));
                std::thread::sleep(Duration::from_millis(5));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        drop(now);
        shared.end();
    }

    #[test]
    fn a_forged_semaphore_count_costs_no_time() {
        use std::os::unix::fs::FileExt;
        let shared = shared();
        let group = shared.workers.group(&shared, user(), Priority::Normal).unwrap();
        shared.workers.start(&shared, &group).unwrap();
        let file = File::options().read(true).write(true).open(&group.path).unwrap();
        for _ in 0..3 {
            file.write_all_at(&i32::MAX.to_le_bytes(), 0).unwrap();
            let (start, mut count) = (Instant::now(), [1; 4]);
            while count != [0; 4] {
                assert!(start.elapsed() < Duration::from_secs(2), "the count is taken one by one");
                file.read_exact_at(&mut count, 0).unwrap();
            }
        }
        shared.end();
    }

    /// A thread that inherits a user's credentials can neither serve other users nor call RDMA.
    #[test]
    fn threads_do_not_inherit_the_credentials_of_a_user() {
        if !rustix::process::geteuid().is_root() {
            let _ = writeln!(std::io::stderr(), "SKIPPED: only root can act as another user");
            return;
        }
        let options =
            MountOptions { emulated_gpu: true, ..MountOptions::new(Path::new("/"), Path::new("/")) };
        let shared = DaemonShared::new(options).unwrap();
        let gpus = Gpus::new(GpuChoice::Emulated);
        let memory = SharedGpuMemory::create(&gpus.open(0).unwrap(), 4096).unwrap();
        let (gpu, _region) = shared.gpus.accept(&memory.offer().unwrap()).unwrap();
        let group = shared.workers.group(&shared, 0, Priority::Normal).unwrap();
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let status = |of: &str| std::fs::read_to_string(format!("/proc/self/task/{of}/status")).ok();
        let before = status(&thread.to_string()).unwrap();

        let acting = shared.act_as(Owner { uid: 21_001, gid: 21_002, pid: 1 }).unwrap().unwrap();
        shared.workers.start(&shared, &group).unwrap();
        shared.engine(gpu).unwrap();
        let (tx, rx) = std::sync::mpsc::channel();
        let locks = wait_threads(&shared.cache_calls, (21_001, 0));
        let [calls, slow] = [&shared.calls, &shared.disk_calls].map(|pool| wait_threads(pool, 21_001));
        for pool in [calls, slow, locks.clone()] {
            let tx = tx.clone();
            pool(SlowCall(Box::new(move || tx.send(()).unwrap())));
        }
        let by = Waiter { inode: 1, uid: 21_001, thread, limit: None, threads: locks };
        shared.waits.add(by, Box::new(move |_| tx.send(()).is_ok()));
        let own = status(&thread.to_string()).unwrap();
        drop(acting);
        (0..4).for_each(|_| rx.recv_timeout(Duration::from_secs(60)).unwrap());

        let has = |status: &str, name: &str| {
            status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned()
        };
        let identity = |of: &str| ["Uid:", "Gid:", "Groups:", "CapEff:"].map(|name| has(of, name));
        assert_ne!(identity(&own), identity(&before));
        // Threads of other tests have these names too, and may act as users for a moment. Inherited credentials would
        // stay.
        let start = Instant::now();
        loop {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
            let all = tasks.filter_map(|task| status(&task.file_name().to_string_lossy()));
            let all: Vec<_> = all.filter(|of| has(of, "Name:").starts_with("usrbio ")).collect();
            let others: Vec<_> = all.iter().filter(|of| identity(of) != identity(&before)).collect();
            if others.is_empty() {
                for name in ["usrbio rings", "usrbio disk", "usrbio waits", "usrbio GPU"] {
                    assert!(all.iter().any(|of| has(of, "Name:") == name), "{name}");
                }
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "{others:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        shared.end();
    }

    #[test]
    fn unused_semaphores_make_room_for_others() {
        if !rustix::process::geteuid().is_root() {
            let _ = writeln!(std::io::stderr(), "SKIPPED: only root has semaphores for others");
            return;
        }
        let shared = shared();
        let group = |uid| shared.workers.group(&shared, uid, Priority::High);
        let first = group(30_000).unwrap();
        for uid in 0..MAX_GROUPS as u32 {
            group(30_001 + uid).unwrap();
        }
        assert!(!first.path.exists() || Arc::strong_count(&first) == 1);
        assert_ne!(group(30_000).unwrap().path, first.path);
        // Groups have no threads before their first ring.
        assert_eq!(lock(&shared.workers.threads).len(), 0);
        shared.end();
    }

    #[test]
    fn ids_of_one_person_share_one_limit_of_semaphores() {
        if !rustix::process::geteuid().is_root() {
            let _ = writeln!(std::io::stderr(), "SKIPPED: only root has semaphores for others");
            return;
        }
        let subuids = std::env::temp_dir().join(format!("onehop-subuids-{}", Id::random().unwrap()));
        std::fs::write(&subuids, "30000:600000:65536\n").unwrap();
        let options = MountOptions::new(Path::new("/"), Path::new("/"));
        let shared =
            DaemonShared::new(MountOptions { threads: 1, subuids: subuids.clone(), ..options }).unwrap();
        std::fs::remove_file(subuids).unwrap();
        let add = |uid| {
            let name = RingName {
                read: true,
                depth: 0,
                priority: Priority::Normal,
                timeout: Duration::ZERO,
                flags: 0,
            };
            let server = RingServer::new(HostMem::anonymous(bytes(1).unwrap()).unwrap(), name).unwrap();
            let owner = Owner { uid, gid: uid, pid: std::process::id() };
            let ring = Arc::new(ServedRing::new(server, owner));
            shared.workers.add(&shared, &ring)
        };
        let few = (600_000..).take_while(|uid| add(*uid).is_ok()).count();
        assert_eq!(few, MAX_GROUPS / 2);
        assert_eq!(add(30_000).err().map(|error| error.errno()), Some(Errno::USERS.raw_os_error()));
        // A further ring in an existing group does not count.
        add(600_000).unwrap();
        add(30_001).unwrap();
        add(0).unwrap();
        shared.end();
    }
}
