//! The CUDA driver's functions, looked up by name when the driver is loaded.
//!
//! The library, its types and its constants are cudarc's. The functions are looked up here and not called through
//! cudarc for two reasons: cudarc panics at a function that an older driver does not have, and it treats the result as
//! an `enum` of one CUDA version's error numbers, although a newer driver may return others.
//!
//! They are called through [`Relaxed`] only, so that a graph which another thread captures does not keep them from working,
//! and is not invalidated by them.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::host::RegisteredPages;
use super::live::LiveMemory;
use super::process_end;
use super::reclaim::{Freed, Reclaimer};
use crate::{Error, Result};

/// A pointer into a context's memory.
pub(super) type DevicePtr = u64;

/// The result of a successful call.
const SUCCESS: c_int = 0;
/// cuEventQuery: not yet.
pub(super) const NOT_READY: c_int = 600;

/// The oldest supported CUDA version of a driver: 11.4.
const OLDEST: c_int = 11040;

macro_rules! functions {
    ($($method:ident = $symbol:literal since $since:literal ($($arg:ident: $ty:ty),* $(,)?);)*) => {
        /// The driver's functions.
        // SAFETY: these are types and no calls; each function's contract is what the driver API says of its name.
        pub(super) struct DriverCalls {
            $($method: Option<unsafe extern "C" fn($($ty),*) -> c_int>,)*
        }

        impl DriverCalls {
            /// Looks all of them up. The library must be present: otherwise `culib` panics.
            fn load() -> Self {
                // SAFETY: the caller has found the library by is_culib_present, and loading it runs libcuda's own code only.
                let library = unsafe { sys::culib() };
                Self {
                    $(
                        // SAFETY: the symbol is a C function of the CUDA driver API, and this is its documented signature.
                        $method: unsafe {
                            library.get::<unsafe extern "C" fn($($ty),*) -> c_int>(concat!($symbol, "\0").as_bytes())
                        }
                        .ok()
                        .map(|symbol| *symbol),
                    )*
                }
            }
        }

        impl DriverCalls {
            $(
                /// The driver's function of this name.
                #[allow(clippy::too_many_arguments, reason = "cuLaunchKernel has eleven")]
                pub(super) unsafe fn $method(&self, $($arg: $ty),*) -> std::result::Result<(), Failure> {
                    let function = self.$method.ok_or(Failure::Missing($symbol, $since))?;
                    // SAFETY: the caller upholds the CUDA driver API's contract for this function.
                    match unsafe { function($($arg),*) } {
                        SUCCESS => Ok(()),
                        code => Err(Failure::Code($symbol, code)),
                    }
                }
            )*
        }
    };
}

