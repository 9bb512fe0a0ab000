//! Known files of a folder, by number.

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

/// The most known files.
const MAX_KNOWN: u64 = 1 << 22;
/// The most mounts nested in each other below the root.
const MAX_MOUNTS: usize = 32;

/// A known file.
pub(super) struct Node {
    pub number: u64,
    /// Held with `O_PATH`: it survives renames, and is not redirected by links.
    pub path: OwnedFd,
    /// `None` in the mount of the root.
    submount: Option<Arc<Submount>>,
    /// Counts the descriptor while it is held; `None` for a node of a single call.
    _counted: Option<CountedDescriptor>,
}

/// Counts descriptors of files that are held open.
struct OpenNodes {
    count: AtomicUsize,
    /// The budget that is shared with other folders, and this folder's number in it.
    shared: Option<(Arc<Shares>, u32)>,
}

impl OpenNodes {
    fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Counts another descriptor; `None` if the budget is used up.
    fn add(self: &Arc<Self>) -> Option<CountedDescriptor> {
        if self.shared.as_ref().is_some_and(|(all, number)| !all.take(*number, 1)) {
            return None;
        }
        self.count.fetch_add(1, Ordering::AcqRel);
        Some(CountedDescriptor(self.clone()))
    }
}

/// A counted descriptor.
struct CountedDescriptor(Arc<OpenNodes>);

impl Drop for CountedDescriptor {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::AcqRel);
        if let Some((all, number)) = &self.0.shared {
            all.put_back(*number, 1);
        }
    }
}

/// A mount below the root, known by its mount point: a descriptor in it would keep it from being unmounted.
#[derive(PartialEq, Eq, Hash)]
struct Submount {
    parent: u64,
    name: Name,
    /// The key of its root.
    key: (u64, u64),
}

impl Node {
    /// Opens a file or folder, and nothing whose opening might block.
    ///
    /// # Errors
    /// `EAGAIN` when another process has a lease on it, whose holder the kernel has then notified.
    pub fn open(&self, flags: OFlags) -> TreeResult<File> {
        match file_type(&self.path)? {
            rustix::fs::FileType::RegularFile | rustix::fs::FileType::Directory => {}
            rustix::fs::FileType::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::NXIO),
        }
        let file = openat(CWD, self.proc(), flags | OFlags::NONBLOCK, Mode::empty())?;
        // Needed for this call only: io_uring would apply it to each transfer.
        rustix::fs::fcntl_setfl(&file, rustix::fs::fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
        Ok(file.into())
    }

    /// A path to it, for system calls that take no descriptor.
    pub fn proc(&self) -> String {
        proc(&self.path)
    }

    pub fn attr(&self) -> TreeResult<Attr> {
        Ok(attr(self.number, &statx_of(&self.path)?))
    }
}

/// Identifies a known file. A file that is visible in two mounts has two numbers: each mount has its own options, and a
/// number must not lead to the other mount.
#[derive(Clone, PartialEq, Eq, Hash)]
struct NodeKey {
    /// `None` in the mount of the root.
    submount: Option<Arc<Submount>>,
    /// Device and inode.
    file: (u64, u64),
}

/// How a known file is held.
#[derive(Clone)]
enum NodeAccess {
    Open(Arc<Node>),
    /// By a file handle, which takes no descriptor.
    Handle(Arc<FileHandle>),
    /// By a handle in a mount below the root.
    Below(Arc<Submount>, Arc<FileHandle>),
}

struct KnownNode {
    held: NodeAccess,
    key: NodeKey,
    /// The user who looked it up first.
    uid: u32,
    /// How often its number was returned.
    times: u64,
}

#[derive(Default)]
struct KnownNodes {
    by_number: HashMap<u64, KnownNode>,
    by_key: HashMap<NodeKey, u64>,
    next: u64,
}

/// All known files.
pub(super) struct Nodes {
    root: Arc<Node>,
    root_key: (u64, u64),
    /// The root opened for reading, which opening by handle requires. `None` if that is not supported.
    handle_root: Option<OwnedFd>,
    most_open: usize,
    /// Counts those that are held open.
    open: Arc<OpenNodes>,
    /// How many files each user knows.
    of_users: Shares,
    known: Mutex<KnownNodes>,
}

/// Opens the root for reading, if files can be opened by their handles.
fn handle_root(root: &OwnedFd) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let handle_root = openat(root, ".", flags, Mode::empty()).ok()?;
    handle_of(root).and_then(|handle| handle.open(&handle_root)).is_ok().then_some(handle_root)
}

