//! An operation in a stream, from when the stream reaches it until it has passed.
//!
//! The bytes cross the bus by a kernel in the program's own stream, between the program's memory and pinned slots. The
//! stream waits only for file I/O, which is done by threads that never call CUDA: a wait blocks all streams that share
//! its channel of the GPU, including those that a copy elsewhere would need.
//!
//! Read: the stream calls [`StreamStep::Reached`], and chunks of the file are read into the slots. For each chunk it
//! waits for the word, runs the kernel, which copies as many bytes as were read, and calls [`StreamStep::Passed`].
//! Write: the stream calls [`StreamStep::Reached`], which describes the copies. For each chunk it runs the kernel and
//! calls [`StreamStep::Passed`], which starts writing the chunk. At the end it waits for the word. Host memory needs no
//! kernel: the stream calls [`StreamStep::Reached`] and waits.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use onehop_gpu::Region;
use onehop_load::engine::calls::Filled;

use crate::error::{Code, Failure};
use crate::files::RegisteredFile;
use crate::io::{Checked, IoRequest, by_host, check};
use crate::log::{Level, say};
use crate::machine::{StreamGpu, machine};
use crate::slots::{AHEAD, CHUNK, PinnedSlot, Reserved, Word};
use crate::state::run;
use crate::stats::{self, Busy, MemorySide, Moved};

/// Which of an operation's words are fixed when it is enqueued.
pub const FIXED_BUFFER_OFFSET: u32 = 1;
pub const FIXED_FILE_OFFSET: u32 = 2;
pub const FIXED_SIZE: u32 = 4;

/// The program's words for an operation, which it keeps until the stream has passed it.
#[derive(Clone, Copy)]
pub struct StreamParameters {
    pub bytes: *const usize,
    pub file_offset: *const i64,
    pub buffer_offset: *const i64,
    pub done: *mut isize,
}

// SAFETY: the program keeps them for this library, on any thread, until the operation has ended.
unsafe impl Send for StreamParameters {}
// SAFETY: as above; they are only used under the operation's lock.
unsafe impl Sync for StreamParameters {}

impl StreamParameters {
    /// The number of bytes, the file's offset and the memory's.
    ///
    /// # Safety
    /// The words are valid.
    pub unsafe fn read(self) -> (usize, i64, i64) {
        // SAFETY: the caller's promise.
        unsafe { (self.bytes.read(), self.file_offset.read(), self.buffer_offset.read()) }
    }

    /// Writes the result.
    ///
    /// # Safety
    /// The words are valid.
    pub unsafe fn finish(self, moved: Result<usize, Failure>) {
        let result = match moved {
            Ok(bytes) => bytes as isize,
            Err(failure) => -(failure.number() as isize),
        };
        // SAFETY: the caller's promise.
        unsafe { self.done.write(result) };
    }
}

/// An operation's parameters at the time it is enqueued.
pub struct EnqueuedOperation {
    pub file: Arc<RegisteredFile>,
    pub base: usize,
    pub writes: bool,
    pub words: StreamParameters,
    /// The words as read then; the flags say which of them are used. The byte count is an upper limit.
    pub early: (usize, i64, i64),
    pub flags: u32,
    /// GPU memory that it may access; none for host memory.
    pub allowed: Option<Range<usize>>,
}

impl EnqueuedOperation {
    /// Number of chunks, and so of waits and kernels in the stream.
    pub fn chunks(&self) -> usize {
        self.most().div_ceil(CHUNK).max(1)
    }

    /// How many slots it needs, and of what size.
    pub fn slots(&self) -> (usize, usize) {
        match self.most() {
            0 => (0, 0),
            most => (self.chunks().min(AHEAD), most.min(CHUNK)),
        }
    }

    /// Bytes that may cross the bus: more than its memory is an error when the operation starts.
    fn most(&self) -> usize {
        self.allowed.as_ref().map_or(0, |allowed| self.early.0.min(allowed.len()))
    }

