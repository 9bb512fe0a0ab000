//! A GPU for tests that does not answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use onehop_gpu::{Copier, Doorbells, Emulated, Gpu, KernelJob, Launch, Mark, Place, Region, Rows, Running};
use onehop_os::{HostMem, Registers};

/// A GPU that makes its copies late. Meanwhile it does not report their state, or reports that they go on.
pub(super) struct SilentGpu {
    pub(super) gpu: Emulated,
    pub(super) has_ended: Arc<AtomicBool>,
    pub(super) goes_on: bool,
}

impl Gpu for SilentGpu {
    fn name(&self) -> &str {
        "silent"
    }
    fn simulated(&self) -> bool {
        false
    }
    fn alloc(&self, place: Place, bytes: usize) -> onehop_gpu::Result<Region> {
        self.gpu.alloc(place, bytes)
    }
    fn adopt(&self, place: Place, mem: HostMem) -> onehop_gpu::Result<Region> {
        self.gpu.adopt(place, mem)
    }
    fn copier(&self, from: &Region, to: &Region) -> onehop_gpu::Result<Box<dyn Copier>> {
        let (copier, has_ended) = (self.gpu.copier(from, to)?, self.has_ended.clone());
        Ok(Box::new(SilentCopier { copier, has_ended, goes_on: self.goes_on, begun: Vec::new() }))
    }
    fn map_registers(&self, regs: Arc<dyn Registers>) -> onehop_gpu::Result<Doorbells> {
        self.gpu.map_registers(regs)
    }
    fn prepare(&self, launch: &Launch) -> onehop_gpu::Result<()> {
        self.gpu.prepare(launch)
    }
    fn launch(&self, launch: &Launch, job: &KernelJob) -> onehop_gpu::Result<Box<dyn Running>> {
        self.gpu.launch(launch, job)
    }
}

struct SilentCopier {
    copier: Box<dyn Copier>,
    has_ended: Arc<AtomicBool>,
    goes_on: bool,
    begun: Vec<Rows>,
}

impl SilentCopier {
    fn poll(&mut self) -> onehop_gpu::Result<()> {
        if !self.has_ended.load(Ordering::Acquire) {
            let cause = Box::new(onehop_gpu::Error::Launch("the driver does not say why".into()));
            return Err(onehop_gpu::Error::OutcomeUnknown { cause });
        }
        self.copier.copy_all(&std::mem::take(&mut self.begun))
    }
}

impl Copier for SilentCopier {
    fn copy(&mut self, rows: &Rows) -> onehop_gpu::Result<()> {
        self.begun.push(*rows);
        Ok(())
    }
    fn mark(&mut self) -> onehop_gpu::Result<Mark> {
        if !self.goes_on {
            self.poll()?;
        }
        self.copier.mark()
    }
    fn is_over(&mut self, mark: Mark) -> onehop_gpu::Result<bool> {
        if self.goes_on && !self.has_ended.load(Ordering::Acquire) {
            return Ok(false);
        }
        self.poll()?;
        self.copier.is_over(mark)
    }
    fn wait(&mut self, _: Mark) -> onehop_gpu::Result<()> {
        self.poll()
    }
}
