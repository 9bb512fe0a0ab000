//! PCI functions over a socket, by the vfio-user protocol: serves simulated devices to QEMU or any other client, and
//! drives NVMe controllers that other processes serve.
//!
//! To serve a device, in order:
//!
//! 1. A [`DeviceModel`] ([`Nvme`], [`Sdr`]) is the device: its identity, BARs and reset.
//! 2. [`Function::new`] adds configuration space, capabilities and interrupts.
//! 3. [`Server::bind`] creates the socket.
//! 4. [`Server::run`] serves one client after another, until its `stop` callback returns true.
//!
//! [`client::open`] connects to a served NVMe controller.
//!
//! ```no_run
//! use onehop_sim::{Config, Sim};
//! use onehop_vfio_user::{Function, Nvme, Server};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let drive = Sim::new(Config::parse("mem:64M")?)?;
//! let function = Function::new(Box::new(Nvme::new(drive)?));
//! let server = Server::bind("/run/drive.sock".as_ref())?;
//! server.run(&function, &|| false, &|event| eprintln!("{event}"))?;
//! # Ok(())
//! # }
//! ```
//!
//! Memory and interrupts are shared as file descriptors (memory files, event fds), so neither data nor interrupts pass
//! through the socket. All input from the socket is checked before use: lengths, offsets, counts and file descriptors.
#![forbid(unsafe_code)]

pub mod client;
mod config;
mod dma;
mod doorbells;
mod error;
mod function;
mod irq;
mod link;
mod memfd;
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
pub use model::{Bar, DeviceModel, FunctionIdentity, MappableParts, Reach, Vectors};
pub use nvme::Nvme;
pub use sdr::Sdr;
pub use server::{Server, ServerEvent, serve};
