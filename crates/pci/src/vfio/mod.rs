//! Devices behind an IOMMU, by VFIO: whatever memory this process has mapped, the device reaches at addresses of our choice,
//! and nothing else.

mod mapper;
mod refusal;
mod sys;

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use onehop_os::{FunctionReset, HostMem, Port};

use crate::bars::Bars;
use crate::claim::{Claim, Owner};
use crate::{Address, Error, Kind, Result, Root};
use mapper::VfioMapper;
pub(crate) use sys::parse_ranges;

/// Offset of the command register in config space, and its bits for memory and for bus mastering.
const COMMAND: u64 = 4;
const DECODE_AND_MASTER: u16 = 0x6;

/// Opens a device of this machine.
pub(crate) fn open(root: &Root, address: Address) -> Result<Port> {
    refusal::before(root, address)?;
    let claim = Claim::take(root, Kind::Drive, address, Owner::Vfio, &[])?;
    let device = Arc::new(Device::open(root, address, claim)?);
    let name = address.to_string();
    let reset: Option<Arc<dyn FunctionReset>> = match sys::can_reset(device.file()) {
        Ok(true) => Some(device.clone()),
        _ => None,
    };
    let bars = Bars::of(Arc::new(Windows(device.clone())), &name)?;
    let mapper = VfioMapper::new(device, &name)?;
    Ok(Port { regs: Arc::new(bars), mapper: Arc::new(mapper), reset, name, simulated: false })
}

/// A device that this process drives. The last handle on it gives it back.
struct Device {
    // The device is closed before its group, its group before its IOMMU, and all of that before it is given back.
    file: Option<File>,
    group: Option<File>,
    container: Option<File>,
    claim: Option<Claim>,
    address: Address,
}

impl Device {
    fn open(root: &Root, address: Address, claim: Claim) -> Result<Self> {
        let number = refusal::group(root, address)?;
        let name = format!("/dev/vfio/{number}");
        let at = |path: &str| root.folder().unwrap_or(Path::new("/")).join(path.trim_start_matches('/'));
        let open = |path: &str| File::options().read(true).write(true).open(at(path));
        let container = open("/dev/vfio/vfio").map_err(|e| refusal::container(address, &e))?;
        let failed = |call: &'static str| move |e: io::Error| Error::call(call, e);
        if sys::api_version(&container).map_err(failed("VFIO_GET_API_VERSION"))? != sys::API_VERSION
            || !sys::has_type1_v2(&container).map_err(failed("VFIO_CHECK_EXTENSION"))?
        {
            return Err(refusal::no_type1(address));
        }
        let group = open(&name).map_err(|e| refusal::open_group(root, address, &name, &e))?;
        if !sys::is_viable(&group).map_err(failed("VFIO_GROUP_GET_STATUS"))? {
            return Err(refusal::not_viable(root, address, number));
        }
        sys::set_container(&group, &container).map_err(failed("VFIO_GROUP_SET_CONTAINER"))?;
        sys::set_iommu(&container).map_err(|e| refusal::set_iommu(address, &e))?;
        let text = CString::new(address.to_string()).unwrap_or_default();
        let file: File = sys::device(&group, &text).map_err(failed("VFIO_GROUP_GET_DEVICE_FD"))?.into();
        let (file, group, container) = (Some(file), Some(group), Some(container));
        let device = Self { file, group, container, claim: Some(claim), address };
        device.decode_and_master().map_err(failed("switching the device's memory and bus mastering on"))?;
        Ok(device)
    }

    fn file(&self) -> &File {
        // Taken only by drop.
        self.file.as_ref().unwrap_or_else(|| unreachable!("the device is open while it lives"))
    }

    fn container(&self) -> &File {
        self.container.as_ref().unwrap_or_else(|| unreachable!("the container is open while it lives"))
    }

    fn decode_and_master(&self) -> io::Result<()> {
        let config = sys::region(self.file(), sys::CONFIG_REGION)?;
        let mut command = [0; 2];
        self.file().read_exact_at(&mut command, config.offset + COMMAND)?;
        let command = u16::from_le_bytes(command) | DECODE_AND_MASTER;
        self.file().write_all_at(&command.to_le_bytes(), config.offset + COMMAND)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Closing the device ends its bus mastering and resets it. Only then may it get another driver.
        self.file = None;
        self.group = None;
        self.container = None;
        if let Some(claim) = self.claim.take() {
            // The guardian has said on stderr what it could not do.
            let _ = claim.give_back();
        }
    }
}

impl FunctionReset for Device {
    fn function_reset(&self) -> onehop_os::Result<()> {
        let failed = |source| onehop_os::Error::System {
            call: format!("VFIO_DEVICE_RESET of {}", self.address),
            source,
            hint: "; `onehop drive recover` takes it off the bus and looks for it again",
        };
        sys::reset(self.file()).and_then(|()| self.decode_and_master()).map_err(failed)
    }
}

/// The device's BARs, through its file.
struct Windows(Arc<Device>);

impl crate::bars::Source for Windows {
    fn bytes(&self, bar: u8) -> Option<u64> {
        let region = sys::region(self.0.file(), bar.into()).ok()?;
        Some(region.size).filter(|size| *size > 0)
    }

    fn map(&self, bar: u8, offset: u64, bytes: u64) -> Result<HostMem> {
        let what = format!("VFIO_DEVICE_GET_REGION_INFO of BAR {bar}");
        let region = sys::region(self.0.file(), bar.into()).map_err(|e| Error::call(what, e))?;
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= region.size);
        if !region.can_map || !fits {
            let why = format!("BAR {bar} of {} cannot be mapped there", self.0.address);
            return Err(Error::call("mmap of a BAR", io::Error::other(why)));
        }
        let mem = HostMem::of_device(self.0.file(), region.offset + offset, bytes as usize)
            .map_err(|e| Error::call(format!("mapping BAR {bar}"), io::Error::other(e)))?;
        // What is mapped keeps the device open, and the device can only be given back when it is closed.
        let hold = self.0.clone();
        Ok(mem.on_last_drop(move || drop(hold)))
    }
}
