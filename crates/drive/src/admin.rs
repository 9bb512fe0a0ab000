//! The admin queue: one command at a time, asynchronous events beside it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use onehop_os::{ControllerBackend, StopSignal, Transport};
use onehop_proto::log::AsyncEvent;
use onehop_proto::queue::{Event, Owner, Slot};
use onehop_proto::sgl::Descriptor;
use onehop_proto::{Cqe, Sqe, admin};

use crate::control::{self, Control};
use crate::options::STOP_PATIENCE;
use crate::ring::{CpuPair, Dma, PairMemory};
use crate::{Error, Result};

/// Entries of both admin queues.
const ENTRIES: u32 = 32;
/// Most event requests that are kept posted.
pub(crate) const MAX_EVENT_REQUESTS: u32 = 4;

/// How often the controller's status is checked while a command is waited for.
const STATUS_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// What a slot of the admin queue is waiting for.
enum Waiting {
    Nothing,
    Answer,
    Event,
    /// Abandoned by its caller; its memory stays until the command is completed or the controller reset.
    Cancelled(#[allow(dead_code)] Option<Dma>),
}

/// The admin queue pair.
pub(crate) struct Admin {
    pair: CpuPair,
    owner: Owner<PairMemory, Vec<Slot>>,
    waiting: Vec<Waiting>,
    /// Events that were reported and not yet handled.
    pub(crate) fired: VecDeque<AsyncEvent>,
    port: ControllerBackend,
    timeout: Duration,
    /// When all commands must have been answered.
    due: Option<Instant>,
    stop: StopSignal,
    /// Whether a controller was enabled on these queues, ever.
    pub(crate) was_started: bool,
}

impl Admin {
    pub(crate) fn new(control: &Control, timeout: Duration) -> Result<Self> {
        let port = &control.port;
        let pair = CpuPair::alloc(port, 0, ENTRIES, control.page_shift, control.cap.dstrd())?;
        let owner = Owner::new(pair.rings, vec![Slot::default(); ENTRIES as usize]);
        let waiting = (0..ENTRIES).map(|_| Waiting::Nothing).collect();
        let (port, stop) = (port.clone(), control.stop.clone());
        Ok(Self {
            pair,
            owner,
            waiting,
            fired: VecDeque::new(),
            port,
            timeout,
            due: None,
            stop,
            was_started: false,
        })
    }

    /// Enables a disabled controller on these queues; commands in flight before are gone. Calls `lost` where the controller
    /// was without power since it was started last.
    pub(crate) fn start(&mut self, control: &Control, lost: impl Fn()) -> Result<()> {
        self.pair.zero()?;
        self.owner.renew();
        self.waiting.iter_mut().for_each(|w| *w = Waiting::Nothing);
        self.fired.clear();
        self.was_started = true;
        control.enable(self.pair.sq.bus, self.pair.cq.bus, ENTRIES, lost)
    }

    /// Sets the default time limit of commands, and returns the previous one.
    pub(crate) fn set_timeout(&mut self, timeout: Duration) -> Duration {
        std::mem::replace(&mut self.timeout, timeout)
    }

    /// Limits the time of all commands together; `None` ends that.
    pub(crate) fn set_due(&mut self, due: Option<Instant>) {
        self.due = due;
    }

    /// Runs a command without data; `what` names it in errors. A request to stop ends the wait for its answer.
    pub(crate) fn run(&mut self, what: &str, sqe: &Sqe) -> Result<Cqe> {
        self.run_for(what, sqe, None, self.timeout, Duration::ZERO)
    }

    /// Runs a command with its own time limit, which a request to stop shortens to [`STOP_PATIENCE`]: for an orderly
    /// end.
    pub(crate) fn run_within(&mut self, what: &str, sqe: &Sqe, timeout: Duration) -> Result<Cqe> {
        self.run_for(what, sqe, None, timeout, STOP_PATIENCE)
    }

    /// Runs a command that fills `bytes` bytes, at most a page.
    pub(crate) fn read(
        &mut self,
        port: &ControllerBackend,
        what: &str,
        sqe: &Sqe,
        bytes: usize,
    ) -> Result<Vec<u8>> {
        let data = Dma::alloc(&*port.mapper, 4096, 12)?;
        let mem = data.mem.clone();
        let sqe = point(port, sqe, &data, bytes.min(4096))?;
        self.run_for(what, &sqe, Some(data), self.timeout, Duration::ZERO)?;
        Ok(mem.to_vec(0, bytes.min(4096))?)
    }

    /// Runs a command that takes `data`, at most a page.
    pub(crate) fn write(
        &mut self,
        port: &ControllerBackend,
        what: &str,
        sqe: &Sqe,
        data: &[u8],
    ) -> Result<Cqe> {
        let buffer = Dma::alloc(&*port.mapper, 4096, 12)?;
        buffer.mem.write(0, data)?;
        let sqe = point(port, sqe, &buffer, data.len())?;
        self.run_for(what, &sqe, Some(buffer), self.timeout, Duration::ZERO)
    }

