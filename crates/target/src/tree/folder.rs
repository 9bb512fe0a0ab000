//! A folder of this machine.
//!
//! What is below it is reached one name at a time from descriptors that are held: no path, no link and no `..` leads out of it.
//! What a caller may do there the kernel decides: each operation runs with the caller's credentials, and what is made has its
//! owner and its mode before it has a name.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use onehop_os::identity::{Acting, OwnCredentials, Umask};
use rustix::fs::{
    Access as Rights, AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Timestamps, UTIME_NOW,
    UTIME_OMIT, Uid, accessat, chmodat, chownat, fstat, linkat, mkdirat, mknodat, openat, openat2,
    renameat_with, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;

use super::local::{Local, Writer};
use super::nodes::{Forgotten, ITSELF, Node, Nodes, file_type, kind};
use super::{FolderNames, OpenFile, Tree, TreeResult, xattrs};
use crate::shares::{Payer, Shares};
use crate::wire::{Attr, AttrChange, Caller, FsSpace, MOST_BODY, Make, Name, OpenMode, TimeChange, Xattr};

/// Bytes of names that are told at once, so that they fit a body whatever else stands there.
const NAMES: usize = MOST_BODY - 8192;
/// The bits by which a program runs as somebody else.
const PRIVILEGES: u32 = 0o6000;

/// What may be done with a folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FolderRules {
    /// Whether it is served to other machines: then nothing is made that gives rights on this one, which are devices and files that
    /// run as their owner.
    pub for_others: bool,
    /// Descriptors for files that are known. Beyond a quarter of them files are known by their handles, where there are some.
    pub most_open: usize,
}

/// A folder that is served.
pub struct Folder {
    nodes: Nodes,
    rules: FolderRules,
    /// What this process returns to when it has acted as a caller; none where it is not root, and acts as itself alone.
    own: Option<Arc<OwnCredentials>>,
}

/// Flags with which a file is opened.
fn flags_of(access: OpenMode) -> OFlags {
    let mut flags = match (access.read, access.write) {
        (true, true) => OFlags::RDWR,
        (false, true) => OFlags::WRONLY,
        _ => OFlags::RDONLY,
    };
    flags.set(OFlags::TRUNC, access.truncate);
    flags.set(OFlags::SYNC, access.sync);
    flags.set(OFlags::DSYNC, access.data_sync);
    flags.set(OFlags::NOATIME, access.no_atime);
    flags | OFlags::CLOEXEC | OFlags::NOCTTY
}

fn timestamp(time: Option<TimeChange>) -> rustix::fs::Timespec {
    let (tv_sec, tv_nsec) = match time {
        None => (0, UTIME_OMIT),
        Some(TimeChange::Now) => (0, UTIME_NOW),
        Some(TimeChange::To((seconds, nanos))) => (seconds, i64::from(nanos.min(999_999_999))),
    };
    rustix::fs::Timespec { tv_sec, tv_nsec }
}

impl Folder {
    /// Serves a folder that is open, as a path at least.
    ///
    /// # Errors
    /// When it cannot be looked at.
    pub fn new(root: OwnedFd, rules: FolderRules) -> TreeResult<Self> {
        let own = OwnCredentials::of_root().map_err(|error| super::errno(&error))?.map(Arc::new);
        Ok(Self { nodes: Nodes::new(root, rules.most_open)?, rules, own })
    }

