//! Telling data that has arrived from data that was only announced.
//!
//! A completion may become visible before the data it stands for: where the platform does not order the drive's writes
//! for whoever polls, or where the drive is faulty. Data may also never come: some controllers report success for a
//! transfer that faulted on its way. Before a read a nonce is written into its memory every 512 bytes; the data is there
//! when no nonce is left.

use onehop_os::Marks;

use crate::{Buffer, Result};

/// A nonce stands in the last eight bytes of every so many, and at the very end.
const STEP: u64 = 512;

/// The nonces of one stretch of memory that is to be read into.
#[derive(Clone, Copy)]
pub(crate) struct Canary {
    every: Marks,
    last: Option<Marks>,
}

impl Canary {
    /// Writes nonces into memory that no command has been given yet.
    #[inline]
    pub(crate) fn place(buffer: &Buffer, offset: u64, len: u64, nonce: u64) -> Result<Self> {
        let marks = |first, count| Marks { first, step: STEP, count, word: nonce };
        let rest = len % STEP;
        let last = (rest >= Marks::BYTES).then(|| marks(offset + len - Marks::BYTES, 1));
        let canary = Self { every: marks(offset + STEP - Marks::BYTES, len / STEP), last };
        for marks in canary.marks() {
            buffer.memory().mark(marks)?;
        }
        Ok(canary)
    }

    /// Whether all data has taken the nonces' places.
    #[inline]
    pub(crate) fn is_gone(&self, buffer: &Buffer) -> bool {
        self.marks().all(|marks| buffer.memory().marks_left(marks).is_ok_and(|left| left == 0))
    }

    fn marks(&self) -> impl Iterator<Item = &Marks> {
        std::iter::once(&self.every).filter(|every| every.count > 0).chain(&self.last)
    }
}

/// Words that memory will not hold by chance.
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
