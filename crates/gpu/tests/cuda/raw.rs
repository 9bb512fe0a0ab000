//! The driver as another library of the process uses it, bypassing onehop: captures, replays and its own kernels.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use cudarc::driver::sys::{self, CUresult};

use crate::ptx;

/// The result of a driver call, with the call's name in the error.
pub fn ok(call: &str, answer: CUresult) -> Result<(), String> {
    match answer {
        CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(format!("{call}: {other:?}")),
    }
}

/// Makes the primary context of GPU 0 current on this thread, permanently.
pub fn enter() {
    let mut context = null_mut();
    // SAFETY: the caller has started the driver; `context` lives across the call, and is never released.
    unsafe {
        ok("retain", sys::cuDevicePrimaryCtxRetain(&mut context, 0)).unwrap();
        ok("make current", sys::cuCtxSetCurrent(context)).unwrap();
    }
}

/// A stream that waits for no other, as PyTorch's do not.
pub struct Stream(pub sys::CUstream);

// SAFETY: a CUstream is a handle that any thread may use.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new() -> Self {
        let mut raw = null_mut();
        // SAFETY: `raw` lives across the call; 1 is CU_STREAM_NON_BLOCKING.
        unsafe { ok("make a stream", sys::cuStreamCreate(&mut raw, 1)).unwrap() };
        Self(raw)
    }

    pub fn is_over(&self) -> Result<bool, String> {
        // SAFETY: the stream lives.
        match unsafe { sys::cuStreamQuery(self.0) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => ok("query", other).map(|()| true),
        }
    }

    pub fn wait(&self) -> Result<(), String> {
        // SAFETY: the stream lives.
        ok("wait for the stream", unsafe { sys::cuStreamSynchronize(self.0) })
    }

    pub fn begin_capture(&self) {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream lives, and captures nothing yet.
        ok("begin a capture", unsafe { sys::cuStreamBeginCapture_v2(self.0, mode) }).unwrap();
    }

    pub fn end_capture(&self) -> Result<sys::CUgraph, String> {
        let mut graph = null_mut();
        // SAFETY: the stream captures, and `graph` lives across the call.
        ok("end the capture", unsafe { sys::cuStreamEndCapture(self.0, &mut graph) })?;
        Ok(graph)
    }

    /// Starts a kernel of `ptx::TOOLS`.
    pub fn launch(&self, name: &str, shape: (u32, u32), args: &mut [u64]) {
        self.start(&Kernel::load(ptx::TOOLS, name), shape, args);
    }

    /// Starts a kernel.
    pub fn start(&self, kernel: &Kernel, (blocks, threads): (u32, u32), args: &mut [u64]) {
        let mut list: Vec<*mut c_void> = args.iter_mut().map(|arg| (&raw mut *arg).cast()).collect();
        let list = list.as_mut_ptr();
        // SAFETY: all of it lives across the call; numbers are little-endian, so that a word of 32 bits is read right too.
        let started = unsafe {
            sys::cuLaunchKernel(kernel.0, blocks, 1, 1, threads, 1, 1, 0, self.0, list, null_mut())
        };
        ok("launch", started).unwrap();
    }
}

/// A kernel whose module is never unloaded.
pub struct Kernel(sys::CUfunction);

impl Kernel {
    pub fn load(ptx: &str, name: &str) -> Self {
        let (image, name) = (CString::new(ptx).unwrap(), CString::new(name).unwrap());
        let (mut module, mut function) = (null_mut(), null_mut());
        // SAFETY: all of it lives across the calls.
        unsafe {
            ok("load", sys::cuModuleLoadData(&mut module, image.as_ptr().cast())).unwrap();
            ok("find", sys::cuModuleGetFunction(&mut function, module, name.as_ptr())).unwrap();
        }
        Self(function)
    }
}

/// Captures a graph of fills and copies in the global mode, keeps the capture open for a while, and replays the graph:
/// repeatedly, until `stop`. Counts the rounds, and returns the first failure.
pub fn capture_and_replay(stop: &AtomicBool, rounds: &AtomicU32) -> Result<(), String> {
    const BYTES: usize = 1 << 20;
    enter();
    let stream = Stream::new();
    let (mut from, mut to) = (0, 0);
    let mut bytes = vec![0u8; BYTES];
    // SAFETY: both results live across the calls.
    unsafe {
        ok("allocate", sys::cuMemAlloc_v2(&mut from, BYTES))?;
        ok("allocate", sys::cuMemAlloc_v2(&mut to, BYTES))?;
    }
    while !stop.load(Ordering::Acquire) {
        let round = rounds.load(Ordering::Acquire);
        stream.begin_capture();
        // SAFETY: both allocations have so many bytes and live until the graph was replayed.
        let captured = unsafe {
            ok("capture a fill", sys::cuMemsetD8Async(from, round as u8, BYTES, stream.0)).and_then(|()| {
                std::thread::sleep(Duration::from_micros(u64::from(round % 5) * 200));
                ok("capture a copy", sys::cuMemcpyDtoDAsync_v2(to, from, BYTES, stream.0))
            })
        };
        let graph = stream.end_capture();
        captured?;
        let graph = graph?;
        let mut ready = null_mut();
        // SAFETY: the graph was captured above and is destroyed after its last use; `bytes` lives until the stream was waited for.
        unsafe {
            ok("instantiate", sys::cuGraphInstantiateWithFlags(&mut ready, graph, 0))?;
            ok("replay", sys::cuGraphLaunch(ready, stream.0))?;
            ok("replay", sys::cuGraphLaunch(ready, stream.0))?;
            ok("copy out", sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), to, BYTES, stream.0))?;
            stream.wait()?;
            ok("destroy", sys::cuGraphExecDestroy(ready))?;
            ok("destroy", sys::cuGraphDestroy(graph))?;
        }
        if bytes.iter().any(|byte| *byte != round as u8) {
            return Err(format!("round {round} replayed other bytes"));
        }
        rounds.fetch_add(1, Ordering::AcqRel);
    }
    Ok(())
}
