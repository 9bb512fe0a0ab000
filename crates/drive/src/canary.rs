//! Detects whether the data of a completed read has arrived.
//!
//! A completion may become visible before its data: where the platform does not order the drive's writes for the
//! reader, or where the drive is faulty. Data may also never come: some controllers report success for a transfer that
//! faulted. So every aligned word of eight bytes is overwritten with a nonce before a read, and the data has arrived
//! when no word holds the nonce any more.
//!
//! Fewer marks are not enough: the words of a transfer arrive in any order, because a device may reorder its writes, as
//! may the `memcpy` of a simulated one. A word that has arrived proves nothing about its neighbours. The one assumption
//! is that an aligned word arrives whole.

use std::time::Duration;

use onehop_os::Marks;

use crate::command::{Io, Op};
use crate::{Buffer, Namespace, Result};

/// The nonces in the memory of a read.
#[derive(Clone, Copy)]
pub(crate) struct Canary(Marks);

impl Canary {
    /// Overwrites the memory of a read that is about to be submitted, if the CPU can reach it.
    pub(crate) fn before(io: &Io<'_>, ns: &Namespace, nonces: &mut Nonces) -> Result<Option<Self>> {
        let (Some((buffer, offset)), Op::Read) = (io.data, io.op) else { return Ok(None) };
        if buffer.host().is_err() {
            return Ok(None);
        }
        let canary = Self::new(buffer, offset, u64::from(io.blocks) * ns.unit, nonces.next());
        canary.place(buffer, Duration::ZERO)?;
        Ok(Some(canary))
    }

    /// Nonces for a range. Bytes before its first aligned word and behind its last are not guarded.
    #[inline]
    pub(crate) fn new(buffer: &Buffer, offset: u64, len: u64, nonce: u64) -> Self {
        // A word that is aligned on the bus is aligned for the CPU and the GPU, too.
        let at = buffer.at(offset).map_or(offset, |run| run.addr.0);
        let first = offset + (at.next_multiple_of(Marks::BYTES) - at);
        let count = (offset + len).saturating_sub(first) / Marks::BYTES;
        Self(Marks { first, count, word: nonce })
    }

    /// Writes the nonces within `limit`. The controller must not write the memory meanwhile. Host memory needs no time.
    ///
    /// # Errors
    /// When the memory cannot be written in time: a GPU that is filled by other kernels cannot write the nonces into
    /// its own.
    #[inline]
    pub(crate) fn place(&self, buffer: &Buffer, limit: Duration) -> Result<()> {
        Ok(buffer.memory().mark(&self.0, limit)?)
    }

    /// Whether the data has replaced all nonces.
    ///
    /// # Errors
    /// As for [`Self::place`].
    #[inline]
    pub(crate) fn is_gone(&self, buffer: &Buffer, limit: Duration) -> Result<bool> {
        Ok(buffer.memory().marks_left(&self.0, limit)? == 0)
    }
}

/// Words that memory is unlikely to hold by chance.
pub(crate) struct Nonces(u64);

impl Nonces {
    pub(crate) fn new() -> Self {
        use std::hash::{BuildHasher, RandomState};
        Self(RandomState::new().hash_one(0))
    }

    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        // An odd step, so that all words come before one comes again.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.0
    }
}