functions! {
    init = "cuInit" since "2.0" (flags: c_uint);
    driver_version = "cuDriverGetVersion" since "2.2" (version: *mut c_int);
    error_name = "cuGetErrorName" since "6.0" (code: c_int, name: *mut *const c_char);
    error_string = "cuGetErrorString" since "6.0" (code: c_int, text: *mut *const c_char);
    device_count = "cuDeviceGetCount" since "2.0" (count: *mut c_int);
    device_get = "cuDeviceGet" since "2.0" (device: *mut c_int, ordinal: c_int);
    device_name = "cuDeviceGetName" since "2.0" (name: *mut c_char, len: c_int, device: c_int);
    device_pci = "cuDeviceGetPCIBusId" since "4.1" (id: *mut c_char, len: c_int, device: c_int);
    device_uuid = "cuDeviceGetUuid" since "9.2" (uuid: *mut [u8; 16], device: c_int);
    device_memory = "cuDeviceTotalMem_v2" since "3.2" (bytes: *mut usize, device: c_int);
    device_attribute = "cuDeviceGetAttribute" since "2.0" (value: *mut c_int, attribute: c_int, device: c_int);
    context_retain = "cuDevicePrimaryCtxRetain" since "7.0" (context: *mut sys::CUcontext, device: c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2" since "11.0" (device: c_int);
    context_state = "cuDevicePrimaryCtxGetState" since "7.0" (device: c_int, flags: *mut c_uint, active: *mut c_int);
    context_id = "cuCtxGetId" since "12.0" (context: sys::CUcontext, id: *mut u64);
    context_push = "cuCtxPushCurrent_v2" since "4.0" (context: sys::CUcontext);
    context_pop = "cuCtxPopCurrent_v2" since "4.0" (context: *mut sys::CUcontext);
    peer_can = "cuDeviceCanAccessPeer" since "4.0" (can: *mut c_int, device: c_int, peer: c_int);
    peer_enable = "cuCtxEnablePeerAccess" since "4.0" (peer: sys::CUcontext, flags: c_uint);
    memory_info = "cuMemGetInfo_v2" since "3.2" (free: *mut usize, total: *mut usize);
    alloc = "cuMemAlloc_v2" since "3.2" (at: *mut DevicePtr, bytes: usize);
    free = "cuMemFree_v2" since "3.2" (at: DevicePtr);
    granularity = "cuMemGetAllocationGranularity" since "10.2" (
        bytes: *mut usize, properties: *const sys::CUmemAllocationProp, which: c_int);
    create = "cuMemCreate" since "10.2" (
        handle: *mut u64, bytes: usize, properties: *const sys::CUmemAllocationProp, flags: u64);
    release = "cuMemRelease" since "10.2" (handle: u64);
    reserve = "cuMemAddressReserve" since "10.2" (
        at: *mut DevicePtr, bytes: usize, align: usize, wish: DevicePtr, flags: u64);
    unreserve = "cuMemAddressFree" since "10.2" (at: DevicePtr, bytes: usize);
    map = "cuMemMap" since "10.2" (at: DevicePtr, bytes: usize, offset: usize, handle: u64, flags: u64);
    unmap = "cuMemUnmap" since "10.2" (at: DevicePtr, bytes: usize);
    set_access = "cuMemSetAccess" since "10.2" (
        at: DevicePtr, bytes: usize, access: *const sys::CUmemAccessDesc, count: usize);
    export_handle = "cuMemExportToShareableHandle" since "10.2" (
        fd: *mut c_int, handle: u64, kind: c_int, flags: u64);
    import_handle = "cuMemImportFromShareableHandle" since "10.2" (
        handle: *mut u64, fd: *mut c_void, kind: c_int);
    host_register = "cuMemHostRegister_v2" since "6.5" (at: *mut c_void, bytes: usize, flags: c_uint);
    host_unregister = "cuMemHostUnregister" since "4.0" (at: *mut c_void);
    host_pointer = "cuMemHostGetDevicePointer_v2" since "3.2" (out: *mut DevicePtr, at: *mut c_void, flags: c_uint);
    pointer_get = "cuPointerGetAttribute" since "4.0" (out: *mut c_void, attribute: c_int, at: DevicePtr);
    pointer_get_all = "cuPointerGetAttributes" since "7.0" (
        count: c_uint, attributes: *mut c_int, out: *mut *mut c_void, at: DevicePtr);
    pointer_set = "cuPointerSetAttribute" since "6.0" (value: *const c_void, attribute: c_int, at: DevicePtr);
    address_range = "cuMemGetAddressRange_v2" since "3.2" (base: *mut DevicePtr, bytes: *mut usize, at: DevicePtr);
    range_handle = "cuMemGetHandleForAddressRange" since "11.7" (
        fd: *mut c_int, at: DevicePtr, bytes: usize, kind: c_int, flags: u64);
    ipc_get = "cuIpcGetMemHandle" since "4.1" (handle: *mut sys::CUipcMemHandle, at: DevicePtr);
    ipc_open = "cuIpcOpenMemHandle_v2" since "11.0" (
        at: *mut DevicePtr, handle: sys::CUipcMemHandle, flags: c_uint);
    ipc_close = "cuIpcCloseMemHandle" since "4.1" (at: DevicePtr);
    flush_writes = "cuFlushGPUDirectRDMAWrites" since "11.3" (target: c_int, scope: c_int);
    stream_create = "cuStreamCreate" since "2.0" (stream: *mut sys::CUstream, flags: c_uint);
    stream_create_apart = "cuStreamCreateWithPriority" since "5.5" (
        stream: *mut sys::CUstream, flags: c_uint, priority: c_int);
    stream_destroy = "cuStreamDestroy_v2" since "4.0" (stream: sys::CUstream);
    stream_query = "cuStreamQuery" since "2.0" (stream: sys::CUstream);
    stream_context = "cuStreamGetCtx" since "9.2" (stream: sys::CUstream, context: *mut sys::CUcontext);
    stream_capturing = "cuStreamIsCapturing" since "10.0" (stream: sys::CUstream, status: *mut c_int);
    stream_call = "cuLaunchHostFunc" since "10.0" (
        stream: sys::CUstream, function: extern "C" fn(*mut c_void), argument: *mut c_void);
    stream_wait_word = "cuStreamWaitValue32_v2" since "11.7" (
        stream: sys::CUstream, at: DevicePtr, value: u32, flags: c_uint);
    context_device = "cuCtxGetDevice" since "2.0" (device: *mut c_int);
    capture_mode = "cuThreadExchangeStreamCaptureMode" since "10.1" (mode: *mut c_int);
    event_create = "cuEventCreate" since "2.0" (event: *mut sys::CUevent, flags: c_uint);
    event_destroy = "cuEventDestroy_v2" since "4.0" (event: sys::CUevent);
    event_record = "cuEventRecord" since "2.0" (event: sys::CUevent, stream: sys::CUstream);
    event_query = "cuEventQuery" since "2.0" (event: sys::CUevent);
    event_elapsed = "cuEventElapsedTime" since "2.0" (ms: *mut f32, from: sys::CUevent, to: sys::CUevent);
    copy_in = "cuMemcpyHtoDAsync_v2" since "3.2" (
        to: DevicePtr, from: *const c_void, bytes: usize, stream: sys::CUstream);
    copy_batch = "cuMemcpyBatchAsync_v2" since "13.0" (
        to: *mut DevicePtr, from: *mut DevicePtr, bytes: *mut usize, count: usize, how: *mut sys::CUmemcpyAttributes,
        first_of_each: *mut usize, ways: usize, stream: sys::CUstream);
    copy_within = "cuMemcpyDtoDAsync_v2" since "3.2" (
        to: DevicePtr, from: DevicePtr, bytes: usize, stream: sys::CUstream);
    copy_out = "cuMemcpyDtoHAsync_v2" since "3.2" (
        to: *mut c_void, from: DevicePtr, bytes: usize, stream: sys::CUstream);
    copy_column = "cuMemcpy2DAsync_v2" since "3.2" (copy: *const sys::CUDA_MEMCPY2D, stream: sys::CUstream);
    set_bytes = "cuMemsetD8Async" since "3.2" (at: DevicePtr, value: u8, bytes: usize, stream: sys::CUstream);
    module_load = "cuModuleLoadDataEx" since "2.1" (
        module: *mut sys::CUmodule, image: *const c_void, count: c_uint, options: *mut c_int, values: *mut *mut c_void);
    module_unload = "cuModuleUnload" since "2.0" (module: sys::CUmodule);
    module_function = "cuModuleGetFunction" since "2.0" (
        function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
    function_get = "cuFuncGetAttribute" since "2.2" (value: *mut c_int, attribute: c_int, function: sys::CUfunction);
    function_set = "cuFuncSetAttribute" since "9.0" (function: sys::CUfunction, attribute: c_int, value: c_int);
    function_load = "cuFuncLoad" since "12.4" (function: sys::CUfunction);
    link_create = "cuLinkCreate_v2" since "6.5" (
        count: c_uint, options: *mut c_int, values: *mut *mut c_void, link: *mut sys::CUlinkState);
    link_add = "cuLinkAddData_v2" since "6.5" (
        link: sys::CUlinkState, kind: c_int, data: *mut c_void, bytes: usize, name: *const c_char, count: c_uint,
        options: *mut c_int, values: *mut *mut c_void);
    link_complete = "cuLinkComplete" since "5.5" (
        link: sys::CUlinkState, image: *mut *mut c_void, bytes: *mut usize);
    link_destroy = "cuLinkDestroy" since "5.5" (link: sys::CUlinkState);
    launch = "cuLaunchKernel" since "4.0" (
        function: sys::CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: sys::CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void);
}

/// Why a call failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Failure {
    /// The driver returned this error number.
    Code(&'static str, c_int),
    /// This driver does not have the function, which came with this CUDA version.
    Missing(&'static str, &'static str),
    /// This process was forked after the driver had started, and must not call it.
    Forked,
    /// The program has destroyed the context, and everything in it.
    Destroyed,
}

impl Failure {
    /// The driver's error number, if it gave one.
    pub(super) fn code(self) -> Option<c_int> {
        match self {
            Self::Code(_, code) => Some(code),
            Self::Missing(..) | Self::Forked | Self::Destroyed => None,
        }
    }
}

/// What a failure implies about the GPU's work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Meaning {
    /// A graph is being captured, and the driver refuses meanwhile. It implies nothing about our own work.
    Capture,
    /// The context is lost: the GPU has ended all work in it, and does no more.
    Lost,
    /// Anything else. Work that was started may continue.
    Other,
}

impl Failure {
    pub(super) fn meaning(self) -> Meaning {
        match self.code() {
            _ if self == Self::Destroyed => Meaning::Lost,
            // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED to _WRONG_THREAD, CUDA_ERROR_CAPTURED_EVENT among them.
            Some(900..=908) => Meaning::Capture,
            Some(code) if is_lost(code) => Meaning::Lost,
            _ => Meaning::Other,
        }
    }
}

/// Whether an error number means that the context is lost for good: those for which NVIDIA's documentation says so. Not
/// included: 214 and 220 (uncorrectable memory and NVLink errors), 999 (unknown) and the errors of MPS (805 to 809),
/// for which it does not say whether work has ended; 4 (the driver is shutting down); 201 (no context), which may be a
/// mistake of the caller's. What the GPU may still use is then leaked.
pub(crate) const fn is_lost(code: c_int) -> bool {
    match code {
        // CUDA_ERROR_CONTAINED. For this and all others but 709 and 710, further work returns the same error until the
        // process is restarted.
        226
        // An illegal address; a kernel that the display's watchdog ended.
        | 700 | 702
        // CUDA_ERROR_CONTEXT_IS_DESTROYED; CUDA_ERROR_ASSERT, after which the context cannot be used, only destroyed.
        | 709 | 710
        // A stack error, an illegal instruction, a misaligned address, a wrong address space, a wrong program counter, any other
        // exception of a kernel, tensor memory that a kernel has not freed.
        | 714..=719 | 721 => true,
        _ => false,
    }
}

/// The driver's functions, while this thread's capture mode is relaxed. Dropping this restores the mode.
///
/// In the mode that threads start with, a call that might wait for a stream fails while *any* thread captures a graph
/// in the global mode, as PyTorch does, and invalidates that capture. Our calls do not wait for captured streams.
pub(super) struct Relaxed<'a> {
    calls: &'a DriverCalls,
    before: c_int,
    /// The mode is per thread.
    _this_thread: PhantomData<*const ()>,
}

