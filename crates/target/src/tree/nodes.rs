//! Files of a folder that somebody knows by their numbers.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use onehop_os::{FileHandle, handle_of};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Statx, StatxFlags, openat, openat2, statx};
use rustix::io::Errno;

use super::{FOREIGN, TreeResult, crossing};
use crate::lock;
use crate::shares::{Payer, Shares};
use crate::wire::{Attr, FileKey, FileKind, Name, ROOT};

/// Files that are known at once.
const MOST_KNOWN: u64 = 1 << 22;
/// Mounts within each other below the root.
const MOST_MOUNTS: usize = 32;

/// A file that somebody knows.
pub(super) struct Node {
    pub number: u64,
    /// Held without being opened: it survives renames, and no link leads elsewhere.
    pub path: OwnedFd,
    /// None in the file system of the root.
    submount: Option<Arc<Submount>>,
    /// Counts the descriptor as long as it is open; none for one of a single call.
    _counted: Option<CountedDescriptor>,
}

/// Descriptors of files that are held open.
struct OpenNodes {
    count: AtomicUsize,
    /// Where other folders want some too: a folder has a share under its number.
    shared: Option<(Arc<Shares>, u32)>,
}

impl OpenNodes {
    fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Counts one more; none where the share is used up.
    fn add(self: &Arc<Self>) -> Option<CountedDescriptor> {
        if self.shared.as_ref().is_some_and(|(all, number)| !all.take(*number, 1)) {
            return None;
        }
        self.count.fetch_add(1, Ordering::AcqRel);
        Some(CountedDescriptor(self.clone()))
    }
}

/// A descriptor among those.
struct CountedDescriptor(Arc<OpenNodes>);

impl Drop for CountedDescriptor {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::AcqRel);
        if let Some((all, number)) = &self.0.shared {
            all.put_back(*number, 1);
        }
    }
}

/// A mount below the root, known by where it is mounted: a descriptor in it would keep it from being unmounted.
#[derive(PartialEq, Eq, Hash)]
struct Submount {
    parent: u64,
    name: Name,
    /// Its root's key.
    key: (u64, u64),
}

impl Node {
    /// Opens it: files and folders, nothing that could wait for somebody.
    ///
    /// # Errors
    /// `EAGAIN` where somebody has a lease on it, whom the kernel has told by then to let go of it.
    pub fn open(&self, flags: OFlags) -> TreeResult<File> {
        match file_type(&self.path)? {
            rustix::fs::FileType::RegularFile | rustix::fs::FileType::Directory => {}
            rustix::fs::FileType::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::NXIO),
        }
        let file = openat(CWD, self.proc(), flags | OFlags::NONBLOCK, Mode::empty())?;
        // It is for this call alone: io_uring takes it for a wish of every transfer.
        rustix::fs::fcntl_setfl(&file, rustix::fs::fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
        Ok(file.into())
    }

    /// A path to it for calls that take nothing else.
    pub fn proc(&self) -> String {
        proc(&self.path)
    }

    pub fn attr(&self) -> TreeResult<Attr> {
        Ok(attr(self.number, &look(&self.path)?))
    }
}

/// What tells one known file from another. A file that is visible in two mounts has two numbers: each mount has rules of its own,
/// and a number never leads to the other mount.
#[derive(Clone, PartialEq, Eq, Hash)]
struct NodeKey {
    /// None in the mount of the root.
    submount: Option<Arc<Submount>>,
    /// Device and inode.
    file: (u64, u64),
}

/// How a file is held that somebody knows.
#[derive(Clone)]
enum NodeAccess {
    Open(Arc<Node>),
    /// By what its file system calls it, which costs no descriptor.
    Handle(Arc<FileHandle>),
    /// The same in a mount below the root.
    Below(Arc<Submount>, Arc<FileHandle>),
}

struct KnownNode {
    held: NodeAccess,
    key: NodeKey,
    /// Who asked for it first.
    uid: u32,
    /// How often its number was told.
    times: u64,
}

#[derive(Default)]
struct KnownNodes {
    by_number: HashMap<u64, KnownNode>,
    by_key: HashMap<NodeKey, u64>,
    next: u64,
}

/// All of them.
pub(super) struct Nodes {
    root: Arc<Node>,
    root_key: (u64, u64),
    /// For files that are found by their handles: the root, opened to be read. None where they cannot be.
    beside: Option<OwnedFd>,
    most_open: usize,
    /// Those that are held open.
    open: Arc<OpenNodes>,
    /// How many files each user knows.
    of_users: Shares,
    known: Mutex<KnownNodes>,
}

