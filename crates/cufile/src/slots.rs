//! Pinned memory that operations in streams move their bytes through, and the words that streams wait on.
//!
//! The call that puts an operation into its stream reserves everything that it may need. An operation that waited for
//! memory when its turn came could wait for a later one in the same GPU channel, for ever.
//!
//! Everything is pinned at once, before the first operation: the driver may wait for streams when it pins memory, and
//! those may wait for the calling thread.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onehop_gpu::{Gpu, Place, Region};
use onehop_load::engine::calls::CallEngine;
use onehop_os::{DmaMemory, HostMem};
use onehop_proto::kernel::PlaceOrder;

use crate::error::{Code, Failure};
use crate::log::{Level, say};

/// Capacity of a slot. Longer operations are cut into chunks, which several threads read.
pub const CHUNK: usize = 4 << 20;
/// Maximum slots per operation: while one chunk is copied, others are read.
pub const AHEAD: usize = 4;
/// Slot sizes, and the number of slots of each. Commands of all slots together fit one channel of a GPU, which takes
/// about a thousand: in a full one the driver's calls wait, for ever if the program holds the stream back.
const CLASSES: [(usize, usize); 4] = [(64 << 10, 32), (256 << 10, 32), (1 << 20, 24), (CHUNK, 32)];
/// Maximum number of operations at once, including those that need no slot.
const WORDS: usize = 128;
/// A slot starts with its order, in a block of its own, so that the bytes after it can be read past the page cache.
const ORDER_BYTES: usize = CallEngine::HOST_BLOCK;
/// Whole blocks are read, so there may be one more before the bytes, and one after them.
const SPARE: usize = 2 * CallEngine::HOST_BLOCK;
/// How long a call waits for a slot to be released: any disk moves a slot's bytes in that time.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Pinned memory for one chunk of an operation.
pub struct PinnedSlot {
    memory: Region,
    start: usize,
    class: usize,
}

impl PinnedSlot {
    /// The address of its order.
    pub fn order(&self) -> (&Region, usize) {
        (&self.memory, self.start)
    }

    /// The start of its bytes.
    pub fn bytes(&self) -> Option<(&HostMem, usize)> {
        self.memory.host().map(|memory| (memory, self.start + ORDER_BYTES))
    }

    /// The GPU address of its bytes.
    pub fn address(&self) -> u64 {
        self.memory.addr().plus((self.start + ORDER_BYTES) as u64).0
    }

    /// Makes a kernel that has not started copy nothing. One store, because it may be reading.
    pub fn cancel_order(&self) -> onehop_gpu::Result<()> {
        // Orders are shorter than 4 GiB.
        self.memory.signal(self.start + PlaceOrder::LENGTH as usize, 0)
    }

    /// Sets what the kernel copies, before it is started.
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
    /// Its count before the operation. It only grows: an old wait that has not seen its count yet sees a larger one.
    before: u32,
}

impl Word {
    /// The word, and its count after this many steps of the operation.
    pub fn after(&self, steps: usize) -> (&Region, usize, u32) {
        (&self.memory, self.offset, self.before.wrapping_add(steps as u32))
    }

    /// Releases the stream's wait for this many steps.
    pub fn reach(&self, steps: usize) {
        let (memory, offset, count) = self.after(steps);
        if let Err(error) = memory.signal(offset, count) {
            say(Level::Error, &format!("a stream waits for ever: {error}"));
        }
    }
}

/// Resources reserved for an operation.
pub struct Reserved {
    pub word: Word,
    pub slots: Vec<PinnedSlot>,
}

/// The pinned slots of one context's streams; see the module.
pub struct SlotPool {
    state: Mutex<FreeSlots>,
    returned: Condvar,
}

#[derive(Default)]
struct FreeSlots {
    words: Vec<Word>,
    classes: [Vec<PinnedSlot>; CLASSES.len()],
    /// Number of releases so far.
    returns: u64,
}

