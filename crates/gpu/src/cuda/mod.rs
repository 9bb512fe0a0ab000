//! NVIDIA's GPUs through the CUDA driver.
//!
//! CUDA is needed neither to build this nor to start a program that uses it: [`Cuda::load`] looks for the driver when
//! it is called, and otherwise returns an error with the reason.
//!
//! ```no_run
//! use onehop_gpu::{Gpu, Place, cuda::Cuda};
//! # fn main() -> onehop_gpu::Result<()> {
//! let cuda = Cuda::load()?;
//! for device in cuda.devices()? {
//!     println!("{} {} at {}", device.ordinal, device.name, device.pci);
//! }
//! let gpu = cuda.open("0")?;
//! let region = gpu.alloc(Place::Vram, 1 << 20)?;
//! region.write(0, b"bytes")?;
//! # Ok(())
//! # }
//! ```

mod arrays;
mod blocks;
mod capabilities;
mod code;
mod context;
mod copier;
mod cufile;
mod dmabuf;
mod driver;
mod gpu;
mod host;
mod ipc;
mod kernels;
mod launch;
mod live;
mod marks;
mod memory;
mod module;
mod nvml;
mod peek;
mod pointers;
mod process_end;
mod ranges;
mod reclaim;
mod registers;
mod resident;
mod rig;
mod stream;
mod stream_work;
mod surroundings;

pub use capabilities::{Capabilities, Consumer, Need, Visibility, WritesOrdering};
pub use code::{Code, Started};
pub use dmabuf::{GpuDmaBuf, Span};
pub use gpu::CudaGpu;
pub use ipc::{Exported, Ticket};
pub use memory::DeviceKind;
pub use module::{Arg, Shape};
pub use nvml::{GpuHealth, Nvml};
pub use pointers::{Pointer, StreamState};
pub use rig::{Rig, RigCode};
pub use stream_work::StreamWork;
pub use surroundings::register_gap;

use std::ffi::c_char;
use std::sync::Arc;

use context::Context;
pub(crate) use driver::is_lost;
use driver::{Driver, Failure};

use crate::{Error, Result};

/// The CUDA driver of this machine.
#[derive(Clone)]
pub struct Cuda(Arc<Driver>);

/// A GPU as the driver reports it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// Its ordinal in this process.
    pub ordinal: u32,
    /// Its product name.
    pub name: String,
    /// Its PCI address: `0000:1b:00.0`.
    pub pci: String,
    /// Its unique ID.
    pub uuid: [u8; 16],
    /// Bytes of its memory.
    pub memory: u64,
    /// Its capabilities, including compute capability and the driver's CUDA version.
    pub can: Capabilities,
    /// The version of the kernel driver, such as 580.159.04, if known.
    pub kernel_driver: Option<String>,
}

impl Cuda {
    /// Finds and starts the driver.
    ///
    /// # Errors
    /// When there is no working driver; the error says why.
    pub fn load() -> Result<Self> {
        Driver::load().map(Self)
    }

    /// The CUDA version of the driver: 1000 × major + 10 × minor.
    #[must_use]
    pub fn version(&self) -> i32 {
        self.0.version()
    }

