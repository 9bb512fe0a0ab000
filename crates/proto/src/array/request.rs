//! A thread's request for a page, and its progress.

use super::cache::Found;
use super::claim::Claim;
use super::layout::{NO_PAGE, counter, life_note, set, state};
use super::{ArrayError, Backing, PageCache};
use crate::GpuAddr;
use crate::kernel::{Answer, Command, DeviceOp};
use crate::queue::Memory;

/// What a request is waiting for.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum PagePhase {
    /// Nothing: the page is looked up.
    Look = 0,
    /// Its own read into the slot.
    Read = 1,
    /// Its own write-back of another page, in the slot that it needs.
    Write = 2,
    /// Another thread's read into the slot.
    Wait = 3,
    /// It was answered.
    Over = 4,
}

/// A thread's request for a page. Once advanced, it must be advanced until it is answered.
#[derive(Clone, Copy)]
pub struct PageRequest {
    page: u64,
    deadline: u64,
    phase: PagePhase,
    slot: u32,
    /// Why it waits, for the error at the time limit.
    full: bool,
    command: Command,
}

/// The progress of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageStep {
    /// It has to be advanced again.
    Pending,
    /// The page is in this slot, and pinned for the caller.
    Pinned(u32),
    /// It is not available.
    Failed(ArrayError),
}

impl PageRequest {
    /// Words of a request.
    pub const WORDS: usize = 8 + Command::WORDS;

    /// For the page of this byte, to be answered within the array's limit and that of the commands that it starts. The last
    /// page may be longer than the array: there is no page of a byte behind the array's end.
    #[inline(always)]
    pub fn new<M: Memory<Addr = GpuAddr>, B: Backing<M>>(
        array: &PageCache<M, B>,
        mem: &M,
        byte: u64,
    ) -> Self {
        Self {
            page: if byte < array.bytes(mem) { byte >> array.page_shift(mem) } else { NO_PAGE },
            deadline: mem.now().saturating_add(array.limit(mem)),
            phase: PagePhase::Look,
            slot: 0,
            full: false,
            command: Command::NONE,
        }
    }

    /// The request as words, for callers that store it outside a thread's own memory.
    #[inline(always)]
    pub fn words(&self) -> [u32; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        [words[0], words[1]] = [self.page as u32, (self.page >> 32) as u32];
        [words[2], words[3]] = [self.deadline as u32, (self.deadline >> 32) as u32];
        [words[4], words[5], words[6]] = [self.phase as u32, self.slot, self.full as u32];
        let command = self.command.words();
        let mut i = 0;
        while i < Command::WORDS {
            words[8 + i] = command[i];
            i += 1;
        }
        words
    }

    /// The request of such words.
    #[inline(always)]
    pub fn from_words(words: [u32; Self::WORDS]) -> Self {
        let mut command = [0; Command::WORDS];
        let mut i = 0;
        while i < Command::WORDS {
            command[i] = words[8 + i];
            i += 1;
        }
        Self {
            page: words[0] as u64 | (words[1] as u64) << 32,
            deadline: words[2] as u64 | (words[3] as u64) << 32,
            phase: match words[4] {
                0 => PagePhase::Look,
                1 => PagePhase::Read,
                2 => PagePhase::Write,
                3 => PagePhase::Wait,
                _ => PagePhase::Over,
            },
            slot: words[5],
            full: words[6] != 0,
            command: Command::from_words(command),
        }
    }
}

impl<M: Memory<Addr = GpuAddr>, B: Backing<M>> PageCache<M, B> {
    /// Moves a request on without waiting for anything.
    #[inline(always)]
    pub fn advance(&self, mem: &M, request: &mut PageRequest) -> PageStep {
        let Some(backing) = self.backing(mem) else { return PageStep::Failed(ArrayError::NoArray) };
        let step = match request.phase {
            PagePhase::Look => self.look(mem, &backing, request),
            PagePhase::Read | PagePhase::Write => self.go_on(mem, &backing, request),
            PagePhase::Wait => self.wait_for_others(mem, request),
            PagePhase::Over => PageStep::Failed(ArrayError::Read(Answer::Spent)),
        };
        if step != PageStep::Pending {
            request.phase = PagePhase::Over;
        }
        step
    }

    #[inline(always)]
    fn look(&self, mem: &M, backing: &B, request: &mut PageRequest) -> PageStep {
        if request.page == NO_PAGE {
            return PageStep::Failed(ArrayError::Range);
        }
        match self.find(mem, request.page) {
            Found::Pinned(slot) => return PageStep::Pinned(slot),
            Found::Crowded => return PageStep::Failed(ArrayError::TooManyPins),
            Found::Elsewhere(slot) if self.kind(mem, slot) == state::LOADING => {
                return self.wait_for(mem, request, slot);
            }
            Found::Elsewhere(_) | Found::Nowhere => {}
        }
        if mem.now() >= request.deadline {
            return PageStep::Failed(if request.full { ArrayError::NoRoom } else { ArrayError::TimedOut });
        }
        match self.claim(mem, backing, request.page) {
            Claim::There(slot) if self.kind(mem, slot) == state::LOADING => self.wait_for(mem, request, slot),
            Claim::There(_) | Claim::Locked => PageStep::Pending,
            // Pages of lost reads make no room any more.
            Claim::Full if backing.is_stopped(mem) => PageStep::Failed(ArrayError::Read(Answer::Stopped)),
            Claim::Full => {
                request.full = true;
                PageStep::Pending
            }
            Claim::Read(slot) => {
                self.count(mem, counter::READS, 1);
                self.start(mem, backing, request, DeviceOp::Read, (slot, request.page))
            }
            Claim::WriteBack(slot) => {
                self.count(mem, counter::WRITES, 1);
                // It is pinned: the tag stays.
                let page = self.tag(mem, slot);
                self.start(mem, backing, request, DeviceOp::Write, (slot, page))
            }
        }
    }

