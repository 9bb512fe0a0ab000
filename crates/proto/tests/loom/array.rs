//! The pages of an array under loom: threads pin, write, evict and flush them. What is explored is the directory; what the
//! array lies on answers at once.

use std::sync::atomic::{AtomicU32 as Plain, Ordering::Relaxed};

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use onehop_proto::array::{ArrayError, ArrayHandle, Backing, PageCache, WAYS, directory_words, flush_slots};
use onehop_proto::kernel::{Answer, Command, DeviceOp};
use onehop_proto::queue::Memory;
use onehop_proto::{GpuAddr, Status};

use crate::explore;

const HANDLE: u64 = 0x1000;
const COUNTERS: u64 = 0x2000;
const DATA: u64 = 0x10000;
const PAGE: u64 = 512;
const PAGES: u64 = 2;

/// What is left out.
#[derive(Clone, Copy, PartialEq)]
enum Without {
    Nothing,
    /// The release when a pin is released.
    Release,
    /// The acquire of a pin.
    Acquire,
}

/// A page of the cache: its first word, and a cell by which loom notices a page that is replaced while it is in use.
struct Page {
    word: AtomicU32,
    used: UnsafeCell<()>,
}

/// A page of what the array lies on. By its cell loom notices two commands for it that nothing orders.
struct Medium {
    word: Plain,
    used: UnsafeCell<()>,
}

struct Model {
    /// The directory's words that threads fight over: those of the ways in use.
    directory: Vec<Option<AtomicU32>>,
    /// Those of the ways that are not.
    rest: Vec<u32>,
    handle: Vec<u32>,
    pages: Vec<Page>,
    media: Vec<Medium>,
    reads: Plain,
    /// Commands fail until this is zero.
    failing: Plain,
    answer: Answer,
    /// The answer of the last command that fails, if it is another.
    then: std::sync::Mutex<Option<Answer>>,
    life: Plain,
    without: Without,
}

#[derive(Clone)]
struct Mem(Arc<Model>);

impl Mem {
    fn new(slots: u32, without: Without) -> Self {
        Self::failing(slots, without, 0, Answer::Done)
    }

    fn failing(slots: u32, without: Without, failing: u32, answer: Answer) -> Self {
        let handle = ArrayHandle {
            data: DATA,
            blocks: PAGES,
            limit: 1,
            counters: COUNTERS,
            pages: slots,
            page_shift: 9,
            block_shift: 9,
            writable: 1,
            ..ArrayHandle::default()
        };
        let rest: Vec<u32> = directory_words(slots).collect();
        let in_use = |i: usize| i as u32 % WAYS < slots || i as u32 == 4 * WAYS;
        let directory =
            rest.iter().enumerate().map(|(i, word)| in_use(i).then(|| AtomicU32::new(*word))).collect();
        let medium = |page| Medium { word: Plain::new(100 + page), used: UnsafeCell::new(()) };
        let page = || Page { word: AtomicU32::new(0), used: UnsafeCell::new(()) };
        Self(Arc::new(Model {
            directory,
            rest,
            handle: handle.words().into(),
            pages: (0..slots).map(|_| page()).collect(),
            media: (0..PAGES as u32).map(medium).collect(),
            reads: Plain::new(0),
            failing: Plain::new(failing),
            answer,
            then: std::sync::Mutex::default(),
            life: Plain::new(1),
            without,
        }))
    }

    fn array(&self) -> PageCache<Self, Disk> {
        PageCache::open(self, GpuAddr(HANDLE)).unwrap()
    }

    fn word(&self, at: GpuAddr) -> Option<&AtomicU32> {
        self.0.directory.get(at.0 as usize / 4)?.as_ref()
    }

    fn page(&self, at: GpuAddr) -> &Page {
        &self.0.pages[((at.0 - DATA) / PAGE) as usize]
    }