/// Where files can be found by their handles: what that takes.
fn beside(root: &OwnedFd) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let beside = openat(root, ".", flags, Mode::empty()).ok()?;
    handle_of(root).and_then(|handle| handle.open(&beside)).is_ok().then_some(beside)
}

impl Nodes {
    pub fn new(root: OwnedFd, most_open: usize) -> TreeResult<Self> {
        let (root_key, beside) = (key(&look(&root)?), beside(&root));
        let root = Arc::new(Node { number: ROOT, path: root, submount: None, _counted: None });
        let of_users = Shares::new(MOST_KNOWN).with_privileged([0, rustix::process::geteuid().as_raw()]);
        let open = Arc::new(OpenNodes { count: AtomicUsize::new(0), shared: None });
        Ok(Self { root, root_key, beside, most_open, open, of_users, known: Mutex::default() })
    }

    /// Has it share its descriptors with other folders, under a number that none of them has.
    pub fn sharing(mut self, descriptors: (Arc<Shares>, u32)) -> Self {
        self.open = Arc::new(OpenNodes { count: AtomicUsize::new(0), shared: Some(descriptors) });
        self
    }

    /// Has what some users know count for others.
    pub fn with_payer(mut self, payer: Payer<u32>) -> Self {
        self.of_users.set_payer(payer);
        self
    }

    pub fn root(&self) -> &Node {
        &self.root
    }

    pub fn get(&self, number: u64) -> TreeResult<Arc<Node>> {
        self.get_within(number, MOST_MOUNTS)
    }

    /// A file in so many mounts within each other at most.
    fn get_within(&self, number: u64, mounts: usize) -> TreeResult<Arc<Node>> {
        if number == ROOT {
            return Ok(self.root.clone());
        }
        let held = lock(&self.known).by_number.get(&number).ok_or(Errno::STALE)?.held.clone();
        let (path, submount) = match held {
            NodeAccess::Open(node) => return Ok(node),
            NodeAccess::Handle(handle) => (handle.open(self.beside.as_ref().ok_or(Errno::STALE)?)?, None),
            NodeAccess::Below(submount, handle) => {
                let within = mounts.checked_sub(1).ok_or(Errno::LOOP)?;
                (self.below(&submount, &handle, within)?, Some(submount))
            }
        };
        Ok(Arc::new(Node { number, path, submount, _counted: None }))
    }

