//! From what people write after `-g` to a GPU.

use std::sync::Arc;

use onehop_gpu::{Emulated, Gpu};

use crate::error::{CliError, Result};
use crate::units;

/// Which GPU.
#[derive(clap::Args)]
pub(crate) struct GpuArg {
    /// The GPU: emu is the emulated one; CUDA ordinals and PCI addresses are for builds with CUDA
    #[arg(short = 'g', long = "gpu", value_name = "GPU")]
    pub gpu: Option<String>,
}

/// A GPU, and why it is this one.
pub(crate) struct Chosen {
    pub gpu: Arc<dyn Gpu>,
    pub why: &'static str,
}

/// The GPU that a description names, or the best that there is.
pub(crate) fn choose(arg: &GpuArg) -> Result<Chosen> {
    let emulated = |why| Ok(Chosen { gpu: Arc::new(Emulated::new()), why });
    match arg.gpu.as_deref() {
        None => emulated("the emulated GPU (CPU threads): this build has no CUDA yet"),
        Some("emu") => emulated("the emulated GPU (CPU threads), as asked for"),
        Some(name) if is_number(name) || units::is_pci_address(name) => Err(CliError::not_possible(
            format!("using GPU {name}"),
            "CUDA is not in this build yet",
            "Use the emulated GPU: -g emu",
        )),
        Some(name) => Err(CliError::Usage(format!(
            "'{}' is no GPU: it is emu, a CUDA ordinal such as 0, or a PCI address",
            name.escape_debug()
        ))),
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}
