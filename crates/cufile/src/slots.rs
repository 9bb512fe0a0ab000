//! Pinned memory that operations in streams move their bytes through, and the words that streams wait on.
//!
//! All that an operation may need is reserved by the call that puts it into its stream. If an operation waited for memory when
//! its turn came, it could wait for one that comes later in the same channel of the GPU, for ever.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onehop_gpu::{Gpu, Place, Region};
use onehop_load::engine::calls::CallEngine;
use onehop_os::{DmaMemory, HostMem};
use onehop_proto::kernel::PlaceOrder;

use crate::error::{Code, Failure};
use crate::log::{Level, say};

/// Bytes that one slot takes at most. Longer operations are cut into pieces, which are read by several threads.
pub const PIECE: usize = 4 << 20;
/// Slots of one operation at most: while one piece is copied, others are read.
pub const AHEAD: usize = 4;
/// Bytes of slots, and how many there may be of each size. One operation of each of 40 streams, with all the slots that it can
/// use, finds room.
const CLASSES: [(usize, usize); 4] = [(64 << 10, 1024), (256 << 10, 512), (1 << 20, 192), (PIECE, 160)];
/// Pinned memory is taken from the system for good, so it is bounded.
const MOST_BYTES: usize = 1 << 30;
const _: () = {
    let (mut class, mut bytes) = (0, 0);
    while class < CLASSES.len() {
        bytes += CLASSES[class].0 * CLASSES[class].1;
        class += 1;
    }
    assert!(bytes <= MOST_BYTES, "the slots are more than what may be pinned");
};
/// Pinned memory is made in parts of about this size: registering it takes time.
const GROWTH: usize = 8 << 20;
/// A slot begins with its order, in a block of its own, so that the bytes behind it can be read past the page cache.
const ORDER_BYTES: usize = CallEngine::HOST_BLOCK;
/// Blocks are whole, so there may be one more before the bytes, and one behind them.
const SPARE: usize = 2 * CallEngine::HOST_BLOCK;
/// Bytes of the words that streams wait on: one for each operation under way.
const WORD_BYTES: usize = 64 << 10;
/// How long nothing may come back before a call gives up: any disk moves the bytes of a slot in that time.
const PATIENCE: Duration = Duration::from_secs(10);

/// Pinned memory for one piece of an operation.
pub struct Slot {
    memory: Region,
    start: usize,
    class: usize,
}

impl Slot {
    /// Where its order lies.
    pub fn order(&self) -> (&Region, usize) {
        (&self.memory, self.start)
    }

    /// Where its bytes begin.
    pub fn bytes(&self) -> Option<(&HostMem, usize)> {
        self.memory.host().map(|memory| (memory, self.start + ORDER_BYTES))
    }

    /// The GPU's address of its bytes.
    pub fn address(&self) -> u64 {
        self.memory.addr().plus((self.start + ORDER_BYTES) as u64).0
    }

    /// Tells the kernel what to copy: before it is let go.
    pub fn set_order(&self, source: u64, destination: u64, bytes: usize) -> Result<(), Failure> {
        let mut order = [0; PlaceOrder::BYTES];
        let words = [source, destination, bytes as u64];
        for (at, word) in [PlaceOrder::SOURCE, PlaceOrder::DESTINATION, PlaceOrder::LENGTH].iter().zip(words)
        {
            order[*at as usize..][..8].copy_from_slice(&word.to_le_bytes());
        }
        Ok(self.memory.write(self.start, &order)?)
    }
}

/// A word that a stream waits on.
pub struct Word {
    memory: Region,
    offset: usize,
    /// The count that it has before the operation. It only grows: an old wait that has not seen its count yet sees a larger one.
    before: u32,
}

impl Word {
    /// The word, and its count when so many steps of the operation are done.
    pub fn after(&self, steps: usize) -> (&Region, usize, u32) {
        (&self.memory, self.offset, self.before.wrapping_add(steps as u32))
    }

    /// Lets the stream go on past the wait for so many steps.
    pub fn reach(&self, steps: usize) {
        let (memory, offset, count) = self.after(steps);
        if let Err(error) = memory.signal(offset, count) {
            say(Level::Error, &format!("a stream waits for ever: {error}"));
        }
    }
}

/// What an operation has for itself.
pub struct Reserved {
    pub word: Word,
    pub slots: Vec<Slot>,
}

/// See the module. For the streams of one context.
pub struct SlotPool {
    gpu: Box<dyn Gpu>,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Default)]
struct State {
    words: Vec<Word>,
    classes: [Class; CLASSES.len()],
    /// How often something came back.
    returns: u64,
}

#[derive(Default)]
struct Class {
    free: Vec<Slot>,
    made: usize,
}

impl State {
    /// Slots of this class, or of a larger one.
    fn take(&mut self, class: usize, count: usize) -> Option<Reserved> {
        let from = self.classes[class..].iter_mut().find(|class| class.free.len() >= count)?;
        let word = self.words.pop()?;
        let slots = from.free.split_off(from.free.len() - count);
        Some(Reserved { word, slots })
    }

    /// A class that more may be made of, and how many.
    fn grow(&mut self, class: usize) -> Option<(usize, usize)> {
        let grows = (class..CLASSES.len()).find(|class| self.classes[*class].made < CLASSES[*class].1)?;
        let (bytes, most) = CLASSES[grows];
        let made = &mut self.classes[grows].made;
        let more = (GROWTH / bytes).clamp(1, most - *made);
        *made += more;
        Some((grows, more))
    }
}

