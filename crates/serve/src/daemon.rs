//! The daemon: starts, serves, and cleans up when it ends.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use fuser::{BackgroundSession, Config, INodeNo, MountOption, Notifier, Session, SessionACL};
use onehop_os::ThreadStarter;
use onehop_os::file_writes::WriteRoutes;
use onehop_os::identity::{Acting, Credentials, OwnCredentials};
use onehop_target::client::RemoteTree;
use onehop_target::shares::Shares;
use onehop_target::tree::{Folder, FolderRules, Tree, mapping_budget, written_sums};
use onehop_usrbio::gpu::{AnyGpu, GpuChoice, Gpus};
use onehop_usrbio::mount::FS_TYPE;
use onehop_usrbio::{Id, SHM};
use rustix::fs::{CWD, OFlags, openat};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use crate::error::{Error, Result};
use crate::fs::{FuseHandler, Mounted};
use crate::io::QueuedTransfers;
use crate::io::gpu::GpuLanes;
use crate::io::pool::{SlowCall, ThreadPool, Zeroes};
use crate::leftovers::remove_leftovers;
use crate::lock;
use crate::locks::Locks;
use crate::memory::write_memory;
use crate::nameless::NamelessOpens;
use crate::opens::Opens;
use crate::persons::{Persons, SUBUIDS};
use crate::predecessor::{source, unmount_stale};
use crate::stats::Stats;
use crate::table::{LinkTable, Owner};
use crate::waits::Waits;
use crate::workers::Workers;

/// Threads that answer the kernel's FUSE requests.
const FUSE_THREADS: usize = 4;
/// The same for a target, where each of them may wait for the network.
const FUSE_THREADS_OF_TARGET: usize = 16;
/// GPU lanes for a target: they wait for the network, so there may be more of them than CPUs.
const LANES_OF_TARGET: usize = 16;
/// How long unmounting waits for a target that does not answer.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(2);
/// Files of a target that may be open at once: as many as a target allows one mount.
const OPEN_OF_TARGET: usize = 16_384;

/// Ring transfers in flight at once. Each takes some hundred bytes.
const MAX_JOBS: u64 = 1 << 18;

/// Where the files are.
#[derive(Clone)]
pub enum MountSource {
    /// A folder of this machine.
    Folder(PathBuf),
    /// The folder of a connected target.
    Target(Arc<RemoteTree>),
}

/// Options of a mount.
#[derive(Clone)]
pub struct MountOptions {
    /// The mount point.
    pub mount_point: PathBuf,
    /// The folder that is served.
    pub source: MountSource,
    /// The number of CPUs to use.
    pub threads: usize,
    /// Whether the kernel handles locks alone, for the programs of this mount only. Otherwise locks on a local folder
    /// exclude everyone who uses that folder, and files of a target cannot be locked.
    pub local_locks: bool,
    /// Whether programs may register memory of the emulated GPU. For tests: this memory is a file, and its size has no
    /// limit.
    pub emulated_gpu: bool,
    /// Bytes of writes, attributes, links and ioctls that wait for a thread, of all users. A user who holds half of it
    /// gets `ENOMEM` for more.
    pub write_memory: u64,
    /// The file that grants subordinate user IDs, `subuid(5)`. What those IDs use counts for their owner. Read once.
    pub subuids: PathBuf,
}

impl MountSource {
    pub(crate) fn target(&self) -> Option<&RemoteTree> {
        match self {
            Self::Folder(_) => None,
            Self::Target(tree) => Some(tree),
        }
    }
}

impl MountOptions {
    /// Serves a folder at a mount point.
    #[must_use]
    pub fn new(mount_point: &Path, root: &Path) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let source = MountSource::Folder(root.to_owned());
        Self {
            mount_point: mount_point.to_owned(),
            source,
            threads,
            local_locks: false,
            emulated_gpu: false,
            write_memory: write_memory(),
            subuids: SUBUIDS.into(),
        }
    }

    /// Serves a target's folder at a mount point. Files cannot be locked: other mounts of the same folder would not see
    /// the lock.
    #[must_use]
    pub fn of_target(mount_point: &Path, target: RemoteTree) -> Self {
        let source = MountSource::Target(Arc::new(target));
        Self { source, ..Self::new(mount_point, Path::new("")) }
    }
}

/// A person, and the lock turn of a file ([`Open::lock_turn`](crate::opens::Open::lock_turn)).
pub(crate) type LockUser = (u32, u64);

