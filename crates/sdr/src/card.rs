//! A board's registers, and what has to be known of it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use onehop_os::{ControllerBackend, Interrupt, Mapper, Registers};
use onehop_pci::kmod;
use onehop_radio::{Limits, regs};

use crate::{Error, Result};

/// What has to be known of a board and cannot be read from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Profile {
    /// What its receiver can do.
    pub rx: Limits,
    /// What its transmitter can do.
    pub tx: Limits,
    /// Whether events tell the lower half of the sample clock.
    pub tells_time: bool,
    /// Whether the register for losses since the last event is there.
    pub tells_tail: bool,
    /// Whether what is transmitted can be fed back to the receiver.
    pub loopback: bool,
}

impl Profile {
    /// The simulated board. Of a real uSDR the last three have not been tried.
    pub const SIMULATED: Self =
        Self { rx: Limits::USDR_RX, tx: Limits::USDR_TX, tells_time: true, tells_tail: true, loopback: true };
    /// A uSDR as its driver's source shows it.
    pub const USDR: Self = Self { tells_time: false, tells_tail: false, loopback: false, ..Self::SIMULATED };
}

/// A board.
pub struct Card {
    registers: Arc<dyn Registers>,
    /// Two accesses make one to the indexed space.
    index: Mutex<()>,
    pub(crate) mapper: Arc<dyn Mapper>,
    pub(crate) interrupt: Arc<dyn Interrupt>,
    /// What is known of it.
    pub profile: Profile,
    /// How people call it.
    pub name: String,
    /// Whether it is a model of a board.
    pub simulated: bool,
    /// Its PCI vendor and device, where it is on that bus.
    pub id: Option<(u16, u16)>,
    /// The kernel module's session, where it is in its hands.
    pub(crate) module: Option<kmod::Session>,
}

impl Card {
    /// A board where it was found, with its interrupt.
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

    /// Fails where the board is no longer there, or may no longer reach memory.
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

    /// Writes a register, of the indexed space too.
    pub fn write(&self, register: u32, value: u32) {
        if register < regs::VIRTUAL {
            return self.registers.write32(register * 4, value.swap_bytes());
        }
        let _both = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        self.registers.write32(regs::INDEX * 4, (register - regs::VIRTUAL).swap_bytes());
        self.registers.write32(regs::INDEX_DATA * 4, value.swap_bytes());
    }

    /// Reads a register, of the indexed space too.
    #[must_use]
    pub fn read(&self, register: u32) -> u32 {
        if register < regs::VIRTUAL {
            return self.registers.read32(register * 4).swap_bytes();
        }
        let _both = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        self.registers.write32(regs::INDEX * 4, (register - regs::VIRTUAL).swap_bytes());
        self.registers.read32(regs::INDEX_DATA * 4).swap_bytes()
    }

    /// The front end of the receiver.
    pub(crate) fn front(&self, what: u32, value: u32) {
        self.write(regs::RX_BASE + regs::FRONT, regs::front::command(what, value));
    }
}
