//! Determines whether this machine can move bytes from a device directly into GPU memory, and what prevents it.
//!
//! 1. [`Root::here`](onehop_pci::Root::here) reads the running machine, [`Root::open`](onehop_pci::Root::open) a
//!    recorded one.
//! 2. [`Facts::gather`] collects the facts.
//! 3. [`examine`] makes [`Check`]s of them, and a [`RouteRow`] for each GPU, device, direction and route.
//! 4. [`Diagnosis::worst`] is the overall result.
//! 5. [`render`] makes it readable.
//!
//! ```no_run
//! # fn main() -> Result<(), onehop_pci::Error> {
//! use onehop_doctor::{Facts, FactsRequest, Only, examine};
//!
//! let facts = Facts::gather(&onehop_pci::Root::here(), &FactsRequest::default())?;
//! let diagnosis = examine(&facts, &Only::default(), None);
//! println!("{}", diagnosis.worst().name());
//! # Ok(())
//! # }
//! ```
//!
//! Everything that can be tried is tried. Anything else is `unknown` or `untested`, never a guess.
#![forbid(unsafe_code)]

mod check;
mod checks;
mod diagnosis;
mod facts;
mod fixes;
mod near;
mod pair;
mod routes;
mod text;
pub mod topo;

/// A composed machine for `onehop doctor --from`: an H100 and a drive behind one PCIe switch.
pub const EXAMPLE: &str = include_str!("../fixtures/h100-switch-acs-on.json");

pub use check::{Check, CheckGroup, Status};
pub use diagnosis::{Diagnosis, Only, examine};
pub use facts::file::recorded as recorded_files;
pub use facts::vm::Virtual;
pub use facts::{Facts, FactsRequest};
pub use routes::{Advice, Direction, RouteRow, Verdict};
pub use text::{Style, render};
