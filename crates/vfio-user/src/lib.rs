//! Simulated PCI functions, served over a socket to QEMU or any other vfio-user client.
//!
//! A [`Model`] is what differs from one device to the next: its identity, its BARs, its reset. [`Function`] puts a
//! configuration space with capabilities and interrupts in front of it; [`Server`] speaks the protocol. The client shares its
//! memory by file descriptors, and interrupts are event fds, so that neither data nor interrupts pass the socket.
//! Nothing that comes over the socket is trusted: lengths, offsets, counts and file descriptors are checked before use.
#![forbid(unsafe_code)]

mod config;
mod dma;
mod error;
mod function;
mod irq;
mod link;
mod model;
mod nvme;
mod sdr;
mod server;
mod session;
mod version;
pub mod wire;

pub use config::ConfigSpace;
pub use error::{Error, Refusal, Result};
pub use function::Function;
pub use irq::Interrupts;
pub use model::{Bar, Identity, Model, Reach, Vectors};
pub use nvme::Nvme;
pub use sdr::Sdr;
pub use server::{Event, Server, serve};
