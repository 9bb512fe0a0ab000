//! A file that calls read and write, opened in every mode that they need.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use onehop_os::HostMem;
use onehop_os::file_writes::{FileSource, FileWrites, WriteRoutes};
use onehop_os::page_cache::{cached_bytes, is_in_memory, open_again};
use rustix::fs::{Advice, OFlags, fadvise, fcntl_getfl, fstat};

use super::{ALIGN, CallCounters, CallError};
use crate::engine::choice::{Direct, past_the_cache};

/// Reads of less than this from a descriptor without O_DIRECT are left to the kernel, with its readahead.
const SMALL: usize = 128 << 10;
/// The largest unit of addresses, offsets and lengths that O_DIRECT requires.
pub(super) const BLOCK: u64 = 4096;

/// See the module.
pub struct CallFile {
    /// As the program opened it.
    own: File,
    is_direct: bool,
    /// For reads through the page cache, without readahead.
    cached: Option<File>,
    direct: Option<Direct>,
    /// For writes that O_DIRECT cannot do; none if the program's own descriptor can.
    unaligned: Option<File>,
    /// Writes by the program's own descriptor.
    writes: FileWrites,
    /// Whether there is nothing behind the page cache.
    in_memory: bool,
    /// Why it is not read past the page cache, if that is so.
    why_cached: Option<String>,
}

/// The result of a read into memory: bytes to skip, and the wanted ones after them.
#[derive(Clone, Copy, Debug)]
pub struct Filled {
    /// Bytes to skip.
    pub skip: usize,
    /// The bytes of the file.
    pub bytes: usize,
}

/// Memory that is read into.
#[derive(Clone, Copy)]
pub(super) struct Room<'a> {
    pub(super) memory: &'a HostMem,
    /// Where it begins, on a multiple of the largest block.
    pub(super) to: usize,
    /// The offset behind that for bytes that need not come in blocks.
    pub(super) shift: usize,
    /// The largest block of O_DIRECT for which there is room.
    pub(super) block: u64,
}

impl CallFile {
    /// A file by its descriptor, which must stay open as long as this. `routes` counts its writes.
    ///
    /// # Errors
    /// When the descriptor is not that of a file.
    pub fn new(own: File, routes: Arc<WriteRoutes>) -> io::Result<Self> {
        let flags = fcntl_getfl(&own)?;
        let access = flags & OFlags::RWMODE;
        let (reads, writes) = (access != OFlags::WRONLY, access != OFlags::RDONLY);
        let (is_direct, in_memory) = (flags.contains(OFlags::DIRECT), is_in_memory(&own));
        let (mut direct, mut why_cached) = (None, None);
        if reads {
            match past_the_cache(&own, ALIGN) {
                Ok(opened) => direct = Some(opened),
                Err(why) => why_cached = Some(why),
            }
        }
        let cached = if reads { open_again(&own).ok() } else { None };
        if let (Some(file), Some(_)) = (&cached, &direct) {
            // Readahead would look like cached data. Failure is harmless.
            let _ = fadvise(file, 0, None, Advice::Random);
        }
        let kept = flags & (OFlags::SYNC | OFlags::DSYNC);
        let unaligned = if writes && is_direct {
            let again = File::options()
                .write(true)
                .custom_flags(kept.bits() as i32)
                .open(format!("/proc/self/fd/{}", own.as_raw_fd()));
            again.ok()
        } else {
            None
        };
        let writes = FileWrites::new(routes, 0);
        Ok(Self { own, is_direct, cached, direct, unaligned, writes, in_memory, why_cached })
    }

    /// The program's own descriptor, or a copy of it.
    #[must_use]
    pub fn own(&self) -> &File {
        &self.own
    }

    /// The descriptor for bytes of host memory at `at`: O_DIRECT does not accept all of them.
    #[must_use]
    pub fn for_host(&self, pointer: usize, at: u64, bytes: usize, writes: bool) -> &File {
        let is_aligned = (pointer as u64 | at | bytes as u64).is_multiple_of(BLOCK);
        let other = if writes { &self.unaligned } else { &self.cached };
        match other {
            Some(other) if self.is_direct && !is_aligned => other,
            _ => &self.own,
        }
    }

