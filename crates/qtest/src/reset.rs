//! Function level reset through the PCI Express capability.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use onehop_os::{Deadline, FunctionReset};

use crate::Result;
use crate::pci::{COMMAND, PciFunction};

/// Id of the PCI Express capability.
const PCI_EXPRESS: u8 = 0x10;
/// Device Capabilities, relative to the capability; bit 28: function level reset is supported.
const DEVICE_CAPABILITIES: u8 = 0x04;
const CAN_FLR: u32 = 1 << 28;
/// Device Control, relative to the capability; bit 15 starts the reset. Its upper half, Device Status, ignores zeros.
const DEVICE_CONTROL: u8 = 0x08;
const START_FLR: u32 = 1 << 15;
/// A function must respond 100 ms after the reset; the rest is for a busy host.
const RESET_TIMEOUT: Duration = Duration::from_secs(1);

/// A function with function level reset.
pub(crate) struct Flr {
    function: PciFunction,
    express: u8,
    /// One reset at a time: a second one would save the registers while they are cleared.
    turn: Mutex<()>,
}

impl Flr {
    /// The reset of `function`, if it has one.
    pub(crate) fn of(function: &PciFunction) -> Result<Option<Self>> {
        let fits = |at: &u8| *at <= u8::MAX - DEVICE_CONTROL;
        let Some(express) = function.capability(PCI_EXPRESS)?.filter(fits) else { return Ok(None) };
        if function.read(express + DEVICE_CAPABILITIES)? & CAN_FLR == 0 {
            return Ok(None);
        }
        Ok(Some(Self { function: function.clone(), express, turn: Mutex::new(()) }))
    }

    /// Resets the function; afterwards memory decoding and bus mastering are off. Returns false if it does not come
    /// back.
    fn reset(&self) -> Result<bool> {
        self.function.write(COMMAND, 0)?;
        let control = self.express + DEVICE_CONTROL;
        let before = self.function.read(control)? & 0xffff;
        self.function.write(control, before | START_FLR)?;
        let until = Deadline::after(RESET_TIMEOUT);
        while !self.function.present()? {
            if until.passed() {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(true)
    }

    /// Resets the function and restores its BARs and command register; interrupts are not used.
    fn reset_and_restore(&self) -> Result<bool> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let command = self.function.read(COMMAND)? & 0xffff;
        let bars = PciFunction::bar_words()
            .map(|word| Ok((word, self.function.read(word)?)))
            .collect::<Result<Vec<_>>>()?;
        let back = self.reset()?;
        for (word, value) in bars {
            self.function.write(word, value)?;
        }
        self.function.write(COMMAND, command)?;
        Ok(back && self.function.read(COMMAND)? & 0xffff == command)
    }
}

impl FunctionReset for Flr {
    fn function_reset(&self) -> onehop_os::Result<()> {
        let failed = |source| onehop_os::Error::System {
            call: format!("function level reset of {} in QEMU", self.function),
            source,
            hint: "; stop QEMU and start it again",
        };
        match self.reset_and_restore() {
            Ok(true) => Ok(()),
            Ok(false) => Err(failed(io::Error::new(io::ErrorKind::TimedOut, "it did not come back"))),
            Err(e) => Err(failed(io::Error::other(e))),
        }
    }
}
