//! Rules of the board that software violated.

use std::sync::{Mutex, PoisonError};

/// Recorded violations per rule: enough for a diagnosis, and no rule displaces another.
const KEPT: usize = 64;

macro_rules! rules {
    ($($(#[doc = $doc:literal])* $rule:ident, $name:literal;)*) => {
        /// A rule of the board.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum BoardRule {
            $($(#[doc = $doc])* $rule,)*
        }

        impl BoardRule {
            /// Its short name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(BoardRule::$rule => $name,)* }
            }
        }
    };
}

rules! {
    /// A register access that is not four aligned bytes within the BAR.
    Access, "access";
    /// A register that does not exist in the indexed space.
    Index, "index";
    /// An address, a size or a format was changed while samples flow.
    Running, "running";
    /// The front end was started with a burst that exceeds its FIFO or counters, or with contradictory settings.
    Shape, "shape";
    /// A block exceeds the buffer limit.
    Limit, "limit";
    /// A buffer's address is not page-aligned.
    Alignment, "alignment";
    /// DMA beyond the engine's address bits.
    Mask, "mask";
    /// DMA to an unmapped address.
    Unmapped, "unmapped";
    /// DMA to read-only memory.
    ReadOnly, "read-only";
    /// DMA while bus mastering is disabled.
    BusMaster, "bus-master";
    /// More buffers were released than had been filled.
    Confirm, "confirm";
    /// Samples flow without an event page, or the event is not routed to it.
    Events, "events";
    /// Events were not read for so long that the page would have been overwritten.
    EventOverrun, "event-overrun";
    /// Acknowledgement of events that have not been written.
    Ack, "ack";
    /// A transmit buffer was submitted before it had been played, or exceeds its limit.
    Transmit, "transmit";
}

/// A violation of a rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BoardViolation {
    /// The rule.
    pub rule: BoardRule,
    /// The details.
    pub detail: String,
}

/// The violations, at least the first of each rule.
#[derive(Default)]
pub(crate) struct Book(Mutex<(Vec<BoardViolation>, u64)>);

impl Book {
    pub(crate) fn note(&self, rule: BoardRule, detail: impl Into<String>) {
        let mut book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        book.1 += 1;
        if book.0.iter().filter(|violation| violation.rule == rule).count() < KEPT {
            book.0.push(BoardViolation { rule, detail: detail.into() });
        }
    }

    pub(crate) fn list(&self) -> Vec<BoardViolation> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1
    }
}