    #[inline(always)]
    fn kind(&self, mem: &M, slot: u32) -> u32 {
        mem.load(self.state(mem, slot)) & state::KIND
    }

    #[inline(always)]
    fn wait_for(&self, mem: &M, request: &mut PageRequest, slot: u32) -> PageStep {
        (request.phase, request.slot) = (PagePhase::Wait, slot);
        self.wait_for_others(mem, request)
    }

    /// Starts a command for a slot that is the caller's.
    #[inline(always)]
    fn start(
        &self,
        mem: &M,
        backing: &B,
        request: &mut PageRequest,
        op: DeviceOp,
        (slot, page): (u32, u64),
    ) -> PageStep {
        request.phase = if op == DeviceOp::Read { PagePhase::Read } else { PagePhase::Write };
        request.slot = slot;
        let (lba, blocks) = self.blocks_of(mem, page);
        let begun = backing.begin(mem, op, lba, blocks, self.offset(mem, slot), &mut request.command);
        let answer = match begun {
            Answer::Pending => backing.test(mem, &mut request.command),
            refused => refused,
        };
        self.settle(mem, request, answer)
    }

    #[inline(always)]
    fn go_on(&self, mem: &M, backing: &B, request: &mut PageRequest) -> PageStep {
        let answer = backing.test(mem, &mut request.command);
        self.settle(mem, request, answer)
    }

    /// Updates a slot after a step of its command.
    #[inline(always)]
    fn settle(&self, mem: &M, request: &mut PageRequest, answer: Answer) -> PageStep {
        if answer == Answer::Pending {
            return PageStep::Pending;
        }
        let slot = request.slot;
        if request.phase == PagePhase::Write {
            return match self.end_write_back(mem, slot, answer, request.command.life()) {
                Ok(()) => {
                    request.phase = PagePhase::Look;
                    PageStep::Pending
                }
                Err(error) => PageStep::Failed(error),
            };
        }
        let at = self.state(mem, slot);
        match answer {
            Answer::Done => {
                let valid = state::VALID - state::LOADING + state::REFERENCED + 1;
                mem.fetch_add_release(at, valid);
                return PageStep::Pinned(slot);
            }
            Answer::OutcomeUnknown | Answer::Stopped => self.lose(mem, slot, request.command.life()),
            _ => {
                mem.store_release(self.word(mem, slot, set::NOTE), answer.code() as u32);
                mem.fetch_add_release(at, state::FAILED.wrapping_sub(state::LOADING));
            }
        }
        self.count(mem, counter::FAILED_READS, 1);
        PageStep::Failed(ArrayError::Read(answer))
    }

    /// Ends a write-back with this answer, and releases its pin. A page that was not written stays dirty.
    #[inline(always)]
    pub(super) fn end_write_back(
        &self,
        mem: &M,
        slot: u32,
        answer: Answer,
        life: u32,
    ) -> Result<(), ArrayError> {
        if answer != Answer::Done {
            let (note, flags) = match answer {
                Answer::OutcomeUnknown | Answer::Stopped => (life_note(life), state::UNSURE),
                _ => (ArrayError::WriteBack(answer).code() as u32, 0),
            };
            mem.store_release(self.word(mem, slot, set::NOTE), note);
            mem.fetch_or(self.state(mem, slot), state::DIRTY | state::BROKEN | flags);
            self.count(mem, counter::FAILED_WRITES, 1);
        }
        self.end_writing(mem, slot);
        if answer == Answer::Done { Ok(()) } else { Err(ArrayError::WriteBack(answer)) }
    }

    #[inline(always)]
    fn wait_for_others(&self, mem: &M, request: &mut PageRequest) -> PageStep {
        let slot = request.slot;
        let kind = mem.load_acquire(self.state(mem, slot)) & state::KIND;
        // The note before the tag: a slot that has another page by now has another tag, too.
        let note = mem.load_acquire(self.word(mem, slot, set::NOTE));
        let same = self.tag(mem, slot) == request.page;
        if same && kind == state::LOADING {
            if mem.now() < request.deadline {
                return PageStep::Pending;
            }
            return PageStep::Failed(ArrayError::TimedOut);
        }
        // Other notes are of a later write-back: the page was read again meanwhile.
        if same
            && kind == state::FAILED
            && let Some(answer) = Answer::from_code(note as i32)
        {
            return PageStep::Failed(ArrayError::Read(answer));
        }
        request.phase = PagePhase::Look;
        PageStep::Pending
    }
}
