//! The seam to a simulated device: what differs between PCI functions.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use onehop_os::HostMem;

use crate::irq::Interrupts;

/// A 64-bit memory BAR, not prefetchable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bar {
    /// Its number: 0 or 2; 4 holds the MSI-X table if there is one.
    pub index: u8,
    /// Its size, a power of two of at least 4096.
    pub bytes: u64,
}

/// The kind of a function's interrupts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Vectors {
    /// MSI-X with 1 to 2048 vectors.
    MsiX(u16),
    /// MSI with one vector.
    Msi,
}

impl Vectors {
    /// Number of vectors.
    #[must_use]
    pub const fn count(self) -> u16 {
        match self {
            Self::MsiX(count) => count,
            Self::Msi => 1,
        }
    }
}

/// The identity of a function.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FunctionIdentity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
    /// Class, subclass and programming interface.
    pub class: u32,
    /// Revision.
    pub revision: u8,
    /// Its interrupts.
    pub vectors: Vectors,
    /// Whether it supports function level reset.
    pub flr: bool,
    /// Its BARs.
    pub bars: Vec<Bar>,
}

/// Keeps client memory within the device's reach until dropped. Dropping it waits for accesses in progress.
pub type Reach = Box<dyn Send + Sync>;

/// Memory behind parts of a BAR: client writes reach the device without a message.
pub struct MappableParts {
    /// A file that covers the parts, with the BAR's offsets. No client can shrink it.
    pub file: Arc<File>,
    /// The parts, in whole pages.
    pub areas: Vec<Range<u64>>,
}

/// A simulated device behind a PCI function.
pub trait DeviceModel: Send + Sync {
    /// Its identity; always the same.
    fn identity(&self) -> FunctionIdentity;
    /// Reads within a BAR. Must not wait for a command of the device.
    fn read(&self, bar: u8, offset: u64, out: &mut [u8]);
    /// Writes within a BAR. Must not wait for a command of the device.
    fn write(&self, bar: u8, offset: u64, data: &[u8]);
    /// The parts of a BAR that clients may map, if any.
    fn mapping(&self, bar: u8) -> Option<&MappableParts> {
        let _ = bar;
        None
    }
    /// Lets the device reach `bytes` of client memory at a bus address. Without `memory`, the client does not share
    /// that range, and accesses by the device fail.
    ///
    /// # Errors
    /// Why this is not possible.
    fn reach(&self, at: u64, bytes: u64, memory: Option<HostMem>) -> Result<Reach, String>;
    /// Enables or disables the device's access to memory.
    fn set_bus_master(&self, on: bool);
    /// Function level reset, or power-on for a function without one: restores the power-on state, except for what
    /// survives a reset.
    fn reset(&self);
    /// Sets where it raises its interrupts.
    fn connect(&self, interrupts: Arc<Interrupts>);
    /// Whether it has left the bus: all reads return ones.
    fn is_gone(&self) -> bool;
}
