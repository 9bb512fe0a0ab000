//! Marks in GPU memory that stand side by side: placed and counted by kernels, at the speed of that memory.

use std::sync::Arc;

use onehop_os::Marks;

use super::context::Context;
use super::driver::DevicePtr;
use super::module::{Arg, Function, Module, Shape};
use super::stream::Stream;
use crate::Result;

/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks at most: each thread takes several words.
const MOST_BLOCKS: u64 = 2048;
/// The driver cuts small allocations from a larger one.
const COUNTER_BYTES: usize = 256;
/// Marks that one launch counts: their number is 32 bits wide.
const MOST: u64 = 1 << 31;

/// The kernels, and the word that they count in.
pub(super) struct Marker {
    mark: Function,
    left: Function,
    counter: Counter,
}

struct Counter {
    context: Arc<Context>,
    at: DevicePtr,
}

impl Drop for Counter {
    fn drop(&mut self) {
        let (context, at) = (self.context.clone(), self.at);
        self.context.driver.reclaimer.give_back(move || {
            // SAFETY: it came from cuMemAlloc; kernels that use it hold the marker.
            let answer = context.attempt(|driver| unsafe { driver.free(at) });
            context.freed(answer, "freeing GPU memory")
        });
    }
}

impl Marker {
    pub(super) fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context, onehop_device::MARKS_PTX)?;
        let mut at = 0;
        // SAFETY: `at` lives across the call, and the context is current in it.
        context.call("allocating a counter", |driver| unsafe { driver.alloc(&mut at, COUNTER_BYTES) })?;
        let counter = Counter { context: context.clone(), at };
        Ok(Self {
            mark: module.function("onehop_mark")?,
            left: module.function("onehop_marks_left")?,
            counter,
        })
    }

    /// Whether these marks are for the kernels: side by side and aligned.
    pub(super) fn takes(memory: DevicePtr, marks: &Marks) -> bool {
        marks.is_dense() && (memory + marks.first).is_multiple_of(Marks::BYTES) && marks.count <= MOST
    }

    /// Begins to write the word to every place.
    ///
    /// # Safety
    /// All of them are allocated until the stream has come so far.
    pub(super) unsafe fn mark(&self, stream: &Stream, memory: DevicePtr, marks: &Marks) -> Result<()> {
        let args = [Arg::U64(memory + marks.first), Arg::U64(marks.count), Arg::U64(marks.word)];
        // SAFETY: these are the kernel's arguments; the caller vouches for the places.
        unsafe { self.mark.launch(stream, shape(marks.count), &args) }
    }

    /// Begins to count the places that still hold the word; the number will be at the address that this returns.
    ///
    /// # Safety
    /// As for [`Self::mark`].
    pub(super) unsafe fn count(
        &self,
        stream: &Stream,
        memory: DevicePtr,
        marks: &Marks,
    ) -> Result<DevicePtr> {
        let Counter { context, at } = &self.counter;
        // SAFETY: the counter is allocated.
        context.call("zeroing a counter", |driver| unsafe { driver.set_bytes(*at, 0, 4, stream.raw()) })?;
        let args =
            [Arg::U64(memory + marks.first), Arg::U64(marks.count), Arg::U64(marks.word), Arg::U64(*at)];
        // SAFETY: these are the kernel's arguments; the caller vouches for the places.
        unsafe { self.left.launch(stream, shape(marks.count), &args) }?;
        Ok(*at)
    }
}

fn shape(count: u64) -> Shape {
    let blocks = count.div_ceil(u64::from(THREADS)).clamp(1, MOST_BLOCKS) as u32;
    Shape { blocks, threads: THREADS, shared: 0 }
}