    /// The same, whose descriptors for known files are a share of a supply, under a number that no other folder has.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn sharing(root: OwnedFd, rules: FolderRules, descriptors: (Arc<Shares>, u32)) -> TreeResult<Self> {
        let Self { nodes, rules, own } = Self::new(root, rules)?;
        Ok(Self { nodes: nodes.sharing(descriptors), rules, own })
    }

    /// The same, where the files that some users know count for others.
    #[must_use]
    pub fn with_payer(self, payer: Payer<u32>) -> Self {
        Self { nodes: self.nodes.with_payer(payer), ..self }
    }

    /// Has this thread act as a caller. A process that is not root's acts as itself.
    fn act_as(&self, by: &Caller) -> TreeResult<Option<Acting<'_>>> {
        self.own.as_ref().map(|own| own.act_as(&by.credentials())).transpose()
    }

    /// What a caller makes is made with this mode.
    fn mode(&self, mode: u32, kind: FileType) -> TreeResult<Mode> {
        // On a folder they give no rights: one says to which group new files belong, the other nothing.
        if self.rules.for_others && kind != FileType::Directory && mode & PRIVILEGES != 0 {
            return Err(Errno::PERM);
        }
        Ok(Mode::from_raw_mode(mode & 0o7777))
    }

    fn local(&self, file: impl Into<std::fs::File>, by: &Caller) -> Local {
        let file = file.into();
        let group = || Some(fstat(&file).ok()?.st_gid).filter(|group| by.groups.contains(group));
        let writer = self.own.clone().map(|own| Writer { own, uid: by.uid, gid: by.gid, group: group() });
        Local::written_by(file, writer)
    }

    /// [`Tree::open`], for who wants to know which file of this machine it is.
    ///
    /// # Errors
    /// When it is neither file nor folder, or the system refuses; `EINVAL` to run a file and to change it.
    pub fn open_local(&self, node: u64, access: OpenMode, by: &Caller) -> TreeResult<Local> {
        // No kernel asks for that, and the right to run a file is none to change it.
        if access.execute && (access.write || access.truncate) {
            return Err(Errno::INVAL);
        }
        let node = self.nodes.get(node)?;
        let acting = self.act_as(by)?;
        if access.execute {
            // The right to run it is enough to read it for that.
            accessat(CWD, node.proc(), Rights::EXEC_OK, AtFlags::EACCESS)?;
            drop(acting);
        }
        Ok(self.local(node.open(flags_of(access))?, by))
    }

    /// Opens a file once more for a client that had it open when its session was lost: what a file's mode says now does not matter.
    ///
    /// # Errors
    /// As for [`Self::open_local`].
    pub fn open_again(&self, node: u64, access: OpenMode, by: &Caller) -> TreeResult<Local> {
        Ok(self.local(self.nodes.get(node)?.open(flags_of(access))?, by))
    }

    /// [`Tree::create`], likewise.
    ///
    /// # Errors
    /// As for that.
    pub fn create_local(
        &self,
        parent: u64,
        name: &Name,
        mode: u32,
        access: OpenMode,
        exclusive: bool,
        by: &Caller,
    ) -> TreeResult<(Attr, Local)> {
        let parent = self.nodes.get(parent)?;
        let mode = self.mode(mode, FileType::RegularFile)?;
        let acting = self.act_as(by)?;
        let umask = Umask::set(by.umask)?;
        let flags = flags_of(access) | OFlags::CREATE | OFlags::NOFOLLOW;
        let file = match openat(&parent.path, name.bytes(), flags | OFlags::EXCL, mode) {
            Err(Errno::EXIST) if !exclusive => self.open_existing(&parent, name, flags, mode)?,
            other => other?,
        };
        drop((acting, umask));
        // By its descriptor: the name may be another file's by now.
        let attr = self.nodes.remember_open(&file, &parent, name, by.uid)?;
        Ok((attr, self.local(file, by)))
    }

    /// Opens what was to be made and is there. The kernel whose user asks takes it for new, and checks nothing: what cannot be
    /// checked here is `ESTALE`, upon which that kernel looks the name up again and opens what it finds.
    fn open_existing(&self, parent: &Node, name: &Name, flags: OFlags, mode: Mode) -> TreeResult<OwnedFd> {
        if self.own.is_none() && self.rules.for_others {
            return Err(Errno::STALE);
        }
        // Something else than a file must not even be opened: devices act on that.
        match file_type(&self.nodes.path(parent, name)?)? {
            FileType::RegularFile => {}
            _ => return Err(Errno::STALE),
        }
        // Nor a file system that a user has mounted there meanwhile, whose daemon might never answer.
        let within = ResolveFlags::BENEATH
            | ResolveFlags::NO_SYMLINKS
            | ResolveFlags::NO_MAGICLINKS
            | ResolveFlags::NO_XDEV;
        let file = openat2(&parent.path, name.bytes(), flags | OFlags::NONBLOCK, mode, within);
        let file = file.map_err(|error| match error {
            Errno::LOOP | Errno::XDEV => Errno::STALE,
            other => other,
        })?;
        if file_type(&file)? == FileType::RegularFile { Ok(file) } else { Err(Errno::STALE) }
    }

    fn set(&self, node: u64, change: &AttrChange, by: &Caller) -> TreeResult<Attr> {
        let node = self.nodes.get(node)?;
        let _acting = self.act_as(by)?;
        if [change.uid, change.gid].contains(&Some(u32::MAX)) {
            return Err(Errno::INVAL);
        }
        let chown = |uid: Option<u32>, gid: Option<u32>| {
            chownat(&node.path, "", uid.map(Uid::from_raw), gid.map(Gid::from_raw), ITSELF)
        };
        if *change == AttrChange::default() {
            // The kernel that asks does so before a write, too, whose user may not change the mode: the write will.
            chown(None, None).or_else(|error| if error == Errno::PERM { Ok(()) } else { Err(error) })?;
        }
        // A change of owner takes privileges away, so the mode comes after it.
        if change.uid.is_some() || change.gid.is_some() {
            chown(change.uid, change.gid)?;
        }
        if let Some(mode) = change.mode {
            let mode = self.mode(mode, file_type(&node.path)?)?;
            chmodat(CWD, node.proc(), mode, AtFlags::empty())?;
        }
        if let Some(size) = change.size {
            rustix::fs::ftruncate(node.open(OFlags::WRONLY | OFlags::CLOEXEC)?, size)?;
        }
        if change.atime.is_some() || change.mtime.is_some() {
            let times = Timestamps {
                last_access: timestamp(change.atime),
                last_modification: timestamp(change.mtime),
            };
            utimensat(CWD, node.proc(), &times, AtFlags::empty())?;
        }
        node.attr()
    }

    fn make_named(&self, parent: &Node, name: &Name, make: &Make) -> TreeResult<()> {
        let (at, bytes) = (&parent.path, name.bytes());
        match make {
            Make::Folder { mode } => mkdirat(at, bytes, self.mode(*mode, FileType::Directory)?),
            Make::Node { mode, rdev } => {
                let kind = FileType::from_raw_mode(*mode);
                let is_device = matches!(kind, FileType::CharacterDevice | FileType::BlockDevice);
                if self.rules.for_others && is_device {
                    return Err(Errno::PERM);
                }
                mknodat(at, bytes, kind, self.mode(*mode, kind)?, (*rdev).into())
            }
            Make::Link { text } => symlinkat(text.as_slice(), at, bytes),
        }
    }
}

