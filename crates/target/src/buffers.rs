//! Memory for data that is on its way: so many buffers and no more, so that whoever brings more has to wait.

use std::fs::File;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use onehop_os::HostMem;
use rustix::fs::MemfdFlags;

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

/// All of them, made as they are needed and kept: adapters may know them.
pub(crate) struct Buffers {
    free: Mutex<Free>,
    there: Condvar,
    most: usize,
}

#[derive(Default)]
struct Free {
    buffers: Vec<FileBuffer>,
    made: usize,
}

/// One that is in use.
pub(crate) struct PooledBuffer {
    buffer: Option<FileBuffer>,
    home: Arc<Buffers>,
}

impl Buffers {
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::default(), there: Condvar::new(), most })
    }

    /// Takes one, waiting for it if need be; none where that takes too long.
    pub fn take(self: &Arc<Self>, limit: Duration) -> Result<Option<PooledBuffer>> {
        let until = Instant::now() + limit;
        let mut free = lock(&self.free);
        loop {
            if let Some(buffer) = free.buffers.pop() {
                return Ok(Some(PooledBuffer { buffer: Some(buffer), home: self.clone() }));
            }
            if free.made < self.most {
                let buffer = FileBuffer::new()?;
                free.made += 1;
                return Ok(Some(PooledBuffer { buffer: Some(buffer), home: self.clone() }));
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
        if let Some(buffer) = self.buffer.take() {
            lock(&self.home.free).buffers.push(buffer);
            self.home.there.notify_one();
        }
    }
}