    /// A file of a mount below the root, if that is still mounted.
    fn below(&self, submount: &Submount, handle: &FileHandle, mounts: usize) -> TreeResult<OwnedFd> {
        let root = self.path(&*self.get_within(submount.parent, mounts)?, &submount.name)?;
        if key(&look(&root)?) != submount.key {
            return Err(Errno::STALE);
        }
        if handle_of(&root).is_ok_and(|of_root| of_root == *handle) {
            return Ok(root);
        }
        handle.open(openat(&root, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Looks a name up for somebody who has to forget what they were told.
    pub fn lookup(&self, parent: &Node, name: &Name, uid: u32) -> TreeResult<Attr> {
        self.remember(self.path(parent, name)?, parent, name, uid)
    }

    /// What has a name, without opening it.
    pub fn path(&self, parent: &Node, name: &Name) -> TreeResult<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let path = openat2(&parent.path, name.bytes(), flags, Mode::empty(), within)?;
        crossing::check(&path)?;
        Ok(path)
    }

    /// [`Self::lookup`] for a file that is open.
    pub fn remember_open(&self, file: &OwnedFd, parent: &Node, name: &Name, uid: u32) -> TreeResult<Attr> {
        let path = openat(CWD, proc(file), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        self.remember(path, parent, name, uid)
    }

    fn remember(&self, path: OwnedFd, parent: &Node, name: &Name, uid: u32) -> TreeResult<Attr> {
        let stat = look(&path)?;
        let file = key(&stat);
        let submount = if mount_of(&path, &stat)? == mount_of(&parent.path, &look(&parent.path)?)? {
            parent.submount.clone()
        } else {
            Some(Arc::new(Submount { parent: parent.number, name: name.clone(), key: file }))
        };
        Ok(attr(self.number(path, NodeKey { submount, file }, uid)?, &stat))
    }

    fn number(&self, path: OwnedFd, key: NodeKey, uid: u32) -> TreeResult<u64> {
        let is_of_root = key.submount.is_none();
        if is_of_root && key.file == self.root_key {
            return Ok(ROOT);
        }
        let mut known = lock(&self.known);
        if let Some(number) = known.by_key.get(&key).copied()
            && let Some(told) = known.by_number.get_mut(&number)
            && is_same(&told.held, &path)
        {
            told.times += 1;
            return Ok(number);
        }
        let (device, inode) = key.file;
        let own = is_of_root
            && device == self.root_key.0
            && (ROOT + 1..FOREIGN).contains(&inode)
            && !known.by_number.contains_key(&inode);
        let number = if own {
            inode
        } else {
            known.next += 1;
            FOREIGN + known.next
        };
        // It counts for who asked for it first.
        if !self.of_users.take(uid, 1) {
            return Err(Errno::NFILE);
        }
        let held = self.hold(number, path, key.submount.clone());
        let held = held.inspect_err(|_| self.of_users.put_back(uid, 1))?;
        known.by_key.insert(key.clone(), number);
        known.by_number.insert(number, KnownNode { held, key, uid, times: 1 });
        Ok(number)
    }

    /// Holds the first files open, which is quickest; more by their handles where there are handles, and so all that are in mounts
    /// below the root.
    fn hold(&self, number: u64, path: OwnedFd, submount: Option<Arc<Submount>>) -> TreeResult<NodeAccess> {
        let (open, shared) = (self.open.count(), &self.open.shared);
        let is_full = shared.as_ref().is_some_and(|(all, number)| all.room(*number) == 0);
        if (submount.is_some() || is_full || open >= self.most_open / 4)
            && self.beside.is_some()
            && let Some(held) = Self::by_handle(&path, submount.clone())
        {
            return Ok(held);
        }
        let counted = if open < self.most_open { self.open.add() } else { None };
        let counted = Some(counted.ok_or(Errno::NFILE)?);
        Ok(NodeAccess::Open(Arc::new(Node { number, path, submount, _counted: counted })))
    }

    /// Holds a file by its handle, where it has one.
    fn by_handle(path: &OwnedFd, submount: Option<Arc<Submount>>) -> Option<NodeAccess> {
        let handle = Arc::new(handle_of(path).ok()?);
        Some(match submount {
            Some(submount) => NodeAccess::Below(submount, handle),
            None => NodeAccess::Handle(handle),
        })
    }

    pub fn forget(&self, number: u64, times: u64) -> Forgotten {
        let mut known = lock(&self.known);
        let Some(told) = known.by_number.get_mut(&number) else { return Forgotten::default() };
        told.times = told.times.saturating_sub(times);
        if told.times > 0 {
            return Forgotten::default();
        }
        let Some(KnownNode { held, key, uid, .. }) = known.by_number.remove(&number) else {
            return Forgotten::default();
        };
        self.of_users.put_back(uid, 1);
        // Another file may have its key by now.
        if known.by_key.get(&key) == Some(&number) {
            known.by_key.remove(&key);
        }
        // Not closed here: all who look names up wait for the lock.
        Forgotten { held: Some(held), uid }
    }
}

/// What was held of a file that is forgotten. It is closed with the value, which takes long where that is the last of a large file
/// without a name.
#[derive(Default)]
pub struct Forgotten {
    held: Option<NodeAccess>,
    uid: u32,
}

impl Forgotten {
    /// Whether closing it may take long.
    #[must_use]
    pub fn may_take_long(&self) -> bool {
        matches!(self.held, Some(NodeAccess::Open(_)))
    }

    /// The user for whom it counted.
    #[must_use]
    pub fn uid(&self) -> u32 {
        self.uid
    }
}

/// Whether what has a known file's key is that file: one that is not held open may be gone, and its number given to another.
fn is_same(held: &NodeAccess, path: &OwnedFd) -> bool {
    match held {
        // What is held open is in use, unless its mount was detached and another took that one's place.
        NodeAccess::Open(node) if node.submount.is_some() => {
            let mount = |of: &OwnedFd| mount_of(of, &look(of)?);
            matches!((mount(&node.path), mount(path)), (Ok(before), Ok(now)) if before == now)
        }
        NodeAccess::Open(_) => true,
        NodeAccess::Handle(known) | NodeAccess::Below(_, known) => {
            handle_of(path).is_ok_and(|handle| handle == **known)
        }
    }
}

/// A path to what is open.
fn proc(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// What kind of file is open, as a path at least.
pub(super) fn file_type(file: &OwnedFd) -> TreeResult<rustix::fs::FileType> {
    Ok(rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode))
}

fn look(path: &OwnedFd) -> TreeResult<Statx> {
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID;
    statx(path, "", AtFlags::EMPTY_PATH, mask)
}

/// Which mount a file is in. Kernels before 5.8 only say it in `/proc`.
fn mount_of(path: &OwnedFd, stat: &Statx) -> TreeResult<u64> {
    if stat.stx_mask & StatxFlags::MNT_ID.bits() != 0 {
        return Ok(stat.stx_mnt_id);
    }
    let told = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", path.as_raw_fd()));
    mount_in(&told.map_err(|error| super::errno(&error))?).ok_or(Errno::NOSYS)
}

/// The mount ID in `/proc/self/fdinfo` of a descriptor.
fn mount_in(fdinfo: &str) -> Option<u64> {
    fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
}

fn key(stat: &Statx) -> (u64, u64) {
    (rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino)
}

/// A kind of file as it is told.
pub(super) fn kind(kind: rustix::fs::FileType) -> FileKind {
    use rustix::fs::FileType as Type;
    match kind {
        Type::Directory => FileKind::Folder,
        Type::Symlink => FileKind::Link,
        Type::Fifo => FileKind::Pipe,
        Type::Socket => FileKind::Socket,
        Type::CharacterDevice => FileKind::Char,
        Type::BlockDevice => FileKind::Block,
        _ => FileKind::Regular,
    }
}

fn attr(node: u64, stat: &Statx) -> Attr {
    let time = |time: rustix::fs::StatxTimestamp| (time.tv_sec, time.tv_nsec);
    let born = (stat.stx_mask & StatxFlags::BTIME.bits() != 0).then(|| time(stat.stx_btime));
    let (device, inode) = key(stat);
    Attr {
        node,
        key: FileKey { device, inode, born },
        kind: kind(rustix::fs::FileType::from_raw_mode(stat.stx_mode.into())),
        perm: stat.stx_mode & 0o7777,
        links: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        rdev: rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        block_size: stat.stx_blksize,
        times: [time(stat.stx_atime), time(stat.stx_mtime), time(stat.stx_ctime)],
    }
}

/// Flags for a call that follows no link and needs no name.
pub(super) const ITSELF: AtFlags = AtFlags::EMPTY_PATH;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_kernels_name_the_same_mount() {
        let path = OwnedFd::from(File::open("/proc/self").unwrap());
        let stat = look(&path).unwrap();
        let mut old = stat;
        old.stx_mask &= !StatxFlags::MNT_ID.bits();
        old.stx_mnt_id = 0;
        assert_eq!(mount_of(&path, &old).unwrap(), mount_of(&path, &stat).unwrap());
        assert_eq!(mount_in("pos:\t0\nflags:\t02\n"), None);
    }

    #[test]
    fn who_knows_many_files_leaves_as_many_to_others() {
        let dir = std::env::temp_dir().join(format!("onehop-nodes-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let names: Vec<_> = (0..12).map(|number| Name::new(number.to_string().as_bytes()).unwrap()).collect();
        for number in 0..12 {
            File::create(dir.join(number.to_string())).unwrap();
        }
        let nodes = Nodes::new(File::open(&dir).unwrap().into(), 64).unwrap();
        // Without handles each file takes a descriptor.
        let descriptors = Arc::new(Shares::new(if nodes.beside.is_some() { 4 } else { 64 }));
        let mut nodes = nodes.sharing((descriptors.clone(), 5));
        nodes.of_users = Shares::new(8);
        let look = |name: usize, uid| nodes.lookup(nodes.root(), &names[name], uid).map(|attr| attr.node);
        let first: Vec<_> = (0..4).map(|name| look(name, 30_000).unwrap()).collect();
        assert_eq!(look(4, 30_000), Err(Errno::NFILE));
        // What is known already costs nobody more, and another user has a share of their own.
        assert_eq!((look(0, 30_000), look(0, 30_001)), (Ok(first[0]), Ok(first[0])));
        assert!(look(5, 30_001).is_ok() && look(6, 30_001).is_ok() && look(7, 30_001).is_err());
        // What closing takes does not keep others from looking up.
        let forgotten: Vec<_> = first.into_iter().map(|number| nodes.forget(number, 3)).collect();
        assert!(forgotten.iter().any(Forgotten::may_take_long));
        assert!(look(8, 30_000).is_ok());
        // Half of the descriptors at most, and none behind it.
        assert!(descriptors.taken() <= if nodes.beside.is_some() { 2 } else { 32 });
        drop(nodes);
        // A descriptor counts until it is closed.
        assert!(descriptors.taken() > 0);
        drop(forgotten);
        assert_eq!(descriptors.taken(), 0);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
