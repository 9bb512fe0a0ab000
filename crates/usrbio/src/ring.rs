//! The ring in which a program requests reads or writes, and receives their completions.
//!
//! ```text
//! 0   i32 submitted   the program's: where the next submission goes
//! 4   i32 taken       the daemon's: up to where it has taken them
//! 8   i32 completed   the daemon's: where the next completion goes
//! 12  i32 seen        the program's: up to where it has taken those
//! 16  requests        56 bytes for each slot
//!     completions     24 bytes for each slot
//!     submissions     16 bytes for each slot: the number of a request
//!     semaphore       32 bytes: counts up with completions
//! ```
//! A ring has one slot more than entries, so that a full one differs from an empty one. [`Client`] is the program's side;
//! [`RingServer`] is the daemon's, which trusts none of its contents.

mod client;
mod server;

pub use client::{Client, Completion, HeldClient};
pub use server::{Done, RingServer, Submission, Taken};

use std::sync::atomic::Ordering;

use onehop_os::{HostMem, Semaphore};

use crate::{Error, Id, Result};

const INDEX_BYTES: usize = 16;
const REQUEST: usize = 56;
const COMPLETION: usize = 24;
const SUBMISSION: usize = 16;
const SLOT: usize = REQUEST + COMPLETION + SUBMISSION;
/// Unused space at the end.
const SPARE: usize = 4096;
const FIXED: usize = INDEX_BYTES + Semaphore::BYTES + SPARE;
/// The most slots. More would overflow 32-bit counts.
const MAX_SLOTS: usize = 1 << 24;

const SUBMITTED: usize = 0;
const TAKEN: usize = 4;
const COMPLETED: usize = 8;
const SEEN: usize = 12;

/// The length of a ring of `entries` entries; `None` for an invalid number.
#[must_use]
pub fn bytes(entries: i32) -> Option<usize> {
    let slots = usize::try_from(entries).ok()?.checked_add(1)?;
    (slots > 1 && slots <= MAX_SLOTS).then(|| FIXED + SLOT * slots)
}

/// The entries of a ring of `bytes` bytes; 0 if there is no room for one.
#[must_use]
pub fn entries(bytes: usize) -> i32 {
    let slots = bytes.saturating_sub(FIXED) / SLOT;
    i32::try_from(slots.saturating_sub(1)).unwrap_or(i32::MAX)
}

/// A request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The buffer.
    pub buffer: Id,
    /// The offset in it.
    pub offset: u64,
    /// The file's inode number.
    pub inode: u64,
    /// The offset in the file.
    pub at: u64,
    /// The number of bytes.
    pub len: u64,
    /// The program's user data.
    pub userdata: u64,
}

impl Request {
    fn to_bytes(self) -> [u8; REQUEST] {
        let mut out = [0; REQUEST];
        out[..16].copy_from_slice(&self.buffer.0);
        let words = [self.offset, self.inode, self.at, self.len, self.userdata];
        for (to, word) in out[16..].chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    fn from_bytes(bytes: &[u8; REQUEST]) -> Self {
        let mut id = [0; 16];
        id.copy_from_slice(&bytes[..16]);
        let [offset, inode, at, len, userdata] = std::array::from_fn(|i| word(&bytes[16 + 8 * i..]));
        Self { buffer: Id(id), offset, inode, at, len, userdata }
    }
}

/// The first eight bytes of a slice.
fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(word)
}

/// The memory of a ring, and its layout.
struct RingRegion {
    mem: HostMem,
    slots: u32,
    done: Semaphore,
}

impl RingRegion {
    fn new(mem: HostMem) -> Result<Self> {
        let slots = (mem.len().saturating_sub(FIXED) / SLOT).min(MAX_SLOTS);
        if slots < 2 {
            return Err(Error::Argument(format!("{} bytes are too few for a ring of one entry", mem.len())));
        }
        let done = Semaphore::at(&mem, INDEX_BYTES + SLOT * slots)?;
        Ok(Self { mem, slots: slots as u32, done })
    }

    fn request(&self, slot: u32) -> usize {
        INDEX_BYTES + REQUEST * slot as usize
    }

    fn completion(&self, slot: u32) -> usize {
        INDEX_BYTES + REQUEST * self.slots as usize + COMPLETION * slot as usize
    }

    fn submission(&self, slot: u32) -> usize {
        INDEX_BYTES + (REQUEST + COMPLETION) * self.slots as usize + SUBMISSION * slot as usize
    }

    /// Loads an index. An index beyond the last slot is an error.
    fn load_index(&self, which: usize) -> Result<u32> {
        let index = self.mem.word(which)?.load(Ordering::SeqCst);
        if index < self.slots {
            return Ok(index);
        }
        Err(Error::Broken(format!("the index {index} is invalid in a ring of {} slots", self.slots)))
    }

    fn store_index(&self, which: usize, slot: u32) -> Result<()> {
        self.mem.word(which)?.store(slot, Ordering::SeqCst);
        Ok(())
    }

    /// The number of slots from one to another.
    fn distance(&self, from: u32, to: u32) -> u32 {
        (to + self.slots - from) % self.slots
    }

    fn after(&self, slot: u32, count: u32) -> u32 {
        (slot + count) % self.slots
    }
}

#[cfg(test)]
mod tests;
