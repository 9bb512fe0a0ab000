//! A board's registers and profile.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use onehop_os::{ControllerBackend, Interrupt, Mapper, Registers};
use onehop_pci::kmod;
use onehop_radio::{BoardLimits, regs};

use crate::{Error, Result};

/// Properties of a board that cannot be read from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Profile {
    /// Limits of its receiver.
    pub rx: BoardLimits,
    /// Limits of its transmitter.
    pub tx: BoardLimits,
    /// Whether events contain the lower half of the sample clock.
    pub reports_time: bool,
    /// Whether the register for losses since the last event exists.
    pub reports_tail: bool,
    /// Whether transmitted samples can be fed back to the receiver.
    pub loopback: bool,
}

impl Profile {
    /// The simulated board. The last three properties are untested on a real uSDR.
    pub const SIMULATED: Self = Self {
        rx: BoardLimits::USDR_RX,
        tx: BoardLimits::USDR_TX,
        reports_time: true,
        reports_tail: true,
        loopback: true,
    };
    /// A real uSDR, according to the source of its driver.
    pub const USDR: Self =
        Self { reports_time: false, reports_tail: false, loopback: false, ..Self::SIMULATED };
}

/// A board.
pub struct Card {
    registers: Arc<dyn Registers>,
    /// Held during an access to the indexed space, which takes two register accesses.
    index: Mutex<()>,
    pub(crate) mapper: Arc<dyn Mapper>,
    pub(crate) interrupt: Arc<dyn Interrupt>,
    /// Its profile.
    pub profile: Profile,
    /// Its name in messages.
    pub name: String,
    /// Whether it is simulated.
    pub simulated: bool,
    /// Its PCI vendor and device ID, if it is a PCI device.
    pub id: Option<(u16, u16)>,
    /// Its session with the kernel module, if it is driven through the module.
    pub(crate) module: Option<kmod::Session>,
}

impl Card {
    /// Wraps a board's registers and interrupt.
    #[must_use]
    pub fn new(port: &ControllerBackend, interrupt: Arc<dyn Interrupt>, profile: Profile) -> Self {
        Self {
            registers: port.regs.clone(),
            index: Mutex::default(),
            mapper: port.mapper.clone(),
            interrupt,
            profile,
            name: port.name.clone(),
            simulated: port.simulated,
            id: None,
            module: None,
        }
    }

    /// Fails if the board is gone, or its DMA was disabled.
    pub(crate) fn check(&self) -> Result<()> {
        if let Some(module) = &self.module
            && let Some(stopped) = module.stopped_within(Duration::ZERO)?
        {
            return Err(Error::Stopped { board: self.name.clone(), why: stopped.to_string() });
        }
        if regs::RxStatus(self.read(regs::RX_STATUS)).gone() {
            return Err(Error::Gone { board: self.name.clone() });
        }
        Ok(())
    }

    /// Writes a register, including those of the indexed space.
    pub fn write(&self, register: u32, value: u32) {
        if register < regs::VIRTUAL {
            return self.registers.write32(register * 4, value.swap_bytes());
        }
        let _guard = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        self.registers.write32(regs::INDEX * 4, (register - regs::VIRTUAL).swap_bytes());
        self.registers.write32(regs::INDEX_DATA * 4, value.swap_bytes());
    }

    /// Reads a register, including those of the indexed space.
    #[must_use]
    pub fn read(&self, register: u32) -> u32 {
        if register < regs::VIRTUAL {
            return self.registers.read32(register * 4).swap_bytes();
        }
        let _guard = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        self.registers.write32(regs::INDEX * 4, (register - regs::VIRTUAL).swap_bytes());
        self.registers.read32(regs::INDEX_DATA * 4).swap_bytes()
    }

    /// Controls the receiver's front end.
    pub(crate) fn front(&self, what: u32, value: u32) {
        self.write(regs::RX_BASE + regs::FRONT, regs::front::command(what, value));
    }
}