    /// # Safety
    /// The words are valid.
    unsafe fn request(&self) -> Result<IoRequest, Failure> {
        let fixed = |flag| self.flags & flag != 0;
        let (early, StreamParameters { bytes, file_offset, buffer_offset, .. }) = (self.early, self.words);
        // SAFETY: the caller's promise; fixed words need not be valid.
        let request = unsafe {
            IoRequest {
                base: self.base,
                bytes: if fixed(FIXED_SIZE) { early.0 } else { bytes.read() },
                file_offset: if fixed(FIXED_FILE_OFFSET) { early.1 } else { file_offset.read() },
                buffer_offset: if fixed(FIXED_BUFFER_OFFSET) { early.2 } else { buffer_offset.read() },
                writes: self.writes,
            }
        };
        if request.bytes > early.0 {
            let what = "an operation in a stream is larger than it was when it was put there";
            say(Level::Error, &format!("{what}: {} bytes instead of {} at most", request.bytes, early.0));
            return Err(Code::InvalidValue.into());
        }
        Ok(request)
    }

    /// The request, now that the stream has reached the operation.
    ///
    /// # Safety
    /// The words are valid.
    unsafe fn checked(&self) -> Result<Checked, Failure> {
        // SAFETY: the caller's promise.
        let checked = check(&self.file, &unsafe { self.request() }?)?;
        let Checked { memory, bytes, .. } = checked;
        match &self.allowed {
            Some(allowed) if bytes > 0 && !(allowed.start <= memory && memory + bytes <= allowed.end) => {
                Err(Code::InvalidPointerRange.into())
            }
            _ => Ok(checked),
        }
    }
}

/// See the module.
pub struct Operation {
    wanted: EnqueuedOperation,
    gpu: Arc<StreamGpu>,
    chunks: usize,
    /// Addresses of the slots' orders, and of the word that the stream waits on: no lock is held while a full channel
    /// blocks a driver call.
    orders: Vec<(Region, usize)>,
    waits_on: (Region, usize, u32),
    state: Mutex<OperationState>,
}

#[derive(Default)]
struct OperationState {
    /// Whether file I/O may begin: everything up to the first wait is in the stream.
    is_open: bool,
    /// Whether the call has failed after all. The program's words are not accessed any more.
    is_cancelled: bool,
    /// Calls that the stream has yet to make, and chunks whose file I/O is in progress.
    calls: usize,
    working: usize,
    /// The slot of a kernel that no call follows in the stream.
    unpassed: Option<usize>,
    /// Chunks whose file I/O is queued.
    pending: Vec<usize>,
    word: Option<Word>,
    slots: Vec<PinnedSlot>,
    /// The request, once the stream has reached the operation.
    checked: Option<Checked>,
    failure: Option<Failure>,
    /// Whether a chunk was short or failed: later ones move nothing. And whether it was short because the file ends.
    has_stopped: bool,
    is_at_end: bool,
    /// Results of the chunks' file I/O, and how many have ended in order.
    ended: Vec<Option<Result<Filled, Failure>>>,
    whole: usize,
    /// Chunks of a write that have left the GPU, and whether one is being written.
    copied: usize,
    is_writing: bool,
    moved: usize,
    begun: Option<(Instant, Busy)>,
}

impl OperationState {
    fn fail(&mut self, failure: Failure) {
        self.has_stopped = true;
        self.failure.get_or_insert(failure);
    }

    /// The bytes of a chunk: offset in the operation, and length.
    fn range(&self, chunk: usize) -> (usize, usize) {
        let (start, bytes) = (chunk * CHUNK, self.checked.map_or(0, |checked| checked.bytes));
        (start, bytes.saturating_sub(start).min(CHUNK))
    }

    fn slot(&self, chunk: usize) -> Option<&PinnedSlot> {
        self.slots.get(chunk % self.slots.len().max(1))
    }
}

/// An event in a stream.
enum StreamStep {
    Reached,
    /// The kernel of this chunk has ended.
    Passed(usize),
}

/// A step of an operation, behind a C pointer.
struct StreamCall(Arc<Operation>, StreamStep);

/// The function that the program's stream calls.
extern "C" fn take_step(argument: *mut c_void) {
    // SAFETY: `put_call` has made the pointer of a box, which the stream passes once.
    let call = unsafe { Box::from_raw(argument.cast::<StreamCall>()) };
    let StreamCall(operation, step) = *call;
    // A panic must not go back to CUDA.
    let _ = run("a step of an operation in a stream", || {
        match step {
            StreamStep::Reached => operation.reached(),
            StreamStep::Passed(chunk) => operation.passed(chunk),
        }
        Ok(())
    });
}

