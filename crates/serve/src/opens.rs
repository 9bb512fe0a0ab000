//! Files that programs have open through the mount. A ring may use a file only while its user has it open.

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use onehop_target::shares::Shares;
use onehop_target::tree::OpenFile;
use onehop_target::wire::OpenMode;
use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::Errno;

use crate::persons::Persons;
use crate::{lock, read, write};

/// Lock turns of a person. With one for each mount below the folder, a person with files in many hung mounts would
/// block all threads.
const LOCK_TURNS: usize = 8;

/// Assigns lock turns: the first mounts in which files are opened get one each, and the others share these.
#[derive(Default)]
struct MountTurns(Mutex<Vec<u64>>);

impl MountTurns {
    fn of(&self, mount: u64) -> u64 {
        let mut first = lock(&self.0);
        let place = first.iter().position(|other| *other == mount).or_else(|| {
            let is_new = first.len() < LOCK_TURNS;
            is_new.then(|| {
                first.push(mount);
                first.len() - 1
            })
        });
        place.map_or(mount % LOCK_TURNS as u64, |place| place as u64)
    }
}

/// The mount of a file; 0 if unknown. This may ask the file system.
fn mount_of(file: &dyn OpenFile) -> u64 {
    file.local().map_or(0, mount_id)
}

fn mount_id(file: impl AsFd) -> u64 {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    statx(file, "", flags, StatxFlags::MNT_ID).map_or(0, |found| found.stx_mnt_id)
}

/// An open file.
pub(crate) struct Open {
    pub inode: u64,
    uid: u32,
    access: OpenMode,
    file: Arc<dyn OpenFile>,
    lock_turn: u64,
    is_elsewhere: bool,
    closed: AtomicBool,
    /// Of all opens of the file: whether the kernel may have pages of it.
    cached: Arc<AtomicBool>,
}

impl Open {
    pub fn file(&self) -> &dyn OpenFile {
        &*self.file
    }

    /// To be called before bytes are read or written for the kernel, which may keep them.
    pub fn note_cached(&self) {
        if !self.cached.load(Ordering::Relaxed) {
            self.cached.store(true, Ordering::Relaxed);
        }
        // Either a ring that writes sees this, or the bytes that follow are the ring's.
        fence(Ordering::SeqCst);
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The user who opened it.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Which of its person's lock turns it uses.
    pub fn lock_turn(&self) -> u64 {
        self.lock_turn
    }

    /// Whether it is in a mount below the served folder.
    pub fn is_elsewhere(&self) -> bool {
        self.is_elsewhere
    }

    /// Whether a write is on the disk when it is acknowledged.
    pub fn syncs(&self) -> bool {
        self.access.sync || self.access.data_sync
    }

    /// Whether it is open for writing.
    pub fn writes(&self) -> bool {
        self.access.write
    }

    /// To be called before a write. The write is made as the user who opened the file: root would keep set-id bits that
    /// another writer must clear.
    pub fn written_by(&self, keeps_set_id: bool) -> std::io::Result<()> {
        if self.uid == 0 && !keeps_set_id { self.file.drop_set_id() } else { Ok(()) }
    }

    fn kind(&self) -> OpenKind {
        OpenKind {
            uid: self.uid,
            // Execute permission does not allow reading.
            reads: self.access.read && !self.access.execute,
            writes: self.access.write,
            syncs: self.syncs(),
        }
    }
}

/// What decides whether a ring may use an open file. There are few kinds, however often a file is open.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct OpenKind {
    uid: u32,
    reads: bool,
    writes: bool,
    syncs: bool,
}

impl OpenKind {
    fn allows(&self, uid: u32, reads: bool) -> bool {
        (self.uid == uid || uid == 0) && if reads { self.reads } else { self.writes }
    }

    /// The kinds that a user may use: their own, and for root all.
    fn of(uid: u32) -> RangeInclusive<Self> {
        let kind = |uid, yes| Self { uid, reads: yes, writes: yes, syncs: yes };
        kind(uid, false)..=kind(if uid == 0 { u32::MAX } else { uid }, true)
    }
}

/// Open files by their handles.
type ByHandle = HashMap<u64, Arc<Open>>;

/// Opens of one file.
#[derive(Default)]
struct InodeOpens {
    /// By kind, so that neither a search nor a close takes longer for a file that is open often.
    kinds: BTreeMap<OpenKind, ByHandle>,
    /// See [`Open::note_cached`]. An open of a file that nobody has open makes the kernel drop its pages.
    cached: Arc<AtomicBool>,
}

/// Why a ring may not use a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotOpen {
    /// The user does not have it open.
    Closed,
    /// The user has it open, but not for this direction.
    Access,
}

/// All open files.
pub(crate) struct Opens {
    by_handle: RwLock<ByHandle>,
    by_inode: RwLock<HashMap<u64, InodeOpens>>,
    shares: Shares,
    next: AtomicU64,
    added: AtomicU64,
    turns: MountTurns,
    /// The mount of the served folder.
    own_mount: OnceLock<u64>,
}