    /// Pins a page and reads its word.
    fn read(&self, page: u64) -> Result<u32, ArrayError> {
        let array = self.array();
        let pin = array.pin(self, page * PAGE)?;
        let page = self.page(pin.address());
        Ok(page.used.with(|_| page.word.load(Ordering::Relaxed)))
    }

    /// Pins a page and writes its word.
    fn write(&self, page: u64, value: u32) -> Result<(), ArrayError> {
        let array = self.array();
        let pin = array.pin_mut(self, page * PAGE)?;
        let page = self.page(pin.address());
        page.used.with(|_| page.word.store(value, Ordering::Relaxed));
        Ok(())
    }

    fn flush(&self) -> (u32, u32) {
        let flushed = flush_slots(self, &self.array(), (0, 1), 1);
        (flushed.written, flushed.failed)
    }

    fn reads(&self) -> u32 {
        self.0.reads.load(Relaxed)
    }

    fn media(&self, page: usize) -> u32 {
        self.0.media[page].word.load(Relaxed)
    }
}

impl Memory for Mem {
    type Addr = GpuAddr;
    type Door = GpuAddr;

    fn load(&self, at: GpuAddr) -> u32 {
        let rest = || match at.0 {
            HANDLE.. => self.0.handle[(at.0 - HANDLE) as usize / 4],
            _ => self.0.rest[at.0 as usize / 4],
        };
        self.word(at).map_or_else(rest, |word| word.load(Ordering::Relaxed))
    }
    fn load_acquire(&self, at: GpuAddr) -> u32 {
        self.word(at).map_or_else(|| self.load(at), |word| word.load(Ordering::Acquire))
    }
    fn store(&self, at: GpuAddr, value: u32) {
        self.word(at).unwrap().store(value, Ordering::Relaxed);
    }
    fn store_release(&self, at: GpuAddr, value: u32) {
        self.word(at).unwrap().store(value, Ordering::Release);
    }
    fn store_entry(&self, _: GpuAddr, _: &[u32; 16]) {}
    fn fetch_add(&self, at: GpuAddr, value: u32) -> u32 {
        self.word(at).map_or(0, |word| word.fetch_add(value, Ordering::AcqRel))
    }
    fn fetch_add_acquire(&self, at: GpuAddr, value: u32) -> u32 {
        let order = if self.0.without == Without::Acquire { Ordering::Relaxed } else { Ordering::Acquire };
        self.word(at).unwrap().fetch_add(value, order)
    }
    fn fetch_add_release(&self, at: GpuAddr, value: u32) -> u32 {
        let pin = value == u32::MAX;
        let order =
            if pin && self.0.without == Without::Release { Ordering::Relaxed } else { Ordering::Release };
        self.word(at).unwrap().fetch_add(value, order)
    }
    fn fetch_add_relaxed(&self, at: GpuAddr, value: u32) -> u32 {
        self.word(at).map_or(0, |word| word.fetch_add(value, Ordering::Relaxed))
    }
    fn fetch_or(&self, at: GpuAddr, bits: u32) -> u32 {
        self.word(at).unwrap().fetch_or(bits, Ordering::AcqRel)
    }
    fn fetch_or_relaxed(&self, at: GpuAddr, bits: u32) -> u32 {
        self.word(at).unwrap().fetch_or(bits, Ordering::Relaxed)
    }
    fn fetch_and(&self, at: GpuAddr, mask: u32) -> u32 {
        self.word(at).unwrap().fetch_and(mask, Ordering::AcqRel)
    }
    fn fetch_and_relaxed(&self, at: GpuAddr, mask: u32) -> u32 {
        self.word(at).unwrap().fetch_and(mask, Ordering::Relaxed)
    }
    fn compare_exchange(&self, at: GpuAddr, old: u32, new: u32) -> u32 {
        let word = self.word(at).unwrap();
        word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).unwrap_or_else(|seen| seen)
    }
    fn compare_exchange_acquire(&self, at: GpuAddr, old: u32, new: u32) -> u32 {
        let word = self.word(at).unwrap();
        word.compare_exchange(old, new, Ordering::Acquire, Ordering::Acquire).unwrap_or_else(|seen| seen)
    }
    fn fence(&self) {}
    fn ring(&self, _: GpuAddr, _: u32) {}
    fn pause(&self) {
        thread::yield_now();
    }
    fn now(&self) -> u64 {
        0
    }
}

