//! From the value of `-g` to a GPU.

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

/// What udmabuf exports at most at once.
const EXPORTED: usize = 64 << 20;

/// The name of all GPUs of CUDA.
const ALL: &str = "all";

/// Which GPU.
#[derive(Clone, clap::Args)]
pub(crate) struct GpuArg {
    /// The GPU: a CUDA ordinal such as 0, a PCI address, or emu, the emulated one; emu:0000:00:02.0 is an emulated one
    /// whose memory is the largest BAR of that device, emu:udmabuf one whose memory the kernel exports as a dma-buf [default: 0; where
    /// CUDA does not work, drives and boards get emu, with a warning, and files of this machine need -g emu].
    /// `onehop load` takes several: 0,1 or all
    #[arg(short = 'g', long = "gpu", value_name = "GPU")]
    pub gpu: Option<String>,
}

impl GpuArg {
    /// Whether all GPUs of CUDA are meant.
    pub(crate) fn is_all(&self) -> bool {
        self.gpu.as_deref() == Some(ALL)
    }

    /// The GPUs that are named, of which there may be several with commas between them; none where the best is wanted.
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

/// How many GPUs CUDA has.
fn count() -> std::result::Result<usize, Error> {
    Ok(Cuda::load()?.devices()?.len())
}

/// What happens if no GPU is named and CUDA does not work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fallback {
    /// The emulated GPU, which the output names.
    Emulated,
    /// The same with a warning: bytes do not arrive where people expect them.
    Warned,
    /// An error: files are loaded for a real GPU.
    Refused,
}

/// The GPUs that a description names, or the best one. No CUDA GPU may be named twice.
pub(crate) fn choose_all(arg: &GpuArg) -> Result<Vec<Chosen>> {
    choose_several(arg, Fallback::Warned)
}

/// The same for files of this machine, which are only loaded into an emulated GPU if it is named.
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
    // One driver for all: what it registers for one GPU is registered for the others.
    let cuda = Cuda::load();
    let (mut chosen, mut seen) = (Vec::new(), HashSet::new());
    for name in names.into_iter().flatten() {
        if name == "emu" {
            chosen.push(emulated("an emulated GPU (CPU threads), as requested".into()));
            continue;
        }
        let gpu = match &cuda {
            Ok(cuda) => cuda.open(&name).map_err(|error| refused(&name, &error))?,
            Err(error) => return Err(refused(&name, error)),
        };
        if !seen.insert(gpu.device().pci.clone()) {
            return Err(CliError::Usage(format!("-g: GPU {name} is named twice")));
        }
        chosen.push(self::cuda(gpu, "as requested"));
    }
    Ok(chosen)
}

/// The GPU that a description names, or the best one.
pub(crate) fn choose(arg: &GpuArg) -> Result<Chosen> {
    choose_or(arg, Fallback::Warned)
}

/// The same for a file of this machine, which is only loaded into an emulated GPU if it is named.
pub(crate) fn require(arg: &GpuArg) -> Result<Chosen> {
    choose_or(arg, Fallback::Refused)
}

/// The GPU that a description names, or CUDA's first, or what `Fallback` says.
pub(crate) fn choose_or(arg: &GpuArg, fallback: Fallback) -> Result<Chosen> {
    choose_named(arg.gpu.as_deref(), fallback)
}

fn choose_named(name: Option<&str>, fallback: Fallback) -> Result<Chosen> {
    match name {
        None => match open("0") {
            Ok(gpu) => Ok(cuda(gpu, "the first that CUDA shows")),
            Err(error) if fallback == Fallback::Refused => Err(refused("0", &error)),
            Err(error) => {
                if fallback == Fallback::Warned {
                    report::warn(&format!("using the emulated GPU (-g emu): {error}"));
                }
                Ok(emulated(format!("the emulated GPU (CPU threads): {error}")))
            }
        },
        Some(ALL) => match count() {
            Ok(0) => {
                Err(refused(ALL, &Error::NoSuchGpu { name: ALL.into(), have: "CUDA shows none".into() }))
            }
            Ok(_) => Err(CliError::Usage("-g all: this command takes one GPU".into())),
            Err(error) => Err(refused(ALL, &error)),
        },
        Some("emu") => Ok(emulated("the emulated GPU (CPU threads), as requested".into())),
        Some("emu:udmabuf") => emulated_exported(),
        Some(name) if name.strip_prefix("emu:").is_some_and(is_pci_address) => emulated_on(&name[4..]),
        Some(name) if is_number(name) || is_pci_address(name) => match open(name) {
            Ok(gpu) => Ok(cuda(gpu, "as requested")),
            Err(error) => Err(refused(name, &error)),
        },
        Some(name) => Err(unknown(name)),
    }
}

fn refused(name: &str, error: &Error) -> CliError {
    CliError::not_possible(format!("using GPU {name}"), error.to_string(), "Use the emulated GPU: -g emu")
}

fn unknown(name: &str) -> CliError {
    if let Some(number) = name.strip_prefix("cuda:").filter(|number| is_number(number)) {
        return CliError::Usage(format!("'{name}' is not a GPU: -g takes the number alone, -g {number}"));
    }
    CliError::Usage(format!(
        "'{}' is not a GPU: -g takes emu, emu:ADDRESS (with the memory of that PCI device), emu:udmabuf, a CUDA ordinal such as 0, a PCI \
         address, or for load and bench load all",
        name.escape_debug()
    ))
}

/// A GPU that CUDA drives: the one that was named, or the first.
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

/// An emulated GPU whose memory is a device's, which a drive has to reach over the bus as it has to reach a real GPU's.
fn emulated_on(device: &str) -> Result<Chosen> {
    let memory = onehop_pci::bar_memory(&Root::here(), device.parse()?, None).map_err(|error| {
        let fix =
            "Name a device with a BAR of memory, or use the emulated GPU with this machine's memory: -g emu";
        CliError::not_possible(format!("using memory of {device}"), error.to_string(), fix)
    })?;
    let why = format!(
        "the emulated GPU (CPU threads) with {} of {device} as its memory",
        units::bytes(memory.len() as u64)
    );
    Ok(Chosen { gpu: Arc::new(Emulated::with_vram(memory)), why })
}

/// An emulated GPU whose memory a driver imports as it imports a real GPU's.
fn emulated_exported() -> Result<Chosen> {
    let memory = Udmabuf::new(EXPORTED).map_err(|error| {
        let fix = "Load udmabuf, be root, or use the emulated GPU with this machine's memory: -g emu";
        CliError::not_possible("exporting memory as a dma-buf", error.to_string(), fix)
    })?;
    let why = format!(
        "the emulated GPU (CPU threads) with {} of memory that udmabuf exports",
        units::bytes(EXPORTED as u64)
    );
    Ok(Chosen { gpu: Arc::new(Emulated::with_exported(memory)), why })
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}
