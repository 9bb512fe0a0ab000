//! Queues for other people's kernels: the functions that they call.
//!
//! The protocol is [`Shared`]'s, single threads on a queue in shared mode; this adds what is needed when neither the
//! kernel nor its commands are ours. Arguments are checked, data pointers use prebuilt lists, failures are retried, and
//! every call is bounded by the times in the handle.
//!
//! **The gate.** The host must be able to take the queue from the controller while kernels run that it does not know. So a
//! call counts itself in, reads the gate, and counts itself out when it is done with queue and doorbells. The host closes
//! the gate and waits for the count to drop to zero: each side writes, fences and then reads, so one of them sees the
//! other. A thread that found the gate closed reads it before it counts itself in again, or the count would stay above 0.
//!
//! **Epochs.** A command that is not completed in time is lost: the thread reports it and leaves. The host then recovers
//! the controller, begins the next epoch of the queue, and opens the gate. A command that was in flight in an earlier
//! epoch is submitted again; until then its memory is the controller's.

use super::handle::HandleAt;
use super::job::{again, due};
use super::{Answer, Gate, signal, tally};
use crate::GpuAddr;
use crate::nvm::opcode;
use crate::prp::PrebuiltPrpLists;
use crate::queue::{Address, Bounds, Memory, Shared, Stop, SubmitError, Token};
use crate::{BusAddr, Sqe, Status};

/// The operation on blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum DeviceOp {
    /// Drive to memory.
    Read = 0,
    /// Memory to drive.
    Write = 1,
}

impl DeviceOp {
    /// The operation with this number, if there is one.
    #[inline(always)]
    #[must_use]
    pub const fn from_code(code: u32) -> Option<Self> {
        match code {
            0 => Some(Self::Read),
            1 => Some(Self::Write),
            _ => None,
        }
    }
}

/// The phase of a command. Numbers that uninitialized memory is unlikely to hold.
mod phase {
    /// To be submitted when it is due.
    pub const READY: u32 = 0x4f48_0101;
    /// The controller has it, in the epoch that the command names.
    pub const IN_FLIGHT: u32 = 0x4f48_0202;
    /// The controller may have it, and no thread waits for its completion.
    pub const ORPHANED: u32 = 0x4f48_0303;
    /// It has ended.
    pub const ENDED: u32 = 0x4f48_0404;
}

/// A command of an exported queue, in memory of the thread that submitted it, or of one that it passes it on to.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Command {
    lba: u64,
    offset: u64,
    /// When it times out.
    deadline: u64,
    /// Ready: when it is due. In flight: when it counts as lost.
    due: u64,
    blocks: u32,
    opcode: u32,
    phase: u32,
    /// Its identifier while it is in flight.
    cid: u32,
    /// The epoch of the queue in which it was submitted.
    epoch: u32,
    /// How often it failed and was retried.
    retries: u32,
    /// How often the controller was recovered while it was in flight.
    recoveries: u32,
    pad: u32,
}

impl Command {
    /// A command that was never submitted.
    pub const NONE: Self = Self {
        lba: 0,
        offset: 0,
        deadline: 0,
        due: 0,
        blocks: 0,
        opcode: 0,
        phase: phase::ENDED,
        cid: 0,
        epoch: 0,
        retries: 0,
        recoveries: 0,
        pad: 0,
    };

    /// Bytes of a command.
    pub const BYTES: usize = size_of::<Self>();

    /// Words of a command.
    pub const WORDS: usize = Self::BYTES / 4;

    /// The command as words, for callers that store it outside a thread's own memory.
    #[inline(always)]
    #[must_use]
    pub const fn words(&self) -> [u32; Self::WORDS] {
        [
            self.lba as u32,
            (self.lba >> 32) as u32,
            self.offset as u32,
            (self.offset >> 32) as u32,
            self.deadline as u32,
            (self.deadline >> 32) as u32,
            self.due as u32,
            (self.due >> 32) as u32,
            self.blocks,
            self.opcode,
            self.phase,
            self.cid,
            self.epoch,
            self.retries,
            self.recoveries,
            self.pad,
        ]
    }

    /// The command of such words.
    #[inline(always)]
    #[must_use]
    pub fn from_words(words: [u32; Self::WORDS]) -> Self {
        let long = |low: u32, high: u32| low as u64 | (high as u64) << 32;
        let [l0, l1, o0, o1, e0, e1, u0, u1, blocks, opcode, phase, cid, epoch, retries, recoveries, pad] =
            words;
        Self {
            lba: long(l0, l1),
            offset: long(o0, o1),
            deadline: long(e0, e1),
            due: long(u0, u1),
            blocks,
            opcode,
            phase,
            cid,
            epoch,
            retries,
            recoveries,
            pad,
        }
    }

