//! Slots of memory that was registered once: whoever is in a hurry takes one and registers nothing.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use onehop_os::Deadline;

use crate::nic::Registered;
use crate::{Error, RemoteMemory, Result};

/// Slots of equal length in one registration, in a GPU's memory or the host's.
pub struct Pool {
    memory: Arc<Registered>,
    slot: u64,
    free: Mutex<Vec<u64>>,
    back: Condvar,
}

/// One of them, until it is dropped.
pub struct PoolSlot {
    pool: Arc<Pool>,
    offset: u64,
}

impl Pool {
    /// As many slots of `slot` bytes as the memory has room for.
    ///
    /// # Errors
    /// When it has room for none.
    pub fn new(memory: Arc<Registered>, slot: u64) -> Result<Arc<Self>> {
        let count = memory.len().checked_div(slot).unwrap_or(0);
        if count == 0 {
            return Err(Error::OutOfRange { offset: 0, bytes: slot, len: memory.len() });
        }
        let free = Mutex::new((0..count).rev().map(|at| at * slot).collect());
        Ok(Arc::new(Self { memory, slot, free, back: Condvar::new() }))
    }

    /// The next slot that is free.
    ///
    /// # Errors
    /// When none was in time.
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

    /// What all slots lie in.
    #[must_use]
    pub fn memory(&self) -> &Arc<Registered> {
        &self.memory
    }
}

impl PoolSlot {
    /// Where in the pool's memory it begins.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The registration that it lies in.
    #[must_use]
    pub fn memory(&self) -> &Arc<Registered> {
        &self.pool.memory
    }

    /// How the other side finds its first bytes.
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
            // The device may still write it: nobody has it again.
            return;
        }
        self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.offset);
        self.pool.back.notify_one();
    }
}
