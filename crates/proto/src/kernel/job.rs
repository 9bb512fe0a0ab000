//! A list of commands for the GPU to execute, and what it records about each.

use crate::queue::{Address, Memory};
use crate::{Sqe, Status, nvm};

/// The items that the `index`th of `of` equal parts of a job takes: neighbours, so that they are read together.
#[must_use]
pub const fn share(count: u32, index: u32, of: u32) -> (u32, u32) {
    let of = if of == 0 { 1 } else { of as u64 };
    let (count, index) = (count as u64, index as u64);
    ((count * index / of) as u32, (count * (index + 1) / of) as u32)
}

/// One read or write, as it lies in memory: 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WorkItem {
    /// The first block.
    pub lba: u64,
    /// PRP entry 1.
    pub prp1: u64,
    /// PRP entry 2.
    pub prp2: u64,
    /// How many blocks, 1 to 65 536.
    pub blocks: u32,
    /// The opcode in the low byte, in the next how often the command was tried in earlier launches; the upper bits are
    /// those of command dword 12.
    pub control: u32,
}

impl WorkItem {
    /// Bytes of a work item.
    pub const BYTES: u32 = 32;
    /// The bits of [`WorkItem::control`] that go into command dword 12: LR, FUA, PRINFO.
    const DW12: u32 = 0xfc00_0000;

    /// The eight words as they lie in memory.
    #[must_use]
    pub const fn words(&self) -> [u32; 8] {
        [
            self.lba as u32,
            (self.lba >> 32) as u32,
            self.prp1 as u32,
            (self.prp1 >> 32) as u32,
            self.prp2 as u32,
            (self.prp2 >> 32) as u32,
            self.blocks,
            self.control,
        ]
    }

    /// The item that lies in memory as these words.
    #[inline(always)]
    #[must_use]
    pub const fn from_halves(low: [u32; 4], high: [u32; 4]) -> Self {
        Self {
            lba: long(low[0], low[1]),
            prp1: long(low[2], low[3]),
            prp2: long(high[0], high[1]),
            blocks: high[2],
            control: high[3],
        }
    }

    /// Reads the item at `at`, a multiple of 16.
    #[inline(always)]
    pub fn load<M: Memory>(mem: &M, at: M::Addr) -> Self {
        Self::from_halves(mem.load_constant(at), mem.load_constant(at.plus(16)))
    }

    /// How often the command was tried in earlier launches.
    #[inline(always)]
    #[must_use]
    pub const fn tries(&self) -> u32 {
        self.control >> 8 & 0xff
    }

    /// The same item with this many earlier tries; more than 255 count as 255.
    #[must_use]
    pub const fn with_tries(mut self, tries: u32) -> Self {
        let tries = if tries > 0xff { 0xff } else { tries };
        self.control = self.control & !0xff00 | tries << 8;
        self
    }

    /// The command. Where the controller makes or checks protection information, the reference tags count blocks from 0.
    #[inline(always)]
    #[must_use]
    pub const fn command(&self, nsid: u32) -> Sqe {
        let nlb_z = self.blocks.wrapping_sub(1) & 0xffff;
        let tag = if self.control & nvm::flag::PRACT == 0 { 0 } else { self.lba as u32 };
        Sqe::new(self.control as u8, nsid)
            .with_prps(self.prp1, self.prp2)
            .with_qword(10, self.lba)
            .with_dw(12, nlb_z | self.control & Self::DW12)
            .with_dw(14, tag)
    }
}

const fn long(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

/// How a work item ended, as it lies in memory: two words, the state and the number of retries, those of earlier
/// launches included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ItemOutcome {
    /// It was not submitted, or it failed and waited for its retry.
    Pending,
    /// The controller completed it with this status.
    Done(Status),
    /// It was submitted and its outcome is unknown: its memory is the controller's until a reset.
    Unknown,
}

impl ItemOutcome {
    /// Bytes of an outcome.
    pub const BYTES: u32 = 8;

    /// The state word.
    #[inline(always)]
    #[must_use]
    pub const fn word(self) -> u32 {
        match self {
            Self::Pending => 0,
            Self::Done(status) => 1 | (status.0 as u32) << 16,
            Self::Unknown => 2,
        }
    }

