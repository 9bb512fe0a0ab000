//! User kernels.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::gpu::CudaGpu;
use super::kernels::KernelCall;
use super::launch::{RunningLaunch, Used};
use super::module::{Arg, Function, Module, Shape};
use crate::Result;

impl CudaGpu {
    /// Compiles `ptx`, runs its kernel `name` and waits for its end; an error if it takes longer than `limit`.
    ///
    /// # Errors
    /// When it cannot be compiled or found, fails, or does not end.
    ///
    /// # Safety
    /// `args` match the kernel's parameters, and it only writes memory whose addresses it was given, within its
    /// bounds; that memory stays until this returns, and after an error until [`Self::wait_for_all`] has succeeded.
    pub unsafe fn run_ptx(
        &self,
        ptx: &str,
        name: &str,
        shape: Shape,
        args: &[Arg],
        limit: Duration,
    ) -> Result<()> {
        let function = Module::load(&self.0.context, ptx)?.function(name)?;
        let call = KernelCall { function: &function, shape, args: args.to_vec() };
        // SAFETY: the caller vouches for the kernel and its arguments.
        unsafe { self.start(name, &call, limit, Used::default()) }?.wait()?;
        Ok(())
    }

    /// Compiles `ptx` for this GPU.
    ///
    /// # Errors
    /// When it does not compile; the error has the compiler's log.
    pub fn load_code(&self, ptx: &str) -> Result<Code> {
        let module = Module::load(&self.0.context, ptx)?;
        Ok(Code { module, found: Arc::default() })
    }

    /// Compiles kernels that call onehop's device functions, as `include/onehop/device.h` declares them, and links
    /// them.
    ///
    /// # Errors
    /// When it does not compile or link; the error has the log.
    pub fn link_code(&self, ptx: &str) -> Result<Code> {
        // Left alone, the functions use more than their callers would like.
        const REGISTERS: u32 = 128;
        let module = Module::link(&self.0.context, &[onehop_device::LIBRARY_PTX, ptx], REGISTERS)?;
        Ok(Code { module, found: Arc::default() })
    }

    /// Starts the kernel `name` without waiting for it.
    ///
    /// # Errors
    /// When there is no such kernel, or it cannot be started.
    ///
    /// # Safety
    /// `args` match the kernel's parameters. It ends within `limit`, and only writes memory whose addresses it was
    /// given; that memory stays until the result reports the end or is dropped.
    pub unsafe fn start_kernel(
        &self,
        code: &Code,
        name: &str,
        shape: Shape,
        args: &[Arg],
        limit: Duration,
    ) -> Result<Started> {
        let function = code.function(name)?;
        let call = KernelCall { function: &function, shape, args: args.to_vec() };
        // SAFETY: the caller vouches for the kernel and its arguments.
        unsafe { self.start(name, &call, limit, Used::default()) }.map(|work| Started(Box::new(work)))
    }
}

/// Compiled device code, and its kernels that were used.
#[derive(Clone)]
pub struct Code {
    module: Arc<Module>,
    found: Arc<Mutex<HashMap<String, Function>>>,
}

impl Code {
    /// Registers per thread of the kernel `name`. This also loads it into GPU memory: loading a kernel while another
    /// runs may have to wait for that one's end.
    ///
    /// # Errors
    /// When there is no such kernel.
    pub fn registers(&self, name: &str) -> Result<u32> {
        self.function(name)?.registers()
    }

    pub(super) fn function(&self, name: &str) -> Result<Function> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = found.get(name) {
            return Ok(function.clone());
        }
        let function = self.module.function(name)?;
        found.insert(name.to_owned(), function.clone());
        Ok(function)
    }
}

/// A running kernel. Dropping it waits for its end.
pub struct Started(pub(super) Box<RunningLaunch>);

impl Started {
    /// Whether it is over, successfully or not.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.is_over()
    }

    /// Waits for its end; returns its time by the GPU's clock.
    ///
    /// # Errors
    /// When it failed, or did not end in time.
    pub fn wait(mut self) -> Result<Duration> {
        self.0.wait()?;
        self.0.took()
    }
}