    /// The epoch of the queue in which it was last submitted.
    #[inline(always)]
    pub(crate) const fn life(&self) -> u32 {
        self.epoch
    }
}

const _: () = assert!(Command::BYTES == 64);

/// How far a command is advanced.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// As [`Self::Look`], and without a wait for room in the queue.
    Try,
    /// As far as it goes without waiting for the controller.
    Look,
    /// Until something happens to it.
    Wait,
    /// The same, after a turn that did not end it.
    WaitOn,
}

/// An exported queue, as a thread sees it.
#[derive(Clone, Copy)]
pub struct DeviceQueue<M: Memory<Addr = GpuAddr, Door = GpuAddr>> {
    queue: Shared<M>,
    handle: HandleAt,
}

impl<M: Memory<Addr = GpuAddr, Door = GpuAddr>> DeviceQueue<M> {
    /// The queue whose handle lies at `at`; none if there is none.
    #[inline(always)]
    pub fn open(mem: &M, at: GpuAddr) -> Option<Self> {
        let handle = HandleAt::new(mem, at)?;
        let queue = Shared::new(handle.rings(mem), GpuAddr(handle.control(mem)))?;
        Some(Self { queue, handle })
    }

    /// Blocks of the namespace.
    #[inline(always)]
    pub fn blocks(&self, mem: &M) -> u64 {
        self.handle.blocks(mem)
    }

    /// Bytes that a block takes in memory.
    #[inline(always)]
    pub fn block_bytes(&self, mem: &M) -> u32 {
        self.handle.block_bytes(mem)
    }

    /// The most blocks of one command.
    #[inline(always)]
    pub fn most_blocks(&self, mem: &M) -> u32 {
        self.handle.most_blocks(mem)
    }

    /// Bytes of the data memory.
    #[inline(always)]
    pub fn data_bytes(&self, mem: &M) -> u64 {
        self.handle.bytes(mem)
    }

    /// Moves blocks and waits for the end.
    #[inline(always)]
    pub fn run(&self, mem: &M, op: DeviceOp, lba: u64, blocks: u32, offset: u64) -> Answer {
        let mut command = Command::NONE;
        match self.begin(mem, op, lba, blocks, offset, &mut command) {
            Answer::Pending => self.wait(mem, &mut command),
            refused => refused,
        }
    }

    /// Submits a command, once the queue has room for it. [`Answer::Pending`] if it is in flight.
    #[inline(always)]
    pub fn submit(
        &self,
        mem: &M,
        op: DeviceOp,
        lba: u64,
        blocks: u32,
        offset: u64,
        command: &mut Command,
    ) -> Answer {
        match self.begin(mem, op, lba, blocks, offset, command) {
            Answer::Pending => self.test(mem, command),
            refused => refused,
        }
    }

    /// Whether a command has ended, and how. On the way, completions are distributed, and a command that needs a retry is
    /// retried.
    #[inline(always)]
    pub fn test(&self, mem: &M, command: &mut Command) -> Answer {
        self.go_on(mem, command, false)
    }

    /// Waits for a command's end, or its deadline.
    #[inline(always)]
    pub fn wait(&self, mem: &M, command: &mut Command) -> Answer {
        self.go_on(mem, command, true)
    }

    /// [`Self::test`] or [`Self::wait`].
    #[inline(always)]
    pub fn go_on(&self, mem: &M, command: &mut Command, waits: bool) -> Answer {
        let mut turn = if waits { Turn::Wait } else { Turn::Look };
        loop {
            match self.turn(mem, command, turn) {
                Answer::Pending => {
                    // Also for callers that poll: one thread may hold a lock while another of the same multiprocessor
                    // runs.
                    mem.pause();
                    if !waits {
                        return Answer::Pending;
                    }
                }
                answer => return answer,
            }
            turn = Turn::WaitOn;
        }
    }

