//! A FUSE file system that stops answering on demand, for folders that a target or a mount serves.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags};
use fuser::{KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyEmpty, ReplyEntry, ReplyLock, ReplyOpen};
use fuser::{ReplyStatfs, Session, SessionACL};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Blocks a file system's answers while it is closed.
#[derive(Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_closed: bool,
    holds_a_request: bool,
}

impl Gate {
    pub fn set(&self, is_closed: bool) {
        self.state.lock().unwrap().is_closed = is_closed;
        self.changed.notify_all();
    }

    /// Whether a request is blocked.
    pub fn holds_a_request(&self) -> bool {
        self.state.lock().unwrap().holds_a_request
    }

    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.holds_a_request = true;
        state = self.changed.wait_while(state, |state| state.is_closed).unwrap();
        state.holds_a_request = false;
    }
}

/// A folder in which every number is the name of an empty file of its own, and all other names are the same file.
/// Exclusive locks are never granted.
struct HungFs {
    gate: Arc<Gate>,
    syncs: Arc<Gate>,
    locks: Arc<Gate>,
}

/// The kernel's numbers of lock types.
const EXCLUSIVE: i32 = 1;
const UNLOCKED: i32 = 2;

fn attr(ino: INodeNo) -> FileAttr {
    let when = UNIX_EPOCH;
    FileAttr {
        ino,
        size: 0,
        blocks: 0,
        atime: when,
        mtime: when,
        ctime: when,
        crtime: when,
        kind: if ino == INodeNo::ROOT { FileType::Directory } else { FileType::RegularFile },
        perm: 0o755,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for HungFs {
    fn init(&mut self, _: &fuser::Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let _ = config.add_capabilities(InitFlags::FUSE_POSIX_LOCKS | InitFlags::FUSE_FLOCK_LOCKS);
        Ok(())
    }

    fn open(&self, _: &fuser::Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.locks.pass();
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn getlk(
        &self,
        _: &fuser::Request,
        _: INodeNo,
        _: FileHandle,
        _: LockOwner,
        start: u64,
        end: u64,
        _: i32,
        _: u32,
        reply: ReplyLock,
    ) {
        self.locks.pass();
        reply.locked(start, end, UNLOCKED, 0);
    }

    fn setlk(
        &self,
        _: &fuser::Request,
        _: INodeNo,
        _: FileHandle,
        _: LockOwner,
        _: u64,
        _: u64,
        kind: i32,
        _: u32,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.locks.pass();
        if kind == EXCLUSIVE { reply.error(fuser::Errno::EAGAIN) } else { reply.ok() }
    }

    fn lookup(&self, _: &fuser::Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let number = name.to_str().and_then(|name| name.parse::<u64>().ok());
        let inode = INodeNo(number.map_or(2, |number| 3 + number));
        reply.entry(&Duration::ZERO, &attr(inode), Generation(0));
    }

    fn getattr(&self, _: &fuser::Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.gate.pass();
        reply.attr(&Duration::ZERO, &attr(inode));
    }

    fn statfs(&self, _: &fuser::Request, _: INodeNo, reply: ReplyStatfs) {
        self.gate.pass();
        reply.statfs(0, 0, 0, 0, 0, 4096, 255, 4096);
    }

    fn fsync(&self, _: &fuser::Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.syncs.pass();
        reply.ok();
    }

    /// Called for each `close`.
    fn flush(&self, _: &fuser::Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.gate.pass();
        reply.ok();
    }
}

/// A mount of [`HungFs`].
pub struct Mounted {
    /// For requests other than lookups, opens, locks and syncs.
    pub gate: Arc<Gate>,
    /// For syncs. A blocked sync blocks all later requests.
    pub syncs: Arc<Gate>,
    /// For opens and locks.
    pub locks: Arc<Gate>,
    at: PathBuf,
}

impl Mounted {
    /// Mounts as root, whose mounts are entered. Without permission to mount, prints a line and returns `None`.
    pub fn new(at: &Path) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        let mounted = File::options().read(true).write(true).open("/dev/fuse").and_then(|fuse| {
            let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", fuse.as_raw_fd());
            mount("none", at, "fuse", MountFlags::empty(), std::ffi::CString::new(options)?.as_c_str())?;
            Ok(OwnedFd::from(fuse))
        });
        let fuse = mounted.map_err(|error| {
            let _ = writeln!(std::io::stderr(), "SKIPPED: cannot mount here: {error}");
        });
        let [gate, syncs, locks] = [(); 3].map(|()| Arc::<Gate>::default());
        let session = Session::from_fd(
            HungFs { gate: gate.clone(), syncs: syncs.clone(), locks: locks.clone() },
            fuse.ok()?,
            SessionACL::All,
            fuser::Config::default(),
        );
        let session = session.unwrap();
        std::thread::spawn(move || session.run());
        Some(Self { gate, syncs, locks, at: at.to_owned() })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.gate.set(false);
        self.syncs.set(false);
        self.locks.set(false);
        let _ = unmount(&self.at, UnmountFlags::DETACH);
    }
}
