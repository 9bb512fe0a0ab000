//! Kernels that are not the queues': other people's code, and the rig of tests and benchmarks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use onehop_proto::GpuAddr;

use super::gpu::CudaGpu;
use super::kernels::Call;
use super::launch::{Used, Work};
use super::live::Touched;
use super::module::{Arg, Function, Module, Shape};
use super::stream::Stream;
use crate::{Gpu, Result};

impl CudaGpu {
    /// Compiles `ptx`, runs the kernel `name` of it and waits for its end; an error if it takes longer than `limit`.
    ///
    /// # Errors
    /// When it cannot be compiled or found, fails, or does not end.
    ///
    /// # Safety
    /// `args` are the kernel's, and it writes no memory but what it was given addresses of, within its bounds.
    pub unsafe fn run_ptx(
        &self,
        ptx: &str,
        name: &str,
        shape: Shape,
        args: &[Arg],
        limit: Duration,
    ) -> Result<()> {
        let function = Module::load(&self.0.context, ptx)?.function(name)?;
        let call = Call { function: &function, shape, args: args.to_vec() };
        // SAFETY: the caller vouches for the kernel and its arguments.
        unsafe { self.start(name, &call, limit, Used::default()) }?.wait()?;
        Ok(())
    }

    /// Compiles `ptx` for this GPU.
    ///
    /// # Errors
    /// What the compiler did not like.
    pub fn load_code(&self, ptx: &str) -> Result<Code> {
        let module = Module::load(&self.0.context, ptx)?;
        Ok(Code { module, found: Arc::default() })
    }

    /// Compiles kernels that call onehop's functions for kernels, as `include/onehop/device.h` declares them, and links them
    /// with these.
    ///
    /// # Errors
    /// What compiler or linker did not like.
    pub fn link_code(&self, ptx: &str) -> Result<Code> {
        // What the functions use if they are let is more than their callers would like.
        const REGISTERS: u32 = 128;
        let module = Module::link(&self.0.context, &[onehop_device::LIBRARY_PTX, ptx], REGISTERS)?;
        Ok(Code { module, found: Arc::default() })
    }

    /// Starts the kernel `name` and does not wait for it.
    ///
    /// # Errors
    /// When there is no such kernel, or it cannot be started.
    ///
    /// # Safety
    /// `args` are the kernel's; it ends within `limit` by itself, and writes no memory but what it was given addresses
    /// of; that memory stays until the result says that it is over, or is dropped.
    pub unsafe fn start_kernel(
        &self,
        code: &Code,
        name: &str,
        shape: Shape,
        args: &[Arg],
        limit: Duration,
    ) -> Result<Started> {
        let function = code.function(name)?;
        let call = Call { function: &function, shape, args: args.to_vec() };
        // SAFETY: the caller vouches for the kernel and its arguments.
        unsafe { self.start(name, &call, limit, Used::default()) }.map(|work| Started(Box::new(work)))
    }

    /// Compiles the controllers and experiments that tests and benchmarks run on a GPU.
    ///
    /// # Errors
    /// As for [`Self::load_code`].
    pub fn load_rig(&self) -> Result<Code> {
        let code = self.servant().load_code(onehop_device::RIG_PTX)?;
        // All of them now: a kernel that is loaded while another runs may have to wait for its end, and those that work
        // together would wait for each other.
        for rig in Rig::ALL {
            code.function(rig.kernel().0)?;
        }
        self.load_kernels()?;
        Ok(code)
    }

    /// The same, compiled once.
    pub(super) fn rig(&self) -> Result<Code> {
        let mut rig = self.0.rig.lock().unwrap_or_else(PoisonError::into_inner);
        match &*rig {
            Some(code) => Ok(code.clone()),
            None => Ok(rig.insert(self.load_rig()?).clone()),
        }
    }

    /// Starts one of them, a warp for each of `count` descriptors at `list`, which name memory of the caller's; that memory
    /// has to stay until the result says that it is over, or is dropped.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_rig(
        &self,
        code: &Code,
        rig: Rig,
        list: GpuAddr,
        count: u32,
        limit: Duration,
    ) -> Result<Started> {
        if let Some(servant) = &self.0.servant {
            return servant.start_rig(code, rig, list, count, limit);
        }
        let (name, words) = rig.kernel();
        let warps = rig.warps();
        let shape = Shape { blocks: count.div_ceil(warps), threads: 32 * warps, shared: warps * words * 4 };
        let args = [Arg::U64(list.0), Arg::U32(count), Arg::U32(words)];
        let function = code.function(name)?;
        let call = Call { function: &function, shape, args: args.to_vec() };
        let context = &self.0.context;
        let stream = if rig.stays() { Stream::apart(context) } else { Stream::new(context) }?;
        let bytes = u64::from(count) * u64::from(rig.descriptor());
        let list = Touched { what: "the list of descriptors", at: list, bytes };
        let used = Used { memory: None, _held: context.hold(&[list])? };
        // SAFETY: the arguments are the kernel's, and the list is held until it has ended; it ends by the limit in its
        // descriptors, which the caller vouches for, as for the memory that these name.
        unsafe { self.start_on(stream, name, &call, limit, used) }.map(|work| Started(Box::new(work)))
    }
}

