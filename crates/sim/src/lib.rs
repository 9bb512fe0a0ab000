//! A simulated NVMe controller that checks every rule it can observe.
//!
//! 1. [`open`] makes a [`Sim`] from a specification such as `disk.img?lba=4096`.
//! 2. [`Sim::port`] is its controller, for the driver.
//! 3. [`Sim::inject`] adds a [`Fault`]: the ways in which real drives fail.
//! 4. [`Sim::violations`] lists the rules that the host broke.
//! 5. [`Sim::stats`] counts what it did.
//!
//! It speaks NVMe 1.4 or 2.0 through the same seams as a real drive, [`Registers`](onehop_os::Registers) and
//! [`Mapper`](onehop_os::Mapper), and reacts to each violation as the specification says.
#![forbid(unsafe_code)]

mod admin;
mod aer;
mod cache;
mod cmb;
mod completion;
mod config;
mod control;
mod core;
mod device;
mod dma;
mod doorbell;
mod engine;
mod error;
mod exec;
mod faults;
mod features;
mod health;
mod late;
mod mapped;
mod media;
mod null;
mod nvm;
mod options;
mod protect;
mod queues;
mod regs;
mod reserved;
mod rng;
mod sim;
mod stats;
mod store;
mod transfer;
mod units;
mod violation;
mod worker;

pub use admin::{PCI_DEVICE, PCI_SUBSYSTEM_VENDOR, PCI_VENDOR};
pub use config::{Config, Media, NullOrder};
pub use dma::SimMapper;
pub use engine::{Blocks, IoEngine, NewQueue, Strike};
pub use error::{Error, Result};
pub use faults::{Edge, Fault, FaultKind, Order, When};
pub use null::ceiling as null_ceiling;
pub use sim::{Reached, Sim, open};
pub use stats::Stats;
pub use violation::{Rule, Violation};
