//! A queue pair for CPU threads: submit, wait, or move many blocks at once.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use onehop_os::Transport;

use crate::command::{Io, Op, describe, max_blocks};
use crate::doubts::until_certain;
use crate::drive::DriveInner;
use crate::entry::Finished;
use crate::ladder::Participant;
use crate::slots::{CommandSlots, Token};
use crate::{Buffer, Error, Namespace, Result};

/// How often a waiting thread reads the controller's status register.
const COMPLETION_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long the commands of a cancelled transfer may take to end by themselves, before the controller is made to end
/// them.
pub(crate) const CANCEL_GRACE: Duration = Duration::from_millis(50);

/// A queue pair, shared by the drive and its user.
pub(crate) struct QueueCell {
    pub(crate) qid: u16,
    pub(crate) slots: Mutex<CommandSlots>,
}

impl QueueCell {
    pub(crate) fn lock(&self) -> MutexGuard<'_, CommandSlots> {
        self.slots.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// A queue pair of one drive. Any thread may use it, one at a time; use one for each thread that should not wait for
/// another.
pub struct IoQueue {
    cell: Arc<QueueCell>,
    drive: Arc<DriveInner>,
}

/// The statistics of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Moved {
    /// Data bytes, extended metadata included.
    pub bytes: u64,
    /// Commands.
    pub commands: u64,
    /// How often one of them was tried again.
    pub retries: u64,
    /// How often all of it was repeated, because a completion may have named the wrong command.
    pub repeats: u64,
    /// How many reads (CPU queues) or memory ranges (GPU queues) were completed before their data was there; noticed only
    /// with [`Options::canary`](crate::Options).
    pub late_data: u64,
    /// Kernel launches; CPU queues need none.
    pub launches: u64,
    /// Allocations of memory for lists and launches. Memory of earlier jobs is reused.
    pub allocations: u64,
    /// How long kernels ran, by the GPU's own clock; zero where it has none.
    pub kernel_time: Duration,
    /// From the first launch to the last completion; CPU queues leave it to their caller's clock.
    pub took: Duration,
}

impl Moved {
    /// Adds a repetition of the same transfer. Both times began with the first try.
    pub(crate) fn repeat(&mut self, again: &Self) {
        self.add(&Self { bytes: 0, commands: 0, repeats: 1, took: Duration::ZERO, ..*again });
        self.took = again.took;
    }

    /// Adds a transfer that came after this one.
    pub fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.commands += other.commands;
        self.retries += other.retries;
        self.repeats += other.repeats;
        self.late_data += other.late_data;
        self.launches += other.launches;
        self.allocations += other.allocations;
        self.kernel_time += other.kernel_time;
        self.took += other.took;
    }
}

/// Commands that are submitted together, with one doorbell, when this is dropped. Until then it locks the queue: every
/// other call on it, and every recovery of the drive, waits.
pub struct Batch<'a> {
    slots: MutexGuard<'a, CommandSlots>,
    queue: &'a IoQueue,
}

impl Batch<'_> {
    /// Adds a command.
    ///
    /// # Errors
    /// When the queue is full, or the command is invalid.
    #[inline]
    pub fn submit(&mut self, ns: &Namespace, io: &Io<'_>) -> Result<Token> {
        self.queue.allow(io, ns)?;
        self.slots.submit(io, ns)
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.slots.publish();
    }
}

impl IoQueue {
    pub(crate) fn new(cell: Arc<QueueCell>, drive: Arc<DriveInner>) -> Self {
        Self { cell, drive }
    }