impl Deref for Relaxed<'_> {
    type Target = DriverCalls;

    fn deref(&self) -> &DriverCalls {
        self.calls
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        // SAFETY: the mode lives across the call, and is the one that the driver gave.
        let _ = unsafe { self.calls.capture_mode(&mut self.before) };
    }
}

/// The CUDA driver of this machine.
pub(super) struct Driver {
    calls: DriverCalls,
    version: c_int,
    /// Host memory that is registered: the driver refuses a second registration of the same page.
    pub(super) registrations: Mutex<Vec<RegisteredPages>>,
    /// Memory whose addresses kernels may get.
    pub(super) live: LiveMemory,
    /// Frees memory, and everything else whose freeing must wait.
    pub(super) reclaimer: Reclaimer,
}

/// Why a forked process does not call the driver.
pub(super) const FORKED: &str =
    "CUDA does not work in a process that was forked after it had started; load it again here";

/// How long to wait for another thread that starts the driver.
const START: Duration = Duration::from_secs(20);

/// The right to start the driver, held by one thread at a time.
struct StartTurn;

/// The process of the thread that holds it; 0 for none. A lock would stay locked in a child forked meanwhile.
static STARTS: AtomicU32 = AtomicU32::new(0);

impl StartTurn {
    fn take() -> Result<Self> {
        let (begun, process) = (Instant::now(), std::process::id());
        loop {
            let why = match STARTS.compare_exchange(0, process, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(Self),
                Err(other) if other != process => {
                    "this process was forked while another thread started it, and it cannot be used here"
                        .into()
                }
                Err(_) if begun.elapsed() >= START => {
                    format!("another thread has been starting it for {START:?}")
                }
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                }
            };
            return Err(Error::NoCuda { why });
        }
    }
}