impl Tree for Folder {
    fn lookup(&self, parent: u64, name: &Name, by: &Caller) -> TreeResult<Attr> {
        let parent = self.nodes.get(parent)?;
        let _acting = self.act_as(by)?;
        self.nodes.lookup(&parent, name, by.uid)
    }

    fn forget(&self, node: u64, times: u64) -> Forgotten {
        self.nodes.forget(node, times)
    }

    fn attr(&self, node: u64, _uid: u32) -> TreeResult<Attr> {
        self.nodes.get(node)?.attr()
    }

    fn change(&self, node: u64, change: &AttrChange, by: &Caller) -> TreeResult<Attr> {
        self.set(node, change, by)
    }

    fn read_link(&self, node: u64, _uid: u32) -> TreeResult<Vec<u8>> {
        let node = self.nodes.get(node)?;
        Ok(rustix::fs::readlinkat(&node.path, "", Vec::new())?.into_bytes())
    }

    fn make(&self, parent: u64, name: &Name, make: &Make, by: &Caller) -> TreeResult<Attr> {
        let parent = self.nodes.get(parent)?;
        let _acting = self.act_as(by)?;
        let _umask = Umask::set(by.umask)?;
        self.make_named(&parent, name, make)?;
        // Whatever has the name by now: the caller may look it up, and nothing is done to it.
        self.nodes.lookup(&parent, name, by.uid)
    }

