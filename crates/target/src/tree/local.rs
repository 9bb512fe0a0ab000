//! A local open file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, OnceLock};

use onehop_os::file_writes::FileWrites;
use onehop_os::identity::{Acting, Credentials, OwnCredentials};
use onehop_os::page_cache::{DirectRules, cached_bytes, is_in_memory, may_swap, open_direct};
use rustix::fs::{FallocateFlags, SeekFrom, fstat};
use rustix::io::{Errno, ReadWriteFlags};

use super::{OpenFile, TransferMemory};

/// The user as whom root's process writes a file: space, quotas and set-id bits are those of the user.
pub(super) struct Writer {
    pub own: Arc<OwnCredentials>,
    pub uid: u32,
    pub gid: u32,
    /// The file's group, if the user is in it, which keeps a set-group-id bit. All groups of the user would take too
    /// much memory.
    pub group: Option<u32>,
}

/// A local open file.
pub struct Local {
    file: File,
    /// `None` to write as this process.
    writer: Option<Writer>,
    /// The same file with `O_DIRECT`, opened on demand.
    direct: OnceLock<Option<(File, DirectRules)>>,
    /// Whether its data is in memory only (tmpfs), once it was read.
    in_memory: OnceLock<bool>,
    /// `None` if one write waits for the other.
    writes: Option<FileWrites>,
}

impl Local {
    /// Writes as this process.
    #[must_use]
    pub fn new(file: File) -> Self {
        Self { file, writer: None, direct: OnceLock::new(), in_memory: OnceLock::new(), writes: None }
    }

    /// Writes as a user.
    pub(super) fn written_by(file: File, writer: Option<Writer>, writes: FileWrites) -> Self {
        let writer = writer.filter(|writer| writer.uid != 0);
        Self { writer, writes: Some(writes), ..Self::new(file) }
    }

    /// Makes this thread act as the writer.
    fn act(&self) -> io::Result<Option<Acting<'_>>> {
        let Some(Writer { own, uid, gid, group }) = &self.writer else { return Ok(None) };
        let who = Credentials { uid: *uid, gid: *gid, groups: group.as_slice(), privileged: false };
        Ok(Some(own.act_as(&who)?))
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl OpenFile for Local {
    fn has_name(&self) -> bool {
        fstat(&self.file).map_or(true, |stat| stat.st_nlink > 0)
    }

    fn read_now(&self, to: TransferMemory<'_>, at: u64) -> io::Result<Option<usize>> {
        // Known only after a read that may block, because a network file system may not answer.
        if self.in_memory.get() == Some(&true) {
            return if may_swap() { Ok(None) } else { self.read(to, at).map(Some) };
        }
        to.mem.read_cached(to.at, to.len, &self.file, at).map_err(onehop_os::Error::into_io)
    }

    fn local(&self) -> Option<&File> {
        Some(&self.file)
    }

    fn read(&self, to: TransferMemory<'_>, at: u64) -> io::Result<usize> {
        self.in_memory.get_or_init(|| is_in_memory(&self.file));
        to.mem.read_file(to.at, to.len, &self.file, at).map_err(onehop_os::Error::into_io)
    }

    fn write(&self, from: TransferMemory<'_>, at: u64) -> io::Result<usize> {
        if let Some(writes) = &self.writes {
            return writes.write(&self.file, from.source(), at, || self.act());
        }
        let _acting = self.act()?;
        from.mem.write_file(from.at, from.len, &self.file, at).map_err(onehop_os::Error::into_io)
    }

    fn write_now(&self, from: TransferMemory<'_>, at: u64) -> Option<usize> {
        self.writes.as_ref().filter(|_| !may_swap())?.write_now(&self.file, from.source(), at)
    }

    fn read_bytes(&self, to: &mut [u8], at: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < to.len() {
            match self.file.read_at(&mut to[done..], at + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn write_bytes(&self, from: &[u8], at: u64) -> io::Result<usize> {
        let _acting = self.act()?;
        self.file.write_at(from, at)
    }

    fn append_bytes(&self, from: &[u8]) -> io::Result<usize> {
        let _acting = self.act()?;
        let from = [io::IoSlice::new(from)];
        Ok(rustix::io::retry_on_intr(|| rustix::io::pwritev2(&self.file, &from, 0, ReadWriteFlags::APPEND))?)
    }

    fn has_hole(&self, at: u64, bytes: u64) -> io::Result<bool> {
        let end = self.file.metadata()?.len().min(at.saturating_add(bytes));
        if at >= end {
            return Ok(false);
        }
        // This moves the file offset, which nothing uses.
        Ok(rustix::fs::seek(&self.file, SeekFrom::Hole(at))? < end)
    }

    fn is_cold(&self, at: u64, bytes: u64) -> bool {
        cached_bytes(&self.file, at, bytes).is_ok_and(|cached| cached < bytes / 2)
    }

    fn read_past(&self, to: TransferMemory<'_>, at: u64) -> io::Result<Option<usize>> {
        let open = || open_direct(&self.file).ok().flatten();
        let Some((file, rules)) = self.direct.get_or_init(open) else { return Ok(None) };
        if [rules.memory, rules.offset].iter().any(|rule| *rule > 4096) {
            return Ok(None);
        }
        match to.mem.read_file(to.at, to.len, file, at).map_err(onehop_os::Error::into_io) {
            // Some file systems accept O_DIRECT but fail the read.
            Err(e) if e.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => Ok(None),
            other => other.map(Some),
        }
    }

    fn sync(&self, data_only: bool) -> io::Result<()> {
        if data_only { self.file.sync_data() } else { self.file.sync_all() }
    }

    fn drop_set_id(&self) -> io::Result<()> {
        // A process that is not root's clears them by the write itself, and may not be the file's owner.
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        // A change to no owner makes the kernel clear set-id bits and file capabilities. It leaves the rest of the mode
        // alone, which the owner may be changing at this moment.
        Ok(rustix::fs::fchown(&self.file, None, None)?)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        let _acting = self.act()?;
        Ok(rustix::fs::ftruncate(&self.file, bytes)?)
    }

    fn allocate(&self, mode: u32, at: u64, bytes: u64) -> io::Result<()> {
        let _acting = self.act()?;
        Ok(rustix::fs::fallocate(&self.file, FallocateFlags::from_bits_retain(mode), at, bytes)?)
    }

    fn seek(&self, at: u64, hole: bool) -> io::Result<u64> {
        let to = if hole { SeekFrom::Hole(at) } else { SeekFrom::Data(at) };
        Ok(rustix::fs::seek(&self.file, to)?)
    }
}
