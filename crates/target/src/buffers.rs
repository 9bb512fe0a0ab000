//! Memory for data that is on its way: a fixed number of buffers, which users share. A user who has more data waits for
//! themselves.

use std::fs::File;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use onehop_os::HostMem;
use rustix::fs::MemfdFlags;

use crate::shares::Shares;
use crate::transport::Stretch;
use crate::wire::MOST_DATA;
use crate::{Error, Result, lock};

/// One of them: memory that is also a file, so that the kernel can copy between it and memory that may vanish.
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
        file.set_len(MOST_DATA as u64).map_err(failed)?;
        Ok(Self { mem: HostMem::of_file(&file, MOST_DATA)?, file })
    }
}

/// A session, and a user of its mount.
pub(crate) type SessionUser = (u32, u32);

/// Which way data goes. A user's writes may wait for a disk; their reads have buffers of their own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum DataFlow {
    Read,
    Write,
}

/// All of them, made as they are needed and kept: adapters may know them.
pub(crate) struct Buffers {
    free: Mutex<Vec<FileBuffer>>,
    there: Condvar,
    /// No user has more than they leave to others: what waits for a disk keeps its buffer.
    shares: Shares<(SessionUser, DataFlow)>,
}

/// One that is in use.
pub(crate) struct PooledBuffer {
    buffer: Option<FileBuffer>,
    user: (SessionUser, DataFlow),
    home: Arc<Buffers>,
}

impl Buffers {
    /// So many, and half as many for users who come when others have these: one for each.
    pub fn new(most: usize) -> Arc<Self> {
        let most = most.max(1) as u64;
        let shares = Shares::new(most).with_reserve(most / 2, 1);
        Arc::new(Self { free: Mutex::default(), there: Condvar::new(), shares })
    }

    /// Takes one for a user's data that goes one way, waiting for it if need be; none where that takes too long.
    pub fn take(
        self: &Arc<Self>,
        user: (SessionUser, DataFlow),
        limit: Duration,
    ) -> Result<Option<PooledBuffer>> {
        let until = Instant::now() + limit;
        let mut free = lock(&self.free);
        loop {
            if self.shares.take(user, 1) {
                // It gives the share back, should there be no memory for it.
                let mut lent = PooledBuffer { buffer: free.pop(), user, home: self.clone() };
                drop(free);
                if lent.buffer.is_none() {
                    lent.buffer = Some(FileBuffer::new()?);
                }
                return Ok(Some(lent));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            free = self.there.wait_timeout(free, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl PooledBuffer {
    fn buffer(&self) -> Result<&FileBuffer> {
        self.buffer.as_ref().ok_or(Error::Memory(onehop_os::Error::NotReachable))
    }

    /// Its first bytes.
    pub fn stretch(&self, len: usize) -> Result<Stretch> {
        Ok(Stretch { mem: self.buffer()?.mem.clone(), at: 0, len })
    }

    /// The same as a file.
    pub fn file(&self) -> Result<&File> {
        Ok(&self.buffer()?.file)
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let mut free = lock(&self.home.free);
        free.extend(self.buffer.take());
        self.home.shares.put_back(self.user, 1);
        drop(free);
        // Not each of those who wait may have it.
        self.home.there.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_leaves_as_many_to_others() {
        let buffers = Buffers::new(8);
        let take = |user| buffers.take((user, DataFlow::Write), Duration::ZERO).unwrap();
        let held: Vec<_> = std::iter::from_fn(|| take((1, 0))).collect();
        let of_another: Vec<_> = std::iter::from_fn(|| take((1, 7))).collect();
        let elsewhere = take((2, 0));
        assert_eq!((held.len(), of_another.len(), elsewhere.is_some()), (4, 2, true));
        // Reads go on while all that a user writes has its buffers; of the reserve, each has one.
        let reads = [(1, 0), (1, 7), (2, 0), (3, 0), (4, 0)]
            .map(|user| buffers.take((user, DataFlow::Read), Duration::ZERO).unwrap().is_some());
        assert_eq!(reads, [true; 5]);
        // One who waits gets the first that comes back, though others wait in front.
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
