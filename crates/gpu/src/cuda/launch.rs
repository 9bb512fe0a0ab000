//! A running kernel, which holds everything it uses until it has ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_proto::kernel::Exit;

use super::context::{Event, WorkProgress};
use super::kernels;
use super::live::MemoryHold;
use super::module::Function;
use super::stream::{self, End, KERNELS, Stream};
use crate::relay::RunningKernel;
use crate::{Error, Region, Result, Running};

/// Kernels end by their own limits; this is for a GPU that other programs keep busy.
const GRACE: Duration = Duration::from_secs(10);
/// The longest limit, within the clock's range.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// Work in a stream, and the event at its end.
pub(super) struct RunningLaunch {
    what: String,
    begun: Event,
    done: Event,
    /// Its time limit, and when that expires.
    limit: Duration,
    until: Instant,
    /// What the kernel uses, held until it has ended.
    held: Option<LaunchHold>,
}

/// Memory that a kernel uses.
#[derive(Default)]
pub(super) struct Used {
    /// The launch's memory, which is returned.
    pub(super) memory: Option<Region>,
    /// The caller's memory.
    pub(super) _held: Vec<MemoryHold>,
}

/// The stream, and everything else that a kernel needs.
pub(super) struct LaunchHold {
    pub(super) stream: Arc<Stream>,
    pub(super) function: Function,
    pub(super) used: Used,
    /// Keeps doorbell relays awake.
    pub(super) awake: RunningKernel,
}

impl LaunchHold {
    /// Leaves everything to a kernel that may never end.
    fn leave(self) {
        let Self { stream, function, used, awake } = self;
        // It would keep a CPU busy for as long as the kernel runs.
        drop(awake);
        stream.outlasted((function, used));
    }
}

impl RunningLaunch {
    /// Marks the end of what was launched in the stream since `begun`, with a time limit. If that or the launch fails,
    /// nothing is freed before the stream has ended.
    pub(super) fn new(
        what: &str,
        (begun, done): (Event, Event),
        (launched, limit): (Result<()>, Duration),
        held: LaunchHold,
    ) -> Result<Self> {
        if let Err(error) = launched.and_then(|()| done.record(&held.stream)) {
            if !matches!(stream::wait(GRACE, KERNELS, || held.stream.progress()), End::Unended(_)) {
                return Err(error);
            }
            held.leave();
            return Err(error.of_begun_work());
        }
        let limit = limit.saturating_add(GRACE).min(FOREVER);
        let until = Instant::now() + limit;
        Ok(Self { what: what.to_owned(), begun, done, limit, until, held: Some(held) })
    }

    /// Whether it is over: it has ended, or its limit has expired.
    pub(super) fn is_over(&self) -> bool {
        self.done.progress() != WorkProgress::Pending || Instant::now() >= self.until
    }

    /// The GPU time, once it is over.
    pub(super) fn took(&self) -> Result<Duration> {
        self.done.since(&self.begun)
    }

    /// Waits until it is over.
    pub(super) fn wait(&mut self) -> Result<Option<Region>> {
        let left = self.until.saturating_duration_since(Instant::now());
        let end = stream::wait(left, KERNELS, || self.done.progress());
        let Some(held) = self.held.take() else {
            return Err(Error::Launch("it was waited for already".into()));
        };
        if end == End::Over {
            return Ok(held.used.memory);
        }
        let error = held.stream.error(&self.what, end, self.limit);
        if matches!(end, End::Unended(_)) {
            held.leave();
        }
        Err(error)
    }
}

impl Drop for RunningLaunch {
    fn drop(&mut self) {
        if self.held.is_some() {
            // The memory is in use until the end, so wait even if the outcome is not needed.
            let _ = self.wait();
        }
    }
}

/// A launch of onehop's kernels.
pub(super) struct Launched {
    pub(super) work: RunningLaunch,
    pub(super) exits_at: usize,
    pub(super) count: usize,
    /// Returns the launch's memory.
    pub(super) return_memory: Box<dyn FnOnce(Region) + Send>,
}

impl Running for Launched {
    fn is_done(&self) -> bool {
        self.work.is_over()
    }

    fn took(&self) -> Option<Duration> {
        self.work.took().ok()
    }

    fn join(mut self: Box<Self>) -> Result<Vec<Exit>> {
        let memory = self.work.wait()?;
        let memory = memory.ok_or_else(|| Error::Launch("its memory is gone".into()))?;
        let mut bytes = vec![0; kernels::exit_bytes(self.count)];
        memory.read(self.exits_at, &mut bytes)?;
        (self.return_memory)(memory);
        kernels::exits(&bytes)
    }
}
