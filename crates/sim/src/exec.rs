//! The life of a command: fetched, executed when its time comes, completed.

use std::time::Duration;

use onehop_proto::{Sqe, Status, nvm};

use crate::device::ControllerState;
use crate::faults::{Effects, Seen};
use crate::late::LateData;
use crate::queues::QueuedCompletion;
use crate::violation::Rule;

/// A command that was fetched.
pub(crate) struct FetchedCommand {
    pub sqid: u16,
    pub sqe: Sqe,
    pub effects: Option<Box<Effects>>,
}

/// Work for a later time.
pub(crate) enum DelayedTask {
    /// Execute a command.
    Execute(FetchedCommand),
    /// Correct the last dword of a completion.
    CorrectCompletion { cq: u16, generation: u64, slot: u32, last: u32 },
    /// Deliver the data of a read that was already completed.
    Data(LateData),
    /// Post held completions, regardless of what they wait for.
    Release,
}

/// A completion that waits for others.
pub(crate) struct HeldCompletion {
    pub entry: QueuedCompletion,
    pub others: u32,
    pub until: u64,
}

/// Why a command failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandFailure {
    pub status: Status,
    pub lba: Option<u64>,
}

impl From<Status> for CommandFailure {
    fn from(status: Status) -> Self {
        Self { status, lba: None }
    }
}

/// A command's result, or its failure.
pub(crate) type CommandResult = std::result::Result<u32, CommandFailure>;

impl ControllerState {
    /// Fetches every new entry of a submission queue.
    pub(crate) fn fetch(&mut self, qid: u16) {
        loop {
            let Some(sq) = self.sqs.get_mut(usize::from(qid)).and_then(Option::as_mut) else { return };
            if self.regs.csts.cfs() || self.gone {
                return;
            }
            match sq.fetch(&self.space) {
                None => return,
                Some(Ok(sqe)) => self.accept(qid, sqe),
                Some(Err(at)) => {
                    self.breach_dma(qid, "submission queue", at);
                    return self.fatal();
                }
            }
        }
    }

    /// Accepts a fetched command, and schedules its execution.
    fn accept(&mut self, sqid: u16, sqe: Sqe) {
        let counts = if sqid == 0 { &mut self.counts.admin } else { &mut self.counts.io };
        counts[usize::from(sqe.opcode())] += 1;
        let Some(sq) = self.sqs.get_mut(usize::from(sqid)).and_then(Option::as_mut) else { return };
        let cid = sqe.cid();
        if !sq.start(cid) {
            self.breach(Rule::CidInUse, Some(sqid), format!("identifier {cid:#x} is outstanding already"));
            let entry = QueuedCompletion::plain(sqid, cid, Status::CID_CONFLICT.with_dnr(), 0);
            return self.post(entry);
        }
        if sqid != 0 {
            let most = &mut self.counts.rest.max_in_flight;
            *most = (*most).max(sq.in_flight());
        }
        if cid == u16::MAX {
            self.breach(Rule::CidReserved, Some(sqid), "a command has the identifier FFFFh");
        }
        let effects = self.effects(sqid, &sqe);
        self.schedule(FetchedCommand { sqid, sqe, effects });
    }

    fn effects(&mut self, sqid: u16, sqe: &Sqe) -> Option<Box<Effects>> {
        let op = sqe.opcode();
        let ranged = matches!(
            op,
            nvm::opcode::READ
                | nvm::opcode::WRITE
                | nvm::opcode::COMPARE
                | nvm::opcode::VERIFY
                | nvm::opcode::WRITE_ZEROES
                | nvm::opcode::WRITE_UNCORRECTABLE
        );
        let rw = nvm::Rw::decode(sqe);
        let blocks = (sqid != 0 && ranged).then_some((rw.lba, u64::from(rw.blocks)));
        let reads = sqid != 0 && matches!(op, nvm::opcode::READ | nvm::opcode::COMPARE | nvm::opcode::VERIFY);
        let now = self.clock.now();
        self.check_retry(sqid, sqe, now);
        self.faults.command(&Seen { sqid, sqe, blocks, reads }, now)
    }

    fn schedule(&mut self, command: FetchedCommand) {
        let late = match command.effects.as_deref() {
            Some(effects) if effects.lost => return self.lost.push(command),
            Some(effects) => effects.late.unwrap_or_default(),
            None => Duration::ZERO,
        };
        let wait = (late.as_nanos() as u64).saturating_add(self.model_wait(&command));
        if wait == 0 {
            self.ready.push_back(command);
        } else {
            self.after(wait, DelayedTask::Execute(command));
        }
    }

    /// The delay of a command by latency and bandwidth.
    fn model_wait(&mut self, command: &FetchedCommand) -> u64 {
        let (latency, jitter) = (self.config.latency.as_nanos() as u64, self.config.jitter.as_nanos() as u64);
        let bandwidth = self.config.bandwidth;
        if command.sqid == 0 || latency | jitter | bandwidth == 0 {
            return 0;
        }
        let jitter = if jitter == 0 { 0 } else { self.rng.up_to(jitter) };
        let wait = latency.saturating_add(jitter);
        let moves = matches!(command.sqe.opcode(), nvm::opcode::READ | nvm::opcode::WRITE);
        if bandwidth == 0 || !moves {
            return wait;
        }
        let bytes = u64::from(nvm::Rw::decode(&command.sqe).blocks) * u64::from(self.config.lba);
        let now = self.clock.now();
        let time = (u128::from(bytes) * 1_000_000_000 / u128::from(bandwidth)) as u64;
        self.medium_free = self.medium_free.max(now).saturating_add(time);
        wait.max(self.medium_free - now)
    }

