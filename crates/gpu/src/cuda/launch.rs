//! A kernel under way, with everything that it uses held until it has ended.

use std::time::{Duration, Instant};

use onehop_proto::kernel::Exit;

use super::context::{Event, Stream};
use super::kernels;
use super::module::Function;
use crate::relay::RunningKernel;
use crate::{Error, Region, Result, Running};

/// Kernels end by their own bounds; this is for a GPU that other programs keep busy meanwhile.
const GRACE: Duration = Duration::from_secs(10);
/// A limit beyond what a clock can count to.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// Work in a stream, and the point at which it is over.
pub(super) struct Work {
    what: String,
    begun: Event,
    done: Event,
    until: Instant,
    /// What the kernel uses: nothing of it may go before the kernel has ended.
    held: Option<Held>,
}

/// The stream, and whatever else a kernel needs.
pub(super) struct Held {
    pub(super) stream: Stream,
    pub(super) function: Function,
    pub(super) memory: Option<Region>,
    /// Keeps doorbell relays awake.
    pub(super) awake: RunningKernel,
}

impl Held {
    /// Leaves everything to a kernel of which nobody knows when it ends.
    fn leak(self) {
        let Self { stream, function, memory, awake } = self;
        std::mem::forget((stream, function, memory));
        drop(awake);
    }
}

impl Work {
    /// Marks the end of what is in the stream since `begun`; it has to come within `limit`.
    pub(super) fn new(
        what: &str,
        (begun, done): (Event, Event),
        limit: Duration,
        held: Held,
    ) -> Result<Self> {
        if let Err(error) = done.record(&held.stream) {
            held.leak();
            return Err(error);
        }
        let now = Instant::now();
        let until = now.checked_add(limit.saturating_add(GRACE)).unwrap_or(now + FOREVER);
        Ok(Self { what: what.to_owned(), begun, done, until, held: Some(held) })
    }

    /// Whether it is over, one way or the other.
    pub(super) fn is_over(&self) -> bool {
        self.done.is_over(&self.what).unwrap_or(true)
    }

    /// How long the GPU took, once it is over.
    pub(super) fn took(&self) -> Result<Duration> {
        self.done.since(&self.begun)
    }

    /// Waits until it is over.
    pub(super) fn wait(&mut self) -> Result<Option<Region>> {
        let mut turns = 0u32;
        loop {
            match self.done.is_over(&self.what) {
                Ok(true) => return Ok(self.held.take().and_then(|held| held.memory)),
                Ok(false) if Instant::now() >= self.until => {
                    if let Some(held) = self.held.take() {
                        held.leak();
                    }
                    return Err(Error::Launch(format!(
                        "{} did not end within its bounds; its memory is left to it until this process ends",
                        self.what
                    )));
                }
                Ok(false) => {}
                Err(error) => {
                    // The context is lost, and its kernels with it.
                    self.held = None;
                    return Err(error);
                }
            }
            turns = turns.saturating_add(1);
            if turns < 1000 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if self.held.is_some() {
            // Whoever does not want the outcome still waits for the end: the memory is in use until then.
            let _ = self.wait();
        }
    }
}

/// A launch of onehop's kernels.
pub(super) struct Launched {
    pub(super) work: Work,
    pub(super) exits_at: usize,
    pub(super) count: usize,
    /// Takes the launch's memory back.
    pub(super) give_back: Box<dyn FnOnce(Region) + Send>,
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
        (self.give_back)(memory);
        kernels::exits(&bytes)
    }
}
