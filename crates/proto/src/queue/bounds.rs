//! The limits of waits for the controller.

use super::Memory;

/// Why a wait ended early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// The deadline passed.
    Deadline,
    /// The host set the poison word to this value.
    Poisoned(u32),
}

/// The bounds of a wait.
pub struct Bounds<M: Memory> {
    /// The moment, on the memory's clock, after which no wait goes on.
    pub deadline: u64,
    /// A word that the host makes non-zero to end every wait on a queue at once.
    pub poison: M::Addr,
}

impl<M: Memory> Clone for Bounds<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Memory> Copy for Bounds<M> {}

impl<M: Memory> Bounds<M> {
    /// Whether a wait must end now.
    ///
    /// # Errors
    /// The reason to stop.
    #[inline(always)]
    pub fn check(&self, mem: &M) -> Result<(), Stop> {
        match mem.load(self.poison) {
            0 if mem.now() < self.deadline => Ok(()),
            0 => Err(Stop::Deadline),
            code => Err(Stop::Poisoned(code)),
        }
    }
}
