//! What a ring asks for, checked, and done: at once where nothing has to be waited for, by other threads where it has.

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
pub(crate) use job::{Rest, TransferJob};

/// What is read at once, by the thread that looks after rings: more would keep it from the others.
const MOST_AT_ONCE: u64 = 128 << 10;

/// What a ring used last, which is mostly what it uses next.
#[derive(Default)]
pub(crate) struct LastUsed {
    /// Whose memory is not kept for that.
    buffer: Weak<LinkedBuffer>,
    /// And how many files had been opened by then.
    open: Option<(u64, Arc<Open>)>,
}

/// How a beginning ended.
pub(crate) enum IoStart {
    /// It is over: bytes, or an error number with a minus sign.
    Over(i64),
    /// Somebody else tells the ring.
    UnderWay,
}

fn refused(errno: Errno) -> i64 {
    -i64::from(errno.raw_os_error())
}

/// The number for the ring of what went wrong with a file or memory.
pub(crate) fn failure(error: &std::io::Error) -> i64 {
    -i64::from(error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()))
}

/// Begins what an entry asks for.
pub(crate) fn begin(shared: &Arc<DaemonShared>, ring: &Arc<ServedRing>, entry: &Submission) -> IoStart {
    let checked = entry.request.ok_or(Errno::INVAL).and_then(|request| {
        let (buffer, open) = check(shared, ring, &request)?;
        Ok((request, buffer, open))
    });
    match checked {
        Err(errno) => {
            shared.stats.refused.fetch_add(1, Ordering::Relaxed);
            IoStart::Over(refused(errno))
        }
        Ok((request, buffer, open)) => start(shared, ring, entry, &request, buffer, open),
    }
}

/// The buffer and the file of a request, if the ring may use them so.
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
    // Another one may write to the disk at once, and then is the one to be written to.
    let added = shared.opens.added();
    let known = cache
        .open
        .take()
        .filter(|(then, open)| *then == added && open.inode == request.inode && !open.is_closed());
    let open = match known {
        Some((_, open)) => open,
        None => shared.opens.find(request.inode, ring.owner.uid, reads).map_err(|why| match why {
            NotOpen::Closed => Errno::BADF,
            NotOpen::Access => Errno::ACCESS,
        })?,
    };
    cache.buffer = Arc::downgrade(&buffer);
    cache.open = Some((added, open.clone()));
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

fn start(
    shared: &Arc<DaemonShared>,
    ring: &Arc<ServedRing>,
    entry: &Submission,
    request: &Request,
    buffer: Arc<LinkedBuffer>,
    open: Arc<Open>,
) -> IoStart {
    // To look for holes may take as long as to read from the disk.
    let is_quick = ring.server.name().read && !ring.refuses_holes() && request.len <= MOST_AT_ONCE;
    if let (true, LinkContent::Host(mem)) = (is_quick, &buffer.what) {
        let to = TransferMemory { mem, at: request.offset as usize, len: request.len as usize, shared: true };
        match open.file().read_now(to, request.at) {
            Ok(Some(count)) if count as u64 == request.len => {
                shared.stats.host_now.count(request.len);
                return IoStart::Over(count as i64);
            }
            // A part of it, or nothing: somebody who may wait finds out whether that is the file's end.
            Ok(_) => {}
            Err(error) => {
                shared.stats.failed.fetch_add(1, Ordering::Relaxed);
                return IoStart::Over(failure(&error));
            }
        }
    }
    match TransferJob::new(shared, ring, entry, request, buffer, open) {
        Ok(job) => {
            job.begin();
            IoStart::UnderWay
        }
        Err(errno) => {
            shared.stats.refused.fetch_add(1, Ordering::Relaxed);
            IoStart::Over(refused(errno))
        }
    }
}