impl Drop for StartTurn {
    fn drop(&mut self) {
        STARTS.store(0, Ordering::Release);
    }
}

impl Driver {
    /// Finds and starts it, once per process: registered pages and running kernels belong to the process.
    pub(super) fn load() -> Result<Arc<Self>> {
        static STARTED: Mutex<Weak<Driver>> = Mutex::new(Weak::new());
        let _turn = StartTurn::take()?;
        let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(driver) = started.upgrade().filter(|driver| !driver.reclaimer.is_forked()) {
            return Ok(driver);
        }
        let driver = Self::start()?;
        *started = Arc::downgrade(&driver);
        Ok(driver)
    }

    fn start() -> Result<Arc<Self>> {
        let none = |why: &str| Error::NoCuda { why: why.into() };
        // SAFETY: this loads and unloads libcuda, whose initialisers only set up libcuda itself.
        if !unsafe { sys::is_culib_present() } {
            return Err(none("there is no CUDA driver (libcuda.so.1); install NVIDIA's driver"));
        }
        let mut driver = Self {
            calls: DriverCalls::load(),
            version: 0,
            registrations: Mutex::default(),
            live: LiveMemory::default(),
            reclaimer: Reclaimer::default(),
        };
        // SAFETY: cuInit takes no pointers; 0 is the only flag there is.
        unsafe { driver.calls.init(0) }.map_err(|failure| none(&driver.why_not_started(failure)))?;
        let mut version = 0;
        // SAFETY: `version` lives across the call.
        unsafe { driver.calls.driver_version(&mut version) }
            .map_err(|failure| none(&driver.why_not_started(failure)))?;
        driver.version = version;
        if version < OLDEST {
            let why = format!(
                "the driver is of CUDA {}, and {} is the oldest that is supported; update it",
                dotted(version),
                dotted(OLDEST)
            );
            return Err(none(&why));
        }
        // After cuInit, so that it runs before the driver's own exit handlers.
        process_end::watch().map_err(|error| none(&error.to_string()))?;
        Ok(Arc::new(driver))
    }