    /// Why it is not read past the page cache, if that is so.
    #[must_use]
    pub fn why_cached(&self) -> Option<&str> {
        self.why_cached.as_deref()
    }

    /// How many of these bytes lie before the file's end.
    ///
    /// # Errors
    /// When the system does not report it.
    pub fn within(&self, at: u64, bytes: usize) -> Result<usize, CallError> {
        let length = fstat(&self.own).map_err(io::Error::from)?.st_size as u64;
        Ok(usize::try_from(length.saturating_sub(at)).unwrap_or(usize::MAX).min(bytes))
    }

    /// Reads into memory.
    pub(super) fn fill(
        &self,
        room: Room<'_>,
        at: u64,
        bytes: usize,
        counts: &CallCounters,
    ) -> Result<Filled, CallError> {
        let Room { memory, shift, .. } = room;
        let to = room.to + shift;
        let whole = |bytes| Filled { skip: shift, bytes };
        let cached = self.cached.as_ref();
        let direct = self.direct.as_ref().filter(|direct| direct.block <= room.block);
        if let Some(cached) = cached
            && bytes < SMALL
        {
            if memory.read_cached(to, bytes, cached, at).map_err(CallError::of_memory)? == Some(bytes) {
                counts.cached.fetch_add(bytes as u64, Ordering::Relaxed);
                return Ok(whole(bytes));
            }
            if !self.is_direct {
                let got = memory.read_file(to, bytes, &self.own, at).map_err(CallError::of_memory)?;
                counts.cache_miss.fetch_add(got as u64, Ordering::Relaxed);
                return Ok(whole(got));
            }
        }
        if let Some(file) = cached.or((!self.is_direct).then_some(&self.own)) {
            let there = self.there(file, at, bytes as u64);
            if direct.is_none() || there * 2 >= bytes as u64 {
                let got = memory.read_file(to, bytes, file, at).map_err(CallError::of_memory)?;
                let there = there.min(got as u64);
                counts.cached.fetch_add(there, Ordering::Relaxed);
                counts.cache_miss.fetch_add(got as u64 - there, Ordering::Relaxed);
                return Ok(whole(got));
            }
        }
        let (file, block) = direct.map_or((&self.own, BLOCK), |direct| (&*direct.file, direct.block));
        let filled = past(memory, room.to, file, block, at, bytes)?;
        counts.direct.fetch_add(filled.bytes as u64, Ordering::Relaxed);
        Ok(filled)
    }

    /// How many of these bytes the page cache has; none if that is unknown.
    fn there(&self, file: &File, at: u64, bytes: u64) -> u64 {
        if self.in_memory { bytes } else { cached_bytes(file, at, bytes).unwrap_or(0) }
    }

    /// Writes the bytes in a slot.
    pub(super) fn store(
        &self,
        ring: &HostMem,
        from: usize,
        at: u64,
        bytes: usize,
    ) -> Result<usize, CallError> {
        let is_aligned = (at | bytes as u64).is_multiple_of(BLOCK);
        if let Some(file) = self.unaligned.as_ref().filter(|_| !is_aligned) {
            return ring.write_file(from, bytes, file, at).map_err(CallError::of_memory);
        }
        let from = FileSource { mem: ring, at: from, len: bytes };
        Ok(self.writes.write(&self.own, from, at, || Ok(()))?)
    }
}

/// Reads whole blocks past the page cache.
fn past(
    ring: &HostMem,
    to: usize,
    file: &File,
    block: u64,
    at: u64,
    bytes: usize,
) -> Result<Filled, CallError> {
    let start = at / block * block;
    let skip = (at - start) as usize;
    let all = (skip + bytes).next_multiple_of(block as usize);
    let mut done = 0;
    while done < skip + bytes {
        match ring.read_some(to + done, all - done, file, start + done as u64) {
            Ok(0) => break,
            Ok(read) => {
                done += read;
                // Less than a block is the file's end.
                if !(done as u64).is_multiple_of(block) {
                    break;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Filled { skip, bytes: done.saturating_sub(skip).min(bytes) })
}
