//! A file system that stops answering when a test says so, for folders that a target or a mount serves.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, LockOwner};
use fuser::{ReplyAttr, ReplyEmpty, ReplyEntry, ReplyStatfs, Session, SessionACL};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Whether a file system answers.
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

    /// Whether a request waits before it.
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

/// A folder in which every number is the name of an empty file, and every other name is another one's.
struct Alike {
    gate: Arc<Gate>,
    syncs: Arc<Gate>,
}

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

impl Filesystem for Alike {
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

    /// A file is closed.
    fn flush(&self, _: &fuser::Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.gate.pass();
        reply.ok();
    }
}

/// A mount of it.
pub struct Mounted {
    /// Of requests but lookups, openings and syncs.
    pub gate: Arc<Gate>,
    /// Of syncs. While one waits, so does everything after it.
    pub syncs: Arc<Gate>,
    at: PathBuf,
}

impl Mounted {
    /// Root's, whose mounts are entered; none, and a line that says so, where nothing can be mounted.
    pub fn new(at: &Path) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        let mounted = File::options().read(true).write(true).open("/dev/fuse").and_then(|fuse| {
            let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", fuse.as_raw_fd());
            mount("none", at, "fuse", MountFlags::empty(), std::ffi::CString::new(options)?.as_c_str())?;
            Ok(OwnedFd::from(fuse))
        });
        let fuse = mounted.map_err(|error| {
            let _ = writeln!(std::io::stderr(), "SKIPPED: nothing can be mounted here: {error}");
        });
        let (gate, syncs) = (Arc::<Gate>::default(), Arc::<Gate>::default());
        let session = Session::from_fd(
            Alike { gate: gate.clone(), syncs: syncs.clone() },
            fuse.ok()?,
            SessionACL::All,
            fuser::Config::default(),
        );
        let session = session.unwrap();
        std::thread::spawn(move || session.run());
        Some(Self { gate, syncs, at: at.to_owned() })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.gate.set(false);
        self.syncs.set(false);
        let _ = unmount(&self.at, UnmountFlags::DETACH);
    }
}