    /// Its functions, for as long as this thread keeps the result.
    pub(super) fn relaxed(&self) -> std::result::Result<Relaxed<'_>, Failure> {
        /// CU_STREAM_CAPTURE_MODE_RELAXED
        const RELAXED: c_int = 2;
        if self.reclaimer.is_forked() {
            return Err(Failure::Forked);
        }
        let mut before = RELAXED;
        // SAFETY: the mode lives across the call, which exchanges it with the thread's.
        unsafe { self.calls.capture_mode(&mut before) }?;
        Ok(Relaxed { calls: &self.calls, before, _this_thread: PhantomData })
    }

    /// The result of a call that frees something.
    pub(super) fn freed(&self, answer: std::result::Result<(), Failure>, what: &str) -> Freed {
        match answer {
            Ok(()) => Freed::Done,
            Err(failure) => match failure.meaning() {
                Meaning::Capture => Freed::NotNow,
                // It was freed with the context, or, if cuMemCreate made it, is with the process.
                Meaning::Lost => Freed::Done,
                Meaning::Other => Freed::Refused(self.error(what, failure).to_string()),
            },
        }
    }

    fn why_not_started(&self, failure: Failure) -> String {
        let hint = match failure.code() {
            Some(100) => {
                "; nvidia-smi shows what the kernel driver sees, and a container has to be given a GPU"
            }
            Some(34) => {
                "; libcuda.so is the stub of a toolkit: let the loader find the driver's own libcuda.so.1"
            }
            Some(802) => "; start nvidia-fabricmanager, or wait until it is ready",
            Some(803 | 804) => {
                "; the driver's library and its kernel module are of different versions: reboot"
            }
            _ => "; nvidia-smi and dmesg say more",
        };
        match failure {
            Failure::Code(call, code) => {
                let (name, text) = self.words(code);
                format!("{call} failed with {name} ({code}): {text}{hint}")
            }
            Failure::Missing(symbol, _) => format!("libcuda has no {symbol}: this is not a CUDA driver"),
            Failure::Forked => FORKED.into(),
            Failure::Destroyed => "the context was destroyed".into(),
        }
    }

    /// Its CUDA version: 1000 × major + 10 × minor.
    pub(super) fn version(&self) -> c_int {
        self.version
    }

    /// The name and the description of an error number.
    pub(super) fn words(&self, code: c_int) -> (String, String) {
        let read = |pointer: *const c_char| {
            // SAFETY: the driver returns null or a static, zero-terminated string.
            (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
        };
        let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
        // SAFETY: `name` lives across the call; an unknown number leaves it null.
        let _ = unsafe { self.calls.error_name(code, &mut name) };
        // SAFETY: as above for `text`.
        let _ = unsafe { self.calls.error_string(code, &mut text) };
        let unknown = || "an error this driver has no words for".to_owned();
        (read(name).unwrap_or_else(|| "CUDA error".into()), read(text).unwrap_or_else(unknown))
    }

    /// The error for a failed call, with a hint.
    pub(super) fn error(&self, what: impl Into<String>, failure: Failure) -> Error {
        self.error_with(what, failure, "")
    }

    /// The same, with an additional hint.
    pub(super) fn error_with(&self, what: impl Into<String>, failure: Failure, more: &str) -> Error {
        let what = what.into();
        match failure {
            Failure::Missing(symbol, since) => Error::NotSupported {
                what,
                why: format!(
                    "the driver, of CUDA {}, has no {symbol}, which came with CUDA {since}; update the driver",
                    dotted(self.version)
                ),
            },
            Failure::Forked => Error::NotSupported { what, why: FORKED.into() },
            Failure::Destroyed => Error::ContextDestroyed { what },
            Failure::Code(call, code) => {
                let (name, text) = self.words(code);
                let hint = if more.is_empty() { usual_hint(code) } else { more };
                let hint = if hint.is_empty() { String::new() } else { format!("; {hint}") };
                Error::Driver { what, call, name, code, text, hint }
            }
        }
    }
}

