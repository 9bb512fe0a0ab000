//! The I/O half of an NVMe controller as code that any processor can run: a host thread, or a GPU warp that stays
//! resident and serves queue pairs whose rings, doorbells and data lie in GPU memory.
//!
//! - [`serve`]: the model. It moves blocks, checks every rule that memory alone can show, and goes wrong on request.
//! - [`null`]: answers at once and moves nothing; what a driver's own speed is measured against.
//! - [`litmus`]: the two orders on which all of it rests, each with its fence taken out on request.
//!
//! - [`check`]: whether blocks that were read are the right ones.
//!
//! A queue pair, its namespace and its faults are described by a [`Pair`] in memory; how it went stands in a
//! [`Report`]. Everything is generic over [`ControllerWarp`]. No allocation, no `std`, no unsafe code, and no wait without a
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
