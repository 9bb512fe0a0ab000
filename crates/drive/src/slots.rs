//! The commands of one CPU-driven queue pair: in flight, waiting to be tried again, or done.

mod flushes;
mod retries;

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_os::Transport;
use onehop_proto::queue::{Event, Owner, Slot};
use onehop_proto::{BusAddr, Cqe, Sqe, Status, nvm};

use crate::canary::{Canary, Nonces};
use crate::command::{self, DataPointer, Io, ListSlot, Op, Pointers, UseSgl, list_pages, max_blocks};
use crate::core::DmaQuarantine;
use crate::doubts::Doubts;
use crate::drive::DriveInner;
use crate::entry::{CommandEntry, CommandState, Finished};
use crate::holds::Holds;
use crate::ring::{CpuPair, Dma, PairHalf, PairMemory};
use crate::{Error, Namespace, Recovery, Result};

pub(crate) use retries::{may_retry, retry_delays};

/// Stands for "never" where adding up times would overflow.
pub(crate) const NEVER: Duration = Duration::from_secs(365 * 86400);

/// Identifies a command of one queue until its result is taken. The default identifies none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct Token {
    /// The number of its queue; no queue has 0.
    queue: u32,
    entry: u32,
    life: u32,
}

/// Memory for separate metadata that the caller does not provide: first the zeroes to write, then room for reads.
struct MetadataScratch {
    dma: Dma,
    half: u64,
}

/// A queue pair and its commands. The holder of this value owns the pair.
pub(crate) struct CommandSlots {
    serial: u32,
    pair: CpuPair,
    owner: Owner<PairMemory, Vec<Slot>>,
    entries: Vec<CommandEntry>,
    holds: Holds,
    free: Vec<u32>,
    waiting: u32,
    settling: u32,
    unsure: u32,
    lists: Dma,
    list_pages: u64,
    scratch: Option<MetadataScratch>,
    pointers: Pointers,
    /// Commands are sent as messages: the controller may execute those that it has even after a reset.
    messages: bool,
    name: String,
    retries: u32,
    timeout: Duration,
    retry_delay: [Duration; 4],
    path_limit: Duration,
    /// For guarded reads.
    nonces: Option<Nonces>,
    /// For each namespace, the losses that flushes on this queue have reported.
    reported: Box<[u64]>,
    quarantine: Arc<DmaQuarantine>,
    namespaces: Arc<[Namespace]>,
    clock: Instant,
    /// The deadline of a command that is submitted now.
    due: Instant,
    asked: u32,
    /// When the current reset began; never cleared once the drive is dead.
    pub(crate) closed: Option<Instant>,
    pub(crate) dead: Option<Error>,
    /// The CID of a completion that belonged to no command in flight.
    pub(crate) unexpected: Option<u16>,
    /// Traces of completions that named the wrong command, so far.
    pub(crate) doubts: Doubts,
}

impl CommandSlots {
    pub(crate) fn new(drive: &DriveInner, qid: u16) -> Result<Self> {
        let (port, identity, options) = (&drive.control.port, drive.identity(), &drive.options);
        let page_shift = identity.page_shift;
        let messages = drive.control.transport() == Transport::Messages;
        let most = u32::from(identity.cap.mqes_z()) + 1;
        let entries = options.depth.saturating_add(1).clamp(2, most);
        let pair = CpuPair::alloc(port, qid, entries, page_shift, identity.cap.dstrd())?;
        let depth = pair.rings.capacity();
        let list_pages = list_pages(page_shift, identity.max_transfer);
        let lists =
            Dma::alloc(&*port.mapper, ((u64::from(depth) * list_pages) << page_shift) as usize, page_shift)?;
        let now = Instant::now();
        let blank = |_| CommandEntry {
            state: CommandState::Free,
            life: 0,
            sqe: Sqe::default(),
            retries: 0,
            path_retries: 0,
            path_due: None,
            deadline: now,
            mark: 0,
            hold: [None, None],
            canary: None,
        };
        Ok(Self {
            serial: drive.next_serial(),
            owner: Owner::new(pair.rings, vec![Slot::default(); depth as usize]),
            pair,
            entries: (0..depth).map(blank).collect(),
            holds: Holds::default(),
            free: (0..depth).rev().collect(),
            waiting: 0,
            settling: 0,
            unsure: 0,
            lists,
            list_pages,
            scratch: scratch(drive)?,
            pointers: Pointers {
                page_shift,
                max_transfer: identity.max_transfer,
                sgl: match (messages, options.sgl && identity.controller().sgls().usable()) {
                    (true, _) => UseSgl::Always,
                    (false, true) => UseSgl::LongRuns,
                    (false, false) => UseSgl::Never,
                },
            },
            messages,
            name: identity.name.clone(),
            retries: options.retries,
            timeout: options.timeout,
            retry_delay: retry_delays(drive),
            path_limit: retries::path_limit(drive),
            // A message is complete before it is reported.
            nonces: (options.canary && !messages).then(Nonces::new),
            reported: drive.namespaces.iter().map(|ns| ns.account.reported()).collect(),
            quarantine: drive.quarantine.clone(),
            namespaces: drive.namespaces.clone(),
            clock: now,
            due: now,
            asked: 0,
            closed: None,
            dead: None,
            unexpected: None,
            doubts: Doubts::default(),
        })
    }

