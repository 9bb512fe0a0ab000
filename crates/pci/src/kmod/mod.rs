//! Devices driven through our kernel module (`kmod/`): with or without an IOMMU, the kernel itself maps memory of any kind
//! for exactly this device. Drives, SDR boards and other DMA devices are opened in the same way.
//!
//! In order: [`Session::take`], [`Session::reset`], map ([`Session::mapper`], or one of the `map_` calls),
//! [`Session::start`] with the [`Epoch`] from before the mapping. `docs/kernel-module.md` specifies the ioctls.
//!
//! ```no_run
//! # use onehop_pci::{DeviceKind, Root, kmod};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let session = kmod::Session::take(&Root::here(), DeviceKind::Board, "0000:0c:00.0".parse()?)?;
//! session.set_mask(32)?;
//! let info = session.info()?;
//! if info.can_reset {
//!     session.reset()?;
//! }
//! let (epoch, registers) = (session.epoch()?, session.registers()?);
//! let mapper = session.mapper(kmod::MapperRules { chunk: Some(65536), ..Default::default() });
//! let ring = mapper.alloc(32 * 65536)?;
//! let mapped = mapper.map(&ring)?;
//! let interrupts = session.interrupts(1)?;
//! if info.can_reset { session.start(epoch)? } else { session.start_unreset(epoch)? }
//! # let _ = (registers, mapped, interrupts);
//! # Ok(())
//! # }
//! ```

mod info;
mod interrupt;
mod mapper;
#[allow(unsafe_code, reason = "lets a device reach memory of this process")]
mod mapping;
mod refusal;
mod session;
#[allow(unsafe_code, reason = "the module's ioctls, and lets devices reach memory")]
mod sys;

use std::sync::Arc;

use onehop_os::{ControllerBackend, FunctionReset};

pub use info::{Info, Missing, Stopped};
pub use mapper::MapperRules;
pub use mapping::{Access, Mapping};
pub use refusal::Refusal;
pub use session::{Epoch, Session};

use crate::{Address, DeviceKind, Result, Root};

/// Opens an NVMe controller of this machine.
pub(crate) fn open(root: &Root, address: Address) -> Result<ControllerBackend> {
    let session = Session::take(root, DeviceKind::Drive, address)?;
    session.restart()?;
    Ok(ControllerBackend {
        regs: session.registers()?,
        mapper: session.mapper(MapperRules::default()),
        reset: Some(Arc::new(Restart(session))),
        name: address.to_string(),
        simulated: false,
    })
}

/// Resets the function, then re-enables its DMA.
struct Restart(Session);

impl FunctionReset for Restart {
    fn function_reset(&self) -> onehop_os::Result<()> {
        self.0.restart().map_err(|error| onehop_os::Error::System {
            call: format!("resetting {}", self.0.address()),
            source: std::io::Error::other(error),
            hint: "; `onehop drive recover` removes it from the bus and rescans",
        })
    }
}