    fn create(
        &self,
        parent: u64,
        name: &Name,
        mode: u32,
        access: OpenMode,
        exclusive: bool,
        by: &Caller,
    ) -> TreeResult<(Attr, Arc<dyn OpenFile>)> {
        let (attr, file) = self.create_local(parent, name, mode, access, exclusive, by)?;
        Ok((attr, Arc::new(file)))
    }

    fn remove(&self, parent: u64, name: &Name, folder: bool, by: &Caller) -> TreeResult<()> {
        let parent = self.nodes.get(parent)?;
        let _acting = self.act_as(by)?;
        let flags = if folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        unlinkat(&parent.path, name.bytes(), flags)
    }

    fn rename(&self, from: (u64, &Name), to: (u64, &Name), flags: u32, by: &Caller) -> TreeResult<()> {
        let flags = rustix::fs::RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        let (source, folder) = (self.nodes.get(from.0)?, self.nodes.get(to.0)?);
        let _acting = self.act_as(by)?;
        renameat_with(&source.path, from.1.bytes(), &folder.path, to.1.bytes(), flags)
    }

    fn link(&self, node: u64, parent: u64, name: &Name, by: &Caller) -> TreeResult<Attr> {
        let (node, parent) = (self.nodes.get(node)?, self.nodes.get(parent)?);
        let _acting = self.act_as(by)?;
        linkat(CWD, node.proc(), &parent.path, name.bytes(), AtFlags::SYMLINK_FOLLOW)?;
        self.nodes.lookup(&parent, name, by.uid)
    }

    fn list(&self, node: u64, from: u64, by: &Caller) -> TreeResult<FolderNames> {
        let node = self.nodes.get(node)?;
        let acting = self.act_as(by)?;
        let opened = node.open(OFlags::DIRECTORY | OFlags::CLOEXEC)?;
        drop(acting);
        let mut folder = Dir::new(opened)?;
        if from != 0 {
            folder.seek(i64::try_from(from).map_err(|_| Errno::INVAL)?)?;
        }
        let (mut names, mut room, mut last) = (Vec::new(), NAMES, from);
        while let Some(entry) = folder.read() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            // What stands beside a name takes 24 bytes at most.
            let takes = name.len() + 24;
            if takes > room {
                return Ok(FolderNames { names, next: Some(last) });
            }
            room -= takes;
            last = entry.offset() as u64;
            names.push((entry.ino().max(1), kind(entry.file_type()), last, name.to_vec()));
        }
        Ok(FolderNames { names, next: None })
    }

    fn sync_folder(&self, node: u64, _uid: u32) -> TreeResult<()> {
        rustix::fs::fsync(self.nodes.get(node)?.open(OFlags::DIRECTORY | OFlags::CLOEXEC)?)
    }

    fn xattr(&self, node: u64, ask: &Xattr, by: &Caller) -> TreeResult<Vec<u8>> {
        let node = self.nodes.get(node)?;
        let _acting = self.act_as(by)?;
        xattrs::ask(&node.proc(), ask, self.rules.for_others)
    }

    fn space(&self, _uid: u32) -> TreeResult<FsSpace> {
        let fs = rustix::fs::fstatvfs(&self.nodes.root().path)?;
        Ok(FsSpace {
            blocks: [fs.f_blocks, fs.f_bfree, fs.f_bavail],
            files: [fs.f_files, fs.f_ffree],
            block_size: [fs.f_bsize as u32, fs.f_frsize as u32],
            name_max: fs.f_namemax as u32,
        })
    }

    fn open(&self, node: u64, access: OpenMode, by: &Caller) -> TreeResult<Arc<dyn OpenFile>> {
        Ok(Arc::new(self.open_local(node, access, by)?))
    }
}
