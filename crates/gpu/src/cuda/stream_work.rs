//! Work for the program's own streams: calls, waits, and copies whose parameters are set later.
//!
//! A copy by the copy engine must be known when it is enqueued, and in a stream of ours it may never start: streams
//! share the context's channels, and a wait blocks everything after it in its channel. So a kernel in the program's own
//! stream does the copies.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;
use onehop_os::DmaMemory;
use onehop_proto::GpuAddr;
use onehop_proto::kernel::PlaceOrder;

use super::context::Context;
use super::gpu::CudaGpu;
use super::module::{Arg, Function, Module, Shape};
use crate::{Error, Region, Result};

/// Each thread has four words of 16 bytes in flight: 256 KiB in all, more than crosses the bus during its latency.
const SHAPE: Shape = Shape { blocks: 16, threads: 256, shared: 0 };
const WHAT: &str = "putting a transfer into a stream";

/// Work for the streams of one context; see the module.
pub struct StreamWork {
    context: Arc<Context>,
    place: Function,
}

impl CudaGpu {
    /// Loads what [`StreamWork`] needs into this GPU's context.
    ///
    /// # Errors
    /// When the driver cannot compile the kernel.
    pub fn stream_work(&self) -> Result<StreamWork> {
        let context = self.0.context.clone();
        let place = Module::load(&context, onehop_device::PLACE_PTX)?.function("onehop_place")?;
        Ok(StreamWork { context, place })
    }

    /// Whether kernels of this GPU's context reach a pointer's memory by that address.
    #[must_use]
    pub fn reaches(&self, at: GpuAddr) -> bool {
        /// CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        const DEVICE_POINTER: c_int = 3;
        let mut found = 0_u64;
        let asked = self.0.context.attempt(|driver| {
            // SAFETY: the attribute is a pointer of the GPU, and `found` lives across the call; the pointer is looked up and not
            // dereferenced.
            unsafe { driver.pointer_get((&raw mut found).cast(), DEVICE_POINTER, at.0) }
        });
        asked.is_ok() && found == at.0
    }

    /// The allocation that contains a pointer.
    ///
    /// # Errors
    /// When the driver knows none in this GPU's context.
    pub fn allocation(&self, at: GpuAddr) -> Result<Range<u64>> {
        let (mut base, mut bytes) = (0, 0);
        self.0.context.call("looking an allocation up", |driver| {
            // SAFETY: both results live across the call; the pointer is looked up and not dereferenced.
            unsafe { driver.address_range(&mut base, &mut bytes, at.0) }
        })?;
        Ok(base..base.saturating_add(bytes as u64))
    }
}

impl StreamWork {
    /// Makes a stream call a function when it reaches this point.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Safety
    /// The stream is one of this context that has not been destroyed, or one of CUDA's numbers for its default streams.
    /// The function may be called with the argument on any thread, once, and does not call CUDA.
    pub unsafe fn call(
        &self,
        stream: *mut c_void,
        function: extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        self.context.call(WHAT, |driver| unsafe {
            driver.stream_call(stream.cast::<sys::CUstream_st>(), function, argument)
        })
    }

    /// Makes a stream wait until the word at `offset` of `words` has reached or passed `value`.
    ///
    /// # Errors
    /// When that is not a word of pinned memory, or the driver refuses.
    ///
    /// # Safety
    /// As for [`Self::call`] for the stream. `words` was made by the GPU of this context, and lives until the stream
    /// has passed the wait.
    pub unsafe fn wait(&self, stream: *mut c_void, words: &Region, offset: usize, value: u32) -> Result<()> {
        /// CU_STREAM_WAIT_VALUE_GEQ: by the difference, so that the count may wrap.
        const AT_LEAST: u32 = 0;
        let at = pinned(words, offset, size_of::<u32>())?;
        // SAFETY: the caller's promise; the word was checked.
        self.context.call(WHAT, |driver| unsafe {
            driver.stream_wait_word(stream.cast::<sys::CUstream_st>(), at, value, AT_LEAST)
        })
    }

    /// Makes a stream execute the [`PlaceOrder`] at `offset` of `orders`, with its content when the stream reaches this
    /// point.
    ///
    /// # Errors
    /// When the order is out of bounds, or the driver refuses.
    ///
    /// # Safety
    /// As for [`Self::wait`]. The memory in the order is then allocated and reachable from this context, until the
    /// stream has passed; and `self` is not dropped before that.
    pub unsafe fn copy(&self, stream: *mut c_void, orders: &Region, offset: usize) -> Result<()> {
        let order = Arg::U64(pinned(orders, offset, PlaceOrder::BYTES)?);
        // SAFETY: this is the kernel's argument, and the caller's promise.
        unsafe { self.place.launch_in(stream.cast::<sys::CUstream_st>(), SHAPE, &[order]) }
    }
}

/// The GPU's address of aligned bytes of pinned memory.
fn pinned(memory: &Region, offset: usize, bytes: usize) -> Result<u64> {
    let align = if bytes < 8 { bytes as u64 } else { 8 };
    let is_aligned = memory.addr().0.wrapping_add(offset as u64).is_multiple_of(align);
    let is_within = offset.checked_add(bytes).is_some_and(|end| end <= memory.len());
    if memory.host().is_none() || !is_aligned || !is_within {
        return Err(Error::Memory(onehop_os::Error::OutOfRange { offset, bytes, len: memory.len() }));
    }
    Ok(memory.addr().plus(offset as u64).0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Emulated, Gpu, Place};

    #[test]
    fn a_misplaced_word_is_refused() {
        let gpu = Emulated::new();
        let words = gpu.alloc(Place::PinnedHost, 4096).unwrap();
        assert_eq!(pinned(&words, 4092, 4).unwrap(), words.addr().0 + 4092);
        let (small, askew) = (words.slice(0..2).unwrap(), words.slice(2..4096).unwrap());
        assert_eq!(pinned(&askew, 2, 4).unwrap(), words.addr().0 + 4);
        for (words, offset, bytes) in [
            (&words, 4096, 4),
            (&words, 2, 4),
            (&words, usize::MAX - 3, 4),
            (&small, 0, 4),
            (&askew, 0, 4),
            (&askew, 4, 4),
            (&words, 4096 - 8, PlaceOrder::BYTES),
            (&words, 4, PlaceOrder::BYTES),
        ] {
            let refused = pinned(words, offset, bytes).unwrap_err();
            assert!(matches!(refused, Error::Memory(_)), "{offset}: {refused}");
        }
    }
}
