//! A wire shared by all users of one QEMU. It remembers why it broke.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::wire::{Wire, WireFault};
use crate::{Error, Result};

/// The x86 I/O ports for PCI configuration space: address, then data.
const CONFIG_ADDRESS: u16 = 0xcf8;
const CONFIG_DATA: u16 = 0xcfc;

enum LinkState {
    Up(Wire),
    Gone(String),
}

/// A connection to QEMU. A failure is permanent: after a reconnect the device would be in another state.
pub(crate) struct QemuLink {
    socket: PathBuf,
    state: Mutex<LinkState>,
}

impl QemuLink {
    /// Connects; `wait` limits the time for each answer.
    pub(crate) fn connect(socket: &Path, wait: Duration) -> Result<Self> {
        let gone = |source: io::Error| Error::Connect { socket: socket.into(), source };
        let wire = Wire::connect(socket, wait).map_err(gone)?;
        Ok(Self { socket: socket.into(), state: Mutex::new(LinkState::Up(wire)) })
    }

    /// The socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Why it is broken, if it is.
    pub(crate) fn why_gone(&self) -> Option<String> {
        match &*self.lock() {
            LinkState::Up(_) => None,
            LinkState::Gone(why) => Some(why.clone()),
        }
    }

    /// A 32-bit read of guest memory or a register.
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

    /// Runs commands without those of another thread in between.
    fn with<T>(&self, run: impl FnOnce(&mut Wire) -> std::result::Result<T, WireFault>) -> Result<T> {
        let mut state = self.lock();
        let why = match &mut *state {
            LinkState::Gone(why) => why.clone(),
            LinkState::Up(wire) => match run(wire) {
                Ok(value) => return Ok(value),
                Err(fault) => fault.to_string(),
            },
        };
        *state = LinkState::Gone(why.clone());
        Err(Error::Gone { socket: self.socket.clone(), why })
    }

    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for QemuLink {
    /// Waits for the last posted write, such as disabling the controller.
    fn drop(&mut self) {
        if let LinkState::Up(wire) = self.state.get_mut().unwrap_or_else(PoisonError::into_inner) {
            // A failure can no longer be reported.
            let _ = wire.settle();
        }
    }
}

/// The value of port 0xcf8 that selects a word of configuration space.
fn config_address(devfn: u8, offset: u8) -> u32 {
    1 << 31 | u32::from(devfn) << 8 | u32::from(offset & !3)
}
