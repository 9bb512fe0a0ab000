//! PCI functions over a socket, by the vfio-user protocol: simulated ones served to QEMU or any other client, and NVMe
//! controllers that others serve, driven as any drive ([`client`]).
//!
//! A [`Model`] is what differs from one device to the next: its identity, its BARs, its reset. [`Function`] puts a
//! configuration space with capabilities and interrupts in front of it; [`Server`] speaks the protocol. The client shares its
//! memory by file descriptors, and interrupts are event fds, so that neither data nor interrupts pass the socket.
//! Nothing that comes over the socket is trusted: lengths, offsets, counts and file descriptors are checked before use.
#![forbid(unsafe_code)]

pub mod client;
mod config;
mod dma;
mod doorbells;
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
pub use error::{ClientError, Error, Refusal, Result};
pub use function::Function;
pub use irq::Interrupts;
pub use model::{Bar, Identity, Mapping, Model, Reach, Vectors};
pub use nvme::Nvme;
pub use sdr::Sdr;
pub use server::{Event, Server, serve};
