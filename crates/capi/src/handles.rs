//! Drives and GPUs by their names on the command line.

use std::sync::Arc;

use onehop_drive::{Io, Options};
use onehop_gpu::Emulated;
use onehop_gpu::cuda::{Cuda, CudaGpu};
use onehop_os::StopSignal;

use crate::error::Result;

/// An open drive.
pub struct Drive {
    pub(crate) drive: onehop_drive::Drive,
    /// Warnings for its user.
    pub(crate) warnings: Vec<String>,
}

impl Drive {
    pub(crate) fn open(name: &str, writable: bool) -> Result<Self> {
        let found = onehop_transfer::controllers::find(name, &StopSignal::default())?;
        let drive = onehop_drive::Drive::open(found.backend, Options { writable, ..Options::default() })?;
        Ok(Self { drive, warnings: found.warnings })
    }

    pub(crate) fn flush(&self, nsid: u32) -> Result<()> {
        let ns = self.drive.namespace(nsid)?;
        self.drive.queue()?.run(ns, &Io::flush())?;
        Ok(())
    }
}

/// An open GPU.
pub struct Gpu {
    pub(crate) gpu: Arc<dyn onehop_gpu::Gpu>,
    /// Set if it is the emulated one.
    pub(crate) emulated: Option<Emulated>,
    /// Set if it is a CUDA GPU.
    pub(crate) cuda: Option<CudaGpu>,
}

impl Gpu {
    pub(crate) fn open(name: &str) -> Result<Self> {
        if name == "emu" {
            let emulated = Emulated::new();
            return Ok(Self { gpu: Arc::new(emulated.clone()), emulated: Some(emulated), cuda: None });
        }
        let cuda = Cuda::load()?.open(name)?;
        Ok(Self { gpu: Arc::new(cuda.clone()), emulated: None, cuda: Some(cuda) })
    }
}