    /// `after_stop`: how much longer to wait for the answer after a request to stop.
    fn run_for(
        &mut self,
        what: &str,
        sqe: &Sqe,
        data: Option<Dma>,
        timeout: Duration,
        after_stop: Duration,
    ) -> Result<Cqe> {
        let left = self.due.map_or(timeout, |due| due.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            let (drive, command) = (self.port.name.clone(), what.to_owned());
            return Err(Error::NoAnswer { drive, command, waited: left });
        }
        let timeout = timeout.min(left);
        let Ok(slot) = self.owner.stage(&self.pair.memory, sqe, 0) else {
            return Err(Error::Full(self.owner.in_flight()));
        };
        self.waiting[slot as usize] = Waiting::Answer;
        self.owner.publish(&self.pair.memory);
        let start = Instant::now();
        let (mut next_look, mut asked) = (start + STATUS_POLL_INTERVAL, None);
        let error = loop {
            // Polled before the deadline is checked: a thread that was kept from running must still find its answer.
            let waited = start.elapsed();
            let mut over = waited >= timeout;
            let mut gone = None;
            if Instant::now() >= next_look {
                // A controller that failed, was reset by others or was removed does not answer any more.
                match control::status(&self.port) {
                    Ok(csts) => over |= csts.cfs() || !csts.rdy(),
                    Err(error) => gone = Some(error),
                }
                next_look = Instant::now() + STATUS_POLL_INTERVAL;
            }
            match self.take() {
                Some((id, cqe)) if id == slot => {
                    return if cqe.status().is_ok() {
                        Ok(cqe)
                    } else {
                        Err(Error::Command { command: what.to_owned(), status: cqe.status() })
                    };
                }
                Some(_) => {}
                None if self.stop.is_set()
                    && asked.get_or_insert_with(Instant::now).elapsed() >= after_stop =>
                {
                    break Error::Interrupted { drive: self.port.name.clone() };
                }
                None if gone.is_some() || over => {
                    let (drive, command) = (self.port.name.clone(), what.to_owned());
                    break gone.unwrap_or(Error::NoAnswer { drive, command, waited });
                }
                None => std::thread::yield_now(),
            }
        };
        self.waiting[slot as usize] = Waiting::Cancelled(data);
        Err(error)
    }

    /// Aborts all abandoned commands within `patience`. Returns whether all of them were completed, as aborted or
    /// otherwise: only then can none be executed later.
    pub(crate) fn abort_cancelled(&mut self, patience: Duration) -> bool {
        let start = Instant::now();
        (0..ENTRIES as u16).all(|slot| {
            let is_cancelled = |this: &Self| matches!(this.waiting[usize::from(slot)], Waiting::Cancelled(_));
            let Some(cid) = self.owner.cid(slot).filter(|_| is_cancelled(self)) else { return true };
            let left = patience.saturating_sub(start.elapsed());
            if left.is_zero() {
                return false;
            }
            let aborted = self.run_within("abort", &admin::abort(0, cid), left);
            // A command that was not aborted may be running, and complete soon.
            while is_cancelled(self) {
                if aborted.is_err() || self.stop.is_set() || start.elapsed() >= patience {
                    return false;
                }
                self.take();
                std::thread::yield_now();
            }
            aborted.is_ok()
        })
    }

    /// The controller could not be disabled: its memory stays mapped for ever.
    pub(crate) fn abandon(&mut self) {
        std::mem::forget(self.pair.keep.take());
        std::mem::forget(std::mem::take(&mut self.waiting));
    }

    /// Takes completions until one is the answer to a command, and records the others.
    fn take(&mut self) -> Option<(u16, Cqe)> {
        for _ in 0..ENTRIES {
            match self.owner.poll(&self.pair.memory)? {
                Event::UnexpectedCompletion(_) => {}
                Event::Done { slot, cqe, .. } => {
                    match std::mem::replace(&mut self.waiting[slot as usize], Waiting::Nothing) {
                        Waiting::Event if cqe.status().is_ok() => {
                            self.fired.push_back(AsyncEvent(cqe.result()));
                        }
                        Waiting::Answer => return Some((slot, cqe)),
                        _ => {}
                    }
                }
            }
        }
        None
    }

    /// Polls for events without waiting. No command may be waiting for its answer.
    pub(crate) fn look(&mut self) {
        self.take();
    }

    /// Keeps event requests posted, up to the controller's limit and [`MAX_EVENT_REQUESTS`]. Events that were not handled yet
    /// count: their requests are posted again afterwards.
    pub(crate) fn post_events(&mut self, limit: u32) {
        let posted = self.waiting.iter().filter(|w| matches!(w, Waiting::Event)).count() + self.fired.len();
        for _ in posted as u32..limit.min(MAX_EVENT_REQUESTS) {
            let Ok(slot) = self.owner.stage(&self.pair.memory, &admin::async_event(), 0) else { break };
            self.waiting[slot as usize] = Waiting::Event;
        }
        self.owner.publish(&self.pair.memory);
    }
}

/// The command with its data pointer.
fn point(port: &ControllerBackend, sqe: &Sqe, data: &Dma, bytes: usize) -> Result<Sqe> {
    let at = data.bus()?;
    Ok(match port.mapper.transport() {
        Transport::Memory => sqe.with_prps(at.0, 0),
        Transport::Messages => Descriptor::Data { at, len: bytes as u32 }.put_in(*sqe),
    })
}
