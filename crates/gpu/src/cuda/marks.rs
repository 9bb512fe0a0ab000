//! Marks in GPU memory, placed and counted by kernels at the speed of that memory.
//!
//! A kernel may find no room on the GPU. The host then cancels it, by the protocol of
//! [`onehop_proto::kernel::run_mark`]: it may start later, but writes nothing. The kernels have a separate stream, so
//! that nothing waits behind one that does not start.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use onehop_os::{HostMem, Marks};
use onehop_proto::kernel::Permit;

use super::context::Context;
use super::driver::DevicePtr;
use super::host::{self, PageRegistration};
use super::module::{Arg, Function, Module, Shape};
use super::stream::{End, Stream};
use crate::{Error, Result};

/// Threads of a block that marks. Every warp reads the permit across the bus, one after another at a microsecond each.
/// Stores do not wait, so 64 warps keep the memory busy.
const MARK_THREADS: u32 = 64;
/// Threads of a block that counts, and blocks: loads wait, and there is no permit.
const COUNT_THREADS: u32 = 256;
const MOST_COUNT_BLOCKS: u32 = 512;
/// Maximum marks of one launch: their number is 32 bits wide.
const MOST: u64 = 1 << 31;
/// The driver cuts small allocations from a larger one.
const COUNTER_BYTES: usize = 256;
/// Offset of the number of remaining marks, after the permit.
const LEFT: usize = Permit::BYTES as usize;
/// How long blocks that are writing may take: a thousand times what they need.
const WRITING: Duration = Duration::from_secs(1);
const MARKING: &str = "marking GPU memory";
const COUNTING: &str = "counting marks in GPU memory";

/// The kernels, and what they share with the host.
pub(super) struct Marker {
    stream: Arc<Stream>,
    mark: Function,
    left: Function,
    counter: Counter,
    /// The permit, followed by the number of remaining marks.
    shared: HostMem,
    shared_at: DevicePtr,
    _registration: PageRegistration,
    /// The number of the last launch. The lock's holder owns the stream and the permit.
    launches: Mutex<u32>,
}

struct Counter {
    context: Arc<Context>,
    at: DevicePtr,
}

impl Drop for Counter {
    fn drop(&mut self) {
        let (context, at) = (self.context.clone(), self.at);
        self.context.driver.reclaimer.enqueue(move || {
            // SAFETY: it came from cuMemAlloc; kernels that use it hold the marker.
            let answer = context.attempt(|driver| unsafe { driver.free(at) });
            context.freed(answer, "freeing GPU memory")
        });
    }
}

