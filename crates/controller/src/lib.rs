//! The I/O half of an NVMe controller, as code for a host thread or a resident GPU warp. It serves queue pairs whose
//! rings, doorbells and data are in memory that it reaches.
//!
//! 1. [`Pair`] describes a queue pair, its namespace and its faults, in memory.
//! 2. [`serve()`] is the model of a controller. It moves blocks, checks every rule that is visible in memory, and
//!    injects faults.
//! 3. [`null()`] answers at once and moves nothing: the reference for a driver's own speed.
//! 4. [`litmus`] tests the two memory orders that both rely on, each also with its fence removed.
//! 5. [`Report`] has the counters, and [`check()`] verifies the blocks that were read.
//!
//! Everything is generic over [`ControllerWarp`]. There is no allocation, no `std`, no unsafe code, and no wait without a
//! deadline.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

mod content;
pub mod fields;
pub mod layout;
pub mod litmus;
mod null;
mod report;
mod rule;
mod seal;
mod serve;
mod space;
mod warp;

pub use content::{block_of, check, content};
pub use layout::{BusMapping, Fault, FaultKind, Pair, Report, Violation};
pub use null::{NULL_BATCH, NULL_FAR_LOCAL_WORDS, NULL_LOCAL_WORDS, null, null_far};
pub use report::Exit;
pub use rule::Rule;
pub use seal::{is_sealed, seal, sealed};
pub use serve::{SERVE_LOCAL_WORDS, serve};
pub use warp::{ControllerWarp, Scoped, Wide};