/// The lanes of a GPU, created at first use.
#[derive(Default)]
struct SharedLanes {
    lanes: OnceLock<Arc<GpuLanes>>,
    /// Held while the lanes are created: opening a GPU may take seconds, and only its own users wait for it.
    making: Mutex<()>,
}

/// State shared by all parts of a daemon.
pub(crate) struct DaemonShared {
    pub options: MountOptions,
    /// Starts all threads of this daemon. A thread that acts as a user must not start another itself, which would
    /// inherit the user's credentials.
    pub starter: Arc<ThreadStarter>,
    pub persons: Persons,
    pub table: LinkTable,
    pub opens: Opens,
    pub nameless: NamelessOpens,
    pub workers: Workers,
    /// Ring transfers to and from host memory that cannot be done at once.
    pub ring_reads: ThreadPool<QueuedTransfers>,
    pub ring_writes: ThreadPool<QueuedTransfers>,
    /// Ring transfers in flight, by user.
    pub jobs: Shares,
    /// Pools for FUSE requests that must not block the session threads: lookups; calls that move bytes or change names;
    /// calls that wait for the disk; calls that make the kernel write back or drop its cached pages. The last wait for
    /// the others, and include file locks. They have a pool of their own, so that a hung file system does not block the
    /// same user's calls elsewhere.
    pub lookups: ThreadPool<SlowCall>,
    pub calls: ThreadPool<SlowCall>,
    pub disk_calls: ThreadPool<SlowCall>,
    pub cache_calls: ThreadPool<SlowCall, LockUser>,
    /// Calls of persons whose threads have many groups, one at a time for each person.
    pub many_group_calls: ThreadPool<SlowCall>,
    /// Unmaps and unregisters memory of programs, one buffer at a time for each person.
    pub releases: ThreadPool<SlowCall>,
    /// Bytes of writes and other calls that wait for one of those threads, by user.
    pub call_memory: Arc<Shares>,
    pub waits: Waits,
    pub locks: Locks,
    pub stats: Stats,
    /// How files of a folder are written.
    pub writes: Arc<WriteRoutes>,
    pub gpus: Gpus,
    pub socket: PathBuf,
    pub zeroes: Zeroes,
    engines: Mutex<HashMap<[u8; 16], Arc<SharedLanes>>>,
    notifier: OnceLock<Notifier>,
    over: AtomicBool,
    /// The credentials to restore after acting as a user. `None` unless this process is root's.
    own: Option<OwnCredentials>,
}

impl DaemonShared {
    pub fn new(options: MountOptions) -> Result<Arc<Self>> {
        let zeroes = Zeroes::open().map_err(|e| Error::file("open", Path::new("/dev/zero"), e))?;
        let descriptors = raise_limits();
        let (most_open, most_locks, most_programs) = match options.source {
            // A file that is read past the page cache takes two descriptors; half of all descriptors are for files that
            // the kernel knows. Locks, programs with links, and GPU memory get a quarter each of the rest.
            MountSource::Folder(_) => (descriptors / 5, descriptors / 40, descriptors / 40),
            MountSource::Target(_) => (OPEN_OF_TARGET, 0, descriptors / 4),
        };
        let mode = if options.emulated_gpu { GpuChoice::Emulated } else { GpuChoice::Cuda };
        let persons = Persons::read(&options.subuids);
        let starter = Arc::new(ThreadStarter::new().map_err(Error::Thread)?);
        // No user is privileged: root's waiting calls must not starve others either.
        let mut call_memory = Shares::new(options.write_memory);
        call_memory.set_payer(persons.payer());
        Ok(Arc::new(Self {
            options,
            table: LinkTable::new(most_programs, &persons),
            opens: Opens::new(most_open, &persons),
            nameless: NamelessOpens::default(),
            workers: Workers::default(),
            ring_reads: ThreadPool::new(&starter),
            ring_writes: ThreadPool::new(&starter),
            jobs: persons.shares(MAX_JOBS),
            lookups: ThreadPool::new(&starter),
            calls: ThreadPool::new(&starter),
            waits: Waits::new(&starter),
            disk_calls: ThreadPool::new(&starter),
            cache_calls: ThreadPool::new(&starter),
            many_group_calls: ThreadPool::with_limit(&starter, 1),
            releases: ThreadPool::with_limit(&starter, 1),
            call_memory: call_memory.into(),
            locks: Locks::new(most_locks, &persons),
            writes: Arc::new(WriteRoutes::new(|most| mapping_budget(persons.shares(most)))),
            persons,
            stats: Stats::default(),
            gpus: Gpus::new(mode),
            socket: Path::new(SHM).join(format!("onehop-{}.sock", Id::random()?)),
            zeroes,
            engines: Mutex::default(),
            notifier: OnceLock::new(),
            over: AtomicBool::new(false),
            starter,
            own: OwnCredentials::of_root()
                .map_err(|e| Error::file("reading", Path::new("credentials"), e))?,
        }))
    }