impl Operation {
    /// An operation with its reserved resources.
    pub fn new(
        wanted: EnqueuedOperation,
        gpu: Arc<StreamGpu>,
        Reserved { word, slots }: Reserved,
    ) -> Result<Arc<Self>, Failure> {
        // A kernel that runs after a failed call copies nothing.
        slots.iter().try_for_each(|slot| slot.set_order(0, 0, 0))?;
        let place = |(memory, at): (&Region, usize)| (memory.clone(), at);
        let orders = slots.iter().map(|slot| place(slot.order())).collect();
        let (memory, offset, before) = word.after(0);
        let waits_on = (memory.clone(), offset, before);
        let chunks = wanted.chunks();
        let state = OperationState {
            word: Some(word),
            slots,
            ended: (0..chunks).map(|_| None).collect(),
            ..OperationState::default()
        };
        Ok(Arc::new(Self { wanted, gpu, chunks, orders, waits_on, state: Mutex::new(state) }))
    }

    /// Puts it into a stream.
    ///
    /// # Errors
    /// When the driver refuses. The program's words are not accessed after that.
    ///
    /// # Safety
    /// The stream belongs to the operation's context. The words and the memory stay valid until the stream has passed
    /// the operation.
    pub unsafe fn put(self: &Arc<Self>, stream: *mut c_void) -> Result<(), Failure> {
        // SAFETY: the caller's promise, as below.
        if let Err(error) = unsafe { self.put_call(stream, StreamStep::Reached) } {
            self.release_reserved(&mut self.state());
            return Err(error.into());
        }
        // SAFETY: as above.
        if let Err(error) = unsafe { self.put_rest(stream) } {
            self.cancel();
            say(Level::Error, &format!("a part of an operation could not be put into its stream: {error}"));
            return Err(error.into());
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Self::put`].
    unsafe fn put_call(self: &Arc<Self>, stream: *mut c_void, step: StreamStep) -> onehop_gpu::Result<()> {
        let argument: *mut c_void = Box::into_raw(Box::new(StreamCall(self.clone(), step))).cast();
        self.state().calls += 1;
        // SAFETY: the caller's promise for the stream; the function takes the argument once, and does not call CUDA.
        let called = unsafe { self.gpu.work.call(stream, take_step, argument) };
        if called.is_err() {
            // SAFETY: it is the pointer of the box above, which the stream never received.
            drop(unsafe { Box::from_raw(argument.cast::<StreamCall>()) });
            self.state().calls -= 1;
        }
        called
    }

    /// # Safety
    /// As for [`Self::put`].
    unsafe fn put_rest(self: &Arc<Self>, stream: *mut c_void) -> onehop_gpu::Result<()> {
        let work = &self.gpu.work;
        let slots = self.orders.len();
        let (words, offset, before) = &self.waits_on;
        let wait = |steps: usize| {
            // SAFETY: the caller's promise for the stream. StreamParameters and orders live as long as their pool: the
            // machine drops that only when the driver reports its context as gone, a cancelled operation leaks
            // it, and its pages are unregistered only after the GPU's work.
            unsafe { work.wait(stream, words, *offset, before.wrapping_add(steps as u32)) }
        };
        for chunk in 0..if slots == 0 { 0 } else { self.chunks } {
            let waited = if self.wanted.writes { chunk.checked_sub(slots) } else { Some(chunk) };
            if let Some(waited) = waited {
                wait(waited + 1)?;
                self.open();
            }
            let (orders, at) = &self.orders[chunk % slots];
            // SAFETY: as above; what an order names was checked to be the program's memory, which it keeps.
            unsafe { work.copy(stream, orders, *at) }?;
            self.state().unpassed = Some(chunk % slots);
            // SAFETY: the caller's promise.
            unsafe { self.put_call(stream, StreamStep::Passed(chunk)) }?;
            self.state().unpassed = None;
        }
        if slots == 0 || self.wanted.writes {
            wait(self.chunks)?;
        }
        self.open();
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, OperationState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allows file I/O to start. Before that, nothing in the stream waits for it, so that a full channel cannot block
    /// the enqueuing thread before it gets here.
    fn open(self: &Arc<Self>) {
        let mut state = self.state();
        state.is_open = true;
        for chunk in std::mem::take(&mut state.pending) {
            self.submit(&mut state, chunk);
        }
        self.write_next(&mut state);
    }

    /// Cancels an operation that is only partly in its stream. Its parts move nothing and wait for nothing.
    fn cancel(self: &Arc<Self>) {
        // It is unknown when the stream will have passed all of it, so memory that it may access is leaked.
        std::mem::forget(self.clone());
        let mut state = self.state();
        state.is_cancelled = true;
        state.pending.clear();
        for slot in &state.slots {
            if let Err(error) = slot.cancel_order() {
                say(
                    Level::Error,
                    &format!("an order of a cancelled operation could not be withdrawn: {error}"),
                );
            }
        }
        if let Some(word) = &state.word {
            word.reach(self.chunks);
        }
        self.release(&mut state);
    }

    /// Releases what a cancelled operation holds after the stream's last call, except the slot of a kernel after it.
    fn release(&self, state: &mut OperationState) {
        if state.is_cancelled && state.calls == 0 && state.working == 0 {
            if let Some(slot) = state.unpassed.take().filter(|slot| *slot < state.slots.len()) {
                state.slots.swap_remove(slot);
            }
            self.release_reserved(state);
        }
    }

    /// The stream has reached the operation.
    fn reached(self: &Arc<Self>) {
        let mut state = self.state();
        state.calls -= 1;
        if state.is_cancelled {
            return self.release(&mut state);
        }
        state.begun = Some((Instant::now(), stats::busy()));
        // SAFETY: the program keeps the words until the stream has passed the operation.
        match unsafe { self.wanted.checked() } {
            Ok(checked) => state.checked = Some(checked),
            Err(failure) => state.fail(failure),
        }
        let first = state.slots.len().clamp(1, self.chunks);
        for chunk in 0..first {
            if self.wanted.writes && !state.slots.is_empty() {
                self.describe(&mut state, chunk);
            } else {
                self.begin(&mut state, chunk);
            }
        }
    }

    /// The kernel of a chunk has ended.
    fn passed(self: &Arc<Self>, chunk: usize) {
        let mut state = self.state();
        state.calls -= 1;
        if state.is_cancelled {
            return self.release(&mut state);
        }
        if self.wanted.writes {
            state.copied = chunk + 1;
            self.write_next(&mut state);
            return;
        }
        let next = chunk + state.slots.len();
        if next < self.chunks {
            self.begin(&mut state, next);
        }
        if chunk + 1 == self.chunks {
            self.report(&mut state);
            self.release_reserved(&mut state);
        }
    }

    /// Starts the file I/O of a chunk.
    fn begin(self: &Arc<Self>, state: &mut OperationState, chunk: usize) {
        if state.is_open { self.submit(state, chunk) } else { state.pending.push(chunk) }
    }

    fn submit(self: &Arc<Self>, state: &mut OperationState, chunk: usize) {
        state.working += 1;
        let operation = self.clone();
        machine().stream_executor.submit(move || operation.do_file_io(chunk));
    }

    /// Starts writing the next chunk. One at a time: after a failure nothing more is written.
    fn write_next(self: &Arc<Self>, state: &mut OperationState) {
        if state.is_open && !state.is_writing && !state.is_cancelled && state.whole < state.copied {
            state.is_writing = true;
            self.submit(state, state.whole);
        }
    }

    /// Describes the copy of a chunk to be written to its kernel.
    fn describe(&self, state: &mut OperationState, chunk: usize) {
        let ((start, bytes), at) = (state.range(chunk), state.checked.map_or(0, |checked| checked.memory));
        let bytes = if state.has_stopped { 0 } else { bytes };
        let Some(slot) = state.slot(chunk) else { return };
        if let Err(failure) = slot.set_order((at + start) as u64, slot.address(), bytes) {
            state.fail(failure);
        }
    }

    /// Does the file I/O of a chunk, on a thread of the executor.
    fn do_file_io(self: &Arc<Self>, chunk: usize) {
        let moved = run("an operation in a stream", || self.move_chunk(chunk));
        let mut state = self.state();
        state.ended[chunk] = Some(moved);
        loop {
            let next = state.whole;
            let Some(moved) = state.ended.get_mut(next).and_then(Option::take) else { break };
            self.end_chunk(&mut state, moved);
        }
        state.working -= 1;
        state.is_writing = false;
        self.write_next(&mut state);
        self.release(&mut state);
    }

    fn move_chunk(&self, chunk: usize) -> Result<Filled, Failure> {
        const NOTHING: Filled = Filled { skip: 0, bytes: 0 };
        let (file, writes) = (&self.wanted.file, self.wanted.writes);
        let (checked, (start, bytes), place) = {
            let state = self.state();
            let place =
                state.slot(chunk).and_then(PinnedSlot::bytes).map(|(memory, at)| (memory.clone(), at));
            match state.checked {
                Some(checked) if !state.has_stopped && !state.is_cancelled => {
                    (checked, state.range(chunk), place)
                }
                _ => return Ok(NOTHING),
            }
        };
        let Checked { memory, at, .. } = checked;
        let Some((slot, to)) = place else {
            let all = checked.bytes;
            // SAFETY: the program keeps the memory until the stream has passed the operation.
            return unsafe { by_host(file, memory, at, all, writes) }.map(|bytes| Filled { skip: 0, bytes });
        };
        if bytes == 0 {
            return Ok(NOTHING);
        }
        let (engine, at) = (machine().engine()?, at + start as u64);
        if writes {
            let written = engine.write_from_host(&file.file, at, bytes, (&slot, to))?;
            return Ok(Filled { skip: 0, bytes: written });
        }
        // The kernel is fastest if both addresses are congruent modulo 16.
        let shift = (memory + start) % 16;
        Ok(engine.read_to_host(&file.file, at, bytes, (&slot, to, shift))?)
    }

    /// The file I/O of a chunk and of all before it has ended.
    fn end_chunk(&self, state: &mut OperationState, moved: Result<Filled, Failure>) {
        let chunk = state.whole;
        let (start, wanted) = match state.slots.is_empty() {
            true => (0, state.checked.map_or(0, |checked| checked.bytes)),
            false => state.range(chunk),
        };
        let mut filled = Filled { skip: 0, bytes: 0 };
        match moved {
            // After a short chunk nothing is moved, even if there was data by then.
            _ if state.has_stopped => {}
            Ok(moved) => {
                filled = moved;
                state.moved += moved.bytes;
                state.has_stopped = moved.bytes < wanted;
                if let Some(checked) = state.checked.filter(|_| state.has_stopped && !self.wanted.writes) {
                    state.is_at_end = self.wanted.file.ends_before(checked.at + state.moved as u64);
                }
            }
            Err(failure) => state.fail(failure),
        }
        state.whole += 1;
        if state.is_cancelled {
            return;
        }
        if self.wanted.writes && !state.slots.is_empty() {
            let next = chunk + state.slots.len();
            if next < self.chunks {
                self.describe(state, next);
            }
        } else if let (Some(slot), Some(checked)) = (state.slot(chunk), state.checked) {
            let (from, to) = (slot.address() + filled.skip as u64, (checked.memory + start) as u64);
            if let Err(failure) = slot.set_order(from, to, filled.bytes) {
                state.fail(failure);
            }
        }
        // The next commands in the stream may use the result.
        let is_last = state.whole == self.chunks && (self.wanted.writes || state.slots.is_empty());
        if is_last {
            self.report(state);
        }
        if let Some(word) = &state.word {
            word.reach(state.whole);
        }
        if is_last {
            self.release_reserved(state);
        }
    }

    /// Writes the result, counts it, and reports a failure.
    fn report(&self, state: &mut OperationState) {
        let wanted = state.checked.map_or(self.wanted.early.0, |checked| checked.bytes);
        let moved = state.failure.map_or(Ok(state.moved), Err);
        // SAFETY: it was not cancelled, and the program keeps the words until the stream has passed the operation.
        unsafe { self.wanted.words.finish(moved) };
        let took = state.begun.take().map_or_else(Default::default, |(begun, _)| begun.elapsed());
        let way = if state.slots.is_empty() { MemorySide::Host } else { MemorySide::Gpu(self.gpu.ordinal) };
        let (bytes, is_ok) = (moved.unwrap_or(0), moved.is_ok());
        stats::moved(&Moved { bytes, is_ok, writes: self.wanted.writes, took, way });
        self.wanted.file.report_outcome(moved, wanted, state.is_at_end);
    }

    /// Releases the reserved resources. The stream only uses them for a wait that its word has ended.
    fn release_reserved(&self, state: &mut OperationState) {
        for slot in state.slots.drain(..) {
            self.gpu.slots.release(slot);
        }
        if let Some(word) = state.word.take() {
            self.gpu.slots.release_word(word, self.chunks);
        }
    }
}