impl Opens {
    /// For this many open files.
    pub fn new(most: usize, persons: &Persons) -> Self {
        Self {
            by_handle: RwLock::default(),
            by_inode: RwLock::default(),
            shares: persons.shares(most as u64),
            next: AtomicU64::new(0),
            added: AtomicU64::new(0),
            turns: MountTurns::default(),
            own_mount: OnceLock::new(),
        }
    }

    /// Sets the served folder. Files of a target are in no mount of this machine.
    pub fn set_folder(&self, folder: impl AsFd) {
        // Called once.
        let _ = self.own_mount.set(mount_id(folder));
    }

    /// Whether a user may open one more file. Each user may have as many as remain for others; root and the daemon's
    /// user may have all.
    ///
    /// # Errors
    /// `EMFILE` if not.
    pub fn check(&self, uid: u32) -> Result<(), Errno> {
        if self.shares.room(uid) > 0 { Ok(()) } else { Err(Errno::MFILE) }
    }

    /// A new handle. Files and folders share one number space, because the kernel passes handles of folders where those
    /// of files are looked up.
    pub fn handle(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Adds an open file, and returns its handle. May ask the file system.
    pub fn add(&self, inode: u64, uid: u32, access: OpenMode, file: Arc<dyn OpenFile>) -> u64 {
        // Found now: neither session threads nor holders of a lock here may wait for a file system.
        let mount = mount_of(&*file);
        let lock_turn = self.turns.of(mount);
        let is_elsewhere = self.own_mount.get().is_some_and(|own| *own != mount);
        let (closed, handle) = (AtomicBool::new(false), self.handle());
        self.shares.count(uid, 1);
        let mut all = write(&self.by_inode);
        let same = all.entry(inode).or_default();
        let cached = same.cached.clone();
        let open = Arc::new(Open { inode, uid, access, file, lock_turn, is_elsewhere, closed, cached });
        same.kinds.entry(open.kind()).or_default().insert(handle, open.clone());
        drop(all);
        write(&self.by_handle).insert(handle, open);
        self.added.fetch_add(1, Ordering::AcqRel);
        handle
    }

    /// The number of opens so far. A result of [`Self::find`] stays valid while this is unchanged and the file is not
    /// closed.
    pub fn added(&self) -> u64 {
        self.added.load(Ordering::Acquire)
    }

    pub fn get(&self, handle: u64) -> Option<Arc<Open>> {
        read(&self.by_handle).get(&handle).cloned()
    }

    /// Removes an open file. It is then to be [released](Self::close_file).
    pub fn close(&self, handle: u64) -> Option<Arc<Open>> {
        let gone = write(&self.by_handle).remove(&handle)?;
        gone.closed.store(true, Ordering::Release);
        let mut all = write(&self.by_inode);
        if let Some(InodeOpens { kinds, .. }) = all.get_mut(&gone.inode) {
            let kind = gone.kind();
            let same = kinds.get_mut(&kind);
            if same.is_some_and(|same| same.remove(&handle).is_some() && same.is_empty()) {
                kinds.remove(&kind);
            }
            if kinds.is_empty() {
                all.remove(&gone.inode);
            }
        }
        drop(all);
        Some(gone)
    }

    /// Closes the file itself. That takes long for the last handle of a large deleted file.
    pub fn close_file(&self, gone: Arc<Open>) {
        let uid = gone.uid;
        drop(gone);
        self.shares.put_back(uid, 1);
    }

    /// An open file that a user's ring may read or write. Synchronous ones are preferred.
    pub fn find(&self, inode: u64, uid: u32, reads: bool) -> Result<Arc<Open>, NotOpen> {
        let all = read(&self.by_inode);
        let InodeOpens { kinds, .. } = all.get(&inode).ok_or(NotOpen::Closed)?;
        let theirs = || kinds.range(OpenKind::of(uid));
        let fitting = theirs().filter(|(kind, _)| kind.allows(uid, reads)).max_by_key(|(kind, _)| kind.syncs);
        if let Some(open) = fitting.and_then(|(_, same)| same.values().next()) {
            return Ok(open.clone());
        }
        let known = theirs().any(|(kind, _)| kind.allows(uid, !reads));
        Err(if known { NotOpen::Access } else { NotOpen::Closed })
    }

    /// Whether the kernel may have pages of a file. To be called after a ring has written to it.
    pub fn has_cached_pages(&self, inode: u64) -> bool {
        fence(Ordering::SeqCst);
        read(&self.by_inode).get(&inode).is_some_and(|opens| opens.cached.load(Ordering::Relaxed))
    }

    pub fn count(&self) -> usize {
        read(&self.by_handle).len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use onehop_os::ThreadStarter;
    use onehop_target::tree::Local;

    use super::*;
    use crate::io::pool::{SlowCall, ThreadPool};

    fn null() -> Arc<Local> {
        Arc::new(Local::new(std::fs::File::open("/dev/null").unwrap()))
    }

    #[test]
    fn open_files_are_limited_per_user() {
        let opens = Opens::new(16, &Persons::default());
        let open = |uid| opens.check(uid).map(|()| opens.add(7, uid, OpenMode::default(), null()));
        let many = |uid| std::iter::from_fn(|| open(uid).ok()).collect::<Vec<_>>();
        let (first, second) = (many(21_001), many(21_002));
        assert_eq!((first.len(), second.len()), (8, 4));
        assert_eq!(open(21_001).err(), Some(Errno::MFILE));
        assert_eq!((many(21_003).len(), many(0).len()), (2, 2));
        assert_eq!(open(0).err(), Some(Errno::MFILE));
        for handle in first {
            if let Some(gone) = opens.close(handle) {
                opens.close_file(gone);
            }
            if let Some(gone) = opens.close(handle) {
                opens.close_file(gone);
            }
        }
        assert_eq!(many(21_002).len(), 2);
    }

    #[test]
    fn files_in_many_hung_mounts_leave_threads_to_others() {
        let pool = ThreadPool::new(&Arc::new(ThreadStarter::new().unwrap()));
        let turns = MountTurns::default();
        let first: Vec<_> = [100, 108, 116, 100].into_iter().map(|mount| turns.of(mount)).collect();
        assert_eq!(first, [0, 1, 2, 0], "mounts share a turn although others are free");
        let gate = Arc::new(RwLock::new(()));
        let closed = gate.write().unwrap();
        for mount in 0..100 {
            for _ in 0..64 {
                let gate = gate.clone();
                pool.add((1, turns.of(mount)), SlowCall(Box::new(move || drop(gate.read()))));
            }
        }
        let (tx, rx) = channel();
        pool.add((2, turns.of(0)), SlowCall(Box::new(move || tx.send(()).unwrap())));
        assert!(rx.recv_timeout(Duration::from_secs(60)).is_ok(), "another person waits");
        drop(closed);
        pool.end();
    }

    #[test]
    fn files_that_others_have_open_do_not_matter() {
        let opens = Opens::new(64, &Persons::default());
        let mode = |read, write, execute| OpenMode { read, write, execute, ..OpenMode::default() };
        for uid in [0, 999, 1001, u32::MAX] {
            opens.add(7, uid, mode(true, true, false), null());
        }
        assert_eq!(opens.find(7, 1000, true).err(), Some(NotOpen::Closed));
        let runs = opens.add(7, 1000, mode(true, false, true), null());
        assert_eq!(opens.find(7, 1000, true).err(), Some(NotOpen::Closed));
        let twice = [(); 2].map(|()| opens.add(7, 1000, mode(false, true, false), null()));
        assert_eq!(opens.find(7, 1000, true).err(), Some(NotOpen::Access));
        for handle in twice {
            assert_eq!(opens.find(7, 1000, false).map(|open| open.uid()), Ok(1000));
            drop(opens.close(handle));
        }
        drop(opens.close(runs));
        assert_eq!(opens.find(7, 1000, false).err(), Some(NotOpen::Closed));
        assert!(opens.find(7, u32::MAX, true).is_ok() && opens.find(7, 0, true).is_ok());
    }

    #[test]
    fn rings_use_only_files_that_their_user_has_open() {
        let opens = Opens::new(8, &Persons::default());
        let reads = OpenMode { read: true, ..OpenMode::default() };
        let reader = opens.add(7, 1000, reads, null());
        assert!(opens.find(7, 1000, true).is_ok() && opens.find(7, 0, true).is_ok());
        assert_eq!(opens.find(7, 1000, false).err(), Some(NotOpen::Access));
        assert_eq!(opens.find(7, 1001, true).err(), Some(NotOpen::Closed));
        assert_eq!(opens.find(8, 1000, true).err(), Some(NotOpen::Closed));
        let both = opens.add(7, 1000, OpenMode { write: true, ..reads }, null());
        let held = opens.find(7, 1000, false).unwrap();
        let synced = opens.add(7, 1000, OpenMode { write: true, data_sync: true, ..reads }, null());
        assert!(opens.find(7, 1000, false).unwrap().syncs() && !held.syncs());
        if let Some(gone) = opens.close(synced) {
            opens.close_file(gone);
        }
        if let Some(gone) = opens.close(both) {
            opens.close_file(gone);
        }
        assert!(held.is_closed());
        assert_eq!(opens.find(7, 1000, false).err(), Some(NotOpen::Access));
        if let Some(gone) = opens.close(reader) {
            opens.close_file(gone);
        }
        if let Some(gone) = opens.close(reader) {
            opens.close_file(gone);
        }
        assert_eq!((opens.count(), opens.find(7, 1000, true).err()), (0, Some(NotOpen::Closed)));
    }
}
