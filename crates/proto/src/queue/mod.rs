//! How a queue pair is driven: by a host thread, a GPU warp, or every thread of a GPU at once.
//!
//! Two modes over one set of memory operations ([`Memory`]):
//! - **owner** ([`Owner`], on [`Ring`]): one thread or warp owns the pair. It stages a batch, rings once, takes
//!   completions in any order and matches them by CID.
//! - **shared** ([`Shared`]): any thread submits and gets a [`Token`]; one doorbell serves all that come at the same
//!   time; a waiting thread drains the completion queue for all.
//!
//! In both, submission slots are freed by SQHD alone, a CID is busy until its own completion, and every wait ends at
//! a deadline or when the host poisons the queue ([`Bounds`]).

mod bounds;
mod cid;
pub(crate) mod counters;
mod memory;
mod owner;
mod ring;
pub(crate) mod shared;

pub use bounds::{Bounds, Stop};
pub use cid::{CidSpace, MAX_SLOTS, NO_CID};
pub use memory::{Address, Memory};
pub use owner::{Event, Full, Owner, Slot};
pub use ring::{Ring, RingState, Rings};
pub use shared::{Drained, Shared, SharedLayout, SubmitError, Token};
