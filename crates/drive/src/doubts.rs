//! What to do when completions may have named the wrong commands.
//!
//! A controller that completes command A under the identifier of command B leaves one of two traces: B is completed twice,
//! or A is never completed. Until then B counts as done, although its data may be that of a failed try, or was never
//! written. Neither trace identifies B for certain. So a transfer that saw one is repeated as a whole. A read that is
//! completed without its data is not such a trace: it is B, and is tried again by itself.

use crate::{Error, Moved, Result};

/// Traces that a transfer has seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Doubts {
    /// Completions of commands that were not in flight.
    pub(crate) unexpected: u64,
    /// Recoveries from commands that were not completed.
    pub(crate) losses: u64,
}

impl Doubts {
    pub(crate) fn since(self, before: Self) -> Self {
        Self { unexpected: self.unexpected - before.unexpected, losses: self.losses - before.losses }
    }

    fn any(self) -> bool {
        self.unexpected + self.losses > 0
    }
}

/// Runs a transfer, and repeats it while it sees doubts, at most `retries` times. `once` gets the number of the try.
///
/// A transfer that only lost commands is trusted after the last try: each lost command was tried again by itself.
pub(crate) fn until_certain(
    retries: u32,
    describe: impl Fn() -> String,
    mut once: impl FnMut(u32) -> Result<(Moved, Doubts)>,
) -> Result<Moved> {
    let (mut moved, mut doubts) = once(0)?;
    for time in 1..=retries {
        if !doubts.any() {
            return Ok(moved);
        }
        let (again, seen) = once(time)?;
        moved.repeat(&again);
        doubts = seen;
    }
    if doubts.unexpected > 0 {
        return Err(Error::WrongCompletions { transfer: describe(), times: retries.saturating_add(1) });
    }
    Ok(moved)
}