    /// Checks the arguments; [`Answer::Pending`] if they are valid. [`Self::go_on`] submits the command.
    #[inline(always)]
    pub fn begin(
        &self,
        mem: &M,
        op: DeviceOp,
        lba: u64,
        blocks: u32,
        offset: u64,
        command: &mut Command,
    ) -> Answer {
        let handle = &self.handle;
        *command = Command::NONE;
        if blocks == 0 || blocks > handle.most_blocks(mem) {
            return Answer::Length;
        }
        let all = handle.blocks(mem);
        if lba >= all || blocks as u64 > all - lba {
            return Answer::Range;
        }
        let (room, need) = (handle.bytes(mem), blocks as u64 * handle.block_bytes(mem) as u64);
        if offset > room || need > room - offset {
            return Answer::Buffer;
        }
        if offset & 3 != 0 {
            return Answer::Alignment;
        }
        if op == DeviceOp::Write && handle.writable(mem) == 0 {
            return Answer::ReadOnly;
        }
        command.lba = lba;
        command.blocks = blocks;
        command.offset = offset;
        command.opcode = match op {
            DeviceOp::Read => opcode::READ,
            DeviceOp::Write => opcode::WRITE,
        } as u32;
        command.deadline = mem.now().saturating_add(handle.limit(mem));
        command.phase = phase::READY;
        Answer::Pending
    }

    /// [`Self::test`] without a wait for room in the queue: a caller with several commands in flight must advance the others,
    /// or there will never be any.
    #[inline(always)]
    pub fn try_test(&self, mem: &M, command: &mut Command) -> Answer {
        self.turn(mem, command, Turn::Try)
    }

    /// The queue's epoch. When it changes, the controller has released all commands of the one before.
    #[inline(always)]
    pub fn life(&self, mem: &M) -> u32 {
        self.gate(mem).epoch()
    }

    /// Whether the host stopped it: there will be no other epoch.
    #[inline(always)]
    pub fn is_stopped(&self, mem: &M) -> bool {
        self.gate(mem).is_shut()
    }

    /// Advances a command.
    #[inline(always)]
    fn turn(&self, mem: &M, command: &mut Command, turn: Turn) -> Answer {
        let early = match command.phase {
            phase::READY => mem.now() < command.due,
            phase::IN_FLIGHT => false,
            phase::ORPHANED => true,
            _ => return Answer::Spent,
        };
        if early || turn != Turn::Wait {
            let gate = self.gate(mem);
            if command.phase == phase::ORPHANED && gate.epoch() != command.epoch {
                if let Some(end) = self.come_back(mem, command) {
                    return end;
                }
            } else if early {
                return self.outside(mem, command, gate);
            }
            if !gate.is_open() {
                return self.outside(mem, command, gate);
            }
        }
        let inside = GpuAddr(self.handle.inside(mem));
        let go_in = |count| {
            mem.fetch_add(inside, count);
            mem.fence_all();
            u64::from(self.gate(mem).0)
        };
        let gate = Gate(mem.combine(inside, go_in).0 as u32);
        let answer = if gate.is_open() {
            self.inside(mem, command, gate.epoch(), turn)
        } else {
            self.outside(mem, command, gate)
        };
        let come_out = |count: u32| u64::from(mem.fetch_add(inside, count.wrapping_neg()));
        mem.combine(Address::plus(inside, tally::OUT), come_out);
        answer
    }

    #[inline(always)]
    fn gate(&self, mem: &M) -> Gate {
        Gate(mem.load_acquire(self.signal(mem, signal::GATE)))
    }

    /// A step of a command that must wait for the host, or until it is due.
    #[inline(always)]
    fn outside(&self, mem: &M, command: &mut Command, gate: Gate) -> Answer {
        let late = if command.phase == phase::READY { Answer::TimedOut } else { Answer::OutcomeUnknown };
        if gate.is_shut() {
            command.phase = phase::ENDED;
            return Answer::Stopped;
        }
        if mem.now() < command.deadline {
            return Answer::Pending;
        }
        command.phase = phase::ENDED;
        late
    }

    /// The controller has released a command that it had: it is submitted again, unless that was done too often.
    #[inline(always)]
    fn come_back(&self, mem: &M, command: &mut Command) -> Option<Answer> {
        command.recoveries += 1;
        command.due = 0;
        if command.recoveries > self.handle.retries(mem) {
            command.phase = phase::ENDED;
            return Some(Answer::TimedOut);
        }
        command.phase = phase::READY;
        None
    }

