//! The FUSE file system.

mod answer;
mod attr;
mod callers;
mod features;
mod folders;
mod ioctl;
mod ops;
mod reports;
mod threads;
pub(crate) mod virt;
mod waiting;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{
    BsdFileFlags, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, IoctlFlags, KernelConfig,
    LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request,
    TimeOrNow, WriteFlags,
};
use onehop_target::tree::Tree;
use onehop_target::wire::{AttrChange, Caller, Make, ROOT, Xattr};
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::daemon::DaemonShared;
use crate::locks::LockRequester;
use crate::opens::Open;
use answer::{ATTR_TIMEOUT, attributes, empty, entry, errno, io, xattr};
use attr::{VIRTUAL, time_change};
use callers::{Callers, Requester, owner};
use folders::{FolderEntry, OpenFolders};
use ops::{LeaseAttempt, Write, may_wait, waits_for, waits_for_list};
use reports::OpenReports;
use threads::{CallClass, SpareThreads};

/// The mounted file system.
pub(crate) struct Mounted {
    shared: Arc<DaemonShared>,
    tree: Arc<dyn Tree>,
    folders: OpenFolders,
    callers: Arc<Callers>,
    spare: SpareThreads,
    /// The statistics as they were when each handle was opened.
    reports: OpenReports,
}

impl Mounted {
    pub fn new(shared: Arc<DaemonShared>, tree: Arc<dyn Tree>) -> Self {
        Self {
            folders: OpenFolders::new(&shared.persons),
            reports: OpenReports::new(&shared.persons),
            spare: SpareThreads::new(shared.session_threads()),
            shared,
            tree,
            callers: Arc::default(),
        }
    }
}

/// The mounted file system, as FUSE calls it.
pub(crate) struct FuseHandler(pub Arc<Mounted>);

impl std::ops::Deref for FuseHandler {
    type Target = Mounted;

    fn deref(&self) -> &Mounted {
        &self.0
    }
}

fn is_virtual(inode: INodeNo) -> bool {
    inode.0 >= VIRTUAL
}

