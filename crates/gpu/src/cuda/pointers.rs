//! Memory and streams that the program has, known by nothing but a pointer.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys;
use onehop_os::DmaMemory;
use onehop_proto::GpuAddr;

use super::driver::{Calls, Failure};
use super::gpu::CudaGpu;
use super::memory::DeviceMemory;
use super::stream::Stream;
use super::{Context, Cuda};
use crate::region::AddressSpace;
use crate::{Error, Region, Result};

/// What the driver knows of a pointer into a GPU's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pointer {
    /// The GPU, as CUDA counts.
    pub ordinal: u32,
    /// The identity of its allocation: unlike the address, it never comes again in this process.
    pub id: u64,
    /// The context that it was allocated in, as a number; 0 where it is of none.
    pub context: usize,
}

/// How a stream of the program can be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamState {
    /// Work put into it runs. With the GPU that it is of.
    Running(u32),
    /// A graph is being captured from it.
    Capturing,
}

/// CU_POINTER_ATTRIBUTE_CONTEXT, _MEMORY_TYPE, _BUFFER_ID, _IS_MANAGED, _DEVICE_ORDINAL.
const ATTRIBUTES: [c_int; 5] = [1, 2, 7, 8, 9];
/// CU_MEMORYTYPE_DEVICE
const DEVICE: u64 = 2;

fn look_up(calls: &Calls, at: u64) -> std::result::Result<Option<Pointer>, Failure> {
    let (mut attributes, mut values) = (ATTRIBUTES, [0_u64; 5]);
    let mut out = values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
    // SAFETY: there are as many attributes as places, each place has the eight bytes that the longest attribute takes, and all
    // live across the call. The pointer is looked up and not dereferenced.
    unsafe { calls.pointer_get_all(ATTRIBUTES.len() as u32, attributes.as_mut_ptr(), out.as_mut_ptr(), at) }?;
    let [context, kind, id, managed, ordinal] = values;
    let (kind, managed, ordinal) = (kind & 0xffff_ffff, managed & 0xff, ordinal as u32 as i32);
    let found = Pointer { ordinal: ordinal.max(0) as u32, id, context: context as usize };
    Ok((kind == DEVICE || managed != 0).then_some(found))
}

impl Cuda {
    /// What the driver knows of a pointer; none for host memory, pinned or not, and for what is no memory.
    ///
    /// # Errors
    /// When the driver does not say: it may want a GPU to be open ([`CudaGpu::pointer`]).
    pub fn pointer(&self, at: GpuAddr) -> Result<Option<Pointer>> {
        let found = self.0.relaxed().and_then(|calls| look_up(&calls, at.0));
        found.map_err(|failure| self.0.error("looking a pointer up", failure))
    }

    /// The GPU that a pointer's memory is of, in the context that the memory was allocated in: a program may have made one of
    /// its own. Managed memory and memory of no context are in the primary one.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Safety
    /// The pointer is what the driver has just said of memory that has not been freed, or is of no context.
    pub unsafe fn open_for(&self, pointer: &Pointer) -> Result<CudaGpu> {
        let (handle, device) = self.device(pointer.ordinal as i32)?;
        let raw = pointer.context as sys::CUcontext;
        let (mut flags, mut active) = (0, 0);
        let state = self.0.relaxed().and_then(|calls| {
            // SAFETY: both results live across the call, and the handle came from cuDeviceGet.
            unsafe { calls.context_state(handle, &mut flags, &mut active) }
        });
        // Another context's memory is no reason to make the primary one.
        if raw.is_null() || state.is_err() || active != 0 {
            let primary = Context::open(&self.0, handle)?;
            if raw.is_null() || primary.is(raw) {
                return CudaGpu::new(primary, device, None);
            }
        }
        CudaGpu::new(Context::of_program(&self.0, handle, raw), device, None)
    }

    /// Whether a stream of the program can be used, and of which GPU it is.
    ///
    /// # Errors
    /// When the driver says that there is no such stream.
    ///
    /// # Safety
    /// The stream is one of this process that has not been destroyed, or one of CUDA's numbers for its default streams.
    pub unsafe fn stream_state(&self, stream: *mut c_void) -> Result<StreamState> {
        const WHAT: &str = "looking a stream up";
        /// CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: the default stream, while another stream is captured that waits for it.
        const IMPLICIT: c_int = 906;
        let stream = stream.cast::<sys::CUstream_st>();
        let error = |failure| self.0.error(WHAT, failure);
        let calls = self.0.relaxed().map_err(error)?;
        let mut status = 0;
        // SAFETY: `status` lives across the call; the caller vouches for the stream.
        match unsafe { calls.stream_capturing(stream, &mut status) } {
            Ok(()) if status == 0 => {}
            Ok(()) | Err(Failure::Code(_, IMPLICIT)) => return Ok(StreamState::Capturing),
            Err(failure) => return Err(error(failure)),
        }
        let device_of_context = |calls: &Calls| {
            let mut device = 0;
            // SAFETY: `device` lives across the call.
            unsafe { calls.context_device(&mut device) }.map(|()| device)
        };
        // SAFETY: the caller vouches for the stream.
        let device = unsafe { in_context_of(&calls, stream, device_of_context) };
        device.map(|device| StreamState::Running(device.max(0) as u32)).map_err(error)
    }

