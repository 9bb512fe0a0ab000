//! Parses and opens devices.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use onehop_gpu::cuda::{Cuda, CudaGpu};
use onehop_gpu::{Emulated, Gpu};
use onehop_load::engine::RingCache;

use crate::dlpack;
use crate::error::{Error, Result};

/// A requested device.
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
                _ => Err(Error::Request(format!(
                    "unknown device '{}': expected cuda:0 or 0, a PCI address, or cpu",
                    text.escape_debug()
                ))),
            },
        }
    }

    /// The cache where loads to it leave their ring.
    pub(crate) fn ring_cache(&self) -> Arc<RingCache> {
        static CACHES: Mutex<BTreeMap<String, Arc<RingCache>>> = Mutex::new(BTreeMap::new());
        let name = match self {
            Self::Cpu => "cpu",
            Self::Any => "0",
            Self::Cuda(name) => name,
        };
        // A process forked meanwhile may find the lock held forever.
        let Ok(mut caches) = CACHES.try_lock() else { return Arc::default() };
        caches.entry(name.into()).or_default().clone()
    }

    /// Opens it. CUDA takes a fifth of a second to start, unless this process has started it.
    pub(crate) fn open(&self) -> Result<GpuDevice> {
        match self {
            Self::Any => cuda("0", "the first that CUDA shows")
                .or_else(|error| Ok(cpu(format!("no GPU, the memory of the CPU: {error}")))),
            Self::Cpu => Ok(cpu("the memory of the CPU, as requested".into())),
            Self::Cuda(name) => Ok(cuda(name, "as requested")?),
        }
    }
}

/// An open GPU: for CUDA its primary context, which torch, CuPy and JAX also use.
pub(crate) struct GpuDevice {
    pub gpu: Arc<dyn Gpu>,
    /// The same, if it is a CUDA GPU.
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
