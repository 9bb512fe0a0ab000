//! A folder's files on another machine: client and server of `onehop target`.
//!
//! 1. [`server::ServerOptions`] names the folder and the key.
//! 2. [`tcp::TcpAcceptor::listen`] listens, and [`server::Target::start`] serves.
//! 3. [`tcp::TcpConnector::new`] names a server.
//! 4. [`client::RemoteTree::connect`] connects to it.
//! 5. Its folder is then used through [`tree::Tree`], like a local one.
//!
//! ```text
//! tree       files by number: the interface between mounts and files
//! wire       messages, and frames with checksums
//! auth       the key, and the keys of a connection that are derived from it
//! seal       encryption of frames
//! transport  the interface between messages and networks
//! tcp, rdma  its implementations
//! server     the storage service
//! client     a folder of another machine
//! turns      a queue in which users take turns
//! shares     a budget that no user can exhaust
//! ```
//!
//! All input from the other side is checked: lengths are bounded before anything is allocated for them.
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

/// Locks a mutex. Poisoning is ignored: the data behind these locks is consistent between any two statements.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The message of a panic.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}