/// The hint for an error number, wherever it occurs.
fn usual_hint(code: c_int) -> &'static str {
    match code {
        2 => "use less GPU memory, or end other programs that use it (nvidia-smi names them)",
        201 | 709 => "the GPU's context is gone: restart the program",
        46 => "another program has the GPU for itself (compute mode): nvidia-smi -c DEFAULT",
        214 | 710 | 714..=718 => {
            "a kernel or the GPU failed, and the context is lost: restart the program; dmesg names the Xid"
        }
        700 => {
            "a kernel used an invalid address, and the context is lost: restart the program; \
             compute-sanitizer finds the place"
        }
        702 => "the display's watchdog ended a kernel: use a GPU without a display",
        719 => "a kernel failed, and the context is lost: restart the program; dmesg names the Xid",
        218 | 222 => "the driver could not compile the kernels: it may be too old for their PTX version",
        209 => "the kernels are not for this GPU's generation",
        712 => "this memory, or a page of it, is registered already",
        801 => "this GPU or driver does not support it",
        999 => "the driver does not say why; dmesg may",
        _ => "",
    }
}

/// A CUDA version as `major.minor`.
pub(super) fn dotted(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_documented_errors_mean_that_the_context_is_lost() {
        let meaning = |code| Failure::Code("cuEventQuery", code).meaning();
        for code in 900..=908 {
            assert_eq!(meaning(code), Meaning::Capture, "{code}");
        }
        for code in [226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721] {
            assert_eq!(meaning(code), Meaning::Lost, "{code}");
        }
        // Out of memory, not ready, launch resources, peers, not supported, time-out, unknown: work continues, or may.
        for code in [1, 2, 3, 4, 201, 214, 220, 400, 600, 701, 704, 711, 712, 713, 720, 801, 899, 909, 999] {
            assert_eq!(meaning(code), Meaning::Other, "{code}");
        }
        assert_eq!(Failure::Missing("cuFuncLoad", "12.4").meaning(), Meaning::Other);
    }
}
