//! Slots of memory that was registered once, for callers that cannot wait for a registration.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use onehop_os::Deadline;

use crate::nic::Registered;
use crate::{Error, RemoteMemory, Result};

/// Slots of equal length in one registration, in GPU or host memory.
pub struct Pool {
    memory: Arc<Registered>,
    slot: u64,
    free: Mutex<Vec<u64>>,
    back: Condvar,
}

/// A slot, until it is dropped.
pub struct PoolSlot {
    pool: Arc<Pool>,
    offset: u64,
}

impl Pool {
    /// Makes as many slots of `slot` bytes as the memory has room for.
    ///
    /// # Errors
    /// When it has no room for one.
    pub fn new(memory: Arc<Registered>, slot: u64) -> Result<Arc<Self>> {
        let count = memory.len().checked_div(slot).unwrap_or(0);
        if count == 0 {
            return Err(Error::OutOfRange { offset: 0, bytes: slot, len: memory.len() });
        }
        let free = Mutex::new((0..count).rev().map(|at| at * slot).collect());
        Ok(Arc::new(Self { memory, slot, free, back: Condvar::new() }))
    }

    /// The next free slot.
    ///
    /// # Errors
    /// When none became free in time.
    pub fn take(self: &Arc<Self>, deadline: Deadline) -> Result<PoolSlot> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(offset) = free.pop() {
                return Ok(PoolSlot { pool: self.clone(), offset });
            }
            if deadline.passed() {
                return Err(Error::TimedOut("waiting for registered memory"));
            }
            free = self.back.wait_timeout(free, deadline.left()).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Bytes of a slot.
    #[must_use]
    pub fn slot_bytes(&self) -> u64 {
        self.slot
    }

    /// The memory of all slots.
    #[must_use]
    pub fn memory(&self) -> &Arc<Registered> {
        &self.memory
    }
}

impl PoolSlot {
    /// Its offset in the pool's memory.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The registration that contains it.
    #[must_use]
    pub fn memory(&self) -> &Arc<Registered> {
        &self.pool.memory
    }

    /// Its first `bytes` bytes, as the other side addresses them.
    ///
    /// # Errors
    /// When it has fewer.
    pub fn remote(&self, bytes: u64) -> Result<RemoteMemory> {
        if bytes > self.pool.slot {
            return Err(Error::OutOfRange { offset: 0, bytes, len: self.pool.slot });
        }
        self.pool.memory.remote(self.offset, bytes)
    }
}

impl Drop for PoolSlot {
    fn drop(&mut self) {
        if self.pool.memory.is_lost() {
            // The device may still write it, so it is leaked.
            return;
        }
        self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.offset);
        self.pool.back.notify_one();
    }
}
