//! Doorbells of controllers whose registers are not memory: the GPU writes a page, and a thread relays its words.
//!
//! Why this is enough:
//!
//! - The thread takes a word by an atomic exchange with [`EMPTY`], which is never a doorbell value. So no write is lost
//!   between a poll and the exchange, and a value that is written twice is relayed twice: a newly created queue may
//!   well be rung with the last value of the old one.
//! - Two writes of one doorbell between two polls become one. Doorbells are positions, not counts, and a ring can never
//!   wrap completely before the controller is notified: the later value includes the earlier.
//! - Words are taken from the lowest offset to the highest, and relayed from the highest to the lowest. A queue's
//!   completion doorbell follows its submission doorbell. So if the GPU frees a completion entry and then submits, both
//!   are relayed in that order: what was written before the word taken first is visible when the second is taken.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::{HostMem, Registers};

use crate::{Error, Result};

/// The value of a word that the GPU has not written: positions have sixteen bits.
pub(crate) const EMPTY: u32 = u32::MAX;

/// How long the thread polls without sleeping after the last word that it relayed.
const AWAKE: Duration = Duration::from_millis(2);
/// Its sleep when idle and no kernel runs.
const REST: Duration = Duration::from_micros(50);

/// How long a turn may take on a very busy machine.
const PATIENCE: Duration = Duration::from_secs(1);

/// The number of running kernels that may ring.
#[derive(Default)]
pub(crate) struct Activity(AtomicUsize);

impl Activity {
    /// Counts a kernel until the result is dropped.
    pub(crate) fn kernel(self: &Arc<Self>) -> RunningKernel {
        self.0.fetch_add(1, Ordering::AcqRel);
        RunningKernel(self.clone())
    }

    fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}

/// See [`Activity::kernel`].
pub(crate) struct RunningKernel(Arc<Activity>);

impl Drop for RunningKernel {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The doorbells that are polled.
#[derive(Clone, Default)]
pub(crate) struct Watched(Arc<Doors>);

#[derive(Default)]
struct Doors {
    /// In order of offset.
    list: Mutex<Vec<u32>>,
    /// How often all of them were polled and relayed.
    turns: AtomicU64,
}

impl Watched {
    /// Adds a doorbell.
    pub(crate) fn add(&self, offset: u32) {
        let mut list = self.0.list.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(at) = list.binary_search(&offset) {
            list.insert(at, offset);
        }
    }