    /// The steps within the open gate, in this epoch of the queue. Unless it is only polled, the command has changed
    /// afterwards.
    #[inline(always)]
    fn inside(&self, mem: &M, command: &mut Command, epoch: u32, turn: Turn) -> Answer {
        let waits = matches!(turn, Turn::Wait | Turn::WaitOn);
        if command.phase == phase::IN_FLIGHT
            && command.epoch != epoch
            && let Some(end) = self.come_back(mem, command)
        {
            return end;
        }
        if command.phase == phase::READY {
            if mem.now() >= command.deadline {
                command.phase = phase::ENDED;
                return Answer::TimedOut;
            }
            command.epoch = epoch;
            // The wait for room lasts until the deadline: the controller's time begins when it has the command.
            let bounds = Bounds { deadline: command.deadline, ..self.bounds(mem, command) };
            let room = if turn == Turn::Try { Bounds { deadline: 0, ..bounds } } else { bounds };
            match self.queue.submit_within(mem, &self.entry(mem, command), &room, &bounds) {
                Ok(token) => {
                    command.cid = token.cid() as u32;
                    command.phase = phase::IN_FLIGHT;
                    command.due = command.deadline.min(mem.now().saturating_add(self.handle.stall(mem)));
                }
                Err(SubmitError::Stopped(Stop::Poisoned(_))) => return Answer::Pending,
                Err(SubmitError::Stopped(Stop::Deadline)) if turn == Turn::Try => return Answer::Pending,
                Err(SubmitError::Stopped(Stop::Deadline)) => {
                    command.phase = phase::ENDED;
                    return Answer::Full;
                }
                Err(SubmitError::OutcomeUnknown(stop)) => return self.lose(mem, command, stop),
            }
            if !waits {
                return Answer::Pending;
            }
        }
        let Some(token) = self.queue.token(command.cid as u16) else { return Answer::Spent };
        if !waits {
            match self.look(mem, &token) {
                Some(status) => return self.settle(mem, command, status),
                None if self.bounds(mem, command).check(mem).is_ok() => return Answer::Pending,
                None => {}
            }
        }
        match self.queue.wait(mem, &token, &self.bounds(mem, command)) {
            Ok(status) => self.settle(mem, command, status),
            Err(stop) => self.lose(mem, command, stop),
        }
    }

    /// Polls once, for all threads.
    #[inline(always)]
    fn look(&self, mem: &M, token: &Token) -> Option<Status> {
        let status = self.queue.test(mem, token);
        if status.is_some() {
            return status;
        }
        self.queue.hand_out(mem, false);
        self.queue.test(mem, token)
    }

    /// A command has been completed.
    #[inline(always)]
    fn settle(&self, mem: &M, command: &mut Command, status: Status) -> Answer {
        if !again(status, command.retries, self.handle.retries(mem)) {
            command.phase = phase::ENDED;
            if !status.is_ok() {
                return Answer::Failed(status);
            }
            if command.opcode == opcode::WRITE as u32 {
                // Only here does the host, which flushes, learn of writes.
                mem.fetch_add(Address::plus(GpuAddr(self.handle.inside(mem)), tally::WRITES), 1);
            }
            return Answer::Done;
        }
        command.retries += 1;
        command.due = due(mem, status, self.handle.retry_delay(mem));
        command.phase = phase::READY;
        Answer::Pending
    }

    /// No thread waits any more for a command that the controller may have.
    #[inline(always)]
    fn lose(&self, mem: &M, command: &mut Command, stop: Stop) -> Answer {
        command.phase = phase::ORPHANED;
        if stop == Stop::Deadline {
            mem.store_release(self.signal(mem, signal::LOST), command.epoch);
        }
        Answer::Pending
    }

    #[inline(always)]
    fn entry(&self, mem: &M, command: &Command) -> Sqe {
        let handle = &self.handle;
        let bytes = command.blocks as u64 * handle.block_bytes(mem) as u64;
        let bus = |table: u64, index: u64| {
            let [low, high] = mem.load_pair(GpuAddr(table).plus(index * 8));
            BusAddr(low as u64 | (high as u64) << 32)
        };
        let (prp1, prp2) = PrebuiltPrpLists::new(handle.page_shift(mem)).point(
            command.offset,
            bytes,
            |page| bus(handle.pages(mem), page),
            |list| bus(handle.lists(mem), list),
        );
        Sqe::new(command.opcode as u8, handle.nsid(mem))
            .with_prps(prp1, prp2)
            .with_qword(10, command.lba)
            .with_dw(12, command.blocks.wrapping_sub(1))
    }

    #[inline(always)]
    fn bounds(&self, mem: &M, command: &Command) -> Bounds<M> {
        Bounds { deadline: command.due, poison: self.signal(mem, signal::POISON) }
    }

    #[inline(always)]
    fn signal(&self, mem: &M, offset: u32) -> GpuAddr {
        Address::plus(GpuAddr(self.handle.signals(mem)), offset)
    }
}
