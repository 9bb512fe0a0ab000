//! The daemon: begins, runs by itself, and leaves nothing behind when it ends.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use fuser::{BackgroundSession, Config, INodeNo, MountOption, Notifier, Session, SessionACL};
use onehop_os::ThreadStarter;
use onehop_os::identity::{Acting, Credentials, OwnCredentials};
use onehop_target::client::RemoteTree;
use onehop_target::shares::Shares;
use onehop_target::tree::{Folder, FolderRules, Tree};
use onehop_usrbio::gpu::{AnyGpu, GpuChoice, Gpus};
use onehop_usrbio::mount::FS_TYPE;
use onehop_usrbio::{Id, SHM};
use rustix::fs::{CWD, OFlags, openat};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use crate::error::{Error, Result};
use crate::fs::{FuseHandler, Mounted};
use crate::io::Rest;
use crate::io::gpu::GpuLanes;
use crate::io::pool::{SlowCall, ThreadPool, Zeroes};
use crate::leftovers::remove_leftovers;
use crate::lock;
use crate::locks::Locks;
use crate::memory::write_memory;
use crate::opens::Opens;
use crate::persons::{Persons, SUBUIDS};
use crate::predecessor::{source, unmount_stale};
use crate::stats::Stats;
use crate::table::{LinkTable, Owner};
use crate::waits::Waits;
use crate::workers::Workers;

/// Threads that answer the kernel.
const FUSE_THREADS: usize = 4;

/// The same where each of them may have to wait for another machine.
const FUSE_THREADS_OF_TARGET: usize = 16;
/// Transfers to a GPU that may wait for another machine at once, though there are few processors.
const LANES_OF_TARGET: usize = 16;
/// How long a mount that ends waits for a target that is gone.
const FAREWELL: Duration = Duration::from_secs(2);
/// Files of a target that are open at once: as many as a target has for one mount.
const OPEN_OF_TARGET: usize = 16_384;

/// Transfers of rings under way at once: some hundred bytes each.
const MOST_JOBS: u64 = 1 << 18;

/// Where the files are.
#[derive(Clone)]
pub enum MountSource {
    /// In a folder of this machine.
    Folder(PathBuf),
    /// In the folder of a target, to which there is a connection.
    Target(Arc<RemoteTree>),
}

/// How a mount is to be.
#[derive(Clone)]
pub struct MountOptions {
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// What is served.
    pub source: MountSource,
    /// Processors to count on.
    pub threads: usize,
    /// Whether the kernel keeps locks by itself, for the programs of this mount alone. Otherwise those of a folder hold for all who use
    /// it, and a target's files have none.
    pub local_locks: bool,
    /// Whether programs may bring memory of the emulated GPU, which is for tests: it is a file, and there may be any amount of it.
    pub emulated_gpu: bool,
    /// Bytes of writes, attributes, links and ioctls that wait for a thread, of all users. One who has half of it waiting gets `ENOMEM`
    /// for more.
    pub write_memory: u64,
    /// The file that grants subordinate user numbers, `subuid(5)`: what they take counts for their person. It is read once.
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
    /// A folder, served at a mount point.
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

    /// A target's folder, served at a mount point. Other mounts may serve it, too: a lock here would exclude nobody there.
    #[must_use]
    pub fn of_target(mount_point: &Path, target: RemoteTree) -> Self {
        let source = MountSource::Target(Arc::new(target));
        Self { source, ..Self::new(mount_point, Path::new("")) }
    }
}

/// A person, and at which of their turns they lock a file.
pub(crate) type LockUser = (u32, u64);

/// The lanes of a GPU, once somebody has used it.
#[derive(Default)]
struct SharedLanes {
    lanes: OnceLock<Arc<GpuLanes>>,
    /// Held while they are made: a GPU may take seconds, for which only its own users wait.
    making: Mutex<()>,
}