    /// Has a stream of the program call a function when it comes to this point, and then wait until the word at `offset` of
    /// `words` has reached `value`, or gone past it. With an error nothing waits; the function may be called all the same.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Safety
    /// As for [`Self::stream_state`]. The function may be called with the argument on any thread, once, and calls nothing of
    /// CUDA. `words` is memory that was adopted as pinned, and lives until the stream has gone on.
    pub unsafe fn call_and_wait(
        &self,
        stream: *mut c_void,
        function: extern "C" fn(*mut c_void),
        argument: *mut c_void,
        (words, offset, value): (&Region, usize, u32),
    ) -> Result<Queued> {
        const WHAT: &str = "putting a transfer into a stream";
        /// CU_STREAM_WAIT_VALUE_GEQ: by the difference, so that the count may wrap.
        const AT_LEAST: u32 = 0;
        if words.host().is_none() || offset % 4 != 0 || words.len() < 4 || offset > words.len() - 4 {
            return Err(Error::Memory(onehop_os::Error::OutOfRange { offset, bytes: 4, len: words.len() }));
        }
        let at = words.addr().plus(offset as u64).0;
        let stream = stream.cast::<sys::CUstream_st>();
        let calls = self.0.relaxed().map_err(|failure| self.0.error(WHAT, failure))?;
        let mut called = false;
        let queue = |calls: &Calls| {
            // SAFETY: the caller vouches for the stream, and for the function and its argument.
            unsafe { calls.stream_call(stream, function, argument) }?;
            called = true;
            // SAFETY: the word was checked to lie within pinned memory, which the caller keeps.
            unsafe { calls.stream_wait_word(stream, at, value, AT_LEAST) }
        };
        // SAFETY: the caller vouches for the stream.
        let queued = unsafe { in_context_of(&calls, stream, queue) };
        match queued {
            Ok(()) => Ok(Queued::Both),
            Err(failure) if called => Ok(Queued::CallAlone(self.0.error(WHAT, failure))),
            Err(failure) => Err(self.0.error(WHAT, failure)),
        }
    }
}

/// What of a call and a wait was put into a stream.
#[derive(Debug)]
pub enum Queued {
    /// The function will be called, and the stream waits.
    Both,
    /// The function will be called, and the stream does not wait, for this reason.
    CallAlone(Error),
}

/// Runs calls in the context that a stream is of; a default stream's is the thread's own.
///
/// # Safety
/// As for [`Cuda::stream_state`].
unsafe fn in_context_of<R>(
    calls: &Calls,
    stream: sys::CUstream,
    f: impl FnOnce(&Calls) -> std::result::Result<R, Failure>,
) -> std::result::Result<R, Failure> {
    let mut context = null_mut();
    // SAFETY: `context` lives across the call; the caller vouches for the stream.
    unsafe { calls.stream_context(stream, &mut context) }?;
    // SAFETY: the driver has just named the context.
    unsafe { calls.context_push(context) }?;
    let answer = f(calls);
    let mut popped = null_mut();
    // SAFETY: `popped` lives across the call; this thread has just pushed the context.
    let _ = unsafe { calls.context_pop(&mut popped) };
    answer
}

impl CudaGpu {
    /// As [`Cuda::pointer`], with this GPU's context current.
    ///
    /// # Errors
    /// When the driver does not say.
    pub fn pointer(&self, at: GpuAddr) -> Result<Option<Pointer>> {
        self.0.context.call("looking a pointer up", |calls| look_up(calls, at.0))
    }

    /// All memory that this GPU's copies reach, as one region whose offsets are addresses: for programs that name memory by
    /// pointers, one call after the other. Kernels are not let into it.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Safety
    /// Every range that is read, written or copied to is allocated until the call has returned; after an error, until
    /// [`Self::wait_for_all`] has succeeded.
    pub unsafe fn all_memory(&self) -> Result<Region> {
        let context: &Arc<Context> = &self.0.context;
        let stream = Arc::new(Stream::apart(context)?);
        let memory = DeviceMemory::everything(context, &stream);
        let space = AddressSpace::Device(context.device);
        Ok(Region::on_device(GpuAddr(0), usize::MAX, Arc::new(memory)).in_space(space))
    }
}
