//! PCI devices of a machine: what they are, how they are connected, and how to drive one.
//!
//! In order:
//!
//! 1. [`Root::here`] reads this machine's files; [`Root::open`] reads a [`Record`] of another machine instead.
//! 2. [`Tree::scan`] reads every device. Unknown values are `None`, malformed ones are kept as [`Error`]s.
//! 3. [`Tree::path`] is the route between two devices.
//! 4. [`Usage::of`] reports the users of an NVMe drive, and [`Usage::refusal`] why it must not be claimed.
//! 5. [`open`] detaches an NVMe controller from the kernel and returns a
//!    [`ControllerBackend`](onehop_os::ControllerBackend): through VFIO, our kernel module, or, as a last resort,
//!    physical addresses. It is rebound to its driver however the process ends. [`kmod::Session`] does the same for
//!    other kinds of device.
//!
//! ```no_run
//! use onehop_pci::{DriveName, Root, Tree, Usage};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let root = Root::here();
//! let tree = Tree::scan(&root)?;
//! let drive: DriveName = "0000:0b:00.0".parse()?;
//! if let Some(path) = tree.path("0000:0a:00.0".parse()?, drive.address) {
//!     println!("GPU and drive are connected by {}", path.class.text());
//! }
//! if let Some(refusal) = Usage::of(&root, drive.address)?.refusal() {
//!     return Err(refusal.into());
//! }
//! let controller = onehop_pci::open(&root, drive)?;
//! # drop(controller);
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

mod address;
mod asked;
mod bar;
mod bars;
mod capability;
mod claim;
mod config;
mod device;
mod error;
mod iommu;
mod kind;
pub mod kmod;
mod link;
mod names;
mod nvme;
mod open_handles;
#[allow(unsafe_code, reason = "io_uring pins the caller's memory")]
mod pagemap;
mod pages;
#[doc(hidden)]
pub mod parsers;
mod places;
mod port;
mod programs;
mod record;
mod root;
mod tree;
#[allow(unsafe_code, reason = "VFIO consists of ioctls, and lets devices reach memory")]
mod vfio;

pub use address::Address;
pub use bar::{Bar, BarKind, parse_resource};
pub use bars::bar_memory;
pub use capability::{Acs, Express, MsiX, PortType, Power, Resizable};
pub use claim::{bind, is_present, rescan};
pub use config::DeviceConfig;
pub use device::{Class, Device, PeerMemory};
pub use error::{Error, Result};
pub use iommu::{is_lazy, is_translated};
pub use kind::DeviceKind;
pub use link::{Link, Speed, Width};
pub use nvme::{BlockDevice, CLASS as NVME_CLASS, Usage};
pub use port::{DriveName, Via, open};
pub use record::{Content, Record};
pub use root::{Root, parent, resolve};
pub use tree::{IommuGroup, Path, PathClass, Tree};