    /// The outcome that a state word stands for.
    #[must_use]
    pub const fn from_word(word: u32) -> Self {
        match word & 3 {
            0 => Self::Pending,
            1 => Self::Done(Status((word >> 16) as u16)),
            _ => Self::Unknown,
        }
    }

    #[inline(always)]
    pub(super) fn store<M: Memory>(self, mem: &M, job: &Job<M>, item: u32, retries: u32) {
        mem.store_pair(job.outcomes.element(item, Self::BYTES), [self.word(), retries]);
    }
}

/// A list of work, and its bounds.
pub struct Job<M: Memory> {
    /// The work items, one after the other, on a multiple of 16. They do not change while the kernel runs.
    pub works: M::Addr,
    /// The outcomes, one for each, on a multiple of 8.
    pub outcomes: M::Addr,
    /// How many there are.
    pub count: u32,
    /// The namespace they go to.
    pub nsid: u32,
    /// How often a command is retried when its status allows it.
    pub retries: u32,
    /// Nanoseconds to wait before a retry, by CRD.
    pub retry_delay: [u64; 4],
    /// Nanoseconds without any completion after which the controller counts as stalled.
    pub stall: u64,
    /// The moment at which every wait ends.
    pub deadline: u64,
    /// The word that the host sets to end it.
    pub poison: M::Addr,
}

impl<M: Memory> Job<M> {
    #[inline(always)]
    pub(super) fn work(&self, mem: &M, item: u32) -> WorkItem {
        WorkItem::load(mem, self.works.element(item, WorkItem::BYTES))
    }

    #[inline(always)]
    pub(super) fn again(&self, status: Status, retries: u32) -> bool {
        again(status, retries, self.retries)
    }

    #[inline(always)]
    pub(super) fn due(&self, mem: &M, status: Status) -> u64 {
        due(mem, status, self.retry_delay)
    }
}

/// Whether a command that ended with `status` after `retries` retries is retried.
#[inline(always)]
pub(super) fn again(status: Status, retries: u32, most: u32) -> bool {
    !status.is_ok() && !status.dnr() && retries < most
}

/// When it is retried.
#[inline(always)]
pub(super) fn due<M: Memory>(mem: &M, status: Status, delay: [u64; 4]) -> u64 {
    // Not indexed: that would keep a copy of the job in each GPU thread's memory.
    let [none, first, second, third] = delay;
    let delay = match status.crd() {
        0 => none,
        1 => first,
        2 => second,
        _ => third,
    };
    mem.now().wrapping_add(delay)
}

/// How a warp or thread ended its kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// Every item it took has an outcome.
    Finished,
    /// The deadline passed, or nothing was completed for too long.
    TimedOut,
    /// The host ended it with this word.
    Poisoned(u32),
    /// The controller completed a command that was not in flight.
    UnexpectedCompletion(u16),
    /// The queue's control memory holds places beyond the rings. Nothing was started.
    InvalidControl,
}

impl Exit {
    /// Two words to hand to the host.
    #[must_use]
    pub const fn words(self) -> [u32; 2] {
        match self {
            Self::Finished => [1, 0],
            Self::TimedOut => [2, 0],
            Self::Poisoned(code) => [3, code],
            Self::UnexpectedCompletion(cid) => [4, cid as u32],
            Self::InvalidControl => [5, 0],
        }
    }

    /// The exit that two words stand for; none if the kernel never wrote them.
    #[must_use]
    pub const fn from_words(words: [u32; 2]) -> Option<Self> {
        match words[0] {
            1 => Some(Self::Finished),
            2 => Some(Self::TimedOut),
            3 => Some(Self::Poisoned(words[1])),
            4 => Some(Self::UnexpectedCompletion(words[1] as u16)),
            5 => Some(Self::InvalidControl),
            _ => None,
        }
    }
}

impl From<crate::queue::Stop> for Exit {
    fn from(stop: crate::queue::Stop) -> Self {
        match stop {
            crate::queue::Stop::Deadline => Self::TimedOut,
            crate::queue::Stop::Poisoned(code) => Self::Poisoned(code),
        }
    }
}
