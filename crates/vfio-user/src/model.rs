//! The seam to a simulated device: what differs from one PCI function to the next.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use onehop_os::HostMem;

use crate::irq::Interrupts;

/// A memory BAR of 64 bits, not prefetchable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bar {
    /// Its number: 0 or 2; 4 holds the MSI-X table where there is one.
    pub index: u8,
    /// Its size, a power of two from 4096 on.
    pub bytes: u64,
}

/// How a function tells its interrupts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Vectors {
    /// MSI-X with so many vectors, 1 to 2048.
    MsiX(u16),
    /// MSI with one.
    Msi,
}

impl Vectors {
    /// How many there are.
    #[must_use]
    pub const fn count(self) -> u16 {
        match self {
            Self::MsiX(count) => count,
            Self::Msi => 1,
        }
    }
}

/// What a function says that it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Vendor.
    pub vendor: u16,
    /// Device.
    pub device: u16,
    /// Vendor of the subsystem.
    pub subsystem_vendor: u16,
    /// Subsystem.
    pub subsystem: u16,
    /// Class, subclass and programming interface.
    pub class: u32,
    /// Revision.
    pub revision: u8,
    /// Its interrupts.
    pub vectors: Vectors,
    /// Whether it has a function level reset.
    pub flr: bool,
    /// Its BARs.
    pub bars: Vec<Bar>,
}

/// Memory of the client stays within the device's reach until this is dropped; dropping it waits for accesses that run.
pub type Reach = Box<dyn Send + Sync>;

/// Memory behind parts of a BAR: what a client writes there reaches the device without a message.
pub struct Mapping {
    /// A file as long as the parts need; offsets in it are those in the BAR. Nobody can make it shorter.
    pub file: Arc<File>,
    /// The parts, in whole pages.
    pub areas: Vec<Range<u64>>,
}

/// A simulated device behind a PCI function.
pub trait Model: Send + Sync {
    /// What it is; always the same.
    fn identity(&self) -> Identity;
    /// Reads within a BAR. Must not wait for a command of the device.
    fn read(&self, bar: u8, offset: u64, out: &mut [u8]);
    /// Writes within a BAR. Must not wait for a command of the device.
    fn write(&self, bar: u8, offset: u64, data: &[u8]);
    /// The parts of a BAR that clients may map; none for most.
    fn mapping(&self, bar: u8) -> Option<&Mapping> {
        let _ = bar;
        None
    }
    /// Lets the device reach `bytes` of the client's memory at a bus address; without `memory` there is something that
    /// the client does not share, and the device has to treat an access as one that fails.
    ///
    /// # Errors
    /// Says why this cannot be.
    fn reach(&self, at: u64, bytes: u64, memory: Option<HostMem>) -> Result<Reach, String>;
    /// Whether the device may reach memory at all.
    fn set_bus_master(&self, on: bool);
    /// A function level reset, or power-on for a function without one: as after power-on, but for what survives that.
    fn reset(&self);
    /// Where it raises its interrupts from now on.
    fn connect(&self, interrupts: Arc<Interrupts>);
    /// Whether it has left the bus: every read gives all ones.
    fn is_gone(&self) -> bool;
}