/// What all parts of a daemon have in common.
pub(crate) struct DaemonShared {
    pub options: MountOptions,
    /// Starts all threads of this daemon: most of those that need another one may have acted as users.
    pub starter: Arc<ThreadStarter>,
    pub persons: Persons,
    pub table: LinkTable,
    pub opens: Opens,
    pub workers: Workers,
    /// Transfers of rings to and from host memory that have to wait.
    pub ring_reads: ThreadPool<Rest>,
    pub ring_writes: ThreadPool<Rest>,
    /// Transfers of rings that are under way, by user.
    pub jobs: Shares,
    /// Calls of the kernel that nothing else is to wait for: those that look for something, those that move bytes or change names,
    /// those that wait until something is on the disk, and those that have the kernel write back or forget what it keeps, which wait
    /// for the former. The latter lock files, and a file system that hangs is to keep none of the same user waiting for others.
    pub looks: ThreadPool<SlowCall>,
    pub calls: ThreadPool<SlowCall>,
    pub slow: ThreadPool<SlowCall>,
    pub caches: ThreadPool<SlowCall, LockUser>,
    /// Calls of persons whose threads have many groups: of each person one at a time.
    pub crowds: ThreadPool<SlowCall>,
    /// Memory of programs that is freed, or that network cards let go of: of each person one at a time.
    pub releases: ThreadPool<SlowCall>,
    /// Bytes of writes and of other calls that wait for one of those threads, by user.
    pub held: Arc<Shares>,
    pub waits: Waits,
    pub locks: Locks,
    pub stats: Stats,
    pub gpus: Gpus,
    pub socket: PathBuf,
    pub zeroes: Zeroes,
    engines: Mutex<HashMap<[u8; 16], Arc<SharedLanes>>>,
    notifier: OnceLock<Notifier>,
    over: AtomicBool,
    /// What a thread returns to when it has acted as a user; none where this is not root's process.
    own: Option<OwnCredentials>,
}

