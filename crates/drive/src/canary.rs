//! Telling data that has arrived from data that was only announced.
//!
//! A completion may become visible before the data it stands for: where the platform does not order the drive's writes
//! for whoever polls, or where the drive is faulty. Before a read a nonce is written into its memory every 512 bytes;
//! the data is there when no nonce is left.

use std::hash::{BuildHasher, RandomState};

use crate::{Buffer, Result};

/// A nonce stands in the last eight bytes of every so many, and at the very end.
const STEP: u64 = 512;
const BYTES: u64 = 8;

/// The nonces of one read.
#[derive(Clone, Copy)]
pub(crate) struct Canary {
    nonce: u64,
    offset: u64,
    len: u64,
}

impl Canary {
    /// Writes nonces into the memory of a read that has not been submitted.
    pub(crate) fn place(buffer: &Buffer, offset: u64, len: u64) -> Result<Self> {
        let canary = Self { nonce: RandomState::new().hash_one(offset), offset, len };
        for at in canary.places() {
            buffer.host()?.write(at as usize, &canary.nonce.to_le_bytes())?;
        }
        Ok(canary)
    }

    /// Whether all data has taken the nonces' places.
    pub(crate) fn is_gone(&self, buffer: &Buffer) -> bool {
        let nonce = self.nonce.to_le_bytes();
        self.places().all(|at| {
            let mut here = [0; BYTES as usize];
            buffer.host().is_ok_and(|mem| mem.read(at as usize, &mut here).is_ok()) && here != nonce
        })
    }

    fn places(&self) -> impl Iterator<Item = u64> + use<> {
        let (offset, len) = (self.offset, self.len);
        (0..len.div_ceil(STEP)).map(move |i| offset + ((i + 1) * STEP).min(len).saturating_sub(BYTES))
    }
}