impl SlotPool {
    /// # Errors
    /// When there is no memory for the words.
    pub fn new(gpu: Box<dyn Gpu>) -> Result<Self, Failure> {
        let memory = gpu.alloc(Place::PinnedHost, WORD_BYTES)?;
        let word = |index| Word { memory: memory.clone(), offset: index * 4, before: 0 };
        let words = (0..WORD_BYTES / 4).rev().map(word).collect();
        let state = Mutex::new(State { words, ..State::default() });
        Ok(Self { gpu, state, returned: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves a word, and so many slots of at least so many bytes. Waits while others come back.
    ///
    /// # Errors
    /// When none has come back for a while, or there is no memory.
    pub fn reserve(&self, bytes: usize, count: usize) -> Result<Reserved, Failure> {
        self.reserve_within(bytes, count, PATIENCE)
    }

    fn reserve_within(&self, bytes: usize, count: usize, patience: Duration) -> Result<Reserved, Failure> {
        let class = CLASSES.iter().position(|(size, _)| bytes <= *size).ok_or(Code::Internal)?;
        let mut state = self.state();
        let (mut since, mut returns) = (Instant::now(), state.returns);
        loop {
            if let Some(reserved) = state.take(class, count) {
                return Ok(reserved);
            }
            if !state.words.is_empty()
                && let Some((class, more)) = state.grow(class)
            {
                // Without the lock: slots come back meanwhile, by functions that must not wait.
                drop(state);
                let made = self.make(class, more);
                state = self.state();
                match made {
                    Ok(slots) => state.classes[class].free.extend(slots),
                    Err(failure) => {
                        state.classes[class].made -= more;
                        return Err(failure);
                    }
                }
                continue;
            }
            if state.returns != returns {
                (since, returns) = (Instant::now(), state.returns);
            }
            let Some(left) = patience.checked_sub(since.elapsed()).filter(|left| !left.is_zero()) else {
                let what = "no operation in a stream has ended for";
                say(Level::Error, &format!("{what} {patience:?}, and there is no memory for another one"));
                return Err(Code::NoMemory.into());
            };
            state = self.returned.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn make(&self, class: usize, count: usize) -> Result<Vec<Slot>, Failure> {
        let stride = ORDER_BYTES + CLASSES[class].0 + SPARE;
        let memory = self.gpu.alloc(Place::PinnedHost, stride * count)?;
        Ok((0..count).map(|index| Slot { memory: memory.clone(), start: index * stride, class }).collect())
    }

    /// Takes a slot back that no kernel uses any more.
    pub fn give_back(&self, slot: Slot) {
        let mut state = self.state();
        state.classes[slot.class].free.push(slot);
        state.returns += 1;
        self.returned.notify_all();
    }

    /// Takes a word back after all steps of the operation.
    pub fn give_word_back(&self, word: Word, steps: usize) {
        let before = word.before.wrapping_add(steps as u32);
        let mut state = self.state();
        state.words.push(Word { before, ..word });
        state.returns += 1;
        self.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use onehop_gpu::Emulated;

    use super::*;

    const BRIEF: Duration = Duration::from_millis(30);

    fn pool() -> SlotPool {
        SlotPool::new(Box::new(Emulated::new())).unwrap()
    }

    #[test]
    fn slots_are_bounded_and_come_back() {
        let pool = pool();
        let all: Vec<Reserved> = (0..40).map(|_| pool.reserve(PIECE, AHEAD).unwrap()).collect();
        assert!(matches!(pool.reserve_within(PIECE, 1, BRIEF), Err(Failure::Code(Code::NoMemory))));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| pool.reserve(PIECE, AHEAD).map(|reserved| reserved.slots.len()));
            for Reserved { word, slots } in all {
                slots.into_iter().for_each(|slot| pool.give_back(slot));
                pool.give_word_back(word, 1);
            }
            assert_eq!(waits.join().unwrap().unwrap(), AHEAD);
        });
    }

    #[test]
    fn small_ones_take_large_slots_where_theirs_are_used_up() {
        let pool = pool();
        let most: usize = CLASSES[2..].iter().map(|(_, most)| most).sum();
        let all: Vec<Reserved> = (0..most).map(|_| pool.reserve(CLASSES[2].0, 1).unwrap()).collect();
        assert!(pool.reserve_within(CLASSES[2].0, 1, BRIEF).is_err());
        // No slot, only a word.
        assert!(pool.reserve_within(0, 0, BRIEF).is_ok() && all.iter().all(|one| one.slots.len() == 1));
    }

    #[test]
    fn a_slot_has_room_for_blocks_around_its_bytes() {
        let Reserved { slots, .. } = pool().reserve(100, 2).unwrap();
        let places: Vec<usize> = slots.iter().map(|slot| slot.bytes().unwrap().1).collect();
        assert!(places.iter().all(|at| at.is_multiple_of(CallEngine::HOST_BLOCK)));
        assert!(places[0].abs_diff(places[1]) >= CLASSES[0].0 + SPARE);
    }

    #[test]
    fn words_count_on_from_one_use_to_the_next() {
        let pool = pool();
        let Reserved { word, .. } = pool.reserve(0, 0).unwrap();
        word.reach(3);
        let (memory, offset) = (word.memory.clone(), word.offset);
        pool.give_word_back(word, 3);
        let Reserved { word, .. } = pool.reserve(0, 0).unwrap();
        assert_eq!((word.offset, word.after(1).2, memory.word(offset).unwrap()), (offset, 4, 3));
    }
}
