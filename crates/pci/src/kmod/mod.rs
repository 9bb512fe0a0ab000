//! Devices in the hands of our kernel module (`kmod/`): with the IOMMU on or off the kernel itself makes the addresses, for
//! exactly this device, of memory of any kind. Drives, SDR boards and whatever else does DMA are had in the same way.
//!
//! In order: [`Session::take`], [`Session::reset`], map ([`Session::mapper`] and the calls behind it), [`Session::start`] with
//! the [`Epoch`] from before the mapping. `docs/kernel-module.md` says what each call promises.
//!
//! ```no_run
//! # use onehop_pci::{Kind, Root, kmod};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let session = kmod::Session::take(&Root::here(), Kind::Board, "0000:0c:00.0".parse()?)?;
//! session.set_mask(32)?;
//! let info = session.info()?;
//! if info.can_reset {
//!     session.reset()?;
//! }
//! let (epoch, registers) = (session.epoch()?, session.registers()?);
//! let mapper = session.mapper(kmod::Rules { chunk: Some(65536), ..Default::default() });
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
#[allow(unsafe_code, reason = "a device reaches memory of this process")]
mod mapping;
mod refusal;
mod session;
#[allow(unsafe_code, reason = "the module's calls, and devices that reach memory")]
mod sys;

use std::sync::Arc;

use onehop_os::{ControllerBackend, FunctionReset};

pub use info::{Info, Missing, Stopped};
pub use mapper::Rules;
pub use mapping::{Access, Mapping};
pub use refusal::Refusal;
pub use session::{Epoch, Session};

use crate::{Address, Kind, Result, Root};

/// Opens an NVMe controller of this machine.
pub(crate) fn open(root: &Root, address: Address) -> Result<ControllerBackend> {
    let session = Session::take(root, Kind::Drive, address)?;
    session.restart()?;
    Ok(ControllerBackend {
        regs: session.registers()?,
        mapper: session.mapper(Rules::default()),
        reset: Some(Arc::new(Restart(session))),
        name: address.to_string(),
        simulated: false,
    })
}

/// Function reset, after which the device may reach memory again.
struct Restart(Session);

impl FunctionReset for Restart {
    fn function_reset(&self) -> onehop_os::Result<()> {
        self.0.restart().map_err(|error| onehop_os::Error::System {
            call: format!("resetting {}", self.0.address()),
            source: std::io::Error::other(error),
            hint: "; `onehop drive recover` takes it off the bus and looks for it again",
        })
    }
}