/// What the array lies on.
struct Disk(Mem);

impl Backing<Mem> for Disk {
    fn open(mem: &Mem, _: GpuAddr) -> Option<Self> {
        Some(Self(mem.clone()))
    }

    fn begin(&self, _: &Mem, op: DeviceOp, lba: u64, blocks: u32, offset: u64, _: &mut Command) -> Answer {
        assert_eq!(blocks, 1);
        let model = &self.0.0;
        let (page, media) = (&model.pages[(offset / PAGE) as usize], &model.media[lba as usize]);
        let left = model.failing.load(Relaxed);
        let fails = left > 0;
        if fails {
            model.failing.fetch_sub(1, Relaxed);
        }
        let then = *model.then.lock().unwrap();
        let answer = then.filter(|_| left == 1).unwrap_or(model.answer);
        match op {
            DeviceOp::Read => {
                model.reads.fetch_add(1, Relaxed);
                page.used.with_mut(|_| ());
                if fails {
                    return answer;
                }
                page.word.store(media.used.with(|_| media.word.load(Relaxed)), Ordering::Relaxed);
            }
            DeviceOp::Write => {
                if fails {
                    return answer;
                }
                let value = page.used.with(|_| page.word.load(Ordering::Relaxed));
                media.used.with_mut(|_| media.word.store(value, Relaxed));
            }
        }
        Answer::Done
    }

    fn test(&self, _: &Mem, _: &mut Command) -> Answer {
        Answer::Spent
    }

    fn life(&self, _: &Mem) -> u32 {
        self.0.0.life.load(Relaxed)
    }

    fn is_stopped(&self, _: &Mem) -> bool {
        false
    }
}

/// Two threads, and what they return.
fn both<R: Send + 'static>(mem: &Mem, one: fn(&Mem) -> R, other: fn(&Mem) -> R) -> [R; 2] {
    let thread = {
        let mem = mem.clone();
        thread::spawn(move || other(&mem))
    };
    [one(mem), thread.join().unwrap()]
}

fn two_pages_in_one(without: Without) {
    let mem = Mem::new(1, without);
    assert_eq!(both(&mem, |mem| mem.read(0), |mem| mem.read(1)), [Ok(100), Ok(101)]);
}

