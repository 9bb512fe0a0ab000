//! Drives and GPUs by the names that the command line has for them.

use std::sync::Arc;

use onehop_drive::{Io, Options};
use onehop_gpu::Emulated;
use onehop_gpu::cuda::Cuda;

use crate::error::{Error, Result};

/// A drive that is open.
pub struct Drive(pub(crate) onehop_drive::Drive);

impl Drive {
    pub(crate) fn open(name: &str, writable: bool) -> Result<Self> {
        let port = if let Some(rest) = name.strip_prefix("sim:") {
            onehop_sim::open(rest)?.port()
        } else if let Some(rest) = name.strip_prefix("qtest:") {
            onehop_qtest::open(rest)?
        } else {
            let name = name.escape_debug();
            return Err(Error::Argument(format!(
                "'{name}' is no drive: it is sim:mem:64M or sim:IMAGE (a simulated one), or qtest:SOCKET,MEMORY-FILE (QEMU's)"
            )));
        };
        Ok(Self(onehop_drive::Drive::open(port, Options { writable, ..Options::default() })?))
    }

    pub(crate) fn flush(&self, nsid: u32) -> Result<()> {
        let ns = self.0.namespace(nsid)?;
        self.0.queue()?.run(ns, &Io::flush())?;
        Ok(())
    }
}

/// A GPU that is open.
pub struct Gpu {
    pub(crate) gpu: Arc<dyn onehop_gpu::Gpu>,
    /// The same, where it is the emulated one.
    pub(crate) emulated: Option<Emulated>,
}

impl Gpu {
    pub(crate) fn open(name: &str) -> Result<Self> {
        if name == "emu" {
            let emulated = Emulated::new();
            return Ok(Self { gpu: Arc::new(emulated.clone()), emulated: Some(emulated) });
        }
        Ok(Self { gpu: Arc::new(Cuda::load()?.open(name)?), emulated: None })
    }
}