    /// The GPUs of this machine that this process may use.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn devices(&self) -> Result<Vec<Device>> {
        let what = "counting GPUs";
        let mut count = 0;
        let counted = self.0.relaxed().and_then(|calls| {
            // SAFETY: `count` lives across the call.
            unsafe { calls.device_count(&mut count) }
        });
        counted.map_err(|failure| self.0.error(what, failure))?;
        (0..count).map(|ordinal| self.device(ordinal).map(|(_, device)| device)).collect()
    }

    /// A GPU by its ordinal (`0`) or its PCI address (`0000:1b:00.0`, `1b:00.0`).
    ///
    /// # Errors
    /// When there is no GPU of that name, or it cannot be opened.
    pub fn open(&self, name: &str) -> Result<CudaGpu> {
        self.open_device(name, None)
    }

    /// The same, with other device code than this build's: PTX with kernels of the same names and parameters.
    ///
    /// # Errors
    /// As for [`Cuda::open`]. The code is compiled at the first launch.
    ///
    /// # Safety
    /// The kernels only write memory whose addresses they are given.
    pub unsafe fn open_with_code(&self, name: &str, ptx: &str) -> Result<CudaGpu> {
        self.open_device(name, Some(ptx.to_owned()))
    }

    fn open_device(&self, name: &str, code: Option<String>) -> Result<CudaGpu> {
        let devices = self.devices()?;
        let wanted = GpuSelector::parse(name);
        let found = devices.iter().find(|device| match &wanted {
            Some(GpuSelector::Ordinal(ordinal)) => device.ordinal == *ordinal,
            Some(GpuSelector::Pci(pci)) => device.pci == *pci,
            None => false,
        });
        let Some(device) = found else {
            let list: Vec<_> =
                devices.iter().map(|d| format!("{} ({} at {})", d.ordinal, d.name, d.pci)).collect();
            let have = if list.is_empty() {
                "CUDA shows none; CUDA_VISIBLE_DEVICES or the container may hide them".into()
            } else {
                format!("there are {}", list.join(", "))
            };
            return Err(Error::NoSuchGpu { name: name.escape_debug().to_string(), have });
        };
        let (handle, device) = self.device(device.ordinal as i32)?;
        CudaGpu::new(Context::open(&self.0, handle)?, device, code)
    }

    fn device(&self, ordinal: i32) -> Result<(i32, Device)> {
        let driver = &self.0;
        let error = |failure: Failure| driver.error(format!("asking about GPU {ordinal}"), failure);
        let calls = driver.relaxed().map_err(error)?;
        let (mut handle, mut memory, mut uuid) = (0, 0, [0; 16]);
        // SAFETY: `handle` lives across the call.
        unsafe { calls.device_get(&mut handle, ordinal) }.map_err(error)?;
        // SAFETY: `memory` lives across the call, and the handle came from cuDeviceGet, as below.
        unsafe { calls.device_memory(&mut memory, handle) }.map_err(error)?;
        // SAFETY: a CUuuid is sixteen bytes, and `uuid` lives across the call.
        unsafe { calls.device_uuid(&mut uuid, handle) }.map_err(error)?;
        let name = text(|out, len| {
            // SAFETY: the buffer has the length that is said.
            unsafe { calls.device_name(out, len, handle) }
        });
        let pci = text(|out, len| {
            // SAFETY: the buffer has the length that is said.
            unsafe { calls.device_pci(out, len, handle) }
        });
        let pci = pci.map_err(error)?;
        let kernel_driver = std::fs::read_to_string("/sys/module/nvidia/version").ok();
        let device = Device {
            ordinal: ordinal as u32,
            name: name.map_err(error)?,
            pci: pci_address(&pci).unwrap_or(pci),
            uuid,
            memory: memory as u64,
            can: Capabilities::read(&calls, driver.version(), handle),
            kernel_driver: kernel_driver.map(|text| text.trim().to_owned()),
        };
        Ok((handle, device))
    }
}

/// A string that the driver writes into a buffer.
fn text(
    f: impl FnOnce(*mut c_char, i32) -> std::result::Result<(), Failure>,
) -> std::result::Result<String, Failure> {
    let mut buffer = [0u8; 256];
    f(buffer.as_mut_ptr().cast(), buffer.len() as i32 - 1)?;
    let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
    Ok(String::from_utf8_lossy(&buffer[..end]).into_owned())
}

/// The loader's message: libloading keeps it as its error's source.
fn loader_words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

enum GpuSelector {
    Ordinal(u32),
    Pci(String),
}

impl GpuSelector {
    fn parse(name: &str) -> Option<Self> {
        if name.bytes().all(|byte| byte.is_ascii_digit()) {
            return name.parse().ok().map(Self::Ordinal);
        }
        pci_address(name).map(Self::Pci)
    }
}

/// A PCI address as Linux writes it, from any spelling, with or without a domain.
fn pci_address(text: &str) -> Option<String> {
    let (rest, function) = text.rsplit_once('.')?;
    let mut parts = rest.rsplit(':');
    let (device, bus, domain) = (parts.next()?, parts.next()?, parts.next().unwrap_or("0"));
    let hex = |text: &str, most: u32| {
        let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        u32::from_str_radix(text, 16).ok().filter(|number| plain && *number <= most)
    };
    let domain = hex(domain, u32::MAX)?;
    let (bus, device, function) = (hex(bus, 0xff)?, hex(device, 0x1f)?, hex(function, 7)?);
    parts.next().is_none().then(|| format!("{domain:04x}:{bus:02x}:{device:02x}.{function}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_have_one_form() {
        for text in ["0000:1B:00.0", "00000000:1b:00.0", "1b:0.0", "0:1b:00.0"] {
            assert_eq!(pci_address(text).as_deref(), Some("0000:1b:00.0"), "{text}");
        }
        for text in ["", "1b", "1b:00", "x:00.0", "1b:20.0", "1b:00.8", "1:2:3:4.0", "+1b:00.0", ":00.0"] {
            assert_eq!(pci_address(text), None, "{text}");
        }
    }
}