impl Marker {
    pub(super) fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context, onehop_device::MARKS_PTX)?;
        let shared = HostMem::anonymous(LEFT + size_of::<u32>())?;
        let (_registration, shared_at) = host::share(context, &shared)?;
        let mut at = 0;
        // SAFETY: `at` lives across the call, and the context is current in it.
        context.call("allocating a counter", |driver| unsafe { driver.alloc(&mut at, COUNTER_BYTES) })?;
        let counter = Counter { context: context.clone(), at };
        Ok(Self {
            stream: Arc::new(Stream::for_marks(context)?),
            mark: module.function("onehop_mark")?,
            left: module.function("onehop_marks_left")?,
            counter,
            shared,
            shared_at,
            _registration,
            launches: Mutex::default(),
        })
    }

    /// Writes the word to every address, within `limit`.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the kernel did not end in time; nothing is written then when this returns.
    /// [`Error::StillWriting`] when it could not be cancelled either.
    ///
    /// # Safety
    /// All places are allocated until this returns; and until the GPU is idle, if it does with [`Error::StillWriting`].
    pub(super) unsafe fn mark(
        self: &Arc<Self>,
        memory: DevicePtr,
        marks: &Marks,
        limit: Duration,
    ) -> Result<()> {
        let deadline = Instant::now() + limit;
        parts(memory, marks).try_for_each(|(first, count)| {
            let mut launches = self.turn(MARKING, limit, deadline)?;
            *launches = launches.wrapping_add(1).max(1);
            self.shared.word(Permit::LAUNCH as usize)?.store(*launches, Ordering::SeqCst);
            let args = [
                Arg::U64(first),
                Arg::U64(marks.word),
                Arg::U64(self.shared_at),
                Arg::U32(count),
                Arg::U32(*launches),
            ];
            // SAFETY: these are the kernel's arguments; the caller vouches for the places. The permit is ours, and the marker is
            // left to a kernel that does not end.
            let begun = unsafe { self.mark.launch(&self.stream, mark_shape(count), &args) };
            let end = self.stream.end(deadline.saturating_duration_since(Instant::now()));
            if end == End::Over {
                return begun;
            }
            self.give_up(end, MARKING, limit)
        })
    }

    /// How many addresses still hold the word, counted within `limit`.
    ///
    /// # Errors
    /// When the GPU did not answer in time.
    ///
    /// # Safety
    /// All places are allocated until this returns, and freed only when all kernels have ended.
    pub(super) unsafe fn left(
        self: &Arc<Self>,
        memory: DevicePtr,
        marks: &Marks,
        limit: Duration,
    ) -> Result<u64> {
        let deadline = Instant::now() + limit;
        parts(memory, marks).try_fold(0, |sum, (first, count)| {
            let _turn = self.turn(COUNTING, limit, deadline)?;
            let Counter { context, at } = &self.counter;
            let args = [Arg::U64(first), Arg::U64(marks.word), Arg::U64(*at), Arg::U32(count)];
            let left = self.shared.word(LEFT)?;
            // SAFETY: the counter is allocated, and the marker is left to work that does not end.
            let zeroed = context.call(COUNTING, |driver| unsafe {
                driver.set_bytes(*at, 0, size_of::<u32>(), self.stream.raw())
            });
            // SAFETY: these are the kernel's arguments; the caller vouches for the places.
            let begun = zeroed
                .and_then(|()| unsafe { self.left.launch(&self.stream, count_shape(count), &args) })
                .and_then(|()| {
                    // SAFETY: as for the counter; `left` is a word of the shared memory.
                    context.call(COUNTING, |driver| unsafe {
                        driver.copy_out(left.as_ptr().cast(), *at, size_of::<u32>(), self.stream.raw())
                    })
                });
            match self.stream.end(deadline.saturating_duration_since(Instant::now())) {
                End::Over => begun.map(|()| sum + u64::from(left.load(Ordering::Acquire))),
                end => {
                    self.leave(end);
                    Err(self.stream.error(COUNTING, end, limit))
                }
            }
        })
    }

    /// Waits for the kernels of other threads.
    fn turn(&self, what: &str, limit: Duration, deadline: Instant) -> Result<MutexGuard<'_, u32>> {
        loop {
            match self.launches.try_lock() {
                Ok(turn) => return Ok(turn),
                Err(TryLockError::Poisoned(turn)) => return Ok(PoisonError::into_inner(turn)),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                    return Err(Error::Cancelled { what: what.into(), limit });
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(20)),
            }
        }
    }

    /// Cancels the running launch, and returns the error.
    fn give_up(self: &Arc<Self>, end: End, what: &str, limit: Duration) -> Result<()> {
        self.leave(end);
        let what = what.to_owned();
        match (self.cancel(), end) {
            (_, End::Lost(_)) => Err(self.stream.error(&what, end, limit)),
            (false, _) => Err(Error::StillWriting { what, limit }),
            (true, End::Unended(Some(_))) => Err(self.stream.error(&what, end, limit)),
            (true, _) => Err(Error::Cancelled { what, limit }),
        }
    }

    /// Revokes the permit; whether no block writes any more.
    fn cancel(&self) -> bool {
        let Ok(permit) = self.shared.word(Permit::LAUNCH as usize) else { return false };
        permit.store(0, Ordering::SeqCst);
        // Pairs with the block's order: it announces its writes before it reads the permit.
        fence(Ordering::SeqCst);
        let writes = |block| {
            let word = self.shared.word(Permit::block(block) as usize);
            word.is_ok_and(|word| word.load(Ordering::Acquire) != 0)
        };
        let start = Instant::now();
        while (0..Permit::MOST_BLOCKS).any(writes) {
            if start.elapsed() >= WRITING {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Leaves everything to work that has not ended.
    fn leave(self: &Arc<Self>, end: End) {
        if matches!(end, End::Unended(_)) {
            self.stream.outlasted(self.clone());
        }
    }
}

/// The launches for marks: the first address and the word count of each.
fn parts(memory: DevicePtr, marks: &Marks) -> impl Iterator<Item = (DevicePtr, u32)> + use<> {
    let Marks { first, count, .. } = *marks;
    let start = move |part: u64| memory + first + part * MOST * Marks::BYTES;
    (0..count.div_ceil(MOST)).map(move |part| (start(part), (count - part * MOST).min(MOST) as u32))
}

fn mark_shape(count: u32) -> Shape {
    let blocks = count.div_ceil(MARK_THREADS).clamp(1, Permit::MOST_BLOCKS);
    Shape { blocks, threads: MARK_THREADS, shared: 0 }
}

fn count_shape(count: u32) -> Shape {
    let blocks = count.div_ceil(COUNT_THREADS).clamp(1, MOST_COUNT_BLOCKS);
    Shape { blocks, threads: COUNT_THREADS, shared: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_cover_every_word_once() {
        for count in [0, 1, MOST - 1, MOST, MOST + 1, 5 * MOST / 2] {
            let marks = Marks { first: 24, count, word: 1 };
            let mut next = 1024;
            for (first, words) in parts(1000, &marks) {
                assert!(first == next && words > 0 && u64::from(words) <= MOST);
                assert!(mark_shape(words).blocks <= Permit::MOST_BLOCKS);
                next += u64::from(words) * Marks::BYTES;
            }
            assert_eq!(next, 1024 + count * Marks::BYTES);
        }
    }
}