    /// The rings, as the commands that create them describe them.
    pub(crate) fn halves(&self) -> (PairHalf, PairHalf) {
        (self.pair.sq, self.pair.cq)
    }

    pub(crate) fn depth(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Reads the clock once for the next submissions.
    pub(crate) fn tick(&mut self) {
        self.clock = Instant::now();
        self.due = self.clock.checked_add(self.timeout).unwrap_or_else(|| self.clock + NEVER);
    }

    /// Puts a command into the queue; the controller sees it after [`Self::publish`].
    #[inline(always)]
    pub(crate) fn submit(&mut self, io: &Io<'_>, ns: &Namespace) -> Result<Token> {
        let Some(&id) = self.free.last() else { return Err(Error::Full(self.depth())) };
        let sqe = self.command(id, io, ns)?;
        let Some(entry) = self.entries.get_mut(id as usize) else { return Err(Error::Full(0)) };
        if let Some(nonces) = &mut self.nonces {
            entry.canary = Canary::before(io, ns, nonces)?;
        }
        self.free.pop();
        entry.sqe = sqe;
        entry.state = match self.owner.stage(&self.pair.memory, &sqe, id) {
            Ok(slot) => CommandState::InFlight(slot),
            Err(_) => {
                self.waiting += 1;
                CommandState::NoRoom
            }
        };
        if io.op == Op::Flush {
            entry.mark = ns.account.mark();
        }
        entry.retries = 0;
        (entry.path_retries, entry.path_due) = (0, None);
        entry.deadline = self.due;
        let mut hold = |(buffer, _)| self.holds.hold(buffer);
        entry.hold = [io.data.and_then(&mut hold), io.metadata.and_then(&mut hold)];
        entry.life = entry.life.wrapping_add(1);
        Ok(Token { queue: self.serial, entry: id, life: entry.life })
    }

    /// The command of an entry.
    #[inline(always)]
    fn command(&self, id: u32, io: &Io<'_>, ns: &Namespace) -> Result<Sqe> {
        let range = io.block_range(ns)?;
        let (mut mptr, mut pointer) = (0, DataPointer::default());
        if io.op.has_data() {
            let bytes = u64::from(io.blocks) * ns.unit;
            let Some(data) = io.data else { return Err(Error::Buffer { have: 0, offset: 0, need: bytes }) };
            if !ns.is_plain && ns.format.has_separate_metadata() {
                mptr = self.metadata(io, ns)?.0;
            }
            let list = || ListSlot {
                lists: &self.lists,
                first_page: u64::from(id) * self.list_pages,
                page_shift: self.pointers.page_shift,
            };
            pointer = self.pointers.point(data, bytes, list)?;
        }
        Ok(command::entry(io.op, ns.nsid, mptr, pointer, range))
    }

    fn metadata(&self, io: &Io<'_>, ns: &Namespace) -> Result<BusAddr> {
        let need = ns.format.metadata_bytes(io.blocks.into()).unwrap_or(u64::MAX);
        let nowhere =
            || Error::Memory("separate metadata needs one bus-contiguous, dword-aligned range".into());
        let run = match (io.metadata, &self.scratch) {
            (Some((buffer, offset)), _) => {
                buffer.check(offset, need)?;
                buffer.at(offset)
            }
            (None, Some(scratch)) => {
                scratch.dma.map.at(if io.op == crate::Op::Read { scratch.half } else { 0 })
            }
            (None, None) => None,
        };
        run.filter(|run| run.len >= need && run.addr.0 & 3 == 0).map(|run| run.addr).ok_or_else(nowhere)
    }

    /// Puts an entry's command into the submission queue again, or notes that it waits for room there.
    fn stage(&mut self, id: u32) {
        let entry = &mut self.entries[id as usize];
        match self.owner.stage(&self.pair.memory, &entry.sqe, id) {
            Ok(slot) => entry.state = CommandState::InFlight(slot),
            Err(_) => {
                entry.state = CommandState::NoRoom;
                self.waiting += 1;
            }
        }
    }

    /// Submits the staged commands to the controller.
    pub(crate) fn publish(&mut self) {
        self.owner.publish(&self.pair.memory);
    }

    /// Takes all available completions, and submits retries that are due; returns the number of completions.
    pub(crate) fn poll(&mut self) -> u32 {
        let taken = self.drain();
        if taken == 0 && self.messages {
            self.pair.memory.idle(self.pair.rings.sq_door);
        }
        if self.settling > 0 {
            self.look_for_data();
        }
        if self.waiting > 0 {
            self.restage();
        }
        taken
    }

    /// Takes the available completions, at most one ring of them, and submits nothing.
    pub(crate) fn drain(&mut self) -> u32 {
        let mut taken = 0;
        while taken < self.pair.rings.cq_entries
            && let Some(event) = self.owner.poll(&self.pair.memory)
        {
            taken += 1;
            match event {
                Event::Done { tag, cqe, .. } => self.settle(tag, &cqe),
                Event::UnexpectedCompletion(cqe) => self.unexpected = Some(cqe.cid()),
            }
        }
        if self.unsure > 0 && taken > 0 {
            self.settle_flushes();
        }
        taken
    }

    #[inline]
    fn settle(&mut self, id: u32, cqe: &Cqe) {
        let status = cqe.status();
        if status.is_ok() && self.entries[id as usize].is_flush() && self.is_unsure(id, cqe) {
            return;
        }
        let entry = &mut self.entries[id as usize];
        if status.is_ok() {
            let finished = Finished { result: cqe.result(), retries: entry.tries(), late_data: false };
            if !is_accounted_for(entry, &self.namespaces, &mut self.reported) {
                entry.state = CommandState::failed(Error::WritesLost { drive: self.name.clone() });
            } else if entry.has_data(&self.holds) {
                entry.state = CommandState::Done(Ok(finished));
                entry.mark_stale(&mut self.holds);
                return;
            } else {
                entry.state = CommandState::Settling(Finished { late_data: true, ..finished });
                self.settling += 1;
                return;
            }
        } else if let Some(delay) = self.retry_delay(id, status) {
            self.entries[id as usize].state = CommandState::Waiting(Instant::now() + delay);
            self.waiting += 1;
            return;
        } else if status.is(Status::ABORT_REQUESTED) {
            // Only the time-out ladder asks for that.
            self.repeat_flushes(Recovery::Abort);
            self.time_out(id, Recovery::Abort);
            return;
        } else if status.is(Status::ABORTED_SQ_DELETION) {
            self.repeat_flushes(Recovery::QueueDelete);
            self.time_out(id, Recovery::QueueDelete);
            return;
        } else {
            let entry = &mut self.entries[id as usize];
            let command = entry.describe(&self.name);
            entry.state = CommandState::failed(Error::Command { command, status });
        }
        self.entries[id as usize].mark_stale(&mut self.holds);
    }

    fn time_out(&mut self, id: u32, recovery: Recovery) {
        let entry = &mut self.entries[id as usize];
        let (command, waited) = (entry.describe(&self.name), entry.waited(self.timeout, self.closed));
        let retries = entry.tries();
        entry.state = CommandState::failed(Error::TimedOut { command, waited, retries, recovery });
        entry.mark_stale(&mut self.holds);
    }

    /// Ends the reads whose data has arrived meanwhile. Reads whose data does not come count as late, and the
    /// controller is reset before their memory is reused: until then the data may still come.
    fn look_for_data(&mut self) {
        for entry in &mut self.entries {
            if let CommandState::Settling(finished) = entry.state
                && entry.has_data(&self.holds)
            {
                entry.state = CommandState::Done(Ok(finished));
                entry.mark_stale(&mut self.holds);
                self.settling -= 1;
            }
        }
    }

    /// Whether a read was completed and its data has not come in time.
    pub(crate) fn lacks_data(&self, token: Token) -> bool {
        self.knows(token)
            && self.entries.get(token.entry as usize).is_some_and(|entry| {
                matches!(entry.state, CommandState::Settling(_))
                    && Instant::now() >= entry.deadline
                    && !entry.has_data(&self.holds)
            })
    }

    /// The data of this read will not be checked again.
    pub(crate) fn keep_unsettled(&mut self) {
        for entry in &mut self.entries {
            if let CommandState::Settling(_) = entry.state {
                entry.keep(&self.holds, &self.quarantine);
                entry.mark_stale(&mut self.holds);
            }
        }
    }

    /// Stages retries that are due, if their namespace has not changed.
    fn restage(&mut self) {
        self.tick();
        for id in 0..self.depth() {
            match self.entries[id as usize].state {
                CommandState::Waiting(due) if due <= self.clock => {
                    self.entries[id as usize].deadline = self.due
                }
                // Its deadline stays: a controller that never makes room must be noticed.
                CommandState::NoRoom => {}
                _ => continue,
            }
            self.waiting -= 1;
            let nsid = self.entries[id as usize].sqe.nsid();
            if let Err(error) = self.entries[id as usize].mark_again(&self.holds) {
                let entry = &mut self.entries[id as usize];
                entry.state = CommandState::failed(error);
                entry.mark_stale(&mut self.holds);
            } else if self.namespaces.iter().any(|ns| ns.nsid == nsid && ns.is_valid()) {
                self.stage(id);
            } else {
                self.end_as_changed(id);
            }
        }
        self.publish();
    }

    fn end_as_changed(&mut self, id: u32) {
        let entry = &mut self.entries[id as usize];
        let (drive, nsid) = (self.name.clone(), entry.sqe.nsid());
        entry.state = CommandState::failed(Error::NamespaceChanged { drive, nsid });
        entry.mark_stale(&mut self.holds);
    }

    /// [`Self::take`], the error on its own.
    pub(crate) fn end(&mut self, token: Token) -> Option<Result<Finished>> {
        self.take(token).map(|end| end.map_err(|error| *error))
    }

    /// The command's result, if it has ended; the token is then used up.
    #[inline]
    pub(crate) fn take(&mut self, token: Token) -> Option<std::result::Result<Finished, Box<Error>>> {
        let known = self.knows(token);
        let Some(entry) = self.entries.get_mut(token.entry as usize).filter(|_| known) else {
            return Some(Err(Box::new(Error::Token)));
        };
        if !matches!(entry.state, CommandState::Done(_)) {
            return None;
        }
        let CommandState::Done(end) = std::mem::replace(&mut entry.state, CommandState::Free) else {
            return None;
        };
        self.free.push(token.entry);
        Some(end)
    }

    /// Whether a token identifies a command of this queue whose result was not taken.
    fn knows(&self, token: Token) -> bool {
        let entry = self.entries.get(token.entry as usize);
        token.queue == self.serial
            && entry
                .is_some_and(|entry| entry.life == token.life && !matches!(entry.state, CommandState::Free))
    }

    /// Whether this command is past its deadline.
    pub(crate) fn is_late(&self, token: Token) -> bool {
        self.lacks_data(token)
            || self.knows(token)
                && self.entries.get(token.entry as usize).is_some_and(|entry| {
                    matches!(entry.state, CommandState::InFlight(_) | CommandState::NoRoom)
                        && Instant::now() >= entry.deadline
                })
            || self.late_concurrent(token).is_some()
    }

    /// Makes a cancelled command late, and prevents retries. A command that the controller does not have ends at once;
    /// the time-out ladder ends the others.
    pub(crate) fn give_up(&mut self, token: Token) {
        if !self.knows(token) {
            return;
        }
        let Some(entry) = self.entries.get_mut(token.entry as usize) else { return };
        entry.retries = self.retries;
        entry.deadline = Instant::now();
        entry.path_due = Some(entry.deadline);
        match entry.state {
            CommandState::Waiting(_) | CommandState::NoRoom => self.waiting -= 1,
            // A flush that waits for other commands has no memory.
            CommandState::Unsure(_) => self.unsure -= 1,
            _ => return,
        }
        entry.state = CommandState::failed(Error::Cancelled { done: 0, count: 1 });
        entry.mark_stale(&mut self.holds);
    }

    /// True every 64th time: for checks that are too expensive for every call.
    pub(crate) fn every_64th_call(&mut self) -> bool {
        self.asked = self.asked.wrapping_add(1);
        self.asked.is_multiple_of(64)
    }

    /// The identifier under which a command is in flight.
    pub(crate) fn cid(&self, token: Token) -> Option<u16> {
        self.cid_of(token.entry).filter(|_| self.knows(token))
    }

    fn cid_of(&self, id: u32) -> Option<u16> {
        match self.entries.get(id as usize)?.state {
            CommandState::InFlight(slot) => self.owner.cid(slot),
            _ => None,
        }
    }

    /// Starts anew on zeroed rings, after the controller was made to end all commands. Those in flight are tried again,
    /// or end as timed out.
    pub(crate) fn restart(&mut self, recovery: Recovery) -> Result<()> {
        self.pair.zero()?;
        self.owner.renew();
        self.unexpected = None;
        self.tick();
        self.look_for_data();
        self.repeat_flushes(recovery);
        let was_reset = matches!(recovery, Recovery::ControllerReset | Recovery::FunctionReset);
        for id in 0..self.depth() {
            match self.entries[id as usize].state {
                CommandState::InFlight(_) => self.lose(id, recovery),
                CommandState::NoRoom => {
                    self.waiting -= 1;
                    self.lose(id, recovery);
                }
                CommandState::Settling(_) if was_reset => {
                    self.settling -= 1;
                    self.lose_data(id);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Tries a read again whose data will not come any more.
    fn lose_data(&mut self, id: u32) {
        let entry = &mut self.entries[id as usize];
        if entry.retries < self.retries {
            entry.retries += 1;
            entry.state = CommandState::Waiting(self.clock);
            self.waiting += 1;
            return;
        }
        let (command, waited) = (entry.describe(&self.name), entry.waited(self.timeout, self.closed));
        entry.state = CommandState::failed(Error::DataMissing { command, waited });
        entry.mark_stale(&mut self.holds);
    }

    fn lose(&mut self, id: u32, recovery: Recovery) {
        let entry = &mut self.entries[id as usize];
        let may_be_carried_out = self.messages && matches!(entry.state, CommandState::InFlight(_));
        if may_be_carried_out && entry.op().writes() {
            let command = entry.describe(&self.name);
            entry.state = CommandState::failed(Error::OutcomeUnknown { command, recovery });
            entry.mark_stale(&mut self.holds);
            return;
        }
        if entry.retries < self.retries {
            entry.retries += 1;
            entry.state = CommandState::Waiting(self.clock);
            self.waiting += 1;
            return;
        }
        self.time_out(id, recovery);
    }

    /// Ends all commands with an error. Their memory is kept: the device may still reach it.
    pub(crate) fn fail(&mut self, error: &Error) {
        self.closed.get_or_insert_with(Instant::now);
        self.dead = Some(error.clone());
        self.waiting = 0;
        self.settling = 0;
        self.unsure = 0;
        for entry in &mut self.entries {
            let in_flight = matches!(entry.state, CommandState::InFlight(_));
            if !matches!(entry.state, CommandState::Free | CommandState::Done(_)) {
                // A target across a network may have received it.
                let why = if self.messages && in_flight && entry.op().writes() {
                    let command = entry.describe(&self.name);
                    Error::OutcomeUnknown { command, recovery: Recovery::FunctionReset }
                } else {
                    error.clone()
                };
                entry.state = CommandState::failed(why);
                entry.keep(&self.holds, &self.quarantine);
                entry.mark_stale(&mut self.holds);
            }
        }
    }
}

/// Counts a write that was acknowledged, or what a flush has made durable; false where the flush has to report a loss.
#[inline]
fn is_accounted_for(entry: &CommandEntry, namespaces: &[Namespace], reported: &mut [u64]) -> bool {
    if matches!(entry.sqe.opcode(), nvm::opcode::READ | nvm::opcode::COMPARE) {
        return true;
    }
    let Some(index) = namespaces.iter().position(|ns| ns.nsid == entry.sqe.nsid()) else { return true };
    let account = &namespaces[index].account;
    if entry.is_flush() {
        return account.flushed(entry.mark, &mut reported[index]);
    }
    if entry.sqe.dw[12] & nvm::flag::FUA == 0 {
        account.wrote();
    }
    true
}

fn scratch(drive: &DriveInner) -> Result<Option<MetadataScratch>> {
    let need = |ns: &Namespace| {
        let blocks = max_blocks(&ns.format, drive.identity().max_transfer);
        ns.format.metadata_bytes(blocks.into()).unwrap_or(0)
    };
    let half = drive.namespaces().iter().filter(|ns| ns.format.has_separate_metadata()).map(need).max();
    let Some(half) = half else { return Ok(None) };
    let half = half.next_multiple_of(4096);
    Ok(Some(MetadataScratch { dma: Dma::alloc(&*drive.control.port.mapper, 2 * half as usize, 12)?, half }))
}
