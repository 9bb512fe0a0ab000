//! One wire, shared by all who talk to the same QEMU; it remembers why it broke.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::wire::{Fault, Wire};
use crate::{Error, Result};

/// The x86 ports through which PCI configuration space is reached: first the address, then the data.
const CONFIG_ADDRESS: u16 = 0xcf8;
const CONFIG_DATA: u16 = 0xcfc;

enum State {
    Up(Wire),
    Gone(String),
}

/// A connection to QEMU. Once it has failed it stays so: whoever reconnects does not meet the same device.
pub(crate) struct Link {
    socket: PathBuf,
    state: Mutex<State>,
}

impl Link {
    /// Connects; no answer may take longer than `wait`.
    pub(crate) fn connect(socket: &Path, wait: Duration) -> Result<Self> {
        let gone = |source: io::Error| Error::Connect { socket: socket.into(), source };
        let wire = Wire::connect(socket, wait).map_err(gone)?;
        Ok(Self { socket: socket.into(), state: Mutex::new(State::Up(wire)) })
    }

    /// The socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Why it is gone, if it is.
    pub(crate) fn why_gone(&self) -> Option<String> {
        match &*self.lock() {
            State::Up(_) => None,
            State::Gone(why) => Some(why.clone()),
        }
    }

    /// A 32-bit read of guest memory or of a register.
    pub(crate) fn read32(&self, addr: u64) -> Result<u32> {
        self.with(|wire| wire.ask(format_args!("readl {addr:#x}"))).map(|v| v as u32)
    }

    /// A 32-bit write, posted.
    pub(crate) fn write32(&self, addr: u64, value: u32) -> Result<()> {
        self.with(|wire| wire.post(format_args!("writel {addr:#x} {value:#x}")))
    }

    /// A 32-bit word of a function's configuration space on bus 0.
    pub(crate) fn config_read(&self, devfn: u8, offset: u8) -> Result<u32> {
        self.with(|wire| {
            wire.post(format_args!("outl {CONFIG_ADDRESS:#x} {:#x}", config_address(devfn, offset)))?;
            wire.ask(format_args!("inl {CONFIG_DATA:#x}"))
        })
        .map(|v| v as u32)
    }

    /// Writes a 32-bit word of a function's configuration space on bus 0.
    pub(crate) fn config_write(&self, devfn: u8, offset: u8, value: u32) -> Result<()> {
        self.with(|wire| {
            wire.post(format_args!("outl {CONFIG_ADDRESS:#x} {:#x}", config_address(devfn, offset)))?;
            wire.post(format_args!("outl {CONFIG_DATA:#x} {value:#x}"))
        })
    }

    /// Runs commands that belong together, with no other thread's in between.
    fn with<T>(&self, run: impl FnOnce(&mut Wire) -> std::result::Result<T, Fault>) -> Result<T> {
        let mut state = self.lock();
        let why = match &mut *state {
            State::Gone(why) => why.clone(),
            State::Up(wire) => match run(wire) {
                Ok(value) => return Ok(value),
                Err(fault) => fault.to_string(),
            },
        };
        *state = State::Gone(why.clone());
        Err(Error::Gone { socket: self.socket.clone(), why })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Link {
    /// What was posted last, such as the controller's stop, is carried out before this returns.
    fn drop(&mut self) {
        if let State::Up(wire) = self.state.get_mut().unwrap_or_else(PoisonError::into_inner) {
            // Nobody is left to be told that it failed.
            let _ = wire.settle();
        }
    }
}

/// What is written to port 0xcf8 to choose a word of configuration space.
fn config_address(devfn: u8, offset: u8) -> u32 {
    1 << 31 | u32::from(devfn) << 8 | u32::from(offset & !3)
}