impl Nodes {
    pub fn new(root: OwnedFd, most_open: usize) -> TreeResult<Self> {
        let (root_key, handle_root) = (key(&statx_of(&root)?), handle_root(&root));
        let root = Arc::new(Node { number: ROOT, path: root, submount: None, _counted: None });
        let of_users = Shares::new(MAX_KNOWN).with_privileged([0, rustix::process::geteuid().as_raw()]);
        let open = Arc::new(OpenNodes { count: AtomicUsize::new(0), shared: None });
        Ok(Self { root, root_key, handle_root, most_open, open, of_users, known: Mutex::default() })
    }

    /// Shares descriptors with other folders, under a number of its own.
    pub fn sharing(mut self, descriptors: (Arc<Shares>, u32)) -> Self {
        self.open = Arc::new(OpenNodes { count: AtomicUsize::new(0), shared: Some(descriptors) });
        self
    }

    /// Sets the function that maps users to those for whom known files count.
    pub fn with_payer(mut self, payer: Payer<u32>) -> Self {
        self.of_users.set_payer(payer);
        self
    }

    pub fn root(&self) -> &Node {
        &self.root
    }

    pub fn get(&self, number: u64) -> TreeResult<Arc<Node>> {
        self.get_within(number, MAX_MOUNTS)
    }