impl DaemonShared {
    pub fn new(options: MountOptions) -> Result<Arc<Self>> {
        let zeroes = Zeroes::open().map_err(|e| Error::file("open", Path::new("/dev/zero"), e))?;
        let descriptors = raise_limits();
        let (most_open, most_locks, most_programs) = match options.source {
            // One that is read past the page cache takes two descriptors; half of them all are for files that are known. A quarter of
            // what is left is for each of locks, programs with links, and GPU memory.
            MountSource::Folder(_) => (descriptors / 5, descriptors / 40, descriptors / 40),
            MountSource::Target(_) => (OPEN_OF_TARGET, 0, descriptors / 4),
        };
        let mode = if options.emulated_gpu { GpuChoice::Emulated } else { GpuChoice::Cuda };
        let persons = Persons::read(&options.subuids);
        let starter = Arc::new(ThreadStarter::new().map_err(Error::Thread)?);
        // Nobody is privileged: what root has waiting must not stop others either.
        let mut held = Shares::new(options.write_memory);
        held.set_payer(persons.payer());
        Ok(Arc::new(Self {
            options,
            table: LinkTable::new(most_programs, &persons),
            opens: Opens::new(most_open, &persons),
            workers: Workers::default(),
            ring_reads: ThreadPool::new(&starter),
            ring_writes: ThreadPool::new(&starter),
            jobs: persons.shares(MOST_JOBS),
            looks: ThreadPool::new(&starter),
            calls: ThreadPool::new(&starter),
            waits: Waits::new(&starter),
            slow: ThreadPool::new(&starter),
            caches: ThreadPool::new(&starter),
            crowds: ThreadPool::with_limit(&starter, 1),
            releases: ThreadPool::with_limit(&starter, 1),
            held: held.into(),
            locks: Locks::new(most_locks, &persons),
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

    /// Has this thread act on files as a user, in one group.
    pub fn act_as(&self, user: Owner) -> std::result::Result<Option<Acting<'_>>, Errno> {
        let who = Credentials { uid: user.uid, gid: user.gid, groups: &[], privileged: true };
        self.own.as_ref().map(|own| own.act_as(&who)).transpose()
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Threads that take calls of the kernel.
    pub fn session_threads(&self) -> usize {
        match self.options.source {
            MountSource::Folder(_) => FUSE_THREADS,
            MountSource::Target(_) => FUSE_THREADS_OF_TARGET,
        }
    }

    /// The lanes of a GPU, which are made when it is first used.
    pub fn engine(&self, device: Arc<AnyGpu>) -> Result<Arc<GpuLanes>> {
        let engine = lock(&self.engines).entry(device.uuid()).or_default().clone();
        let _making = lock(&engine.making);
        if let Some(lanes) = engine.lanes.get() {
            return Ok(lanes.clone());
        }
        // What ends has all lanes end that it finds.
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

    /// A ring has written to a file, some of these bytes at least: the kernel forgets what it knew of them.
    pub fn written(&self, inode: u64, at: u64, bytes: u64) {
        self.invalidate(inode, at as i64, bytes as i64);
    }

    /// Has the kernel write back what programs have changed of a file by their mappings, and forget what it keeps of it. It waits for
    /// reads and writes of the file, so no thread of the session may call this.
    pub fn forget_pages(&self, inode: u64) {
        self.invalidate(inode, 0, 0);
    }

    /// Has the kernel forget a file's attributes. By those of now it finds out whether the pages that it keeps are still good.
    pub fn forget_attributes(&self, inode: u64) {
        self.invalidate(inode, -1, 0);
    }

    fn invalidate(&self, inode: u64, at: i64, bytes: i64) {
        if let Some(notifier) = self.notifier.get() {
            // It may know nothing of it.
            let _ = notifier.inval_inode(INodeNo(inode), at, bytes);
        }
    }

    /// The account of everything, as JSON, and of what a user who asks has and may have.
    pub fn report(&self, asks: Option<u32>) -> Vec<u8> {
        let (programs, buffers, rings) = self.table.counts();
        let target = self.options.source.target();
        let mut document = self.stats.document(target.map(|tree| tree.via()).as_ref());
        if let Some(target) = target {
            document["remote"] = json!(target.report());
        }
        document["programs"] = json!(programs);
        document["buffers"] = json!(buffers);
        document["rings"] = json!(rings);
        document["open_files"] = json!(self.opens.count());
        if let Some(uid) = asks {
            document["yours"] = self.table.of_user(uid);
        }
        let engines = lock(&self.engines);
        let gpus = engines.values().filter_map(|engine| engine.lanes.get());
        document["gpus"] = gpus.map(|lanes| json!({ "gpu": lanes.device.gpu().name() })).collect();
        format!("{document:#}\n").into_bytes()
    }

    /// Calls may wait unanswered where no thread could be started for them.
    pub fn start_missing_threads(&self) {
        [&self.ring_reads, &self.ring_writes].into_iter().for_each(ThreadPool::try_again);
        let calls = [&self.looks, &self.calls, &self.slow, &self.crowds, &self.releases];
        calls.into_iter().for_each(ThreadPool::try_again);
        self.caches.try_again();
    }

    pub fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.workers.end();
        self.ring_reads.end();
        self.ring_writes.end();
        // Each may add to those that end after it; the calls may wait for the caches.
        self.waits.end();
        self.caches.end();
        self.slow.end();
        self.calls.end();
        self.looks.end();
        self.crowds.end();
        self.releases.end();
        for engine in std::mem::take(&mut *lock(&self.engines)).into_values() {
            // One that is being made now is there when this lock is had, or never.
            let _making = lock(&engine.making);
            if let Some(lanes) = engine.lanes.get() {
                lanes.end();
            }
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// A mount that is served. Dropping it unmounts.
pub struct Daemon {
    shared: Arc<DaemonShared>,
    session: Option<BackgroundSession>,
    threads: Vec<JoinHandle<()>>,
}

impl Daemon {
    /// Mounts, and serves from now on.
    ///
    /// # Errors
    /// When a folder is none, or the system has no FUSE for us.
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

    /// Whether somebody else has unmounted it.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.guard.is_finished())
    }

    /// What is in `3fs-virt/onehop/stats`.
    #[must_use]
    pub fn report(&self) -> String {
        String::from_utf8_lossy(&self.shared.report(None)).into_owned()
    }

    /// Unmounts and ends: programs find the mount gone, and their waits at their own time.
    ///
    /// # Errors
    /// When the system does not unmount.
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
            tree.end_within(FAREWELL);
        }
        // While somebody has files of it open the kernel would refuse; so it goes from the tree now, and altogether with
        // the last of them.
        let detached = rustix::mount::unmount(&path, rustix::mount::UnmountFlags::DETACH);
        self.end_threads();
        let ended = match detached {
            // Files that are still open get errors once the session is gone.
            Ok(()) => drop_session(session),
            Err(_) => session.umount_and_join(),
        };
        let ended = ended.or_else(|error| match error.kind() {
            // The end, seen by a thread that had just taken a request from the kernel.
            std::io::ErrorKind::ConnectionAborted => Ok(()),
            _ => Err(error),
        });
        ended.map_err(|source| Error::Mount { path, source, hint: "" })
    }

    fn end_threads(&mut self) {
        // These first: they give the others work, which nobody would do any more.
        self.shared.over.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.shared.end();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Who wants to know calls `end`.
        let _ = self.finish();
    }
}

/// The mount is gone from the tree; the session's own thread ends with the last file, or with the process.
fn drop_session(session: BackgroundSession) -> std::io::Result<()> {
    let start = std::time::Instant::now();
    while !session.guard.is_finished() && start.elapsed() < Duration::from_millis(500) {
        std::thread::sleep(Duration::from_millis(2));
    }
    if session.guard.is_finished() { session.join() } else { Ok(()) }
}

/// What is served.
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
    Ok(Arc::new(folder.with_payer(shared.persons.payer())))
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
        // fusermount3 does it for others, who let nobody else in.
        config.mount_options = vec![
            MountOption::FSName(source),
            MountOption::Subtype("hf3fs".into()),
            MountOption::DefaultPermissions,
        ];
        Session::new(mounted, path, &config)
    };
    let session = session.map_err(failed)?;
    // Before the first call: who is answered may rely on what the kernel was told.
    let _ = shared.notifier.set(session.notifier());
    session.spawn().map_err(failed)
}

/// Under the type of 3FS, by which programs know its mounts.
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

/// Files that the kernel knows take descriptors; gives how many there may be.
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

/// A mount within what it shows, or over it, would ask itself for its files.
fn check_apart(point: &Path, root: &Path) -> Result<()> {
    let real = |path: &Path| path.canonicalize().map_err(|e| Error::file("realpath of", path, e));
    let (point, root) = (real(point)?, real(root)?);
    if root.starts_with(&point) {
        let why = format!("the folder that it would show, {}, lies within it", root.display());
        return Err(Error::Folder { path: point, why });
    }
    if point.starts_with(&root) {
        let why = format!("it lies within the folder that it would show, {}", root.display());
        return Err(Error::Folder { path: point, why });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Run by [`only_its_user_brings_an_emulated_gpu`], with the variable that programs have.
    #[test]
    fn with_a_variable() {
        assert!(!MountOptions::new(Path::new("/"), Path::new("/")).emulated_gpu);
    }

    #[test]
    fn only_its_user_brings_an_emulated_gpu() {
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        again.args(["--exact", "daemon::tests::with_a_variable"]).env("HF3FS_GDR_ENABLED", "emulated");
        let output = again.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }
}
