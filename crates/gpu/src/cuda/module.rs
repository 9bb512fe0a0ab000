//! Device code: loaded from PTX, its functions found and launched.

use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::{Context, Stream};
use crate::{Error, Result};

const LOG_BYTES: usize = 16 << 10;

/// What cuFuncGetAttribute tells.
const REGISTERS: c_int = 4;
const MAX_THREADS: c_int = 0;
const MAX_DYNAMIC_SHARED: c_int = 8;

/// Device code in a context.
pub(super) struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: a CUmodule is a handle that any thread may use.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Has the driver compile PTX for this GPU. What the compiler said is in the error.
    pub(super) fn load(context: &Arc<Context>, ptx: &str) -> Result<Arc<Self>> {
        let what = "compiling the kernels for this GPU";
        let text = CString::new(ptx).map_err(|_| Error::Launch("the PTX has a zero byte in it".into()))?;
        let mut log = vec![0u8; LOG_BYTES];
        // CU_JIT_ERROR_LOG_BUFFER and CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES; the size is a number in a pointer's place.
        let mut options: [c_int; 2] = [5, 6];
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), LOG_BYTES as *mut c_void];
        let mut raw = null_mut();
        let loaded = context.attempt(|driver| {
            // SAFETY: all pointers live across the call; the text ends in a zero byte; the log has the length it says.
            unsafe {
                let (image, options) = (text.as_ptr().cast(), options.as_mut_ptr());
                driver.module_load(&mut raw, image, 2, options, values.as_mut_ptr())
            }
        });
        loaded.map_err(|failure| {
            let said = log.split(|byte| *byte == 0).next().unwrap_or_default();
            let said = String::from_utf8_lossy(said);
            if said.trim().is_empty() {
                context.driver.error(what, failure)
            } else {
                context.driver.error_with(what, failure, &format!("the compiler said: {}", said.trim()))
            }
        })?;
        Ok(Arc::new(Self { context: context.clone(), raw }))
    }

    /// A kernel by its name, in the GPU's memory already: with lazy loading the first launch of a kernel would wait for
    /// those that run, and one of those may be waiting for it.
    pub(super) fn function(self: &Arc<Self>, name: &str) -> Result<Function> {
        let what = format!("finding the kernel {name}");
        let text = CString::new(name).map_err(|_| Error::Launch("a kernel's name has a zero byte".into()))?;
        let mut raw = null_mut();
        self.context.call(&what, |driver| {
            // SAFETY: all pointers live across the call, and the module as long as self.
            unsafe { driver.module_function(&mut raw, self.raw, text.as_ptr()) }
        })?;
        let function = Function { module: self.clone(), raw, name: name.to_owned() };
        // SAFETY: the function is of this module. Drivers without the call have it loaded by the question below.
        let _ = self.context.attempt(|driver| unsafe { driver.function_load(raw) });
        function.registers()?;
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: nobody holds a function of it, and launches hold functions.
        let _ = self.context.attempt(|driver| unsafe { driver.module_unload(self.raw) });
    }
}

/// The size of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Blocks.
    pub blocks: u32,
    /// Threads of each.
    pub threads: u32,
    /// Bytes of dynamic shared memory of each.
    pub shared: u32,
}

/// A kernel's argument.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Arg {
    /// A 32-bit number.
    U32(u32),
    /// A 64-bit number, or an address.
    U64(u64),
    /// A structure, as words of eight bytes.
    Words(Box<[u64]>),
}

/// A kernel.
#[derive(Clone)]
pub(super) struct Function {
    module: Arc<Module>,
    raw: sys::CUfunction,
    name: String,
}

// SAFETY: a CUfunction is a handle that any thread may use.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    fn get(&self, attribute: c_int) -> Result<u32> {
        let mut value = 0;
        let what = format!("asking about the kernel {}", self.name);
        self.module.context.call(&what, |driver| {
            // SAFETY: `value` lives across the call, and the function as long as its module.
            unsafe { driver.function_get(&mut value, attribute, self.raw) }
        })?;
        Ok(value.max(0) as u32)
    }

    /// Registers that a thread of it uses.
    pub(super) fn registers(&self) -> Result<u32> {
        self.get(REGISTERS)
    }

    /// Threads that a block of it may have.
    pub(super) fn most_threads(&self) -> Result<u32> {
        self.get(MAX_THREADS)
    }

    /// Lets its blocks use so much dynamic shared memory. The driver gives 48 KiB without being asked.
    fn allow_shared(&self, bytes: u32) -> Result<()> {
        if bytes <= 48 << 10 {
            return Ok(());
        }
        let what = format!("giving the kernel {} {bytes} bytes of shared memory", self.name);
        self.module.context.call(&what, |driver| {
            // SAFETY: the function lives as long as its module.
            unsafe { driver.function_set(self.raw, MAX_DYNAMIC_SHARED, bytes as c_int) }
        })
    }

    /// Puts it into a stream.
    ///
    /// # Safety
    /// The arguments are those of the kernel, in number, kind and order, and the addresses among them are what the
    /// kernel takes them for until it has ended.
    pub(super) unsafe fn launch(&self, stream: &Stream, shape: Shape, args: &[Arg]) -> Result<()> {
        self.allow_shared(shape.shared)?;
        let mut pointers: Vec<*mut c_void> = args
            .iter()
            .map(|arg| match arg {
                Arg::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::U64(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::Words(words) => words.as_ptr().cast_mut().cast(),
            })
            .collect();
        let what = format!("launching {}", self.name);
        let Shape { blocks, threads, shared } = shape;
        let (function, stream) = (self.raw, stream.raw());
        self.module.context.call(&what, |driver| {
            let list = pointers.as_mut_ptr();
            // SAFETY: the driver copies the arguments in this call, and `args` lives across it; the caller vouches for them.
            unsafe { driver.launch(function, blocks, 1, 1, threads, 1, 1, shared, stream, list, null_mut()) }
        })
    }
}
