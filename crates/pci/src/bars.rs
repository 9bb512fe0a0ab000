//! BARs mapped into this process.

use std::fs::File;
use std::io;
use std::sync::Arc;

use onehop_os::{Guard, HostMem, MmioWindow, Registers};

use crate::{Address, BarKind, Error, Result, Root, parse_resource};

/// BARs are mapped in whole pages.
const PAGE: u64 = 4096;
/// Mapped part of BAR0: enough for the doorbells of all possible queues.
const MOST_REGISTERS: u64 = 1 << 20;

/// Access to a device's BARs.
pub(crate) trait BarSource: Send + Sync {
    /// The size of a BAR; `None` if the device does not have it.
    fn bytes(&self, bar: u8) -> Option<u64>;
    /// Maps a part of a BAR, in whole pages.
    fn map(&self, bar: u8, offset: u64, bytes: u64) -> Result<HostMem>;
}

/// A controller's registers in BAR0, and memory behind its other BARs.
pub(crate) struct Bars {
    registers: MmioWindow,
    size: u32,
    source: Arc<dyn BarSource>,
    /// Survives accesses after the device was unbound or unplugged.
    _guard: Guard,
}

impl Bars {
    pub(crate) fn of(source: Arc<dyn BarSource>, name: &str) -> Result<Self> {
        let bytes = source.bytes(0).ok_or_else(|| Error::Refused {
            what: format!("driving {name}"),
            why: "its registers cannot be mapped: it has no mappable BAR0".into(),
            fix: "See `onehop drive list`".into(),
        })?;
        let size = bytes.min(MOST_REGISTERS);
        let registers = source.map(0, 0, size.next_multiple_of(PAGE))?;
        let guard = Guard::of_device(&registers)
            .map_err(|e| Error::call(format!("guarding BAR0 of {name}"), io::Error::other(e)))?;
        Ok(Self { registers: MmioWindow::new(registers), size: size as u32, source, _guard: guard })
    }
}

impl Registers for Bars {
    fn read32(&self, offset: u32) -> u32 {
        self.registers.read32(offset)
    }

    fn write32(&self, offset: u32, value: u32) {
        self.registers.write32(offset, value);
    }

    fn write64(&self, offset: u32, value: u64) {
        // One 64-bit store, as the specification allows: QEMU takes the address of the memory buffer (CMBMSC) in no
        // other way.
        self.registers.write64(offset, value);
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn window(&self, bar: u8, offset: u64, bytes: u64) -> Option<HostMem> {
        let first = offset / PAGE * PAGE;
        let skip = offset - first;
        let mapped = self.source.map(bar, first, (skip + bytes).next_multiple_of(PAGE)).ok()?;
        mapped.slice(skip as usize..(skip + bytes) as usize).ok()
    }

    fn mmio(&self) -> Option<MmioWindow> {
        Some(self.registers.clone())
    }
}

/// BARs through sysfs, for a device without a driver.
pub(crate) struct Sysfs {
    folder: std::path::PathBuf,
    address: Address,
    bars: Vec<crate::Bar>,
    /// Held as long as anything is mapped.
    hold: Option<Arc<dyn Send + Sync>>,
}

impl Sysfs {
    pub(crate) fn of(root: &Root, address: Address, hold: Option<Arc<dyn Send + Sync>>) -> Result<Self> {
        let folder = format!("/sys/bus/pci/devices/{address}");
        let path = format!("{folder}/resource");
        let bars = parse_resource(&path, &root.text(&path)?)?;
        let below = root.folder().unwrap_or(std::path::Path::new("/")).join(folder.trim_start_matches('/'));
        Ok(Self { folder: below, address, bars, hold })
    }
}

impl BarSource for Sysfs {
    fn bytes(&self, bar: u8) -> Option<u64> {
        let of = |b: &&crate::Bar| b.index == usize::from(bar) && b.kind == BarKind::Memory && b.assigned;
        self.bars.iter().find(of).map(|b| b.size)
    }

    fn map(&self, bar: u8, offset: u64, bytes: u64) -> Result<HostMem> {
        let what = || format!("mapping BAR {bar} of {}", self.address);
        let fits =
            self.bytes(bar).is_some_and(|size| offset.checked_add(bytes).is_some_and(|end| end <= size));
        if !fits {
            return Err(Error::call(what(), io::Error::other("the BAR is too short")));
        }
        let path = self.folder.join(format!("resource{bar}"));
        let file = File::options().read(true).write(true).open(&path).map_err(|e| Error::call(what(), e))?;
        let mem = HostMem::of_device(&file, offset, bytes as usize)
            .map_err(|e| Error::call(what(), io::Error::other(e)))?;
        let hold = self.hold.clone();
        Ok(mem.on_last_drop(move || drop(hold)))
    }
}

/// Maps the memory behind a BAR of a device that has no driver, or whose driver allows mapping. In a test bed it stands
/// for a GPU's memory. `bar` is its number; the largest by default.
///
/// # Errors
/// When there is no such device or BAR, or the kernel refuses the mapping.
pub fn bar_memory(root: &Root, address: Address, bar: Option<u8>) -> Result<HostMem> {
    let sysfs = Sysfs::of(root, address, None)?;
    let largest =
        sysfs.bars.iter().filter(|b| b.kind == BarKind::Memory && b.assigned).max_by_key(|b| b.size);
    let bar = bar.or_else(|| largest.and_then(|b| u8::try_from(b.index).ok()));
    let found = bar.and_then(|bar| Some((bar, sysfs.bytes(bar)?)));
    let (bar, bytes) = found.ok_or_else(|| Error::Refused {
        what: format!("mapping memory of {address}"),
        why: "it has no such BAR, or the system gave it no address".into(),
        fix: "See its BARs with `lspci -v`".into(),
    })?;
    // A device without a driver decodes nothing until it is enabled.
    let enable = sysfs.folder.join("enable");
    if root.link_name(&format!("/sys/bus/pci/devices/{address}/driver")).is_none() {
        std::fs::write(&enable, "1").map_err(|e| Error::call(format!("enabling {address}"), e))?;
    }
    sysfs.map(bar, 0, bytes)
}
