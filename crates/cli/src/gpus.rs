//! From what people write after `-g` to a GPU.

use std::sync::Arc;

use onehop_gpu::cuda::Cuda;
use onehop_gpu::{Emulated, Error, Gpu};

use crate::error::{CliError, Result};
use crate::units;

/// Which GPU.
#[derive(Clone, clap::Args)]
pub(crate) struct GpuArg {
    /// The GPU: a CUDA ordinal such as 0, a PCI address, or emu, the emulated one [default: 0 where CUDA works, else emu]
    #[arg(short = 'g', long = "gpu", value_name = "GPU")]
    pub gpu: Option<String>,
}

/// A GPU, and why it is this one.
pub(crate) struct Chosen {
    pub gpu: Arc<dyn Gpu>,
    pub why: String,
}

/// The GPU that a description names, or the best that there is.
pub(crate) fn choose(arg: &GpuArg) -> Result<Chosen> {
    match arg.gpu.as_deref() {
        None => Ok(open("0").map_or_else(
            |error| emulated(format!("the emulated GPU (CPU threads): {error}")),
            |gpu| cuda(gpu, "the first that CUDA shows"),
        )),
        Some("emu") => Ok(emulated("the emulated GPU (CPU threads), as asked for".into())),
        Some(name) if is_number(name) || units::is_pci_address(name) => match open(name) {
            Ok(gpu) => Ok(cuda(gpu, "as asked for")),
            Err(error) => {
                let fix = "Use the emulated GPU: -g emu";
                Err(CliError::not_possible(format!("using GPU {name}"), error.to_string(), fix))
            }
        },
        Some(name) => Err(CliError::Usage(format!(
            "'{}' is no GPU: it is emu, a CUDA ordinal such as 0, or a PCI address",
            name.escape_debug()
        ))),
    }
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

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}
