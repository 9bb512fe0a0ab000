//! A fixed number of transfer buffers, which users share. A user who needs more waits without delaying others.

use std::fs::File;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use onehop_os::HostMem;
use rustix::fs::MemfdFlags;

use crate::shares::Shares;
use crate::transport::MemoryRange;
use crate::wire::MAX_DATA;
use crate::{Error, Result, lock};

/// A buffer. It is also a file, so that the kernel can copy between it and memory that may be truncated.
struct FileBuffer {
    mem: HostMem,
    file: File,
}

impl FileBuffer {
    fn new() -> Result<Self> {
        let failed = |e: std::io::Error| Error::io("memory for", "data on its way", e);
        let fd =
            rustix::fs::memfd_create("onehop-data", MemfdFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        let file = File::from(fd);
        file.set_len(MAX_DATA as u64).map_err(failed)?;
        Ok(Self { mem: HostMem::of_file(&file, MAX_DATA)?, file })
    }
}

/// A session and a user of its mount.
pub(crate) type SessionUser = (u32, u32);

/// The direction of data. Writes may wait for a disk, so a user's reads have buffers of their own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum DataFlow {
    Read,
    Write,
}

/// All buffers. They are allocated on demand and kept, because adapters may have registered them.
pub(crate) struct Buffers {
    free: Mutex<Vec<FileBuffer>>,
    available: Condvar,
    /// Each user leaves as many to others: data that waits for a disk keeps its buffer.
    shares: Shares<(SessionUser, DataFlow)>,
}

/// A buffer in use.
pub(crate) struct PooledBuffer {
    buffer: Option<FileBuffer>,
    user: (SessionUser, DataFlow),
    pool: Arc<Buffers>,
}

impl Buffers {
    /// `most` buffers, and half as many for users who find these taken, one for each.
    pub fn new(most: usize) -> Arc<Self> {
        let most = most.max(1) as u64;
        let shares = Shares::new(most).with_reserve(most / 2, 1);
        Arc::new(Self { free: Mutex::default(), available: Condvar::new(), shares })
    }

    /// Takes a buffer for a user's data in one direction. Waits up to `limit`; `None` if available is none by then.
    pub fn take(
        self: &Arc<Self>,
        user: (SessionUser, DataFlow),
        limit: Duration,
    ) -> Result<Option<PooledBuffer>> {
        let until = Instant::now() + limit;
        let mut free = lock(&self.free);
        loop {
            if self.shares.take(user, 1) {
                // Its `drop` returns the share if available is no memory.
                let mut pooled = PooledBuffer { buffer: free.pop(), user, pool: self.clone() };
                drop(free);
                if pooled.buffer.is_none() {
                    pooled.buffer = Some(FileBuffer::new()?);
                }
                return Ok(Some(pooled));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            free = self.available.wait_timeout(free, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl PooledBuffer {
    fn buffer(&self) -> Result<&FileBuffer> {
        self.buffer.as_ref().ok_or(Error::Memory(onehop_os::Error::NotReachable))
    }

    /// The first `len` bytes.
    pub fn range(&self, len: usize) -> Result<MemoryRange> {
        Ok(MemoryRange { mem: self.buffer()?.mem.clone(), at: 0, len })
    }

    /// The buffer's file.
    pub fn file(&self) -> Result<&File> {
        Ok(&self.buffer()?.file)
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let mut free = lock(&self.pool.free);
        free.extend(self.buffer.take());
        self.pool.shares.put_back(self.user, 1);
        drop(free);
        // A waiter may be at its limit, so wake all.
        self.pool.available.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_limited_per_user() {
        let buffers = Buffers::new(8);
        let take = |user| buffers.take((user, DataFlow::Write), Duration::ZERO).unwrap();
        let held: Vec<_> = std::iter::from_fn(|| take((1, 0))).collect();
        let of_another: Vec<_> = std::iter::from_fn(|| take((1, 7))).collect();
        let elsewhere = take((2, 0));
        assert_eq!((held.len(), of_another.len(), elsewhere.is_some()), (4, 2, true));
        // A user's reads have buffers while all their write buffers are taken. Each user gets one of the reserve.
        let reads = [(1, 0), (1, 7), (2, 0), (3, 0), (4, 0)]
            .map(|user| buffers.take((user, DataFlow::Read), Duration::ZERO).unwrap().is_some());
        assert_eq!(reads, [true; 5]);
        // A waiter gets the first returned buffer, although others at their limit wait in front of it.
        let late = [take((5, 0)), take((6, 0)), take((7, 0)), take((8, 0)), take((9, 0))];
        assert!(late.iter().all(Option::is_some) && take((10, 0)).is_none());
        let wait =
            |user, seconds| buffers.take((user, DataFlow::Write), Duration::from_secs(seconds)).unwrap();
        std::thread::scope(|scope| {
            let others = [(); 3].map(|()| scope.spawn(|| wait((1, 7), 1)));
            std::thread::sleep(Duration::from_millis(100));
            let one = scope.spawn(|| wait((10, 0), 60));
            std::thread::sleep(Duration::from_millis(100));
            drop(late);
            assert!(one.join().unwrap().is_some());
            for other in others {
                drop(other.join().unwrap());
            }
        });
        drop((held, of_another, elsewhere));
        assert_eq!(buffers.shares.taken(), 0);
        assert!(lock(&buffers.free).len() <= 12);
    }
}
