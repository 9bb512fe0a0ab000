//! Resolves the value of `-g` to GPUs.

use std::collections::HashSet;
use std::sync::Arc;

use onehop_gpu::cuda::Cuda;
use onehop_gpu::{Emulated, Error};
use onehop_os::Udmabuf;
use onehop_pci::Root;
use onehop_transfer::controllers::is_pci_address;

use crate::error::{CliError, Result};
use crate::report;
use crate::units;

pub(crate) use onehop_transfer::Chosen;

/// Maximum size of a udmabuf.
const UDMABUF_BYTES: usize = 64 << 20;

/// The name for all CUDA GPUs.
const ALL: &str = "all";

/// The option `-g`.
#[derive(Clone, clap::Args)]
pub(crate) struct GpuArg {
    /// The GPU: a CUDA ordinal such as 0, a PCI address, or emu (emulated). emu:0000:00:02.0 is an emulated GPU whose
    /// memory is the largest BAR of that device, emu:udmabuf one whose memory the kernel exports as a dma-buf [default:
    /// 0; if CUDA does not work, emu with a warning for drives and boards, and an error for local files]. `onehop load`
    /// takes several: 0,1 or all
    #[arg(short = 'g', long = "gpu", value_name = "GPU")]
    pub gpu: Option<String>,
}

impl GpuArg {
    /// Whether all CUDA GPUs are requested.
    pub(crate) fn is_all(&self) -> bool {
        self.gpu.as_deref() == Some(ALL)
    }

    /// The named GPUs, separated by commas; one `None` for the default.
    pub(crate) fn names(&self) -> Vec<Option<String>> {
        match self.gpu.as_deref() {
            None => vec![None],
            Some(ALL) => match count() {
                Ok(count) if count > 0 => (0..count).map(|ordinal| Some(ordinal.to_string())).collect(),
                _ => vec![Some(ALL.into())],
            },
            Some(names) => names.split(',').map(|name| Some(name.into())).collect(),
        }
    }
}

/// The number of CUDA GPUs.
fn count() -> std::result::Result<usize, Error> {
    Ok(Cuda::load()?.devices()?.len())
}

/// What to do if no GPU is named and CUDA does not work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fallback {
    /// Use the emulated GPU.
    Emulated,
    /// Use the emulated GPU, with a warning that the bytes do not reach a real one.
    Warned,
    /// Fail: local files are loaded for a real GPU.
    Refused,
}

/// The named GPUs, or the default one. No CUDA GPU may be named twice.
pub(crate) fn choose_all(arg: &GpuArg) -> Result<Vec<Chosen>> {
    choose_several(arg, Fallback::Warned)
}

/// Like [`choose_all`], for local files: an emulated GPU is used only if it is named.
pub(crate) fn require_all(arg: &GpuArg) -> Result<Vec<Chosen>> {
    choose_several(arg, Fallback::Refused)
}

fn choose_several(arg: &GpuArg, fallback: Fallback) -> Result<Vec<Chosen>> {
    let names = arg.names();
    if let [name] = &names[..] {
        return Ok(vec![choose_named(name.as_deref(), fallback)?]);
    }
    let is_known = |name: &&String| *name == "emu" || is_number(name) || is_pci_address(name);
    if let Some(name) = names.iter().flatten().find(|name| !is_known(name)) {
        return Err(unknown(name));
    }
    // One driver for all GPUs, so that memory registered for one is registered for all.
    let cuda = Cuda::load();
    let (mut chosen, mut seen) = (Vec::new(), HashSet::new());
    for name in names.into_iter().flatten() {
        if name == "emu" {
            chosen.push(emulated("an emulated GPU (CPU threads), as requested".into()));
            continue;
        }
        let gpu = match &cuda {
            Ok(cuda) => cuda.open(&name).map_err(|error| unusable(&name, &error))?,
            Err(error) => return Err(unusable(&name, error)),
        };
        if !seen.insert(gpu.device().pci.clone()) {
            return Err(CliError::Usage(format!("-g: GPU {name} is named twice")));
        }
        chosen.push(self::cuda(gpu, "as requested"));
    }
    Ok(chosen)
}

/// The named GPU, or the default one.
pub(crate) fn choose(arg: &GpuArg) -> Result<Chosen> {
    choose_or(arg, Fallback::Warned)
}

/// Like [`choose`], for a local file: an emulated GPU is used only if it is named.
pub(crate) fn require(arg: &GpuArg) -> Result<Chosen> {
    choose_or(arg, Fallback::Refused)
}

/// The named GPU, or the first CUDA GPU, or the fallback.
pub(crate) fn choose_or(arg: &GpuArg, fallback: Fallback) -> Result<Chosen> {
    choose_named(arg.gpu.as_deref(), fallback)
}