#[test]
fn array_of_two_pages_in_a_cache_of_one() {
    explore(3, || two_pages_in_one(Without::Nothing));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn array_pins_that_do_not_release_are_caught() {
    explore(3, || two_pages_in_one(Without::Release));
}

#[test]
fn array_page_that_two_threads_want_is_read_once() {
    explore(3, || {
        let mem = Mem::new(2, Without::Nothing);
        assert_eq!(both(&mem, |mem| mem.read(0), |mem| mem.read(0)), [Ok(100), Ok(100)]);
        assert_eq!(mem.reads(), 1);
    });
}

#[test]
#[should_panic]
fn array_pins_that_do_not_acquire_are_caught() {
    explore(3, || {
        let mem = Mem::new(2, Without::Acquire);
        assert_eq!(both(&mem, |mem| mem.read(0), |mem| mem.read(0)), [Ok(100), Ok(100)]);
    });
}

#[test]
fn array_writes_outlive_their_eviction() {
    explore(2, || {
        let mem = Mem::new(1, Without::Nothing);
        let done = both(&mem, |mem| mem.write(0, 7), |mem| mem.read(1).map(|word| assert_eq!(word, 101)));
        assert_eq!(done, [Ok(()), Ok(())]);
        assert_eq!(mem.read(0), Ok(7));
        mem.flush();
        assert_eq!([mem.media(0), mem.media(1)], [7, 101]);
    });
}

#[test]
fn array_write_during_a_flush_is_in_the_next() {
    explore(2, || {
        let mem = Mem::new(1, Without::Nothing);
        mem.write(0, 7).unwrap();
        let [one, other] = both(&mem, Mem::flush, |mem| mem.write(0, 8).map_or((9, 9), |()| (0, 0)));
        assert_eq!((one.1, other), (0, (0, 0)));
        assert!([7, 8].contains(&mem.media(0)), "what was written before is flushed");
        mem.flush();
        assert_eq!(mem.media(0), 8);
        assert_eq!(mem.flush(), (0, 0));
    });
}

#[test]
fn array_flushes_at_one_time_write_a_page_once() {
    explore(2, || {
        let mem = Mem::new(1, Without::Nothing);
        mem.write(0, 7).unwrap();
        let [(one, _), (other, _)] = both(&mem, Mem::flush, Mem::flush);
        assert_eq!((one + other, mem.media(0)), (1, 7));
    });
}

#[test]
fn array_read_that_fails_frees_its_page() {
    explore(2, || {
        let failed = Err(ArrayError::Read(Answer::Failed(Status(0x281))));
        let mem = Mem::failing(1, Without::Nothing, 1, Answer::Failed(Status(0x281)));
        let [one, other] = both(&mem, |mem| mem.read(0), |mem| mem.read(0));
        assert!(one == failed || other == failed);
        assert!([failed, Ok(100)].contains(&one) && [failed, Ok(100)].contains(&other));
        assert_eq!((mem.read(1), mem.read(0)), (Ok(101), Ok(100)));
    });
}

#[test]
fn array_page_with_an_unknown_outcome_is_used_again_in_the_next_life() {
    explore(2, || {
        let mem = Mem::failing(2, Without::Nothing, 1, Answer::OutcomeUnknown);
        let unknown = Err(ArrayError::Read(Answer::OutcomeUnknown));
        // A command of unknown outcome was begun in epoch 0, which is not over before the host says so.
        mem.0.life.store(0, Relaxed);
        let got = both(&mem, |mem| mem.read(0), |mem| mem.read(0));
        assert!(got == [unknown, Ok(100)] || got == [Ok(100), unknown], "{got:?}");
        // One slot is left.
        assert_eq!((mem.read(1), mem.read(0), mem.reads()), (Ok(101), Ok(100), 4));
        mem.0.life.store(1, Relaxed);
        assert_eq!((mem.read(1), mem.read(0), mem.read(1), mem.reads()), (Ok(101), Ok(100), Ok(101), 5));
    });
}

#[test]
fn array_flush_beside_a_write_back_that_fails_is_complete_or_an_error() {
    explore(2, || {
        let mem = Mem::failing(1, Without::Nothing, 0, Answer::Failed(Status(0x281)));
        mem.write(0, 7).unwrap();
        mem.0.failing.store(1, Relaxed);
        let [(_, failed), _] = both(&mem, Mem::flush, |mem| (u32::from(mem.read(1).is_ok()), 0));
        assert!(failed > 0 || mem.media(0) == 7, "it was flushed, and is not there");
        mem.flush();
        assert_eq!(mem.media(0), 7);
    });
}

#[test]
fn array_read_that_waits_gets_the_error_of_a_read_of_its_page() {
    explore(2, || {
        let failed = Answer::Failed(Status(0x281));
        let mem = Mem::failing(1, Without::Nothing, 2, failed);
        *mem.0.then.lock().unwrap() = Some(Answer::OutcomeUnknown);
        let twice = |mem: &Mem| [mem.read(0), mem.read(0)];
        let waits = |mem: &Mem| [mem.read(0), Ok(100)];
        for end in both(&mem, twice, waits).concat() {
            let errors =
                [ArrayError::Read(failed), ArrayError::Read(Answer::OutcomeUnknown), ArrayError::NoRoom];
            assert!(end.is_ok() || errors.iter().any(|error| end == Err(*error)), "{end:?}");
        }
    });
}