    /// A file in at most this many nested mounts.
    fn get_within(&self, number: u64, mounts: usize) -> TreeResult<Arc<Node>> {
        if number == ROOT {
            return Ok(self.root.clone());
        }
        let held = lock(&self.known).by_number.get(&number).ok_or(Errno::STALE)?.held.clone();
        let (path, submount) = match held {
            NodeAccess::Open(node) => return Ok(node),
            NodeAccess::Handle(handle) => {
                (handle.open(self.handle_root.as_ref().ok_or(Errno::STALE)?)?, None)
            }
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
        if key(&statx_of(&root)?) != submount.key {
            return Err(Errno::STALE);
        }
        if handle_of(&root).is_ok_and(|of_root| of_root == *handle) {
            return Ok(root);
        }
        handle.open(openat(&root, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Looks a name up. The file stays known until it is forgotten.
    pub fn lookup(&self, parent: &Node, name: &Name, uid: u32) -> TreeResult<Attr> {
        self.remember(self.path(parent, name)?, parent, name, uid)
    }

    /// Opens a name with `O_PATH`.
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
        let stat = statx_of(&path)?;
        let file = key(&stat);
        let submount = if mount_of(&path, &stat)? == mount_of(&parent.path, &statx_of(&parent.path)?)? {
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
            && let Some(known_node) = known.by_number.get_mut(&number)
            && is_same(&known_node.held, &path)
        {
            known_node.times += 1;
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
        // Counts for the first user who looks it up.
        if !self.of_users.take(uid, 1) {
            return Err(Errno::NFILE);
        }
        let held = self.hold(number, path, key.submount.clone());
        let held = held.inspect_err(|_| self.of_users.put_back(uid, 1))?;
        known.by_key.insert(key.clone(), number);
        known.by_number.insert(number, KnownNode { held, key, uid, times: 1 });
        Ok(number)
    }

    /// Holds the first files open, which is fastest. Further ones, and all in mounts below the root, are held by their
    /// handles if they have any.
    fn hold(&self, number: u64, path: OwnedFd, submount: Option<Arc<Submount>>) -> TreeResult<NodeAccess> {
        let (open, shared) = (self.open.count(), &self.open.shared);
        let is_full = shared.as_ref().is_some_and(|(all, number)| all.room(*number) == 0);
        if (submount.is_some() || is_full || open >= self.most_open / 4)
            && self.handle_root.is_some()
            && let Some(held) = Self::by_handle(&path, submount.clone())
        {
            return Ok(held);
        }
        let counted = if open < self.most_open { self.open.add() } else { None };
        let counted = Some(counted.ok_or(Errno::NFILE)?);
        Ok(NodeAccess::Open(Arc::new(Node { number, path, submount, _counted: counted })))
    }

    /// Holds a file by its handle, if it has one.
    fn by_handle(path: &OwnedFd, submount: Option<Arc<Submount>>) -> Option<NodeAccess> {
        let handle = Arc::new(handle_of(path).ok()?);
        Some(match submount {
            Some(submount) => NodeAccess::Below(submount, handle),
            None => NodeAccess::Handle(handle),
        })
    }

    pub fn forget(&self, number: u64, times: u64) -> Forgotten {
        let mut known = lock(&self.known);
        let Some(known_node) = known.by_number.get_mut(&number) else { return Forgotten::default() };
        known_node.times = known_node.times.saturating_sub(times);
        if known_node.times > 0 {
            return Forgotten::default();
        }
        let Some(KnownNode { held, key, uid, .. }) = known.by_number.remove(&number) else {
            return Forgotten::default();
        };
        self.of_users.put_back(uid, 1);
        // The key may be another file's by now.
        if known.by_key.get(&key) == Some(&number) {
            known.by_key.remove(&key);
        }
        // Not closed here, because all lookups wait for this lock.
        Forgotten { held: Some(held), uid }
    }
}

/// What was held of a forgotten file. Dropping it closes the file, which takes long for the last handle of a large
/// deleted file.
#[derive(Default)]
pub struct Forgotten {
    held: Option<NodeAccess>,
    uid: u32,
}

impl Forgotten {
    /// Whether dropping it may take long.
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

/// Whether a path with a known file's key is that file. If it is not held open, it may be deleted, and its inode number
/// reused.
fn is_same(held: &NodeAccess, path: &OwnedFd) -> bool {
    match held {
        // An open file's inode is in use, unless its mount was detached and another one took its place.
        NodeAccess::Open(node) if node.submount.is_some() => {
            let mount = |of: &OwnedFd| mount_of(of, &statx_of(of)?);
            matches!((mount(&node.path), mount(path)), (Ok(before), Ok(now)) if before == now)
        }
        NodeAccess::Open(_) => true,
        NodeAccess::Handle(known) | NodeAccess::Below(_, known) => {
            handle_of(path).is_ok_and(|handle| handle == **known)
        }
    }
}

/// The path of a descriptor in `/proc`.
fn proc(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// The type of an open file.
pub(super) fn file_type(file: &OwnedFd) -> TreeResult<rustix::fs::FileType> {
    Ok(rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode))
}

fn statx_of(path: &OwnedFd) -> TreeResult<Statx> {
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID;
    statx(path, "", AtFlags::EMPTY_PATH, mask)
}

/// The ID of a file's mount. Kernels before 5.8 report it in `/proc` only.
fn mount_of(path: &OwnedFd, stat: &Statx) -> TreeResult<u64> {
    if stat.stx_mask & StatxFlags::MNT_ID.bits() != 0 {
        return Ok(stat.stx_mnt_id);
    }
    let fdinfo = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", path.as_raw_fd()));
    mount_in(&fdinfo.map_err(|error| super::errno(&error))?).ok_or(Errno::NOSYS)
}

/// The mount ID in `/proc/self/fdinfo` of a descriptor.
fn mount_in(fdinfo: &str) -> Option<u64> {
    fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
}

fn key(stat: &Statx) -> (u64, u64) {
    (rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino)
}

/// The file type as it is sent.
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

/// Flags for calls on a descriptor itself, without a name.
pub(super) const ITSELF: AtFlags = AtFlags::EMPTY_PATH;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_kernels_report_the_same_mount() {
        let path = OwnedFd::from(File::open("/proc/self").unwrap());
        let stat = statx_of(&path).unwrap();
        let mut old = stat;
        old.stx_mask &= !StatxFlags::MNT_ID.bits();
        old.stx_mnt_id = 0;
        assert_eq!(mount_of(&path, &old).unwrap(), mount_of(&path, &stat).unwrap());
        assert_eq!(mount_in("pos:\t0\nflags:\t02\n"), None);
    }

    #[test]
    fn known_files_are_limited_per_user() {
        let dir = std::env::temp_dir().join(format!("onehop-nodes-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let names: Vec<_> = (0..12).map(|number| Name::new(number.to_string().as_bytes()).unwrap()).collect();
        for number in 0..12 {
            File::create(dir.join(number.to_string())).unwrap();
        }
        let nodes = Nodes::new(File::open(&dir).unwrap().into(), 64).unwrap();
        // Without handles, each file takes a descriptor.
        let descriptors = Arc::new(Shares::new(if nodes.handle_root.is_some() { 4 } else { 64 }));
        let mut nodes = nodes.sharing((descriptors.clone(), 5));
        nodes.of_users = Shares::new(8);
        let look = |name: usize, uid| nodes.lookup(nodes.root(), &names[name], uid).map(|attr| attr.node);
        let first: Vec<_> = (0..4).map(|name| look(name, 30_000).unwrap()).collect();
        assert_eq!(look(4, 30_000), Err(Errno::NFILE));
        // A known file counts only once, and another user has their own share.
        assert_eq!((look(0, 30_000), look(0, 30_001)), (Ok(first[0]), Ok(first[0])));
        assert!(look(5, 30_001).is_ok() && look(6, 30_001).is_ok() && look(7, 30_001).is_err());
        // A slow close does not block lookups.
        let forgotten: Vec<_> = first.into_iter().map(|number| nodes.forget(number, 3)).collect();
        assert!(forgotten.iter().any(Forgotten::may_take_long));
        assert!(look(8, 30_000).is_ok());
        // Half of the descriptors at most are used.
        assert!(descriptors.taken() <= if nodes.handle_root.is_some() { 2 } else { 32 });
        drop(nodes);
        // A descriptor counts until it is closed.
        assert!(descriptors.taken() > 0);
        drop(forgotten);
        assert_eq!(descriptors.taken(), 0);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
