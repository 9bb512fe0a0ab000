//! Device code: loaded from PTX, its functions found and launched.

use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::{Context, Raw};
use super::driver::Failure;
use super::stream::{LONGEST, Stream};
use crate::{Error, KernelJob, Result};

const LOG_BYTES: usize = 16 << 10;

/// Options of the driver's compiler; numbers are passed as pointers.
const JIT_MAX_REGISTERS: c_int = 0;
const JIT_ERROR_LOG: c_int = 5;
const JIT_ERROR_LOG_BYTES: c_int = 6;
/// An input of the linker.
const INPUT_PTX: c_int = 1;

/// A cuFuncGetAttribute attribute.
const REGISTERS: c_int = 4;
const MAX_THREADS: c_int = 0;
const MAX_DYNAMIC_SHARED: c_int = 8;

/// PTX with a zero byte behind it. The driver recognizes a compiled image by its first bytes, and trusts the
/// lengths in it. A `str` can start as one only with DEL: as an ELF file.
fn c_text(ptx: &str) -> Result<CString> {
    if ptx.starts_with('\x7f') {
        return Err(Error::Launch("the PTX is not text; it starts as a compiled image does".into()));
    }
    CString::new(ptx).map_err(|_| Error::Launch("the PTX has a zero byte in it".into()))
}

/// The compiler's log.
struct Log(Vec<u8>);

impl Log {
    fn new() -> Self {
        Self(vec![0; LOG_BYTES])
    }

    fn error(&self, context: &Context, what: &str, failure: Failure) -> Error {
        let said = self.0.split(|byte| *byte == 0).next().unwrap_or_default();
        let said = String::from_utf8_lossy(said);
        if said.trim().is_empty() {
            context.driver.error(what, failure)
        } else {
            context.driver.error_with(what, failure, &format!("the compiler said: {}", said.trim()))
        }
    }
}

/// A linker; it ends when it is dropped.
struct Linker {
    context: Arc<Context>,
    raw: sys::CUlinkState,
}

impl Drop for Linker {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: it was created, and its output was loaded or is not used. `Module::link_texts` drops it.
            let _ = self.context.attempt(|driver| unsafe { driver.link_destroy(self.raw) });
        }
    }
}

/// Device code in a context.
pub(super) struct Module {
    // As in DeviceMemory.
    context: ManuallyDrop<Arc<Context>>,
    raw: sys::CUmodule,
}

