//! A folder's files on another machine: what both sides say to each other, and how it gets there.
//!
//! ```text
//! wire       frames with checksums, and what stands in them
//! auth       who has the key
//! transport  the seam: how frames and data go from one side to the other
//! ```
//! Whatever comes from the other side is hostile until it is checked: lengths are bounded before anything is allocated for them.
#![forbid(unsafe_code)]

pub mod auth;
mod error;
pub mod transport;
pub mod wire;

pub use error::{Error, Result};