    /// Makes this thread act on files as a user, in one group.
    pub fn act_as(&self, user: Owner) -> std::result::Result<Option<Acting<'_>>, Errno> {
        let who = Credentials { uid: user.uid, gid: user.gid, groups: &[], privileged: true };
        self.own.as_ref().map(|own| own.act_as(&who)).transpose()
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Threads that take requests from the kernel.
    pub fn session_threads(&self) -> usize {
        match self.options.source {
            MountSource::Folder(_) => FUSE_THREADS,
            MountSource::Target(_) => FUSE_THREADS_OF_TARGET,
        }
    }

    /// The lanes of a GPU, created at first use.
    pub fn engine(&self, device: Arc<AnyGpu>) -> Result<Arc<GpuLanes>> {
        let engine = lock(&self.engines).entry(device.uuid()).or_default().clone();
        let _making = lock(&engine.making);
        if let Some(lanes) = engine.lanes.get() {
            return Ok(lanes.clone());
        }
        // `end` stops all lanes that exist by then.
        if self.is_over() {
            return Err(Error::file("a GPU of", &self.options.mount_point, Errno::SHUTDOWN));
        }
        let threads = match self.options.source {
            MountSource::Folder(_) => self.options.threads,
            MountSource::Target(_) => LANES_OF_TARGET,
        };
        let lanes = GpuLanes::new(&self.starter, device, threads)?;
        Ok(engine.lanes.get_or_init(|| lanes).clone())
    }

    /// Invalidates the kernel's cache of ranges after a ring has written to them: of the file, the offset and the length.
    /// Of a file without cached pages, only the attributes are invalidated, once.
    pub fn written(&self, ranges: impl IntoIterator<Item = (u64, u64, u64)>) {
        let mut known = Vec::new();
        for (inode, at, bytes) in ranges {
            if self.opens.has_cached_pages(inode) {
                self.invalidate(inode, at as i64, bytes as i64);
            } else if !known.contains(&inode) {
                known.push(inode);
                self.forget_attributes(inode);
            }
        }
    }

    /// Makes the kernel write back dirty mapped pages of a file and drop its cached pages. It waits for reads and
    /// writes of the file, so session threads must not call this.
    pub fn forget_pages(&self, inode: u64) {
        self.invalidate(inode, 0, 0);
    }

    /// Invalidates the kernel's cached attributes of a file. From the new ones it decides whether its cached pages are
    /// still valid.
    pub fn forget_attributes(&self, inode: u64) {
        self.invalidate(inode, -1, 0);
    }

    fn invalidate(&self, inode: u64, at: i64, bytes: i64) {
        if let Some(notifier) = self.notifier.get() {
            // Fails if the kernel does not know the inode.
            let _ = notifier.inval_inode(INodeNo(inode), at, bytes);
        }
    }

    /// The statistics as JSON, with the budgets of the user who asks.
    pub fn report(&self, user: Option<u32>) -> Vec<u8> {
        let (programs, buffers, rings) = self.table.counts();
        let target = self.options.source.target();
        let mut document = self.stats.document(target.map(|tree| tree.via()).as_ref());
        if let Some(target) = target {
            document["remote"] = json!(target.report());
        }
        document["writes"] = json!(written_sums(&self.writes));
        document["programs"] = json!(programs);
        document["buffers"] = json!(buffers);
        document["rings"] = json!(rings);
        document["open_files"] = json!(self.opens.count());
        if let Some(uid) = user {
            document["yours"] = self.table.of_user(uid);
        }
        let engines = lock(&self.engines);
        let gpus = engines.values().filter_map(|engine| engine.lanes.get());
        document["gpus"] = gpus.map(|lanes| json!({ "gpu": lanes.device.gpu().name() })).collect();
        format!("{document:#}\n").into_bytes()
    }