fn choose_named(name: Option<&str>, fallback: Fallback) -> Result<Chosen> {
    match name {
        None => match open("0") {
            Ok(gpu) => Ok(cuda(gpu, "the first that CUDA shows")),
            Err(error) if fallback == Fallback::Refused => Err(unusable("0", &error)),
            Err(error) => {
                if fallback == Fallback::Warned {
                    report::warn(&format!("using the emulated GPU (-g emu): {error}"));
                }
                Ok(emulated(format!("the emulated GPU (CPU threads): {error}")))
            }
        },
        Some(ALL) => match count() {
            Ok(0) => {
                Err(unusable(ALL, &Error::NoSuchGpu { name: ALL.into(), have: "CUDA shows none".into() }))
            }
            Ok(_) => Err(CliError::Usage("-g all: this command takes one GPU".into())),
            Err(error) => Err(unusable(ALL, &error)),
        },
        Some("emu") => Ok(emulated("the emulated GPU (CPU threads), as requested".into())),
        Some("emu:udmabuf") => emulated_exported(),
        Some(name) if name.strip_prefix("emu:").is_some_and(is_pci_address) => emulated_on(&name[4..]),
        Some(name) if is_number(name) || is_pci_address(name) => match open(name) {
            Ok(gpu) => Ok(cuda(gpu, "as requested")),
            Err(error) => Err(unusable(name, &error)),
        },
        Some(name) => Err(unknown(name)),
    }
}

fn unusable(name: &str, error: &Error) -> CliError {
    CliError::not_possible(format!("using GPU {name}"), error.to_string(), "Use the emulated GPU: -g emu")
}

fn unknown(name: &str) -> CliError {
    if let Some(number) = name.strip_prefix("cuda:").filter(|number| is_number(number)) {
        return CliError::Usage(format!("'{name}' is not a GPU: -g takes the number alone, -g {number}"));
    }
    CliError::Usage(format!(
        "'{}' is not a GPU: -g takes emu, emu:ADDRESS (with the memory of that PCI device), emu:udmabuf, a CUDA ordinal such as 0, a PCI \
         address, or all (load and bench load only)",
        name.escape_debug()
    ))
}

/// The named CUDA GPU, or the first.
pub(crate) fn cuda_only(arg: &GpuArg) -> Result<onehop_gpu::cuda::CudaGpu> {
    let name = arg.gpu.as_deref().unwrap_or("0");
    open(name).map_err(|error| {
        CliError::not_possible(
            format!("measuring GPU {name}"),
            error.to_string(),
            "Measure the CPU's side: --side cpu",
        )
    })
}

fn open(name: &str) -> std::result::Result<onehop_gpu::cuda::CudaGpu, Error> {
    Cuda::load()?.open(name)
}

fn cuda(gpu: onehop_gpu::cuda::CudaGpu, why: &str) -> Chosen {
    let device = gpu.device();
    let driver = device.kernel_driver.as_deref().map_or(String::new(), |v| format!("driver {v}, "));
    let version = device.can.driver;
    let why = format!("{why} ({driver}CUDA {}.{})", version / 1000, version % 1000 / 10);
    Chosen { gpu: Arc::new(gpu), why }
}

fn emulated(why: String) -> Chosen {
    Chosen { gpu: Arc::new(Emulated::new()), why }
}

/// An emulated GPU whose memory is a device's BAR, which drives reach over the bus like a real GPU's.
fn emulated_on(device: &str) -> Result<Chosen> {
    let memory = onehop_pci::bar_memory(&Root::here(), device.parse()?, None).map_err(|error| {
        let fix = "Name a device with a memory BAR, or use the emulated GPU with host memory: -g emu";
        CliError::not_possible(format!("using memory of {device}"), error.to_string(), fix)
    })?;
    let why = format!(
        "the emulated GPU (CPU threads) with {} of {device} as its memory",
        units::bytes(memory.len() as u64)
    );
    Ok(Chosen { gpu: Arc::new(Emulated::with_vram(memory)), why })
}

/// An emulated GPU whose memory is a dma-buf, which drivers import like a real GPU's.
fn emulated_exported() -> Result<Chosen> {
    let memory = Udmabuf::new(UDMABUF_BYTES).map_err(|error| {
        let fix = "Load udmabuf, run as root, or use the emulated GPU with host memory: -g emu";
        CliError::not_possible("exporting memory as a dma-buf", error.to_string(), fix)
    })?;
    let why = format!(
        "the emulated GPU (CPU threads) with {} of memory that udmabuf exports",
        units::bytes(UDMABUF_BYTES as u64)
    );
    Ok(Chosen { gpu: Arc::new(Emulated::with_exported(memory)), why })
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}
