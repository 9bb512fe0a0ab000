//! PCI devices as the system's own files tell of them: who they are, what their BARs and links are, how they are joined.
//!
//! [`Root`] is where the files come from: this machine, a folder, or a [`Record`] that was made elsewhere, so that whoever
//! looks at a machine can look at a recorded one. [`Tree::scan`] reads every device; what a machine does not tell is
//! unknown, what it tells wrongly is kept as an [`Error`], and nothing panics.
//!
//! [`open`] takes an NVMe controller from the kernel and hands it out as a [`ControllerBackend`](onehop_os::ControllerBackend): by VFIO, by
//! our kernel module, or as a last resort by physical addresses. It gives the controller back however the process ends. What
//! must not be taken is told by [`Usage`] and [`Kind`]. [`kmod::Session`] is for devices of other kinds.
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
#[allow(unsafe_code, reason = "io_uring pins memory of whoever calls")]
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
#[allow(unsafe_code, reason = "VFIO is ioctls, and devices that reach memory")]
mod vfio;

pub use address::Address;
pub use bar::{Bar, BarKind, parse_resource};
pub use bars::bar_memory;
pub use capability::{Acs, Express, MsiX, PortType, Power, Resizable};
pub use claim::{bind, is_present, rescan};
pub use config::Config;
pub use device::{Class, Device, PeerMemory};
pub use error::{Error, Result};
pub use iommu::{is_lazy, is_translated};
pub use kind::Kind;
pub use link::{Link, Speed, Width};
pub use nvme::{BlockDevice, CLASS as NVME_CLASS, Usage};
pub use port::{DriveName, Via, open};
pub use record::{Content, Record};
pub use root::{Root, parent, resolve};
pub use tree::{Group, Path, PathClass, Tree};
