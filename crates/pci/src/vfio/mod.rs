//! Devices behind an IOMMU, through VFIO: the device reaches memory that this process has mapped, at addresses of our
//! choice, and nothing else.

mod iommu;
mod iommufd;
mod mapper;
mod refusal;
mod sys;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use onehop_os::{ControllerBackend, FunctionReset, HostMem};

use crate::bars::Bars;
use crate::claim::{Claim, NewDriver};
use crate::{Address, DeviceKind, Error, Result, Root};
use iommu::Iommu;
use mapper::VfioMapper;
pub(crate) use sys::parse_ranges;

/// Offset of the command register in config space, and its bits for memory, for bus mastering, and against INTx:
/// vfio-pci enables the interrupt line, which is unused here and may be shared.
const COMMAND: u64 = 4;
const DECODE_AND_MASTER: u16 = 0x406;

/// Opens a device of this machine: through its group, because type1 maps other devices' BARs; through iommufd if the
/// kernel has no containers.
pub(crate) fn open(root: &Root, address: Address) -> Result<ControllerBackend> {
    open_by(root, address, |root, address| {
        if iommu::only_iommufd(root) {
            iommu::by_iommufd(root, address)
        } else {
            iommu::by_group(root, address)
        }
    })
}

/// Opens a device of this machine through iommufd.
pub(crate) fn open_by_iommufd(root: &Root, address: Address) -> Result<ControllerBackend> {
    refusal::before(root, address)?;
    iommu::has_iommufd(root, address)?;
    open_by(root, address, iommu::by_iommufd)
}

fn open_by(
    root: &Root,
    address: Address,
    how: impl Fn(&Root, Address) -> Result<(File, Iommu)>,
) -> Result<ControllerBackend> {
    refusal::before(root, address)?;
    let claim = Claim::take(root, DeviceKind::Drive, address, NewDriver::Vfio, &[])?;
    let (file, iommu) = how(root, address)?;
    let device = VfioDevice { file, iommu, _claim: claim, address };
    let failed = |e| Error::call("enabling the device's memory and bus mastering", e);
    device.decode_and_master().map_err(failed)?;
    let device = Arc::new(device);
    let name = address.to_string();
    let reset: Option<Arc<dyn FunctionReset>> = match sys::can_reset(&device.file) {
        Ok(true) => Some(device.clone()),
        _ => None,
    };
    let bars = Bars::of(Arc::new(Windows(device.clone())), &name)?;
    let mapper = VfioMapper::new(device, &name)?;
    Ok(ControllerBackend { regs: Arc::new(bars), mapper: Arc::new(mapper), reset, name, simulated: false })
}

/// A device that this process drives. Dropping the last handle releases it.
struct VfioDevice {
    // Dropped in this order: closing the device ends its bus mastering and resets it, and only then may another driver
    // bind.
    file: File,
    iommu: Iommu,
    _claim: Claim,
    address: Address,
}

impl VfioDevice {
    fn decode_and_master(&self) -> io::Result<()> {
        let config = sys::region(&self.file, sys::CONFIG_REGION)?;
        let mut command = [0; 2];
        self.file.read_exact_at(&mut command, config.offset + COMMAND)?;
        self.file.write_all_at(&switched_on(command), config.offset + COMMAND)
    }
}

/// The command register while the device is driven, given its former value.
fn switched_on(command: [u8; 2]) -> [u8; 2] {
    (u16::from_le_bytes(command) | DECODE_AND_MASTER).to_le_bytes()
}

impl FunctionReset for VfioDevice {
    fn function_reset(&self) -> onehop_os::Result<()> {
        let failed = |source| onehop_os::Error::System {
            call: format!("VFIO_DEVICE_RESET of {}", self.address),
            source,
            hint: "; `onehop drive recover` removes it from the bus and rescans",
        };
        sys::reset(&self.file).and_then(|()| self.decode_and_master()).map_err(failed)
    }
}

/// The device's BARs, through its file.
struct Windows(Arc<VfioDevice>);

impl crate::bars::BarSource for Windows {
    fn bytes(&self, bar: u8) -> Option<u64> {
        let region = sys::region(&self.0.file, bar.into()).ok()?;
        Some(region.size).filter(|size| *size > 0)
    }

    fn map(&self, bar: u8, offset: u64, bytes: u64) -> Result<HostMem> {
        let what = format!("VFIO_DEVICE_GET_REGION_INFO of BAR {bar}");
        let region = sys::region(&self.0.file, bar.into()).map_err(|e| Error::call(what, e))?;
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= region.size);
        if !region.can_map || !fits {
            let why = format!("BAR {bar} of {} cannot be mapped there", self.0.address);
            return Err(Error::call("mmap of a BAR", io::Error::other(why)));
        }
        let mem = HostMem::of_device(&self.0.file, region.offset + offset, bytes as usize)
            .map_err(|e| Error::call(format!("mapping BAR {bar}"), io::Error::other(e)))?;
        // A mapping keeps the device open, and the device is only released once closed.
        let hold = self.0.clone();
        Ok(mem.on_last_drop(move || drop(hold)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driven_device_raises_no_line_interrupt() {
        // As vfio-pci leaves it: without memory, bus mastering and "no interrupts". Parity errors stay as they are.
        assert_eq!(switched_on([0, 0]), [0x06, 0x04]);
        assert_eq!(switched_on([0x42, 0x01]), [0x46, 0x05]);
    }
}