    /// How many commands may be in flight.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.cell.lock().depth()
    }

    /// The queue's number on the controller.
    #[must_use]
    pub fn id(&self) -> u16 {
        self.cell.qid
    }

    #[inline]
    fn allow(&self, io: &Io<'_>, ns: &Namespace) -> Result<()> {
        if io.op.writes() {
            self.drive.allow_writes()?;
        }
        if io.op == Op::Compare {
            self.allow_compare(ns)?;
        }
        let control = &self.drive.control;
        ns.check(control)?;
        if let Some((data, _)) = io.data {
            data.belongs(control)?;
        }
        if let Some((metadata, _)) = io.metadata {
            metadata.belongs(control)?;
        }
        Ok(())
    }

    #[inline(never)]
    fn allow_compare(&self, ns: &Namespace) -> Result<()> {
        if ns.hides_metadata() {
            let why = "Compare takes no PRACT, and protection information does not travel here";
            return Err(Error::Unsupported { drive: self.drive.name().to_owned(), why: why.into() });
        }
        Ok(())
    }

    /// The pair, once no reset is under way.
    fn open(&self) -> Result<MutexGuard<'_, CommandSlots>> {
        loop {
            let slots = self.cell.lock();
            if slots.closed.is_none() {
                return Ok(slots);
            }
            if let Some(error) = &slots.dead {
                return Err(error.clone());
            }
            drop(slots);
            self.drive.wait_for_reset();
        }
    }

    /// A batch of commands to submit together.
    ///
    /// # Errors
    /// When the drive is dead.
    pub fn batch(&self) -> Result<Batch<'_>> {
        let mut slots = self.open()?;
        slots.tick();
        Ok(Batch { slots, queue: self })
    }

    /// Submits one command.
    ///
    /// # Errors
    /// When the queue is full, or the command is invalid.
    pub fn submit(&self, ns: &Namespace, io: &Io<'_>) -> Result<Token> {
        self.batch()?.submit(ns, io)
    }

    /// Takes the available completions without waiting; returns how many.
    ///
    /// # Errors
    /// When the drive is dead.
    #[inline]
    pub fn poll(&self) -> Result<u32> {
        Ok(self.open()?.poll())
    }

    /// The result of a command, if it has ended; the token is then used up. Does not wait, unless the command is late:
    /// then it runs the time-out ladder, as [`Self::wait`] does.
    #[inline]
    pub fn test(&self, token: Token) -> Option<Result<Finished>> {
        let mut slots = self.cell.lock();
        let end = look(&mut slots, token);
        if end.is_none() && slots.every_64th_call() {
            self.recover_if_overdue(slots, token);
            return look(&mut self.cell.lock(), token);
        }
        end
    }

    /// Takes the results of several commands in order, as far as they have ended; as [`Self::test`].
    pub fn test_front(&self, tokens: &mut VecDeque<Token>, mut each: impl FnMut(Token, Result<Finished>)) {
        let mut slots = self.cell.lock();
        if slots.closed.is_none() {
            slots.poll();
        }
        let mut ended = 0;
        for &token in &*tokens {
            let Some(end) = slots.take(token) else {
                if slots.every_64th_call() {
                    self.recover_if_overdue(slots, token);
                }
                break;
            };
            ended += 1;
            // Two calls: a common one would copy the size of an error for every command.
            match end {
                Ok(finished) => each(token, Ok(finished)),
                Err(error) => each(token, Err(*error)),
            }
        }
        tokens.drain(..ended);
    }

    fn recover_if_overdue(&self, slots: MutexGuard<'_, CommandSlots>, token: Token) {
        let is_overdue = slots.closed.is_none() && (slots.unexpected.is_some() || slots.is_late(token));
        drop(slots);
        if is_overdue {
            self.drive.recover(&self.cell, token);
        }
    }

    /// Fails once the caller asked for an end ([`Options::stop`](crate::Options::stop)), for callers that poll commands with
    /// [`Self::test`]. Commands in flight go on; dropping the queue takes them from the controller.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn check_stop(&self) -> Result<()> {
        self.drive.control.check_stop()
    }

    /// Waits for a command, and runs the time-out ladder if the controller does not finish it.
    ///
    /// # Errors
    /// How the command failed; [`Error::Interrupted`] once the caller asked for an end. When this returns, the
    /// controller no longer uses the command's memory, or the drive is dead and keeps it.
    pub fn wait(&self, token: Token) -> Result<Finished> {
        let end = self.wait_while(token, &|| !self.drive.control.stop.is_set());
        end.unwrap_or_else(|| {
            let end = self.cut_short(token, Instant::now(), &VecDeque::new());
            end.map_err(|error| {
                if is_of_cancelled(&error) { self.drive.control.or_interrupted(error) } else { error }
            })
        })
    }

    /// The same while `go_on` returns true; it is called every few milliseconds. Without a result the token stays
    /// valid, and the controller may still reach the command's memory.
    fn wait_while(&self, token: Token, go_on: &dyn Fn() -> bool) -> Option<Result<Finished>> {
        let mut turns = 0u32;
        let mut next_look = Instant::now() + COMPLETION_POLL_INTERVAL;
        loop {
            let end = look(&mut self.cell.lock(), token);
            let slots = match self.open() {
                Ok(slots) => slots,
                // Commands in flight have ended with the drive's error: take the result.
                Err(error) => {
                    return end.or_else(|| self.cell.lock().end(token)).or(Some(Err(error)));
                }
            };
            let (late, unexpected) = (end.is_none() && slots.is_late(token), slots.unexpected);
            drop(slots);
            if late || unexpected.is_some() {
                self.drive.recover(&self.cell, token);
            } else if end.is_none() && turns > 256 && Instant::now() >= next_look {
                // A controller that failed or was removed completes nothing.
                self.drive.check_controller_health(&self.cell);
                next_look = Instant::now() + COMPLETION_POLL_INTERVAL;
                if !go_on() {
                    return None;
                }
            }
            if end.is_some() {
                return end;
            }
            turns = turns.saturating_add(1);
            if turns < 256 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Submits a command and waits for it.
    ///
    /// # Errors
    /// How it failed.
    pub fn run(&self, ns: &Namespace, io: &Io<'_>) -> Result<Finished> {
        let token = self.submit_in_time(ns, io)?;
        self.wait(token)
    }

    /// Submits a command once there is room: other threads may be freeing some.
    fn submit_in_time(&self, ns: &Namespace, io: &Io<'_>) -> Result<Token> {
        let start = Instant::now();
        loop {
            let late = start.elapsed() >= self.drive.options.timeout;
            match self.submit(ns, io) {
                Err(Error::Full(_)) if !late => {
                    self.check_stop()?;
                    self.poll()?;
                    std::thread::yield_now();
                }
                other => return other,
            }
        }
    }

    /// Reads any number of blocks.
    ///
    /// # Errors
    /// The first error of any of its commands.
    pub fn read(&self, ns: &Namespace, lba: u64, blocks: u64, into: &Buffer, offset: u64) -> Result<Moved> {
        self.transfer(Op::Read, ns, lba, blocks, into, offset)
    }

    /// Writes any number of blocks.
    ///
    /// # Errors
    /// The first error of any of its commands; which blocks were written is then unknown.
    pub fn write(&self, ns: &Namespace, lba: u64, blocks: u64, from: &Buffer, offset: u64) -> Result<Moved> {
        self.transfer(Op::Write, ns, lba, blocks, from, offset)
    }

    /// Makes all earlier writes durable.
    ///
    /// # Errors
    /// As for [`Self::wait`]; [`Error::WritesLost`], once, when the drive may have lost acknowledged writes.
    pub fn flush(&self, ns: &Namespace) -> Result<()> {
        self.run(ns, &Io::flush()).map(|_| ())
    }

    /// Moves blocks by as many commands as needed, up to the queue's depth at once. If a lost command or an unexpected
    /// completion shows that a completion may have named the wrong command, the whole transfer is repeated.
    ///
    /// # Errors
    /// The first error of any of its commands; [`Error::WrongCompletions`]; [`Error::Interrupted`]. All commands have ended
    /// when this returns.
    pub fn transfer(
        &self,
        op: Op,
        ns: &Namespace,
        lba: u64,
        blocks: u64,
        buffer: &Buffer,
        offset: u64,
    ) -> Result<Moved> {
        self.transfer_while(op, ns, lba, blocks, (buffer, offset), &|| true)
    }

    /// The same while `go_on` returns true; it is called every few milliseconds of a wait. Once it returns false,
    /// commands that do not end soon are aborted like late ones.
    ///
    /// # Errors
    /// As for [`Self::transfer`], and [`Error::Cancelled`]. All commands have ended when this returns.
    pub fn transfer_while(
        &self,
        op: Op,
        ns: &Namespace,
        lba: u64,
        blocks: u64,
        memory: (&Buffer, u64),
        go_on: &dyn Fn() -> bool,
    ) -> Result<Moved> {
        // A target across a network may still execute a write that it has received.
        let may_repeat = !op.writes() || self.drive.control.transport() != Transport::Messages;
        let retries = if may_repeat { self.drive.options.retries } else { 0 };
        let describe = || describe(op.name(), self.drive.name(), ns.nsid, lba, blocks);
        let go_on = || !self.drive.control.stop.is_set() && go_on();
        until_certain(retries, describe, |_| {
            let before = self.cell.lock().doubts;
            let moved = self.transfer_once(op, ns, lba, blocks, memory, &go_on)?;
            self.recover_from_unexpected();
            Ok((moved, self.cell.lock().doubts.since(before)))
        })
    }

    /// Takes completions that came after the last one that was waited for, and recovers the queue if one was unexpected.
    fn recover_from_unexpected(&self) {
        let mut slots = self.cell.lock();
        if slots.closed.is_none() {
            slots.poll();
        }
        let has_unexpected = slots.unexpected.is_some() && slots.closed.is_none();
        drop(slots);
        if has_unexpected {
            self.drive.recover(&self.cell, Token::default());
        }
    }

    fn transfer_once(
        &self,
        op: Op,
        ns: &Namespace,
        lba: u64,
        blocks: u64,
        (buffer, offset): (&Buffer, u64),
        go_on: &dyn Fn() -> bool,
    ) -> Result<Moved> {
        let step = max_blocks(&ns.format, self.drive.identity().max_transfer);
        let mut moved = Moved::default();
        let mut first_error = None;
        let mut tokens = VecDeque::new();
        let mut done = 0u64;
        let mut goes_on = true;
        while done < blocks && first_error.is_none() && goes_on {
            let count = u64::from(step).min(blocks - done) as u32;
            let at = offset + ns.format.transfer_bytes(done).unwrap_or(u64::MAX - offset);
            let io = Io::new(op, lba.saturating_add(done), count, buffer, at);
            let submitted =
                if tokens.is_empty() { self.submit_in_time(ns, &io) } else { self.submit(ns, &io) };
            match submitted {
                Ok(token) => {
                    tokens.push_back(token);
                    moved.commands += 1;
                    done += u64::from(count);
                }
                Err(Error::Full(_)) if !tokens.is_empty() => {
                    // If the drive never makes the caller wait, there is no other time to check.
                    goes_on = self.settle(&mut tokens, &mut moved, &mut first_error, go_on)
                        && !self.drive.control.stop.is_set();
                }
                Err(error) => note(&mut first_error, error),
            }
        }
        while !tokens.is_empty() && goes_on {
            goes_on = self.settle(&mut tokens, &mut moved, &mut first_error, go_on);
        }
        if !goes_on {
            let count = blocks.div_ceil(u64::from(step).max(1));
            let done = moved.commands - self.cancel(tokens, &mut first_error);
            let cancelled = self.drive.control.or_interrupted(Error::Cancelled { done, count });
            return Err(first_error.unwrap_or(cancelled));
        }
        moved.bytes = ns.format.transfer_bytes(blocks).unwrap_or(u64::MAX);
        first_error.map_or(Ok(moved), Err)
    }

    /// Waits for the first of these commands. Returns false if the caller cancelled; the command is then still among
    /// them.
    fn settle(
        &self,
        tokens: &mut VecDeque<Token>,
        moved: &mut Moved,
        first_error: &mut Option<Error>,
        go_on: &dyn Fn() -> bool,
    ) -> bool {
        let Some(token) = tokens.front() else { return true };
        let Some(end) = self.wait_while(*token, go_on) else { return false };
        tokens.pop_front();
        match end {
            Ok(finished) => {
                moved.retries += u64::from(finished.retries);
                moved.late_data += u64::from(finished.late_data);
            }
            Err(error) => note(first_error, error),
        }
        true
    }

    /// Ends cancelled commands; returns how many did not succeed. When this returns, the controller no longer uses
    /// their memory, or the drive is dead and keeps it.
    fn cancel(&self, mut tokens: VecDeque<Token>, first_error: &mut Option<Error>) -> u64 {
        let start = Instant::now();
        let mut unfinished = 0;
        while let Some(token) = tokens.pop_front() {
            match self.cut_short(token, start, &tokens) {
                Ok(_) => continue,
                Err(error) if is_of_cancelled(&error) => {}
                Err(error) => note(first_error, error),
            }
            unfinished += 1;
        }
        unfinished
    }

    /// The result of a command that was cancelled at `since`: its own if it ends soon; else that of the time-out
    /// ladder, as if this command and those behind it were late.
    fn cut_short(&self, token: Token, since: Instant, behind: &VecDeque<Token>) -> Result<Finished> {
        if let Some(end) = self.wait_while(token, &|| since.elapsed() < CANCEL_GRACE) {
            return end;
        }
        let mut slots = self.cell.lock();
        slots.give_up(token);
        behind.iter().for_each(|token| slots.give_up(*token));
        drop(slots);
        loop {
            if let Some(end) = self.wait_while(token, &|| true) {
                return end;
            }
        }
    }
}

/// Whether this is the error of a cancelled command.
fn is_of_cancelled(error: &Error) -> bool {
    matches!(error, Error::Cancelled { .. } | Error::TimedOut { .. } | Error::DataMissing { .. })
}

/// Keeps the first error of a transfer, but prefers one that says that the outcome of a write is unknown.
fn note(first: &mut Option<Error>, error: Error) {
    let is_unknown = |error: &Error| matches!(error, Error::OutcomeUnknown { .. });
    if first.as_ref().is_none_or(|first| is_unknown(&error) && !is_unknown(first)) {
        *first = Some(error);
    }
}

/// The result of a command, if it has ended.
#[inline]
fn look(slots: &mut CommandSlots, token: Token) -> Option<Result<Finished>> {
    if let Some(end) = slots.end(token) {
        return Some(end);
    }
    if slots.closed.is_some() {
        return None;
    }
    slots.poll();
    slots.end(token)
}

impl Drop for IoQueue {
    fn drop(&mut self) {
        self.drive.close_queue(&self.cell);
    }
}

impl Participant for QueueCell {
    fn close(&self) {
        self.lock().closed.get_or_insert_with(Instant::now);
    }

    fn recreate(
        &self,
        drive: &DriveInner,
        admin: &mut crate::admin::Admin,
        recovery: crate::Recovery,
    ) -> Result<()> {
        let mut slots = self.lock();
        slots.restart(recovery)?;
        let (sq, cq) = slots.halves();
        drive.create_pair(admin, self.qid, sq, cq, None)
    }

    fn open(&self) {
        self.lock().closed = None;
    }

    fn fail(&self, error: &Error) {
        self.lock().fail(error);
    }
}
