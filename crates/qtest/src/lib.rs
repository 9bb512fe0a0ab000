//! QEMU's NVMe model as a controller backend, with the guest's vCPUs stopped.
//!
//! 1. [`bed::Qemu::start_or_skip`] starts QEMU in a test; `bed/qtest.sh` starts it by hand.
//! 2. [`check`] checks a drive's name.
//! 3. [`open`] returns the drive's backend; [`bed::Qemu::port`] does it for a test's QEMU.
//! 4. [`QemuDrive::open`] gives access to more than the backend, such as the controller memory buffer.
//! 5. [`bed::Qemu::image`] is the file that holds a namespace's data.
//!
//! ```no_run
//! use onehop_qtest::bed::{QemuOptions, Qemu};
//!
//! # fn main() -> Result<(), onehop_qtest::Error> {
//! if let Some(qemu) = Qemu::start_or_skip(&QemuOptions::default())? {
//!     let backend = qemu.port()?;
//!     println!("CAP {:#x}", backend.regs.read64(0));
//! }
//! # Ok(())
//! # }
//! ```
//!
//! QEMU runs with `-S` and a qtest socket. Registers are accessed through that socket. The guest's RAM is a file that
//! both sides map, so a bus address is an offset in it. No root, KVM or guest is needed.
//!
//! From the bottom: `wire` speaks the line protocol, `link` shares one wire among threads and remembers why it broke,
//! `pci` finds and places the controller, `bar`, `reset` and `ram` are the three seams, `model` puts them together.

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
pub use model::QemuDrive;

/// Opens the drive whose name, behind `qtest:`, is `SOCKET,MEMORY-FILE[,bdf=DD.F]`.
///
/// # Errors
/// When QEMU, the memory file or the controller cannot be opened, with a fix.
pub fn open(spec: &str) -> Result<onehop_os::ControllerBackend> {
    Ok(QemuDrive::open(spec)?.port())
}

/// Checks such a name without opening anything.
///
/// # Errors
/// What is wrong with it, and the correct form.
pub fn check(spec: &str) -> Result<()> {
    spec::Spec::parse(spec).map(|_| ())
}