impl Filesystem for FuseHandler {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        features::request(config, self.shared.options.local_locks);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if is_virtual(parent) {
            return entry(reply, virt::lookup(&self.shared, parent.0, name, request.uid()));
        }
        if parent.0 == ROOT
            && let Some(attr) = virt::top(name)
        {
            return entry(reply, Ok(attr));
        }
        let name = name.to_owned();
        let requester = Requester::of(request, 0);
        self.run_as_caller(CallClass::Lookup, requester, move |this, by| {
            let found = by.and_then(|by| this.find(&by, parent, &name));
            this.shared.nameless.looked_up(requester.thread, &found);
            entry(reply, found);
        });
    }

    fn forget(&self, _request: &Request, inode: INodeNo, times: u64) {
        let forgotten = self.tree.forget(inode.0, times);
        if forgotten.may_take_long() {
            // FUSE does not name the user here.
            self.run_call(forgotten.uid(), move |_| drop(forgotten));
        }
    }

    fn getattr(&self, request: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        if is_virtual(inode) {
            return attributes(reply, virt::attr(&self.shared, inode.0));
        }
        let uid = waits_for(inode, request.uid());
        let attr = move |this: &Mounted| this.tree.attr(inode.0, uid).map(|found| attr::attr(&found));
        self.run_lookup(uid, move |this| attributes(reply, attr(this)));
    }

    fn setattr(
        &self,
        request: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let [atime, mtime] = [atime, mtime].map(|time| time.map(time_change));
        let change = AttrChange { mode, uid, gid, size, atime, mtime };
        let requester = Requester::of(request, 0);
        let call = move |this: &Mounted, by: Result<Caller, Errno>| {
            // Does not wait for a lease: the kernel holds the inode's lock, which lookups of hard links wait for.
            attributes(reply, by.and_then(|by| ops::change(this.attempt(&by), inode, handle, change)));
        };
        // Truncating may have to free blocks first.
        self.run_as_caller(if size.is_some() { CallClass::Disk } else { CallClass::Other }, requester, call);
    }

    fn readlink(&self, request: &Request, inode: INodeNo, reply: ReplyData) {
        if is_virtual(inode) {
            return match virt::readlink(&self.shared, inode.0, request.uid()) {
                Ok(target) => reply.data(target.as_os_str().as_bytes()),
                Err(error) => reply.error(errno(error)),
            };
        }
        let uid = request.uid();
        self.run_lookup(uid, move |this| match this.tree.read_link(inode.0, uid) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(errno(error)),
        });
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let name = name.to_owned();
        self.run_as_caller(CallClass::Other, Requester::of(request, umask), move |this, by| {
            entry(reply, by.and_then(|by| this.make(&by, parent, &name, &Make::Node { mode, rdev })));
        });
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let name = name.to_owned();
        self.run_as_caller(CallClass::Other, Requester::of(request, umask), move |this, by| {
            entry(reply, by.and_then(|by| this.make(&by, parent, &name, &Make::Folder { mode })));
        });
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        if parent.0 == virt::IOVS {
            return empty(reply, virt::unlink(&self.shared, name, request.uid()));
        }
        let (name, requester) = (name.to_owned(), Requester::of(request, 0));
        self.run_as_caller(CallClass::Other, requester, move |this, by| {
            empty(reply, by.and_then(|by| this.remove(&by, parent, &name, false)));
        });
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (name, requester) = (name.to_owned(), Requester::of(request, 0));
        self.run_as_caller(CallClass::Other, requester, move |this, by| {
            empty(reply, by.and_then(|by| this.remove(&by, parent, &name, true)));
        });
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        if parent.0 == virt::IOVS {
            return entry(reply, virt::symlink(&self.shared, name, target, owner(request)));
        }
        let Some(held) = self.reserve(request.uid(), target.as_os_str().as_bytes()) else {
            return reply.error(errno(Errno::NOMEM));
        };
        let (name, target) = (name.to_owned(), target.to_owned());
        self.run_as_caller(CallClass::Other, Requester::of(request, 0), move |this, by| {
            entry(reply, by.and_then(|by| this.make_link(&by, parent, &name, &target)));
            drop(held);
        });
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (name, new_name) = (name.to_owned(), new_name.to_owned());
        self.run_as_caller(CallClass::Other, Requester::of(request, 0), move |this, by| {
            let rename = |by| this.rename(&by, (parent, &name), (new_parent, &new_name), flags.bits());
            empty(reply, by.and_then(rename));
        });
    }

    fn link(&self, request: &Request, inode: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (name, requester) = (name.to_owned(), Requester::of(request, 0));
        self.run_as_caller(CallClass::Other, requester, move |this, by| {
            entry(reply, by.and_then(|by| this.link_again(&by, inode, parent, &name)));
        });
    }

    fn open(&self, request: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if inode.0 == virt::STATS {
            let (handle, uid) = (self.shared.opens.handle(), request.uid());
            if let Err(error) = self.reports.open(handle, uid, || self.shared.report(Some(uid))) {
                return reply.error(errno(error));
            }
            return reply.opened(FileHandle(handle), FopenFlags::FOPEN_DIRECT_IO);
        }
        let requester = Requester::of(request, 0);
        self.run_as_caller(CallClass::Other, requester, move |this, by| {
            let answer = move |done| match done {
                Ok(handle) => reply.opened(FileHandle(handle), ops::cached(flags)),
                Err(error) => reply.error(errno(error)),
            };
            let by = match by {
                Ok(by) => by,
                Err(error) => return answer(Err(error)),
            };
            let work = move |of: LeaseAttempt| ops::open_file(of, inode, flags, requester.thread);
            this.retry_on_lease((requester, by), inode, may_wait(flags), work, answer);
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let requester = Requester::of(request, umask);
        let (name, flags) = (name.to_owned(), OpenFlags(flags));
        self.run_as_caller(ops::class_of_open(flags), requester, move |this, by| {
            match by.and_then(|by| ops::make_file(this.attempt(&by), parent, &name, mode, flags)) {
                Ok((attr, handle)) => {
                    let handle = FileHandle(handle);
                    reply.created(&ATTR_TIMEOUT, &attr, Generation(0), handle, ops::cached(flags));
                }
                // Created by another program, with a lease: on ESTALE the kernel looks the name up and opens it.
                Err(Errno::AGAIN) if may_wait(flags) => reply.error(errno(Errno::STALE)),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn read(
        &self,
        request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if inode.0 == virt::STATS {
            let report = self.reports.text(handle.0);
            let from = usize::try_from(offset).unwrap_or(usize::MAX).min(report.len());
            let to = from.saturating_add(size as usize).min(report.len());
            return reply.data(&report[from..to]);
        }
        self.run_call(request.uid(), move |this| match this.read_file(handle, offset, size) {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(errno(error)),
        });
    }

    fn write(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        // Mapped pages are written at their offset, even with O_APPEND.
        let is_mapped = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let appends = !is_mapped && OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::APPEND);
        let keeps_set_id = !write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        match self.opened(handle) {
            Ok(open) => {
                let at = (!appends).then_some(offset);
                self.write(Write { open, at, keeps_set_id, is_mapped }, data, reply)
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    fn flush(&self, by: &Request, inode: INodeNo, of: FileHandle, owner: LockOwner, reply: ReplyEmpty) {
        // The kernel has sent all writes by now, so only locks are waited for.
        self.after_locks(by.uid(), (inode, of), owner, || reply.ok());
    }

    fn release(
        &self,
        request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        if inode.0 == virt::STATS {
            self.reports.close(handle.0);
        } else {
            let gone = self.shared.opens.close(handle.0);
            let uid = gone.as_ref().map_or(request.uid(), |gone| gone.uid());
            self.end_locks(uid, inode, handle, gone.clone());
            if let Some(gone) = gone {
                self.close_file(gone);
            }
        }
        reply.ok();
    }

    fn fsync(&self, request: &Request, _: INodeNo, handle: FileHandle, data_only: bool, reply: ReplyEmpty) {
        let open = self.opened(handle);
        let sync = move || open.and_then(|open| open.file().sync(data_only).map_err(|error| io(&error)));
        self.run_disk_call(request.uid(), move |_| empty(reply, sync()));
    }

    fn opendir(&self, request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let thread = request.pid();
        self.run_as_caller(CallClass::Other, Requester::of(request, 0), move |this, by| {
            match by.and_then(|by| this.open_folder(&by, inode, thread)) {
                Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::empty()),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn readdir(&self, by: &Request, of: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        self.run_call(by.uid(), move |this| {
            let add =
                |entry: &FolderEntry| reply.add(INodeNo(entry.inode), entry.next, entry.kind, &entry.name);
            match this.read_folder(of, handle, offset, add) {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        let folder = self.folders.remove(handle.0);
        if let Some(pid) = folder.and_then(|folder| folder.watcher) {
            self.shared.table.folder_closed(pid);
        }
        reply.ok();
    }

    fn fsyncdir(&self, request: &Request, inode: INodeNo, _: FileHandle, _data: bool, reply: ReplyEmpty) {
        let (node, uid) = (self.real(inode), request.uid());
        let sync = move |this: &Mounted| empty(reply, node.and_then(|node| this.tree.sync_folder(node, uid)));
        self.run_disk_call(uid, sync);
    }

    fn statfs(&self, request: &Request, _inode: INodeNo, reply: ReplyStatfs) {
        let uid = request.uid();
        self.run_lookup(uid, move |this| match this.tree.space(uid) {
            Ok(space) => {
                let [all, free, available] = space.blocks;
                let [files, free_files] = space.files;
                let [block, fragment] = space.block_size;
                reply.statfs(all, free, available, files, free_files, block, space.name_max, fragment);
            }
            Err(error) => reply.error(errno(error)),
        });
    }

    fn ioctl(
        &self,
        request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        flags: IoctlFlags,
        command: u32,
        data: &[u8],
        _out: u32,
        reply: ReplyIoctl,
    ) {
        let of = ioctl::On { inode, handle, folder: flags.contains(IoctlFlags::FUSE_IOCTL_DIR) };
        if command == ioctl::FSYNC {
            let sync = |open: Arc<Open>| open.file().sync(false).map_err(|error| io(&error));
            let open = of.file(self);
            return self.run_disk_call(request.uid(), move |_| match open.and_then(sync) {
                Ok(()) => reply.ioctl(0, &[0; 4]),
                Err(error) => reply.error(errno(error)),
            });
        }
        if command == ioctl::PUNCH_HOLES {
            let Some(held) = self.reserve(request.uid(), data) else {
                return reply.error(errno(Errno::NOMEM));
            };
            let (open, data, keeps_set_id) = (of.file(self), data.to_vec(), request.uid() == 0);
            return self.run_cache_call(request.uid(), open.clone().ok(), move |this| {
                let punch = |open: Arc<Open>| ioctl::punch_holes(&this.shared, &open, keeps_set_id, &data);
                match open.and_then(punch) {
                    Ok(()) => reply.ioctl(0, &[]),
                    Err(error) => reply.error(errno(error)),
                }
                drop(held);
            });
        }
        if virt::is_link_call(inode.0, command) {
            return virt::ioctl(&self.shared, command, data, owner(request), |done| match done {
                Ok(()) => reply.ioctl(0, &[]),
                Err(error) => reply.error(errno(error)),
            });
        }
        let Some(held) = self.reserve(request.uid(), data) else { return reply.error(errno(Errno::NOMEM)) };
        let data = data.to_vec();
        self.run_as_caller(CallClass::Other, Requester::of(request, 0), move |this, by| {
            match by.and_then(|by| ioctl::run(this, &by, of, command, &data)) {
                Ok(answer) => reply.ioctl(0, &answer),
                Err(error) => reply.error(errno(error)),
            }
            drop(held);
        });
    }

    fn fallocate(
        &self,
        request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let (open, keeps_set_id) = (self.opened(handle), request.uid() == 0);
        let allocate = move |open: Arc<Open>| {
            let done = open.written_by(keeps_set_id);
            done.and_then(|()| open.file().allocate(mode as u32, offset, length)).map_err(|error| io(&error))
        };
        self.run_disk_call(request.uid(), move |_| empty(reply, open.and_then(allocate)));
    }

    fn getlk(
        &self,
        request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        pid: u32,
        reply: ReplyLock,
    ) {
        let by = LockRequester { owner: owner.0, handle: handle.0, uid: self.person(request.uid()), pid };
        self.run_cache_call(by.uid, self.opened(handle).ok(), move |this| {
            match this.get_lock(by, (start, end), kind) {
                Ok(((start, end), kind, pid)) => reply.locked(start, end, kind, pid),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn setlk(
        &self,
        request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        pid: u32,
        wait: bool,
        reply: ReplyEmpty,
    ) {
        let by = LockRequester { owner: owner.0, handle: handle.0, uid: self.person(request.uid()), pid };
        let (thread, open, range) = (request.pid(), self.opened(handle).ok(), (start, end));
        self.run_cache_call(by.uid, open, move |this| this.set_lock(thread, by, range, (kind, wait), reply));
    }

    fn getxattr(&self, request: &Request, inode: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        // Reading an ACL takes no permission: the kernel reads it to check one.
        let is_list = name.as_bytes().starts_with(b"system.posix_acl_");
        let ask = Xattr::Get { name: name.as_bytes().to_vec() };
        let get = move |this: &Mounted, by: Result<Caller, Errno>| {
            xattr(reply, size, by.and_then(|by| this.xattr(&by, inode, &ask)));
        };
        if is_list {
            let uid = waits_for_list(inode, name, request.uid());
            return self.run_call(uid, move |this| get(this, Ok(Caller::ROOT)));
        }
        self.run_as_caller(CallClass::Other, Requester::of(request, 0), get);
    }

    fn listxattr(&self, request: &Request, inode: INodeNo, size: u32, reply: ReplyXattr) {
        self.run_as_caller(CallClass::Other, Requester::of(request, 0), move |this, by| {
            xattr(reply, size, by.and_then(|by| this.xattr(&by, inode, &Xattr::List)));
        });
    }

    fn setxattr(
        &self,
        request: &Request,
        inode: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let Some(held) = self.reserve(request.uid(), value) else { return reply.error(errno(Errno::NOMEM)) };
        let ask = Xattr::Set { name: name.as_bytes().to_vec(), value: value.to_vec(), flags: flags as u32 };
        self.run_as_caller(CallClass::Other, Requester::of(request, 0), move |this, by| {
            empty(reply, by.and_then(|by| this.xattr(&by, inode, &ask)).map(drop));
            drop(held);
        });
    }

    fn removexattr(&self, request: &Request, inode: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let ask = Xattr::Remove { name: name.as_bytes().to_vec() };
        self.run_as_caller(CallClass::Other, Requester::of(request, 0), move |this, by| {
            empty(reply, by.and_then(|by| this.xattr(&by, inode, &ask)).map(drop));
        });
    }

    fn lseek(
        &self,
        request: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        self.run_call(request.uid(), move |this| match this.seek(handle, offset, whence) {
            Ok(at) => reply.offset(at),
            Err(error) => reply.error(errno(error)),
        });
    }
}