/// A kernel for tests and benchmarks: see the controller crate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rig {
    /// The controller that moves blocks; descriptors are `Pair`s.
    Serve,
    /// The null controller; descriptors are `Pair`s.
    Null,
    /// The same for submission queues behind a bus.
    NullFar,
    /// Compares memory with blocks; descriptors are `Check`s.
    Check,
    /// Litmus experiments; descriptors are `Litmus`.
    Submit,
    /// As above.
    Fetch,
    /// As above.
    Complete,
    /// As above.
    Consume,
}

impl Rig {
    const ALL: [Self; 8] = [
        Self::Serve,
        Self::Null,
        Self::NullFar,
        Self::Check,
        Self::Submit,
        Self::Fetch,
        Self::Complete,
        Self::Consume,
    ];

    /// Warps of a block. Null controllers keep together, or with many of them none of the GPU's processors would be left to
    /// what is measured.
    const fn warps(self) -> u32 {
        match self {
            Self::Null | Self::NullFar => 4,
            _ => 1,
        }
    }

    /// Whether it is a controller, which stays until its host ends it.
    const fn stays(self) -> bool {
        matches!(self, Self::Serve | Self::Null | Self::NullFar)
    }

    /// Bytes of one of its descriptors.
    const fn descriptor(self) -> u32 {
        use onehop_controller::Pair;
        use onehop_controller::layout::{Check, Litmus};
        match self {
            Self::Serve | Self::Null | Self::NullFar => Pair::BYTES,
            Self::Check => Check::BYTES,
            Self::Submit | Self::Fetch | Self::Complete | Self::Consume => Litmus::BYTES,
        }
    }

    /// Its entry, and the words of shared memory that a warp of it needs.
    const fn kernel(self) -> (&'static str, u32) {
        use onehop_controller::litmus::LITMUS_LOCAL_WORDS;
        use onehop_controller::{NULL_FAR_LOCAL_WORDS, NULL_LOCAL_WORDS, SERVE_LOCAL_WORDS};
        match self {
            Self::Serve => ("onehop_serve", SERVE_LOCAL_WORDS),
            Self::Null => ("onehop_null", NULL_LOCAL_WORDS),
            Self::NullFar => ("onehop_null_far", NULL_FAR_LOCAL_WORDS),
            Self::Check => ("onehop_check", 0),
            Self::Submit => ("onehop_litmus_submit", LITMUS_LOCAL_WORDS),
            Self::Fetch => ("onehop_litmus_fetch", LITMUS_LOCAL_WORDS),
            Self::Complete => ("onehop_litmus_complete", LITMUS_LOCAL_WORDS),
            Self::Consume => ("onehop_litmus_consume", LITMUS_LOCAL_WORDS),
        }
    }
}

/// Compiled device code, and those of its kernels that were asked for.
#[derive(Clone)]
pub struct Code {
    module: Arc<Module>,
    found: Arc<Mutex<HashMap<String, Function>>>,
}

impl Code {
    /// Registers that a thread of the kernel `name` uses. It is in the GPU's memory then: a kernel that is loaded while
    /// another runs may have to wait for its end.
    ///
    /// # Errors
    /// When there is no such kernel.
    pub fn registers(&self, name: &str) -> Result<u32> {
        self.function(name)?.registers()
    }

    fn function(&self, name: &str) -> Result<Function> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = found.get(name) {
            return Ok(function.clone());
        }
        let function = self.module.function(name)?;
        found.insert(name.to_owned(), function.clone());
        Ok(function)
    }
}

/// A kernel under way. Dropping it waits for its end.
pub struct Started(Box<Work>);

impl Started {
    /// Whether it is over, one way or the other.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.is_over()
    }

    /// Waits for its end; gives how long it took by the GPU's clock.
    ///
    /// # Errors
    /// When it failed, or did not end in time.
    pub fn wait(mut self) -> Result<Duration> {
        self.0.wait()?;
        self.0.took()
    }
}
