//! What to do when completions may have named the wrong commands.
//!
//! A controller that completes command A under the identifier of command B leaves one of two traces: B is completed twice,
//! or A is never completed. Until then B counts as done, although its data may be that of a failed try, or was never
//! written. Neither trace says for certain which command B was. So a transfer that saw one is carried out again as a whole.
//! A read that is completed without its data is no such trace: it is B, and is tried again by itself.

use crate::{Error, Moved, Result};

/// Traces that a transfer has seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Doubts {
    /// Completions of commands that were not in flight.
    pub(crate) strays: u64,
    /// Recoveries from commands that were not completed.
    pub(crate) losses: u64,
}

impl Doubts {
    pub(crate) fn since(self, before: Self) -> Self {
        Self { strays: self.strays - before.strays, losses: self.losses - before.losses }
    }

    fn any(self) -> bool {
        self.strays + self.losses > 0
    }
}

/// Carries a transfer out, and again as long as it sees doubts, at most `retries` times. `once` is given which time it is.
///
/// What is only lost every time is believed in the end: each lost command was tried again by itself.
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
    if doubts.strays > 0 {
        return Err(Error::WrongCompletions { transfer: describe(), times: retries.saturating_add(1) });
    }
    Ok(moved)
}