    /// Tries again to start threads that could not be started before. Without them, calls may wait unanswered.
    pub fn start_missing_threads(&self) {
        [&self.ring_reads, &self.ring_writes].into_iter().for_each(ThreadPool::try_again);
        let calls = [&self.lookups, &self.calls, &self.disk_calls, &self.many_group_calls, &self.releases];
        calls.into_iter().for_each(ThreadPool::try_again);
        self.cache_calls.try_again();
    }

    pub fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.workers.end();
        self.ring_reads.end();
        self.ring_writes.end();
        // A pool may add work to those that end after it; calls may wait for the cache calls.
        self.waits.end();
        self.cache_calls.end();
        self.disk_calls.end();
        self.calls.end();
        self.lookups.end();
        self.many_group_calls.end();
        self.releases.end();
        for engine in std::mem::take(&mut *lock(&self.engines)).into_values() {
            // Lanes that are being created exist once this lock is acquired.
            let _making = lock(&engine.making);
            if let Some(lanes) = engine.lanes.get() {
                lanes.end();
            }
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// A mounted folder. Dropping it unmounts.
pub struct Daemon {
    shared: Arc<DaemonShared>,
    session: Option<BackgroundSession>,
    threads: Vec<JoinHandle<()>>,
}

impl Daemon {
    /// Mounts and begins to serve.
    ///
    /// # Errors
    /// When a folder does not exist or is not a directory, or FUSE is not available.
    pub fn start(options: MountOptions) -> Result<Self> {
        raise_limits();
        unmount_stale(&options.mount_point, options.source.target())?;
        folder(&options.mount_point)?;
        remove_leftovers();
        let shared = DaemonShared::new(options)?;
        let tree = tree(&shared)?;
        let mut this = Self { shared: shared.clone(), session: None, threads: Vec::new() };
        let socket = crate::socket::open(&shared.socket)?;
        this.spawn("usrbio accepts", move |shared| crate::socket::serve(shared, &socket))?;
        this.spawn("usrbio sweeps", |shared| shared.sweep())?;
        this.session = Some(mount(&shared, tree)?);
        Ok(this)
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce(&Arc<DaemonShared>) + Send + 'static) -> Result<()> {
        let shared = self.shared.clone();
        let thread = self.shared.starter.spawn(name, move || work(&shared));
        self.threads.push(thread.map_err(Error::Thread)?);
        Ok(())
    }

    /// Whether something else has unmounted it.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.guard.is_finished())
    }

    /// The content of `3fs-virt/onehop/stats`.
    #[must_use]
    pub fn report(&self) -> String {
        String::from_utf8_lossy(&self.shared.report(None)).into_owned()
    }

    /// Unmounts and ends. Programs get errors from then on.
    ///
    /// # Errors
    /// When the kernel refuses to unmount.
    pub fn end(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        let Some(session) = self.session.take() else {
            self.end_threads();
            return Ok(());
        };
        let path = self.shared.options.mount_point.clone();
        if let MountSource::Target(tree) = &self.shared.options.source {
            tree.end_within(UNMOUNT_TIMEOUT);
        }
        // The kernel refuses to unmount while files are open. A detached mount leaves the tree now, and goes when the
        // last of them is closed.
        let detached = rustix::mount::unmount(&path, rustix::mount::UnmountFlags::DETACH);
        self.end_threads();
        let ended = match detached {
            // Files that are still open fail once the session is gone.
            Ok(()) => drop_session(session),
            Err(_) => session.umount_and_join(),
        };
        let ended = ended.or_else(|error| match error.kind() {
            // A thread had just taken a request from the kernel when the session ended.
            std::io::ErrorKind::ConnectionAborted => Ok(()),
            _ => Err(error),
        });
        ended.map_err(|source| Error::Mount { path, source, hint: "" })
    }

    fn end_threads(&mut self) {
        // These threads first: they add work to the pools that end below.
        self.shared.over.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.shared.end();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Call `end` to get the error.
        let _ = self.finish();
    }
}

/// The mount has left the tree; the session's thread ends with the last open file, or with the process.
fn drop_session(session: BackgroundSession) -> std::io::Result<()> {
    let start = std::time::Instant::now();
    while !session.guard.is_finished() && start.elapsed() < Duration::from_millis(500) {
        std::thread::sleep(Duration::from_millis(2));
    }
    if session.guard.is_finished() { session.join() } else { Ok(()) }
}

/// The tree that is served.
fn tree(shared: &DaemonShared) -> Result<Arc<dyn Tree>> {
    let options = &shared.options;
    let root = match &options.source {
        MountSource::Target(tree) => {
            tree.set_payer(shared.persons.payer());
            return Ok(tree.clone());
        }
        MountSource::Folder(root) => root,
    };
    let held = folder(root)?;
    check_apart(&options.mount_point, root)?;
    shared.opens.set_folder(&held);
    let rules = FolderRules { for_others: false, most_open: raise_limits() / 2 };
    let folder = Folder::new(held, rules).map_err(|e| Error::file("statx", root, e))?;
    Ok(Arc::new(folder.with_payer(shared.persons.payer()).with_writes(shared.writes.clone())))
}

fn mount(shared: &Arc<DaemonShared>, tree: Arc<dyn Tree>) -> Result<BackgroundSession> {
    let path = &shared.options.mount_point;
    let failed = |source: std::io::Error| Error::Mount { path: path.clone(), hint: hint(&source), source };
    let mounted = FuseHandler(Arc::new(Mounted::new(shared.clone(), tree)));
    let mut config = Config::default();
    config.n_threads = Some(shared.session_threads());
    let source = source(shared.options.source.target());
    let session = if rustix::process::geteuid().is_root() {
        config.acl = SessionACL::All;
        mount_as_root(&source, path).and_then(|fuse| Session::from_fd(mounted, fuse, SessionACL::All, config))
    } else {
        // Users other than root mount through fusermount3, and only they can access the mount.
        config.mount_options = vec![
            MountOption::FSName(source),
            MountOption::Subtype("hf3fs".into()),
            MountOption::DefaultPermissions,
        ];
        Session::new(mounted, path, &config)
    };
    let session = session.map_err(failed)?;
    // Before the first request: its answer may rely on notifications.
    let _ = shared.notifier.set(session.notifier());
    session.spawn().map_err(failed)
}

/// Mounts with 3FS's file system type, by which programs recognise it.
fn mount_as_root(source: &str, path: &Path) -> std::io::Result<OwnedFd> {
    let fuse = openat(CWD, "/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, rustix::fs::Mode::empty())?;
    let number = fuse.as_raw_fd();
    let options = format!("fd={number},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other");
    let options = std::ffi::CString::new(options)?;
    let flags = rustix::mount::MountFlags::NOSUID | rustix::mount::MountFlags::NODEV;
    rustix::mount::mount(source, path, FS_TYPE, flags, options.as_c_str())?;
    Ok(fuse)
}

fn hint(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(code) if code == Errno::NOENT.raw_os_error() || code == Errno::NODEV.raw_os_error() => {
            "; there is no /dev/fuse: load the kernel module fuse, or give the container the device"
        }
        Some(code) if code == Errno::PERM.raw_os_error() || code == Errno::ACCESS.raw_os_error() => {
            "; mounting takes root, or the program fusermount3 (Debian: fuse3)"
        }
        _ => "",
    }
}

/// Raises the limit of descriptors: each file that the kernel knows takes one. Returns the limit.
fn raise_limits() -> usize {
    let now = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum });
    getrlimit(Resource::Nofile).current.map_or(1 << 20, |most| most as usize)
}

