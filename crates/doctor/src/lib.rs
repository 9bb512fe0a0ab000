//! Can this machine move bytes from a device straight into GPU memory, and what keeps it from it?
//!
//! [`Facts`] are what the machine is, read through a [`onehop_pci::Root`]: the running machine, or one that was recorded.
//! [`examine`] makes [`Check`]s of them, which are data, and a [`Row`] for each GPU, device, direction and route. What can
//! be tried is tried; what cannot is `unknown` or `untested`, never a guess.
#![forbid(unsafe_code)]

mod check;
mod checks;
mod diagnosis;
mod facts;
mod near;
mod pair;
mod routes;
mod text;
pub mod topo;

/// A composed machine to try `onehop doctor --from` with: an H100 and a drive behind one PCIe switch.
pub const EXAMPLE: &str = include_str!("../fixtures/h100-switch-acs-on.json");

pub use check::{Check, Group, Status};
pub use diagnosis::{Diagnosis, Only, examine};
pub use facts::file::recorded as recorded_files;
pub use facts::vm::Virtual;
pub use facts::{Facts, FactsRequest};
pub use routes::{Advice, Direction, Row, Verdict};
pub use text::{Style, render};
