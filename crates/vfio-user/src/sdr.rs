//! The simulated SDR board as a PCI function.

use std::sync::Arc;

use onehop_board::Board;
use onehop_os::{HostMem, Registers};
use onehop_radio::ids;

use crate::irq::Interrupts;
use crate::model::{Bar, DeviceModel, FunctionIdentity, Reach, Vectors};

/// Signal processing controller, other.
const CLASS: u32 = 0x11_8000;

/// A simulated board. Its own thread moves samples, so register accesses do not wait for them.
pub struct Sdr {
    board: Arc<Board>,
    registers: Arc<dyn Registers>,
}

impl Sdr {
    /// Wraps a board.
    #[must_use]
    pub fn new(board: Arc<Board>) -> Self {
        Self { registers: board.port().regs, board }
    }

    /// Whether an access covers whole registers.
    fn is_regular(&self, offset: u64, bytes: usize) -> bool {
        let regular = offset.is_multiple_of(4) && bytes.is_multiple_of(4);
        if !regular {
            self.board.note_irregular_access(offset, bytes);
        }
        regular
    }
}

impl DeviceModel for Sdr {
    fn identity(&self) -> FunctionIdentity {
        let config = self.board.config();
        FunctionIdentity {
            vendor: config.vendor,
            device: config.device,
            subsystem_vendor: ids::SIMULATED.0,
            subsystem: ids::SIMULATED.1,
            class: CLASS,
            revision: 0,
            vectors: Vectors::Msi,
            flr: config.flr,
            bars: vec![Bar { index: 0, bytes: self.registers.size().into() }],
        }
    }

    fn read(&self, _bar: u8, offset: u64, out: &mut [u8]) {
        if !self.is_regular(offset, out.len()) {
            return out.fill(0xff);
        }
        for (at, word) in (offset as u32..).step_by(4).zip(out.as_chunks_mut().0) {
            *word = self.registers.read32(at).to_le_bytes();
        }
    }

    fn write(&self, _bar: u8, offset: u64, data: &[u8]) {
        if self.is_regular(offset, data.len()) {
            for (at, word) in (offset as u32..).step_by(4).zip(data.as_chunks().0) {
                self.registers.write32(at, u32::from_le_bytes(*word));
            }
        }
    }

    fn reach(&self, at: u64, _bytes: u64, memory: Option<HostMem>) -> std::result::Result<Reach, String> {
        // Memory that the client does not share is simply not mapped.
        let Some(memory) = memory else { return Ok(Box::new(())) };
        let reached = self.board.reach(at, memory);
        reached
            .map(|reached| Box::new(reached) as Reach)
            .ok_or_else(|| "something is mapped there already".into())
    }

    fn set_bus_master(&self, on: bool) {
        self.board.set_bus_master(on);
    }

    fn reset(&self) {
        self.board.power_on();
    }

    fn connect(&self, interrupts: Arc<Interrupts>) {
        self.board.on_interrupt(move |vector| interrupts.raise(vector));
    }

    fn is_gone(&self) -> bool {
        false
    }
}
