//! NVMe over Fabrics: drives of other machines.
//!
//! 1. [`SubsystemAddress`] parses a target's name, `nvme-tcp://HOST/NQN`.
//! 2. [`discover`] lists the subsystems of a discovery service.
//! 3. [`open`] connects to a subsystem and returns a [`ControllerBackend`], so that the driver for PCIe devices drives it.
//! 4. `onehop_drive::Drive::open` brings that controller up.
//! 5. [`queue`] is the protocol without its connection, [`pdu`] its messages.
//!
//! A lost connection appears as a controller that reports a fatal status. Resetting it reconnects. The driver then
//! repeats reads, but not writes: the target may still execute those that it received.
#![forbid(unsafe_code)]

mod ahead;
mod association;
mod auth;
mod connect;
mod controller;
mod digest;
mod discovery;
mod error;
mod group;
mod health;
mod host;
mod link;
mod name;
mod patch;
pub mod pdu;
pub mod queue;
mod ring;
mod space;

use onehop_os::{ControllerBackend, StopSignal};

pub use auth::ChapSecret;
pub use discovery::{Subsystem, discover};
pub use error::{Error, Result};
pub use host::{Host, Secrets};
pub use name::{FORM, SCHEME, SubsystemAddress};

/// Connects to the subsystem in a target's name. Once `stop` is set, connecting and reconnecting end with
/// [`Error::Interrupted`], and other waits for the target within a second.
///
/// # Errors
/// When the name contains no subsystem, or the target cannot be reached or used.
pub fn open(target: &SubsystemAddress, stop: &StopSignal) -> Result<ControllerBackend> {
    if target.nqn.is_none() {
        let why = "it names no subsystem; `onehop drive list -d` shows those of its discovery service".into();
        return Err(Error::Name { name: target.to_string(), why });
    }
    let host = Host::of(target)?;
    let controller = controller::RemoteController::connect(target.clone(), host, stop.clone())?;
    Ok(ControllerBackend {
        mapper: controller.space.clone(),
        reset: Some(std::sync::Arc::new(controller::Reconnect(controller.clone()))),
        name: target.to_string(),
        simulated: false,
        regs: controller,
    })
}
