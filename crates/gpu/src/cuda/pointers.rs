//! The program's own memory and streams, given as pointers.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys;
use onehop_proto::GpuAddr;

use super::driver::{DriverCalls, Failure};
use super::gpu::CudaGpu;
use super::memory::DeviceMemory;
use super::stream::Stream;
use super::{Context, Cuda};
use crate::region::AddressSpace;
use crate::{Region, Result};

/// The driver's information about a pointer into GPU memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pointer {
    /// The GPU, as CUDA counts.
    pub ordinal: u32,
    /// The identity of its allocation: unlike the address, it is never reused in this process.
    pub id: u64,
    /// The context of the allocation, as a number; 0 if none.
    pub context: usize,
    /// Whether every GPU reaches it: the driver migrates it to its users.
    pub is_managed: bool,
}

/// How a stream of the program can be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamState {
    /// Work put into it runs.
    Running {
        /// The GPU, as CUDA counts.
        ordinal: u32,
        /// The context, as a number.
        context: usize,
    },
    /// A graph is being captured from it.
    Capturing,
}

/// CU_POINTER_ATTRIBUTE_CONTEXT, _MEMORY_TYPE, _BUFFER_ID, _IS_MANAGED, _DEVICE_ORDINAL.
const ATTRIBUTES: [c_int; 5] = [1, 2, 7, 8, 9];
/// CU_MEMORYTYPE_DEVICE
const DEVICE: u64 = 2;

fn look_up(calls: &DriverCalls, at: u64) -> std::result::Result<Option<Pointer>, Failure> {
    let (mut attributes, mut values) = (ATTRIBUTES, [0_u64; 5]);
    let mut out = values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
    // SAFETY: there are as many attributes as places, each place has the eight bytes that the longest attribute takes, and all
    // live across the call. The pointer is looked up and not dereferenced.
    unsafe { calls.pointer_get_all(ATTRIBUTES.len() as u32, attributes.as_mut_ptr(), out.as_mut_ptr(), at) }?;
    let [context, kind, id, managed, ordinal] = values;
    let (kind, managed, ordinal) = (kind & 0xffff_ffff, managed & 0xff, ordinal as u32 as i32);
    let is_managed = managed != 0;
    let found = Pointer { ordinal: ordinal.max(0) as u32, id, context: context as usize, is_managed };
    Ok((kind == DEVICE || is_managed).then_some(found))
}

impl Cuda {
    /// The driver's information about a pointer; `None` for host memory, pinned or not, and for invalid pointers.
    ///
    /// # Errors
    /// When the driver does not answer: it may need an open GPU ([`CudaGpu::pointer`]).
    pub fn pointer(&self, at: GpuAddr) -> Result<Option<Pointer>> {
        let found = self.0.relaxed().and_then(|calls| look_up(&calls, at.0));
        found.map_err(|failure| self.0.error("looking a pointer up", failure))
    }

    /// Opens the GPU of a pointer's memory, in the context of the allocation: a program may have created its own.
    /// Managed memory and memory without a context are in the primary one.
    ///
    /// # Errors
    /// When the driver fails; for a context of the program's, when the driver is older than CUDA 12.0 and does not
    /// distinguish contexts.
    ///
    /// # Safety
    /// `pointer` is the driver's current information about memory that has not been freed, or that has no context. The
    /// program does not destroy the context while a call uses the result, or what was made with it: host memory that
    /// was first registered with it, too, which calls of other GPUs may use.
    pub unsafe fn open_for(&self, pointer: &Pointer) -> Result<CudaGpu> {
        let (handle, device) = self.device(pointer.ordinal as i32)?;
        let raw = pointer.context as sys::CUcontext;
        let (mut flags, mut active) = (0, 0);
        let state = self.0.relaxed().and_then(|calls| {
            // SAFETY: both results live across the call, and the handle came from cuDeviceGet.
            unsafe { calls.context_state(handle, &mut flags, &mut active) }
        });
        // Another context's memory is no reason to create the primary one.
        if raw.is_null() || state.is_err() || active != 0 {
            let primary = Context::open(&self.0, handle)?;
            if raw.is_null() || primary.is(raw) {
                return CudaGpu::new(primary, device, None);
            }
        }
        // SAFETY: the caller's promise: its memory has not been freed.
        let context = unsafe { Context::of_program(&self.0, handle, raw) }?;
        CudaGpu::new(context, device, None)
    }

    /// Whether a stream of the program can be used, and its GPU.
    ///
    /// # Errors
    /// When the driver reports that there is no such stream.
    ///
    /// # Safety
    /// The stream of this process has not been destroyed, or is one of CUDA's numbers for default streams.
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
        let mut context = null_mut();
        // SAFETY: `context` lives across the call; the caller vouches for the stream.
        unsafe { calls.stream_context(stream, &mut context) }.map_err(error)?;
        let device = device_of(&calls, context).map_err(error)?;
        Ok(StreamState::Running { ordinal: device.max(0) as u32, context: context as usize })
    }
}

/// The device of a context.
fn device_of(calls: &DriverCalls, context: sys::CUcontext) -> std::result::Result<c_int, Failure> {
    // SAFETY: the driver has just named the context.
    unsafe { calls.context_push(context) }?;
    let mut device = 0;
    // SAFETY: `device` lives across the call.
    let answer = unsafe { calls.context_device(&mut device) };
    let mut popped = null_mut();
    // SAFETY: `popped` lives across the call; this thread has just pushed the context.
    let _ = unsafe { calls.context_pop(&mut popped) };
    answer.map(|()| device)
}

impl CudaGpu {
    /// Whether the program has destroyed this GPU's context: see [`Cuda::open_for`]. All calls fail then.
    #[must_use]
    pub fn is_destroyed(&self) -> bool {
        self.0.context.is_destroyed()
    }

    /// As [`Cuda::pointer`], with this GPU's context current.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn pointer(&self, at: GpuAddr) -> Result<Option<Pointer>> {
        self.0.context.call("looking a pointer up", |calls| look_up(calls, at.0))
    }

    /// All memory that this GPU's copies reach, as one region whose offsets are addresses: for programs that pass
    /// pointers, one call after the other. Kernels do not get its addresses.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Safety
    /// Every range that is read or written stays allocated until the call has returned; one that a `Copier` copies
    /// to, until a mark after the copy is over or the copier has been dropped; after an error, until
    /// [`Self::wait_for_all`] has succeeded.
    pub unsafe fn all_memory(&self) -> Result<Region> {
        let context: &Arc<Context> = &self.0.context;
        let stream = Arc::new(Stream::apart(context)?);
        let memory = DeviceMemory::everything(context, &stream);
        let space = AddressSpace::Everything(context.key());
        Ok(Region::on_device(GpuAddr(0), usize::MAX, Arc::new(memory)).in_space(space))
    }
}