// SAFETY: a CUmodule is a handle that any thread may use.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Has the driver compile PTX for this GPU. The error contains the compiler's log.
    pub(super) fn load(context: &Arc<Context>, ptx: &str) -> Result<Arc<Self>> {
        const WHAT: &str = "compiling the kernels for this GPU";
        let (text, owned) = (c_text(ptx)?, context.clone());
        context.driver.reclaimer.load_with_time_limit(WHAT, LONGEST, move || {
            let mut log = Log::new();
            // SAFETY: the text ends in a zero byte, and lives across the call; `c_text` has refused what is not
            // text of PTX.
            let loaded = unsafe { Self::load_image(&owned, text.as_ptr().cast(), &mut log) };
            loaded.map_err(|failure| log.error(&owned, WHAT, failure))
        })
    }

    /// Has the driver compile several PTX texts and link the calls between them. Separately compiled functions use at
    /// most this many registers.
    pub(super) fn link(context: &Arc<Context>, parts: &[&str], registers: u32) -> Result<Arc<Self>> {
        const WHAT: &str = "linking kernels for this GPU";
        let texts = parts.iter().map(|part| c_text(part)).collect::<Result<Vec<_>>>()?;
        let owned = context.clone();
        let link = move || Self::link_texts(&owned, WHAT, &texts, registers);
        context.driver.reclaimer.load_with_time_limit(WHAT, LONGEST, link)
    }

    fn link_texts(
        context: &Arc<Context>,
        what: &str,
        texts: &[CString],
        registers: u32,
    ) -> Result<Arc<Self>> {
        let mut log = Log::new();
        let mut options = [JIT_MAX_REGISTERS, JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES];
        let mut values: [*mut c_void; 3] =
            [registers as usize as *mut c_void, log.0.as_mut_ptr().cast(), LOG_BYTES as *mut c_void];
        let mut link = Linker { context: context.clone(), raw: null_mut() };
        let linked = context.attempt(|driver| {
            let mut image = null_mut();
            // SAFETY: options, values and the log live until the link is over, which is when `link` is dropped; each text ends
            // in a zero byte that is counted; the image lives as long as the link, and is loaded before that.
            unsafe {
                driver.link_create(3, options.as_mut_ptr(), values.as_mut_ptr(), &mut link.raw)?;
                for text in texts {
                    let (data, bytes) = (text.as_ptr().cast_mut().cast(), text.as_bytes_with_nul().len());
                    let name = c"kernels".as_ptr();
                    driver.link_add(link.raw, INPUT_PTX, data, bytes, name, 0, null_mut(), null_mut())?;
                }
                driver.link_complete(link.raw, &mut image, &mut 0)?;
                Self::load_image(context, image, &mut Log::new())
            }
        });
        drop(link);
        linked.map_err(|failure| log.error(context, what, failure))
    }

    /// # Safety
    /// `image` is PTX with a zero byte behind it, or what a linker made.
    unsafe fn load_image(
        context: &Arc<Context>,
        image: *const c_void,
        log: &mut Log,
    ) -> std::result::Result<Arc<Self>, Failure> {
        let mut options = [JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES];
        let mut values: [*mut c_void; 2] = [log.0.as_mut_ptr().cast(), LOG_BYTES as *mut c_void];
        let mut raw = null_mut();
        context.attempt(|driver| {
            // SAFETY: the caller's promise, and all else lives across the call; the log has the length that is said.
            unsafe { driver.module_load(&mut raw, image, 2, options.as_mut_ptr(), values.as_mut_ptr()) }
        })?;
        Ok(Arc::new(Self { context: ManuallyDrop::new(context.clone()), raw }))
    }

    /// A kernel by its name, already loaded into GPU memory: with lazy loading the first launch of a kernel would wait
    /// for running ones, and one of those may be waiting for it.
    pub(super) fn function(self: &Arc<Self>, name: &str) -> Result<Function> {
        let what = format!("finding the kernel {name}");
        let text = CString::new(name).map_err(|_| Error::Launch("a kernel's name has a zero byte".into()))?;
        let (module, name, why) = (self.clone(), name.to_owned(), what.clone());
        let find = move || module.find(&text, name, &what);
        self.context.driver.reclaimer.load_with_time_limit(&why, LONGEST, find)
    }

    fn find(self: &Arc<Self>, text: &CStr, name: String, what: &str) -> Result<Function> {
        let mut raw = null_mut();
        self.context.call(what, |driver| {
            // SAFETY: all pointers live across the call, and the module as long as self.
            unsafe { driver.module_function(&mut raw, self.raw, text.as_ptr()) }
        })?;
        let function = Function { module: self.clone(), raw, name };
        // SAFETY: the function is of this module. In drivers without the call the query below loads it.
        let _ = self.context.attempt(|driver| unsafe { driver.function_load(raw) });
        function.registers()?;
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: it is not used after this, in which self goes.
        let context = unsafe { ManuallyDrop::take(&mut self.context) };
        let (module, reclaimer) = (Raw(self.raw), context.driver.reclaimer.clone());
        reclaimer.enqueue(move || {
            // SAFETY: nobody holds a function of it, and launches hold functions, or their callers keep the
            // `StreamWork`.
            let answer = context.attempt(|driver| unsafe { driver.module_unload(module.get()) });
            context.freed(answer, "unloading device code")
        });
    }
}

/// Size of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Blocks.
    pub blocks: u32,
    /// Threads per block.
    pub threads: u32,
    /// Bytes of dynamic shared memory per block.
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
    /// A list of work and its bounds.
    Job(KernelJob),
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

    /// Registers per thread.
    pub(super) fn registers(&self) -> Result<u32> {
        self.get(REGISTERS)
    }

    /// Maximum threads per block.
    pub(super) fn most_threads(&self) -> Result<u32> {
        self.get(MAX_THREADS)
    }

    /// Lets its blocks use this much dynamic shared memory. The default limit is 48 KiB.
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

    /// Launches it in a stream.
    ///
    /// # Safety
    /// The arguments match the kernel's in number, kind and order, and the addresses among them stay valid for it until
    /// it has ended.
    pub(super) unsafe fn launch(&self, stream: &Stream, shape: Shape, args: &[Arg]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_in(stream.raw(), shape, args) }
    }

    /// The same in a stream of this context that belongs to the program.
    ///
    /// # Safety
    /// As for [`Self::launch`]; the stream has not been destroyed.
    pub(super) unsafe fn launch_in(&self, stream: sys::CUstream, shape: Shape, args: &[Arg]) -> Result<()> {
        self.allow_shared(shape.shared)?;
        let mut pointers: Vec<*mut c_void> = args
            .iter()
            .map(|arg| match arg {
                Arg::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::U64(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::Words(words) => words.as_ptr().cast_mut().cast(),
                Arg::Job(job) => std::ptr::from_ref(job).cast_mut().cast(),
            })
            .collect();
        let what = format!("launching {}", self.name);
        let Shape { blocks, threads, shared } = shape;
        let function = self.raw;
        self.module.context.call(&what, |driver| {
            let list = pointers.as_mut_ptr();
            // SAFETY: the driver copies the arguments in this call, and `args` lives across it; the caller vouches for them.
            unsafe { driver.launch(function, blocks, 1, 1, threads, 1, 1, shared, stream, list, null_mut()) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The driver would trust the lengths in a compiled image.
    #[test]
    fn a_compiled_image_is_no_text() {
        for bad in ["\x7fELF\x02\x01", ".version 7.0\0"] {
            assert!(matches!(c_text(bad), Err(Error::Launch(_))), "{bad:?}");
        }
        assert!(c_text(".version 7.0\n").is_ok());
    }
}