impl FreeSlots {
    /// Slots of this class, or of a larger one. Fewer if few are left, so that many operations find one.
    fn take(&mut self, class: usize, count: usize) -> Option<Reserved> {
        let mut slots = Vec::new();
        if count > 0 {
            let from = self.classes[class..].iter_mut().find(|free| !free.is_empty())?;
            let left = from.len();
            if !self.words.is_empty() {
                slots = from.split_off(left - count.min((left / 4).max(1)));
            }
        }
        Some(Reserved { word: self.words.pop()?, slots })
    }
}

impl SlotPool {
    /// Pins all slots.
    ///
    /// # Errors
    /// When memory is short.
    pub fn new(gpu: &dyn Gpu) -> Result<Self, Failure> {
        let stride = |class: usize| ORDER_BYTES + CLASSES[class].0 + SPARE;
        let word_bytes = (WORDS * size_of::<u32>()).next_multiple_of(CallEngine::HOST_BLOCK);
        let bytes = (0..CLASSES.len()).map(|class| stride(class) * CLASSES[class].1).sum::<usize>();
        let memory = gpu.alloc(Place::PinnedHost, word_bytes + bytes)?;
        let word = |index| Word { memory: memory.clone(), offset: index * size_of::<u32>(), before: 0 };
        let (words, mut start) = ((0..WORDS).rev().map(word).collect(), word_bytes);
        let classes = std::array::from_fn(|class| {
            let mut slot = || {
                let slot = PinnedSlot { memory: memory.clone(), start, class };
                start += stride(class);
                slot
            };
            (0..CLASSES[class].1).map(|_| slot()).collect()
        });
        let state = Mutex::new(FreeSlots { words, classes, returns: 0 });
        Ok(Self { state, returned: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, FreeSlots> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves a word and up to `count` slots of at least `bytes` bytes, but at least one. Waits for others to be
    /// released.
    ///
    /// # Errors
    /// When none was released for a while.
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

    /// Releases a slot that no kernel uses any more.
    pub fn release(&self, slot: PinnedSlot) {
        let mut state = self.state();
        state.classes[slot.class].push(slot);
        state.returns += 1;
        self.returned.notify_all();
    }

    /// Releases a word after all steps of the operation.
    pub fn release_word(&self, word: Word, steps: usize) {
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
        SlotPool::new(&Emulated::new()).unwrap()
    }

    fn release(pool: &SlotPool, all: Vec<Reserved>) {
        for Reserved { word, slots } in all {
            slots.into_iter().for_each(|slot| pool.release(slot));
            pool.release_word(word, 1);
        }
    }

    #[test]
    fn slots_are_bounded_and_come_back() {
        let pool = pool();
        assert_eq!(pool.reserve(CHUNK, AHEAD).map(|all| all.slots.len()).unwrap(), AHEAD);
        let mut all: Vec<Reserved> = Vec::new();
        while let Ok(reserved) = pool.reserve_within(CHUNK, AHEAD, BRIEF) {
            all.push(reserved);
        }
        // More operations than slots, if each took as many as it can use.
        assert!(all.len() > CLASSES[3].1 / AHEAD && all.iter().all(|one| !one.slots.is_empty()));
        assert!(matches!(pool.reserve_within(CHUNK, 1, BRIEF), Err(Failure::Code(Code::NoMemory))));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| pool.reserve(CHUNK, AHEAD).map(|reserved| reserved.slots.len()));
            release(&pool, all);
            assert!(waits.join().unwrap().unwrap() > 0);
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
    fn words_are_bounded_and_no_slot_goes_with_none() {
        let pool = pool();
        let all: Vec<Reserved> = (0..WORDS).map(|_| pool.reserve(0, 0).unwrap()).collect();
        assert!(pool.reserve_within(1, 1, BRIEF).is_err() && pool.reserve_within(0, 0, BRIEF).is_err());
        release(&pool, all);
        assert_eq!(pool.state().classes[0].len(), CLASSES[0].1);
        assert_eq!(pool.reserve(1, 1).unwrap().slots.len(), 1);
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
        pool.release_word(word, 3);
        let Reserved { word, .. } = pool.reserve(0, 0).unwrap();
        assert_eq!((word.offset, word.after(1).2, memory.word(offset).unwrap()), (offset, 4, 3));
    }
}
