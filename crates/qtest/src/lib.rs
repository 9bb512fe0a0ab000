//! QEMU's own NVMe model behind the seams, with the guest's processor stopped.
//!
//! QEMU is started with `-S` and a qtest socket (`bed/qtest.sh`, or [`bed::Qemu`] in tests). Registers are read and
//! written through that socket; the guest's RAM is a file that both sides map, so a bus address is an offset in it.
//! Nothing here needs root, KVM or a guest.
//!
//! From the bottom: `wire` speaks the line protocol, `link` shares one wire among threads and remembers why it broke,
//! `pci` finds and places the controller, `bar` and `reset` and `ram` are the three seams, `model` puts them together.

#![forbid(unsafe_code)]

mod bar;
pub mod bed;
mod error;
mod link;
mod model;
mod pci;
mod ram;
mod reset;
mod spec;
mod wire;

pub use error::{Error, Result};
pub use model::Model;

/// Opens the drive named by what follows `qtest:`, which is `SOCKET,MEMORY-FILE[,bdf=DD.F]`.
///
/// # Errors
/// When QEMU, the memory file or the controller cannot be had, with what to do about it.
pub fn open(spec: &str) -> Result<onehop_os::ControllerBackend> {
    Ok(Model::open(spec)?.port())
}

/// Whether `spec` is such a name, without opening anything.
///
/// # Errors
/// What is wrong with it, and the form that is wanted.
pub fn check(spec: &str) -> Result<()> {
    spec::Spec::parse(spec).map(|_| ())
}
