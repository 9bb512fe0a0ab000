//! A folder's files on another machine: client and server of `onehop target`.
//!
//! 1. [`server::ServerOptions`] names the folder and the key.
//! 2. [`tcp::TcpAcceptor::listen`] listens, and [`server::Target::start`] serves.
//! 3. [`tcp::TcpConnector::new`] names a server.
//! 4. [`client::RemoteTree::connect`] connects to it.
//! 5. [`tree::Tree`] is how its folder is used then, as one of this machine is.
//!
//! ```text
//! tree       files by number: the seam between mounts and files
//! wire       messages, and frames with checksums
//! auth       the key, and the keys of a connection that are derived from it
//! seal       encryption of frames
//! transport  the seam between messages and networks
//! tcp, rdma  its implementations
//! server     the storage service
//! client     a folder of another machine
//! turns      a queue in which users take turns
//! shares     a supply that no user can use up
//! ```
//!
//! Everything that the other side sends is checked: lengths are bounded before anything is allocated for them.
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

/// What a thread said that panicked.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}
