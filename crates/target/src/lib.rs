//! A folder's files on another machine: what both sides say to each other, and how it gets there.
//!
//! ```text
//! tree       files, by number: the seam between who asks and who has them; a folder of this machine
//! wire       frames with checksums, and what stands in them
//! auth       who has the key, and the keys of a connection that come of it
//! seal       frames that nobody on the way can read or change
//! transport  the seam: how frames and data go from one side to the other
//! tcp        one of them
//! server     the storage service
//! client     a folder of another machine
//! turns      a queue in which users take turns
//! shares     a supply that no user can use up
//! ```
//! Whatever comes from the other side is hostile until it is checked: lengths are bounded before anything is allocated for them.
#![forbid(unsafe_code)]

pub mod auth;
mod buffers;
mod cipher;
pub mod client;
mod error;
mod handshake;
pub mod rdma;
mod seal;
pub mod server;
pub mod shares;
pub mod tcp;
pub mod transport;
pub mod tree;
pub mod turns;
pub mod wire;

pub use error::{Error, Result};

/// A lock, whatever became of who had it before: what is behind locks here is whole between any two statements.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
