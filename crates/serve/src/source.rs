//! Where the bytes of a file come from: the seam behind which a file of this machine stands, and a storage service can.

use std::fs::File;
use std::io;

use onehop_os::HostMem;
use onehop_os::page_cache::{DirectRules, cached_bytes, open_direct};

/// An open file. Transfers go to and from memory that others may write at the same time, so they are never made through slices.
pub trait Source: Send + Sync {
    /// Reads what can be had without waiting into the memory at `offset`: none where that is nothing, or not known.
    ///
    /// # Errors
    /// When the memory is gone, or the file cannot be read.
    fn read_now(&self, mem: &HostMem, offset: usize, bytes: usize, at: u64) -> io::Result<Option<usize>>;

    /// Reads; gives how many bytes there were before the file's end.
    ///
    /// # Errors
    /// As for [`Self::read_now`].
    fn read(&self, mem: &HostMem, offset: usize, bytes: usize, at: u64) -> io::Result<usize>;

    /// Writes; gives how many bytes were written.
    ///
    /// # Errors
    /// When the memory is gone, or the file cannot be written.
    fn write(&self, mem: &HostMem, offset: usize, bytes: usize, at: u64) -> io::Result<usize>;

    /// Whether there is a hole in a range, before the file's end.
    ///
    /// # Errors
    /// When that cannot be told.
    fn has_hole(&self, at: u64, bytes: u64) -> io::Result<bool>;

    /// Whether reading a range past the caches of this machine is worth it, as most of it is not there.
    fn is_cold(&self, at: u64, bytes: u64) -> bool;

    /// Reads past the caches of this machine into page-aligned memory; the range is whole pages. None where that cannot be.
    ///
    /// # Errors
    /// As for [`Self::read_now`].
    fn read_past(&self, mem: &HostMem, offset: usize, bytes: usize, at: u64) -> io::Result<Option<usize>>;
}

/// A file of this machine.
pub struct Local {
    file: File,
    /// The same past the page cache, opened when it is first wanted.
    direct: std::sync::OnceLock<Option<(File, DirectRules)>>,
}

impl Local {
    /// An open file.
    #[must_use]
    pub fn new(file: File) -> Self {
        Self { file, direct: std::sync::OnceLock::new() }
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }
}

fn plain(error: onehop_os::Error) -> io::Error {
    match error.errno() {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => io::Error::other(error),
    }
}

impl Source for Local {
    fn read_now(&self, mem: &HostMem, offset: usize, bytes: usize, at: u64) -> io::Result<Option<usize>> {
        mem.read_cached(offset, bytes, &self.file, at).map_err(plain)
    }

    fn read(&self, mem: &HostMem, offset: usize, bytes: usize, at: u64) -> io::Result<usize> {
        mem.read_file(offset, bytes, &self.file, at).map_err(plain)
    }

    fn write(&self, mem: &HostMem, offset: usize, bytes: usize, at: u64) -> io::Result<usize> {
        mem.write_file(offset, bytes, &self.file, at).map_err(plain)
    }

    fn has_hole(&self, at: u64, bytes: u64) -> io::Result<bool> {
        let end = self.file.metadata()?.len().min(at.saturating_add(bytes));
        if at >= end {
            return Ok(false);
        }
        // The place of the descriptor moves; nobody reads from there.
        Ok(rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Hole(at))? < end)
    }

    fn is_cold(&self, at: u64, bytes: u64) -> bool {
        cached_bytes(&self.file, at, bytes).is_ok_and(|cached| cached < bytes / 2)
    }

    fn read_past(&self, mem: &HostMem, offset: usize, bytes: usize, at: u64) -> io::Result<Option<usize>> {
        let open = || open_direct(&self.file).ok().flatten();
        let Some((file, rules)) = self.direct.get_or_init(open) else { return Ok(None) };
        if [rules.memory, rules.offset].iter().any(|rule| *rule > 4096) {
            return Ok(None);
        }
        match mem.read_file(offset, bytes, file, at).map_err(plain) {
            // Some file systems promise and do not keep it.
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => Ok(None),
            other => other.map(Some),
        }
    }
}