fn folder(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(CWD, path, flags, rustix::fs::Mode::empty()).map_err(|e| {
        let why = match e {
            Errno::NOENT => "there is no such folder".into(),
            Errno::NOTDIR => "it is not a folder".into(),
            other => std::io::Error::from(other).to_string(),
        };
        Error::Folder { path: path.to_owned(), why }
    })
}

/// Refuses a mount point within the served folder, or around it: the mount would have to ask itself for files.
fn check_apart(point: &Path, root: &Path) -> Result<()> {
    let real = |path: &Path| path.canonicalize().map_err(|e| Error::file("realpath of", path, e));
    let (point, root) = (real(point)?, real(root)?);
    if root.starts_with(&point) {
        let why = format!("the folder to serve, {}, is inside it", root.display());
        return Err(Error::Folder { path: point, why });
    }
    if point.starts_with(&root) {
        let why = format!("it is inside the folder to serve, {}", root.display());
        return Err(Error::Folder { path: point, why });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Run by [`the_emulated_gpu_is_off_by_default`], with the environment variable that programs set.
    #[test]
    fn with_a_variable() {
        assert!(!MountOptions::new(Path::new("/"), Path::new("/")).emulated_gpu);
    }

    #[test]
    fn the_emulated_gpu_is_off_by_default() {
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        again.args(["--exact", "daemon::tests::with_a_variable"]).env("HF3FS_GDR_ENABLED", "emulated");
        let output = again.output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
    }
}
