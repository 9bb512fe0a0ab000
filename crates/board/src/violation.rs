//! What software did that the board could not have followed.

use std::sync::{Mutex, PoisonError};

/// Of each rule: enough to see what goes wrong, and none hides another.
const KEPT: usize = 64;

macro_rules! rules {
    ($($(#[doc = $doc:literal])* $rule:ident, $name:literal;)*) => {
        /// A rule of the board.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum Rule {
            $($(#[doc = $doc])* $rule,)*
        }

        impl Rule {
            /// Its short name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Rule::$rule => $name,)* }
            }
        }
    };
}

rules! {
    /// A register access that is not four bytes on a multiple of four within the BAR.
    Access, "access";
    /// A register of the indexed space that there is not.
    Index, "index";
    /// An address, a size or a format was changed while samples flow.
    Running, "running";
    /// The front end was started with a burst that its FIFO or its counters cannot hold, or with settings that contradict
    /// each other.
    Shape, "shape";
    /// A block is longer than the limit that was set for buffers.
    Limit, "limit";
    /// A buffer's address is no multiple of a page.
    Alignment, "alignment";
    /// DMA reached beyond the address bits that the engine drives.
    Mask, "mask";
    /// DMA reached where nothing is mapped.
    Unmapped, "unmapped";
    /// DMA wrote memory that must not be written.
    ReadOnly, "read-only";
    /// DMA while the function is no bus master.
    BusMaster, "bus-master";
    /// More buffers were given back than had been filled.
    Confirm, "confirm";
    /// Samples flow and no event page was given, or the event is not routed to it.
    Events, "events";
    /// Events were not read for so long that the page would have been overwritten.
    EventOverrun, "event-overrun";
    /// An acknowledgement of events that have not been written.
    Ack, "ack";
    /// A transmit buffer was handed over that had not been played yet, or that holds more than its limit.
    Transmit, "transmit";
}

/// A rule that was broken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// Which.
    pub rule: Rule,
    /// How.
    pub detail: String,
}

/// The rules that were broken, the first of them at least.
#[derive(Default)]
pub(crate) struct Book(Mutex<(Vec<Violation>, u64)>);

impl Book {
    pub(crate) fn note(&self, rule: Rule, detail: impl Into<String>) {
        let mut book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        book.1 += 1;
        if book.0.iter().filter(|violation| violation.rule == rule).count() < KEPT {
            book.0.push(Violation { rule, detail: detail.into() });
        }
    }

    pub(crate) fn list(&self) -> Vec<Violation> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1
    }
}
