//! A local folder.
//!
//! Files below it are reached one name at a time, from descriptors that are held: no path, link or `..` leads out of
//! it. The kernel checks permissions: each operation runs with the caller's credentials, and a new file has its owner
//! and mode before it has a name.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use onehop_os::file_writes::{FileWrites, WriteRoutes};
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
use crate::wire::{Attr, AttrChange, Caller, FsSpace, MAX_BODY, Make, Name, OpenMode, TimeChange, Xattr};

/// Bytes of names in one answer, which fits in a body with everything else in it.
const MAX_NAME_BYTES: usize = MAX_BODY - 8192;
/// The set-id bits.
const SET_ID_BITS: u32 = 0o6000;

/// Limits on what may be done with a folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FolderRules {
    /// Whether it is served to other machines. Then nothing is created that gives rights on this one: no devices, and
    /// no set-id files.
    pub for_others: bool,
    /// Descriptors for known files. Beyond a quarter of them, files are known by their handles where the file system
    /// has handles.
    pub most_open: usize,
}

/// A folder that is served.
pub struct Folder {
    nodes: Nodes,
    rules: FolderRules,
    /// The credentials to restore after acting as a caller. `None` unless this process is root's.
    own: Option<Arc<OwnCredentials>>,
    /// How files are written, and the number for which all their mapped bytes count; `None` if each user's own do.
    writes: (Arc<WriteRoutes>, Option<u32>),
}

/// The flags of `open` for a mode.
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
    /// Serves an open folder; `O_PATH` is enough.
    ///
    /// # Errors
    /// When the system calls for it fail.
    pub fn new(root: OwnedFd, rules: FolderRules) -> TreeResult<Self> {
        let own = OwnCredentials::of_root().map_err(|error| super::errno(&error))?.map(Arc::new);
        let writes = WriteRoutes::new(|most| super::mapping_budget(Shares::new(most)));
        Ok(Self { nodes: Nodes::new(root, rules.most_open)?, rules, own, writes: (Arc::new(writes), None) })
    }

    /// Takes descriptors for known files, and mapped bytes for writes, from budgets that are shared with other folders,
    /// under a number of this folder's own.
    #[must_use]
    pub fn sharing(self, descriptors: Arc<Shares>, writes: Arc<WriteRoutes>, number: u32) -> Self {
        Self { nodes: self.nodes.sharing((descriptors, number)), writes: (writes, Some(number)), ..self }
    }

    /// Takes mapped bytes for writes from this budget.
    #[must_use]
    pub fn with_writes(self, writes: Arc<WriteRoutes>) -> Self {
        Self { writes: (writes, None), ..self }
    }

    /// Sets the function that maps users to those for whom known files count.
    #[must_use]
    pub fn with_payer(self, payer: Payer<u32>) -> Self {
        Self { nodes: self.nodes.with_payer(payer), ..self }
    }

    /// Makes this thread act as a caller. A process that is not root's acts as itself.
    fn act_as(&self, by: &Caller) -> TreeResult<Option<Acting<'_>>> {
        self.own.as_ref().map(|own| own.act_as(&by.credentials())).transpose()
    }

    /// Checks the mode of a new file.
    fn mode(&self, mode: u32, kind: FileType) -> TreeResult<Mode> {
        // On a folder set-id bits give no rights: set-group-id passes the group on to new files, and set-user-id has no
        // effect.
        if self.rules.for_others && kind != FileType::Directory && mode & SET_ID_BITS != 0 {
            return Err(Errno::PERM);
        }
        Ok(Mode::from_raw_mode(mode & 0o7777))
    }

    fn local(&self, file: impl Into<std::fs::File>, by: &Caller) -> Local {
        let file = file.into();
        let group = || Some(fstat(&file).ok()?.st_gid).filter(|group| by.groups.contains(group));
        let writer = self.own.clone().map(|own| Writer { own, uid: by.uid, gid: by.gid, group: group() });
        let (routes, number) = &self.writes;
        Local::written_by(file, writer, FileWrites::new(routes.clone(), number.unwrap_or(by.uid)))
    }

    /// [`Tree::open`], which returns the local file.
    ///
    /// # Errors
    /// When it is neither a file nor a folder, or the system refuses; `EINVAL` to execute and change it at once.
    pub fn open_local(&self, node: u64, access: OpenMode, by: &Caller) -> TreeResult<Local> {
        // No kernel requests that, and execute permission does not allow changes.
        if access.execute && (access.write || access.truncate) {
            return Err(Errno::INVAL);
        }
        let node = self.nodes.get(node)?;
        let acting = self.act_as(by)?;
        if access.execute {
            // Execute permission is enough to read a file for execution.
            accessat(CWD, node.proc(), Rights::EXEC_OK, AtFlags::EACCESS)?;
            drop(acting);
        }
        Ok(self.local(node.open(flags_of(access))?, by))
    }

    /// Reopens a file for a client that had it open when its session was lost. Its mode may have changed since, so it
    /// is not checked.
    ///
    /// # Errors
    /// As for [`Self::open_local`].
    pub fn open_again(&self, node: u64, access: OpenMode, by: &Caller) -> TreeResult<Local> {
        Ok(self.local(self.nodes.get(node)?.open(flags_of(access))?, by))
    }

    /// [`Tree::create`], which returns the local file.
    ///
    /// # Errors
    /// As for [`Tree::create`].
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
        // By the descriptor: the name may be another file's by now.
        let attr = self.nodes.remember_open(&file, &parent, name, by.uid)?;
        Ok((attr, self.local(file, by)))
    }

    /// Opens an existing file that was to be created. The client's kernel takes it for new and checks nothing. What
    /// cannot be checked here is `ESTALE`: then that kernel looks the name up again, and opens what it finds.
    fn open_existing(&self, parent: &Node, name: &Name, flags: OFlags, mode: Mode) -> TreeResult<OwnedFd> {
        if self.own.is_none() && self.rules.for_others {
            return Err(Errno::STALE);
        }
        // Other types must not even be opened: devices may react to that.
        match file_type(&self.nodes.path(parent, name)?)? {
            FileType::RegularFile => {}
            _ => return Err(Errno::STALE),
        }
        // Nor must a mount be entered that a user has made there meanwhile: its daemon might never answer.
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
            // The kernel also requests this before a write by a user who may not change the mode. The write itself
            // clears the bits.
            chown(None, None).or_else(|error| if error == Errno::PERM { Ok(()) } else { Err(error) })?;
        }
        // A change of owner clears set-id bits, so the mode is set after it.
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
        // The name may be another file's by now. That is harmless: the caller may look it up.
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
        let (mut names, mut room, mut last) = (Vec::new(), MAX_NAME_BYTES, from);
        while let Some(entry) = folder.read() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            // Everything but the name takes 24 bytes at most.
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