    /// Runs `f` on the list under its lock: a doorbell that was added is polled from then on.
    fn with(&self, f: impl FnOnce(&[u32])) {
        f(&self.0.list.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits until what is in the page now was relayed.
    pub(crate) fn settle(&self) {
        let (turns, start) = (&self.0.turns, Instant::now());
        // The present turn may have polled already; the next one has not.
        let enough = turns.load(Ordering::Acquire) + 2;
        while turns.load(Ordering::Acquire) < enough && start.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
    }
}

/// The thread, and the page that it polls. When dropped, relays what is left and ends.
pub(crate) struct Relay {
    watched: Watched,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// Starts relaying from `page`, which has a GPU address, to the registers.
    pub(crate) fn start(page: HostMem, regs: Arc<dyn Registers>, kernels: Arc<Activity>) -> Result<Self> {
        for at in (0..page.len()).step_by(4) {
            page.word(at)?.store(EMPTY, Ordering::Relaxed);
        }
        let (watched, stop) = (Watched::default(), Arc::new(AtomicBool::new(false)));
        let (list, ended) = (watched.clone(), stop.clone());
        let thread = std::thread::Builder::new()
            .name("doorbell relay".into())
            .spawn(move || {
                let mut pass = Pass { page, regs, found: Vec::new() };
                run(&mut pass, &list, &kernels, &ended);
            })
            .map_err(|e| Error::Registers {
                why: format!("no thread could be started to relay them: {e}"),
            })?;
        Ok(Self { watched, stop, thread: Some(thread) })
    }

    /// The list of doorbells, for adding to it.
    pub(crate) fn watched(&self) -> Watched {
        self.watched.clone()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Pass {
    page: HostMem,
    regs: Arc<dyn Registers>,
    found: Vec<(u32, u32)>,
}

impl Pass {
    /// Polls every doorbell once; returns whether there was something to relay.
    fn once(&mut self, watched: &Watched) -> bool {
        self.found.clear();
        watched.with(|list| {
            for offset in list {
                // An offset past the end has neither a word nor a GPU address.
                let Ok(word) = self.page.word(*offset as usize) else { continue };
                // A plain read first: an exchange would take the cache line away from other writers.
                if word.load(Ordering::Acquire) != EMPTY {
                    self.found.push((*offset, word.swap(EMPTY, Ordering::AcqRel)));
                }
            }
        });
        for (offset, value) in self.found.iter().rev() {
            self.regs.write32(*offset, *value);
        }
        watched.0.turns.fetch_add(1, Ordering::AcqRel);
        !self.found.is_empty()
    }
}

fn run(pass: &mut Pass, watched: &Watched, kernels: &Activity, stop: &AtomicBool) {
    let mut last = Instant::now();
    let mut idle = 0u32;
    loop {
        let ending = stop.load(Ordering::Acquire);
        if pass.once(watched) {
            last = Instant::now();
            idle = 0;
        } else if ending {
            return;
        } else if kernels.any() || last.elapsed() < AWAKE {
            idle = idle.wrapping_add(1);
            if idle.is_multiple_of(64) { std::thread::yield_now() } else { std::hint::spin_loop() }
        } else {
            std::thread::sleep(REST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Heard(Mutex<Vec<(u32, u32)>>);

    impl Registers for Heard {
        fn read32(&self, _offset: u32) -> u32 {
            0
        }
        fn write32(&self, offset: u32, value: u32) {
            self.0.lock().unwrap().push((offset, value));
        }
        fn size(&self) -> u32 {
            16384
        }
    }

    fn started() -> (HostMem, Arc<Heard>, Relay) {
        let (page, heard) = (HostMem::anonymous(16384).unwrap(), Arc::<Heard>::default());
        let relay = Relay::start(page.clone(), heard.clone(), Arc::default()).unwrap();
        (page, heard, relay)
    }

    fn ring(page: &HostMem, offset: u32, value: u32) {
        page.word(offset as usize).unwrap().store(value, Ordering::Release);
    }

    /// Waits until the word was taken, as a controller's answer would take it.
    fn taken(page: &HostMem, offset: u32) {
        let start = Instant::now();
        while page.word(offset as usize).unwrap().load(Ordering::Acquire) != EMPTY {
            assert!(start.elapsed() < Duration::from_secs(20), "nobody took it");
            std::thread::yield_now();
        }
    }

    #[test]
    fn every_ring_arrives_in_order_and_the_same_value_arrives_again() {
        let (page, heard, relay) = started();
        relay.watched().add(0x1008);
        relay.watched().add(0x1008);
        let values: Vec<u32> = (0..500).map(|i| i / 2).collect();
        for value in &values {
            ring(&page, 0x1008, *value);
            taken(&page, 0x1008);
        }
        drop(relay);
        let heard: Vec<u32> = heard.0.lock().unwrap().iter().map(|(_, value)| *value).collect();
        assert_eq!(heard, values);
    }

    #[test]
    fn a_freed_completion_is_relayed_before_the_next_submission() {
        let (page, heard, relay) = started();
        let (sq, cq) = (0x1010, 0x1014);
        relay.watched().add(sq);
        relay.watched().add(cq);
        for turn in 1..2000 {
            ring(&page, cq, turn);
            ring(&page, sq, turn);
            if turn % 7 == 0 {
                taken(&page, sq);
            }
        }
        drop(relay);
        let heard = heard.0.lock().unwrap();
        let mut freed = 0;
        for (offset, value) in heard.iter() {
            if *offset == cq {
                freed = *value;
            } else {
                assert!(*value <= freed, "submission {value} was relayed after completion {freed}");
            }
        }
        assert!(heard.ends_with(&[(cq, 1999), (sq, 1999)]) || heard.ends_with(&[(sq, 1999)]));
    }

    #[test]
    fn earlier_doorbells_have_arrived_after_settle() {
        let (page, heard, relay) = started();
        let watched = relay.watched();
        watched.add(0x1008);
        for turn in 1..200 {
            ring(&page, 0x1008, turn);
            watched.settle();
            assert_eq!(heard.0.lock().unwrap().last(), Some(&(0x1008, turn)));
        }
    }

    #[test]
    fn only_doorbells_that_were_handed_out_are_passed_on_and_nothing_is_left_behind() {
        let (page, heard, relay) = started();
        relay.watched().add(0x1000);
        relay.watched().add(1 << 20);
        ring(&page, 0x1004, 5);
        ring(&page, 0x1000, 6);
        drop(relay);
        assert_eq!(*heard.0.lock().unwrap(), [(0x1000, 6)]);
        // The page is no longer polled.
        ring(&page, 0x1000, 7);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(heard.0.lock().unwrap().len(), 1);
    }
}
