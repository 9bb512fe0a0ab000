//! The program's side of a ring.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onehop_os::HostMem;

use super::{COMPLETED, Request, RingRegion, SEEN, SUBMITTED, TAKEN, word};
use crate::{Error, Result};

/// A completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The slot that [`Client::prepare`] returned.
    pub index: i32,
    /// Bytes, or an error number with a minus sign.
    pub result: i64,
    /// The request's user data.
    pub userdata: u64,
}

/// The program's side. One thread at a time enters requests; others wait meanwhile.
pub struct Client {
    ring: RingRegion,
    /// Unused slots of requests, and the next submission.
    free: Mutex<Vec<u32>>,
    seeing: Mutex<()>,
}

/// See [`Client::hold`].
pub struct HeldClient<'a> {
    _free: MutexGuard<'a, Vec<u32>>,
    _seeing: MutexGuard<'a, ()>,
}

impl Client {
    /// In memory that was registered with a daemon.
    ///
    /// # Errors
    /// When it is too small.
    pub fn new(mem: HostMem) -> Result<Self> {
        let ring = RingRegion::new(mem)?;
        let free = (0..ring.slots - 1).rev().collect();
        Ok(Self { ring, free: Mutex::new(free), seeing: Mutex::default() })
    }

    /// Keeps other threads from the ring as long as the result lives. A thread that forks needs this, or a lock that another
    /// thread had would stay locked in the child.
    #[must_use]
    pub fn hold(&self) -> HeldClient<'_> {
        let seeing = self.seeing();
        HeldClient { _free: self.free(), _seeing: seeing }
    }

    fn free(&self) -> MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Taken before the other.
    fn seeing(&self) -> MutexGuard<'_, ()> {
        self.seeing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a request; returns its slot. The daemon does not read it before its semaphore was posted.
    ///
    /// # Errors
    /// When the ring is full.
    pub fn prepare(&self, request: &Request) -> Result<i32> {
        let mut free = self.free();
        let next = self.ring.mark(SUBMITTED)?;
        let after = self.ring.after(next, 1);
        if after == self.ring.mark(TAKEN)? {
            return Err(Error::Full);
        }
        let slot = free.pop().ok_or(Error::Full)?;
        self.ring.mem.write(self.ring.request(slot), &request.to_bytes())?;
        let mut submission = [0; 16];
        submission[..4].copy_from_slice(&slot.to_le_bytes());
        submission[8..].copy_from_slice(&request.userdata.to_le_bytes());
        self.ring.mem.write(self.ring.submission(next), &submission)?;
        self.ring.set_mark(SUBMITTED, after)?;
        Ok(slot as i32)
    }

    /// Takes completions, as many as there are and `out` has room for; returns how many.
    ///
    /// # Errors
    /// When the ring's contents are inconsistent.
    pub fn take(&self, out: &mut Vec<Completion>, most: usize) -> Result<usize> {
        let _one = self.seeing();
        let seen = self.ring.mark(SEEN)?;
        let count = self.ring.distance(seen, self.ring.mark(COMPLETED)?).min(most.min(1 << 24) as u32);
        if count == 0 {
            return Ok(0);
        }
        for place in 0..count {
            let mut bytes = [0; 24];
            self.ring.mem.read(self.ring.completion(self.ring.after(seen, place)), &mut bytes)?;
            let first = word(&bytes) as u32;
            let (result, userdata) = (word(&bytes[8..]) as i64, word(&bytes[16..]));
            out.push(Completion { index: first as i32, result, userdata });
        }
        self.ring.set_mark(SEEN, self.ring.after(seen, count))?;
        let mut free = self.free();
        for done in &out[out.len() - count as usize..] {
            // Invented numbers from a daemon must not free a slot twice.
            let known = u32::try_from(done.index).ok().filter(|slot| *slot < self.ring.slots - 1);
            if free.len() < self.ring.slots as usize - 1 {
                free.extend(known);
            }
        }
        Ok(count as usize)
    }

    /// Waits until the daemon signals a completion, for `limit` at most.
    pub fn wait(&self, limit: Duration) {
        let _ = self.ring.done.wait(limit);
    }

    /// Entries of it.
    #[must_use]
    pub fn entries(&self) -> i32 {
        self.ring.slots as i32 - 1
    }
}
