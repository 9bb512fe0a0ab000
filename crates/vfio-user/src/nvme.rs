//! The simulated NVMe drive as a PCI function.

use std::sync::Arc;

use onehop_os::{HostMem, Registers};
use onehop_proto::BusAddr;
use onehop_sim::{PCI_DEVICE, PCI_SUBSYSTEM_VENDOR, PCI_VENDOR, Sim};

use crate::doorbells::MappedDoorbells;
use crate::error::{Error, Result};
use crate::irq::Interrupts;
use crate::model::{Bar, DeviceModel, FunctionIdentity, MappableParts, Reach, Vectors};

/// Mass storage, non-volatile memory, NVM Express.
const CLASS: u32 = 0x01_0802;

/// A simulated drive. Its own thread executes commands, so register accesses do not wait for commands.
pub struct Nvme {
    sim: Sim,
    registers: Arc<dyn Registers>,
    mapped: Option<MappedDoorbells>,
}

impl Nvme {
    /// Wraps a drive.
    ///
    /// # Errors
    /// When the drive executes commands within register accesses, or transfers no data.
    pub fn new(sim: Sim) -> Result<Self> {
        if !sim.config().workers {
            return Err(Error::Unfit(
                "with workers=0 it executes commands within register accesses; leave that out",
            ));
        }
        if sim.config().null.is_some() {
            return Err(Error::Unfit("with null it moves no data; leave that out"));
        }
        Ok(Self { registers: sim.registers(), sim, mapped: None })
    }

    /// Offers the doorbells for mapping; a thread polls them.
    ///
    /// # Errors
    /// When memory or a thread cannot be created.
    pub fn with_mapped_doorbells(self) -> Result<Self> {
        let mapped = MappedDoorbells::start(&self.sim)?;
        Ok(Self { mapped: Some(mapped), ..self })
    }

    /// The controller memory buffer behind an access that is entirely within it.
    fn buffer(&self, offset: u64, bytes: usize) -> Option<HostMem> {
        self.registers.window(0, offset, bytes as u64)
    }

    /// Whether an access covers whole registers.
    fn is_regular(&self, offset: u64, bytes: usize) -> bool {
        let regular = offset.is_multiple_of(4) && bytes.is_multiple_of(4);
        if !regular {
            self.sim.note_irregular_access(offset, bytes);
        }
        regular
    }
}

impl DeviceModel for Nvme {
    fn identity(&self) -> FunctionIdentity {
        FunctionIdentity {
            vendor: PCI_VENDOR,
            device: PCI_DEVICE,
            subsystem_vendor: PCI_SUBSYSTEM_VENDOR,
            subsystem: PCI_DEVICE,
            class: CLASS,
            revision: 1,
            vectors: Vectors::MsiX(self.sim.config().vectors()),
            flr: true,
            bars: vec![Bar { index: 0, bytes: self.registers.size().into() }],
        }
    }

    fn read(&self, _bar: u8, offset: u64, out: &mut [u8]) {
        if let Some(buffer) = self.buffer(offset, out.len())
            && buffer.read(0, out).is_ok()
        {
            return;
        }
        if !self.is_regular(offset, out.len()) {
            return out.fill(0xff);
        }
        for (at, word) in (offset as u32..).step_by(4).zip(out.as_chunks_mut().0) {
            *word = self.registers.read32(at).to_le_bytes();
        }
    }

    fn write(&self, _bar: u8, offset: u64, data: &[u8]) {
        if let Some(buffer) = self.buffer(offset, data.len())
            && buffer.write(0, data).is_ok()
        {
            return;
        }
        if self.is_regular(offset, data.len()) {
            for (at, word) in (offset as u32..).step_by(4).zip(data.as_chunks().0) {
                self.registers.write32(at, u32::from_le_bytes(*word));
            }
        }
    }

    fn mapping(&self, bar: u8) -> Option<&MappableParts> {
        self.mapped.as_ref().filter(|_| bar == 0).map(MappedDoorbells::mapping)
    }

    fn reach(&self, at: u64, bytes: u64, memory: Option<HostMem>) -> std::result::Result<Reach, String> {
        match self.sim.reach(BusAddr(at), bytes, memory) {
            Ok(reached) => Ok(Box::new(reached)),
            Err(error) => Err(error.to_string()),
        }
    }

    fn set_bus_master(&self, on: bool) {
        self.sim.set_bus_master(on);
        if let Some(mapped) = &self.mapped {
            mapped.set_active(on);
        }
    }

    fn reset(&self) {
        // Fails only if the drive has left the bus; there is nothing to reset then.
        let _ = self.sim.port().reset.map(|reset| reset.function_reset());
    }

    fn connect(&self, interrupts: Arc<Interrupts>) {
        self.sim.on_interrupt(move |vector| interrupts.raise(vector));
    }

    fn is_gone(&self) -> bool {
        self.sim.is_gone()
    }
}
