//! PCI devices as the system's own files tell of them: who they are, what their BARs and links are, how they are joined.
//!
//! [`Root`] is where the files come from: this machine, a folder, or a [`Record`] that was made elsewhere, so that whoever
//! looks at a machine can look at a recorded one. [`Tree::scan`] reads every device; what a machine does not tell is
//! unknown, what it tells wrongly is kept as an [`Error`], and nothing panics.
#![forbid(unsafe_code)]

mod address;
mod bar;
mod capability;
mod config;
mod device;
mod error;
mod link;
mod names;
mod record;
mod root;
mod tree;

pub use address::Address;
pub use bar::{Bar, BarKind, parse_resource};
pub use capability::{Acs, Express, MsiX, PortType, Power, Resizable};
pub use config::Config;
pub use device::{Class, Device, PeerMemory};
pub use error::{Error, Result};
pub use link::{Link, Speed, Width};
pub use record::{Content, Record};
pub use root::{Root, parent, resolve};
pub use tree::{Group, Path, PathClass, Tree};
