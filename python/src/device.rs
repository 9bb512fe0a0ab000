//! From what people write for a device to a GPU.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use onehop_gpu::cuda::{Cuda, CudaGpu};
use onehop_gpu::{Emulated, Gpu};
use onehop_load::engine::RingCache;

use crate::dlpack;
use crate::error::{Error, Result};

/// What was asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum DeviceSpec {
    /// GPU 0 where CUDA works, else the CPU's memory.
    Any,
    /// The CPU's memory: the emulated GPU's.
    Cpu,
    /// A CUDA ordinal, or a PCI address.
    Cuda(String),
}

impl DeviceSpec {
    pub(crate) fn parse(text: Option<&str>) -> Result<Self> {
        let Some(text) = text else { return Ok(Self::Any) };
        let is_ordinal = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        match text {
            "cpu" | "cpu:0" | "emu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda("0".into())),
            _ if is_ordinal(text) || text.contains('.') => Ok(Self::Cuda(text.into())),
            _ => match text.strip_prefix("cuda:") {
                Some(ordinal) if is_ordinal(ordinal) => Ok(Self::Cuda(ordinal.into())),
                _ => Err(Error::Asked(format!(
                    "unknown device '{}': expected cuda:0 or 0, a PCI address, or cpu",
                    text.escape_debug()
                ))),
            },
        }
    }

    /// Where loads to it leave their ring for the next one.
    pub(crate) fn ring_cache(&self) -> Arc<RingCache> {
        static SHELVES: Mutex<BTreeMap<String, Arc<RingCache>>> = Mutex::new(BTreeMap::new());
        let name = match self {
            Self::Cpu => "cpu",
            Self::Any => "0",
            Self::Cuda(name) => name,
        };
        // A process that was forked meanwhile may find the lock taken for ever.
        let Ok(mut shelves) = SHELVES.try_lock() else { return Arc::default() };
        shelves.entry(name.into()).or_default().clone()
    }

    /// Opens it. CUDA takes a fifth of a second to start, unless somebody in this process has started it.
    pub(crate) fn open(&self) -> Result<GpuDevice> {
        match self {
            Self::Any => cuda("0", "the first that CUDA shows")
                .or_else(|error| Ok(cpu(format!("no GPU, the memory of the CPU: {error}")))),
            Self::Cpu => Ok(cpu("the memory of the CPU, as requested".into())),
            Self::Cuda(name) => Ok(cuda(name, "as requested")?),
        }
    }
}

/// A GPU that is open: for CUDA its primary context, the one that torch, CuPy and JAX work in too.
pub(crate) struct GpuDevice {
    pub gpu: Arc<dyn Gpu>,
    /// The same, if it is one of CUDA's.
    pub cuda: Option<CudaGpu>,
    pub why: String,
    pub dlpack: dlpack::DlDevice,
}

fn cuda(name: &str, why: &str) -> onehop_gpu::Result<GpuDevice> {
    let gpu = Cuda::load()?.open(name)?;
    let ordinal = gpu.device().ordinal as i32;
    let cuda = Some(gpu.clone());
    let (why, dlpack) = (why.into(), dlpack::DlDevice::cuda(ordinal));
    Ok(GpuDevice { gpu: Arc::new(gpu), cuda, why, dlpack })
}

fn cpu(why: String) -> GpuDevice {
    emulated(Emulated::private(), why)
}

/// The memory of the CPU.
pub(crate) fn emulated(gpu: Emulated, why: String) -> GpuDevice {
    GpuDevice { gpu: Arc::new(gpu), cuda: None, why, dlpack: dlpack::DlDevice::CPU }
}