    /// Schedules work after `wait` nanoseconds.
    pub(crate) fn after(&mut self, wait: u64, task: DelayedTask) {
        self.order += 1;
        self.timers.insert((self.clock.now().saturating_add(wait), self.order), task);
    }

    /// When the next work is due; 0 means now.
    pub(crate) fn next_due(&self) -> Option<u64> {
        if !self.ready.is_empty() && self.runs() {
            return Some(0);
        }
        let timer = self.timers.first_key_value().map(|((due, _), _)| *due).filter(|_| self.runs());
        [timer, self.next_tick()].into_iter().flatten().min()
    }

    /// Does at most `most` units of due work; returns whether there was any.
    pub(crate) fn run(&mut self, most: usize) -> bool {
        self.tick();
        let mut did = false;
        for _ in 0..most {
            if !self.runs() {
                break;
            }
            let Some(task) = self.due_task() else { break };
            did = true;
            self.perform(task);
        }
        did
    }

    fn due_task(&mut self) -> Option<DelayedTask> {
        if let Some(first) = self.timers.first_entry()
            && first.key().0 <= self.clock.now()
        {
            return Some(first.remove());
        }
        self.ready.pop_front().map(DelayedTask::Execute)
    }

    fn perform(&mut self, task: DelayedTask) {
        match task {
            DelayedTask::Execute(command) => self.execute(command),
            DelayedTask::Release => self.release_held(),
            DelayedTask::Data(late) => self.bring(late),
            DelayedTask::CorrectCompletion { cq, generation, slot, last } => {
                if let Some(queue) = self.cqs.get_mut(usize::from(cq)).and_then(Option::as_mut)
                    && queue.generation == generation
                    && let Err(at) = queue.correct_entry(&self.space, slot, last)
                {
                    self.breach_dma(cq, "completion queue", at);
                }
            }
        }
    }

    fn execute(&mut self, command: FetchedCommand) {
        let forced = command.effects.as_deref().copied().unwrap_or_default();
        if let Some(strike) = forced.strike {
            return self.strike(strike);
        }
        let reply = match forced.fail {
            Some(status) => {
                let status = self.crd_allowed(&command, status);
                Err(CommandFailure { status, lba: forced.bad_block })
            }
            None if command.sqid == 0 => match self.admin(&command) {
                Some(reply) => reply,
                None => return,
            },
            None => self.io(&command),
        };
        self.complete(&command, reply);
    }

    /// Completes a command with its result.
    pub(crate) fn complete(&mut self, command: &FetchedCommand, reply: CommandResult) {
        let (sqid, cid) = (command.sqid, command.sqe.cid());
        let (status, result) = match reply {
            Ok(result) => (Status::SUCCESS, result),
            Err(failure) => (self.note_failure(command, failure), 0),
        };
        let mut entry = QueuedCompletion::plain(sqid, cid, status, result);
        let Some(effects) = command.effects.as_deref() else {
            return self.finish(entry);
        };
        entry.lag = effects.lag;
        entry.stale = effects.stale.map(|t| t.as_nanos() as u64);
        if effects.wrong_cid || effects.other_cid {
            let sq = self.sqs.get(usize::from(sqid)).and_then(Option::as_ref);
            let other = sq.filter(|_| effects.other_cid).and_then(|sq| sq.another_cid(cid, true));
            entry.cid = other.or_else(|| sq?.another_cid(cid, false)).unwrap_or(cid);
            self.lost.push(FetchedCommand { sqid, sqe: command.sqe, effects: None });
            return self.post(entry);
        }
        if let Some((others, wait)) = effects.hold {
            let wait = wait.as_nanos() as u64;
            self.held.push(HeldCompletion { entry, others, until: self.clock.now().saturating_add(wait) });
            return self.after(wait, DelayedTask::Release);
        }
        self.finish(entry);
        if effects.dup {
            self.post(entry);
        }
    }

    /// Ends a command and posts its completion.
    pub(crate) fn finish(&mut self, entry: QueuedCompletion) {
        if let Some(sq) = self.sqs.get_mut(usize::from(entry.sqid)).and_then(Option::as_mut) {
            sq.finish(entry.cid);
        }
        self.post(entry);
        if entry.sqid != 0 && !self.held.is_empty() {
            self.held.iter_mut().for_each(|h| h.others = h.others.saturating_sub(1));
            self.release_held();
        }
    }

    /// Posts the held completions that have waited long enough.
    fn release_held(&mut self) {
        let now = self.clock.now();
        while let Some(i) = self.held.iter().position(|h| h.others == 0 || h.until <= now) {
            let held = self.held.remove(i);
            self.finish(held.entry);
        }
    }
}

impl QueuedCompletion {
    /// A completion without faults.
    pub(crate) const fn plain(sqid: u16, cid: u16, status: Status, result: u32) -> Self {
        Self { result, sqid, cid, status, lag: 0, stale: None }
    }
}
