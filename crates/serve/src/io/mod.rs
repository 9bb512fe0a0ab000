//! Checks and executes requests of rings: at once if that does not block, or on other threads.

pub(crate) mod gpu;
mod job;
pub(crate) mod pool;
#[cfg(test)]
mod tests;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use onehop_target::tree::TransferMemory;
use onehop_usrbio::ring::{Request, Submission};
use rustix::io::Errno;

use crate::daemon::DaemonShared;
use crate::lock;
use crate::opens::{NotOpen, Open};
use crate::table::{LinkContent, LinkedBuffer};
use crate::workers::ServedRing;
pub(crate) use job::{QueuedTransfers, TransferJob};

/// The longest transfer that the ring's thread executes itself. Of longer ones it executes reads of at most
/// [`MAX_INLINE_BATCH`] bytes together: several threads are faster, and the other rings are not delayed.
const MAX_INLINE: u64 = 16 << 10;
const MAX_INLINE_BATCH: u64 = 128 << 10;

/// The buffer and file that a ring used last, and mostly uses next.
#[derive(Default)]
pub(crate) struct LastUsed {
    /// Weak: the cache does not keep memory alive.
    buffer: Weak<LinkedBuffer>,
    /// With the number of opens at that time. Weak, too: a closed file is closed.
    open: Option<(u64, Weak<Open>)>,
}

/// The result of starting a request.
pub(crate) enum IoStart {
    /// Done: the number of bytes, or a negative error number.
    Done(i64),
    /// All bytes of a request are written. The kernel is to learn that before the program.
    Written(Request),
    /// Other threads will complete it, once it is [queued](TransferJob::begin_all).
    Later(Box<TransferJob>),
}

fn refused(errno: Errno) -> i64 {
    -i64::from(errno.raw_os_error())
}

/// The negative error number for a ring.
pub(crate) fn failure(error: &std::io::Error) -> i64 {
    -i64::from(error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()))
}

/// Whether a request of a batch may be executed by the ring's thread.
fn is_short(ring: &ServedRing, request: &Request, batch: u64) -> bool {
    request.len <= MAX_INLINE || (ring.server.name().read && batch <= MAX_INLINE_BATCH)
}

/// Starts the request of an entry, in a batch of so many bytes.
pub(crate) fn begin(
    shared: &Arc<DaemonShared>,
    ring: &Arc<ServedRing>,
    entry: &Submission,
    batch: u64,
) -> IoStart {
    let checked = entry.request.ok_or(Errno::INVAL).and_then(|request| {
        let (buffer, open) = check(shared, ring, &request)?;
        Ok((request, buffer, open))
    });
    match checked {
        Err(errno) => {
            shared.stats.refused.fetch_add(1, Ordering::Relaxed);
            IoStart::Done(refused(errno))
        }
        Ok((request, buffer, open)) => {
            let is_short = is_short(ring, &request, batch);
            let done = is_short.then(|| at_once(shared, ring, &request, &buffer, &open)).flatten();
            done.unwrap_or_else(|| queued(shared, ring, entry, &request, buffer, open))
        }
    }
}

/// Returns the buffer and the file of a request, if the ring may use them.
fn check(
    shared: &DaemonShared,
    ring: &ServedRing,
    request: &Request,
) -> Result<(Arc<LinkedBuffer>, Arc<Open>), Errno> {
    let mut cache = lock(&ring.cache);
    let known = cache.buffer.upgrade().filter(|b| b.name.id == request.buffer && !b.is_gone());
    let buffer = known.or_else(|| shared.table.get(request.buffer)).ok_or(Errno::NOENT)?;
    check_range(&buffer, ring, request)?;
    let reads = ring.server.name().read;
    // A file opened since may be synchronous, and must then be the one that is written.
    let added = shared.opens.added();
    let known = cache
        .open
        .take()
        .filter(|(then, _)| *then == added)
        .and_then(|(_, open)| open.upgrade())
        .filter(|open| open.inode == request.inode && !open.is_closed());
    let open = match known {
        Some(open) => open,
        None => shared.opens.find(request.inode, ring.owner.uid, reads).map_err(|why| match why {
            NotOpen::Closed => Errno::BADF,
            NotOpen::Access => Errno::ACCESS,
        })?,
    };
    cache.buffer = Arc::downgrade(&buffer);
    cache.open = Some((added, Arc::downgrade(&open)));
    Ok((buffer, open))
}

fn check_range(buffer: &LinkedBuffer, ring: &ServedRing, request: &Request) -> Result<(), Errno> {
    if buffer.owner.uid != ring.owner.uid && ring.owner.uid != 0 {
        return Err(Errno::ACCESS);
    }
    let last = request.offset.checked_add(request.len.wrapping_sub(1)).ok_or(Errno::INVAL)?;
    if request.len == 0 || last >= buffer.len() {
        return Err(Errno::INVAL);
    }
    let block = buffer.name.block;
    if block > 0 && request.offset / block != last / block {
        return Err(Errno::INVAL);
    }
    let end = request.at.checked_add(request.len).ok_or(Errno::INVAL)?;
    i64::try_from(end).map_err(|_| Errno::FBIG)?;
    Ok(())
}

/// Executes a request if that does not block.
fn at_once(
    shared: &DaemonShared,
    ring: &ServedRing,
    request: &Request,
    buffer: &LinkedBuffer,
    open: &Open,
) -> Option<IoStart> {
    let LinkContent::Host(mem) = &buffer.what else { return None };
    let memory = TransferMemory { mem, at: request.offset as usize, len: request.len as usize, shared: true };
    if !ring.server.name().read {
        if open.syncs() {
            return None;
        }
        open.file().write_now(memory, request.at)?;
        shared.stats.host_written.count(request.len);
        return Some(IoStart::Written(*request));
    }
    // Looking for holes may take as long as reading from the disk.
    if ring.refuses_holes() {
        return None;
    }
    match open.file().read_now(memory, request.at) {
        Ok(Some(count)) if count as u64 == request.len => {
            shared.stats.host_now.count(request.len);
            Some(IoStart::Done(count as i64))
        }
        // Short: a thread that may block finds out whether this is the end of the file.
        Ok(_) => None,
        Err(error) => {
            shared.stats.failed.fetch_add(1, Ordering::Relaxed);
            Some(IoStart::Done(failure(&error)))
        }
    }
}

fn queued(
    shared: &Arc<DaemonShared>,
    ring: &Arc<ServedRing>,
    entry: &Submission,
    request: &Request,
    buffer: Arc<LinkedBuffer>,
    open: Arc<Open>,
) -> IoStart {
    match TransferJob::new(shared, ring, entry, request, buffer, open) {
        Ok(job) => IoStart::Later(Box::new(job)),
        Err(errno) => {
            shared.stats.refused.fetch_add(1, Ordering::Relaxed);
            IoStart::Done(refused(errno))
        }
    }
}
