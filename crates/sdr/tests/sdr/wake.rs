//! A board has one interrupt for both directions. Neither thread may sleep through an interrupt that wakes the other.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use onehop_board::{Board, BoardConfig};
use onehop_os::Interrupt;
use onehop_radio::{Format, Shape};
use onehop_sdr::{Card, Receiver, RxOptions, SampleRoute, Session, Transmitter, TxOptions};

use crate::common::{LONG, gpu, profile};

/// An interrupt that always wakes the thread that created it, if that thread waits, and never the other. An eventfd may
/// wake either reader.
struct Unfair {
    inner: Arc<dyn Interrupt>,
    preferred: ThreadId,
    is_waiting: AtomicBool,
    /// How often the other thread slept with no interrupt to wake it.
    overslept: AtomicU32,
}

impl Interrupt for Unfair {
    fn wait(&self, limit: Duration) -> bool {
        if std::thread::current().id() == self.preferred {
            self.is_waiting.store(true, Ordering::SeqCst);
            let raised = self.inner.wait(limit);
            self.is_waiting.store(false, Ordering::SeqCst);
            return raised;
        }
        if self.is_waiting.load(Ordering::SeqCst) {
            self.overslept.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(limit);
            return false;
        }
        self.inner.wait(limit)
    }
}

fn session(board: &Board) -> (Arc<Session>, Arc<Unfair>) {
    let preferred = std::thread::current().id();
    let (is_waiting, overslept) = Default::default();
    let interrupt = Arc::new(Unfair { inner: board.interrupt(), preferred, is_waiting, overslept });
    (Session::open(Card::new(&board.port(), interrupt.clone(), profile(board))).unwrap(), interrupt)
}

const ROUNDS: usize = 100;
/// Upper limit for the median round: sleeping through an interrupt takes 20 ms.
const MAX_MEDIAN: Duration = Duration::from_millis(10);

#[test]
fn the_transmitter_does_not_sleep_through_the_receiver_s_interrupts() {
    let board = Board::new(BoardConfig::parse("usdr?rate=2M").unwrap()).unwrap();
    let ((session, interrupt), gpu) = (session(&board), gpu());
    // Blocks of an eighth of a second: the receiver waits nearly all the time.
    let shape = Shape::of_bytes(Format::Ci16, &board.limits(), 1 << 20).unwrap();
    let options = RxOptions { shape, only: Some(SampleRoute::Pinned), self_test: None };
    let mut receiver = Receiver::open(&session, &gpu, &options).unwrap();
    let tx = TxOptions { bytes: 4096, only: Some(SampleRoute::Pinned), self_test: LONG };
    let mut transmitter = Transmitter::open(&session, &gpu, &tx).unwrap();
    receiver.start().unwrap();
    let (over, begin) = (AtomicBool::new(false), Barrier::new(2));
    let took = std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            begin.wait();
            let mut times = Vec::new();
            for _ in 0..ROUNDS {
                let begun = Instant::now();
                transmitter.acquire(LONG).unwrap().unwrap().submit(64, None).unwrap();
                assert!(transmitter.drain(LONG).unwrap());
                times.push(begun.elapsed());
            }
            over.store(true, Ordering::SeqCst);
            times.sort();
            times[ROUNDS / 2]
        });
        begin.wait();
        while !over.load(Ordering::SeqCst) {
            let _ = receiver.acquire(Duration::from_secs(1)).unwrap();
        }
        sender.join().unwrap()
    });
    assert!(took < MAX_MEDIAN, "the median time for a buffer of 32 µs is {took:?}");
    assert_eq!(interrupt.overslept.load(Ordering::SeqCst), 0);
}

#[test]
fn the_receiver_does_not_sleep_through_the_transmitter_s_interrupts() {
    // Blocks of two milliseconds. A buffer plays for a quarter of a second, and the transmitter waits for it.
    let board = Board::new(BoardConfig::parse("usdr?rate=64k").unwrap()).unwrap();
    let ((session, interrupt), gpu) = (session(&board), gpu());
    let shape = Shape::of_bytes(Format::Ci16, &board.limits(), 512).unwrap();
    let options = RxOptions { shape, only: Some(SampleRoute::Pinned), self_test: None };
    let mut receiver = Receiver::open(&session, &gpu, &options).unwrap();
    let tx = TxOptions { bytes: 64 << 10, only: Some(SampleRoute::Pinned), self_test: LONG };
    let mut transmitter = Transmitter::open(&session, &gpu, &tx).unwrap();
    let (over, begin) = (AtomicBool::new(false), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            begin.wait();
            receiver.start().unwrap();
            for _ in 0..ROUNDS {
                let _ = receiver.acquire(LONG).unwrap().unwrap();
            }
            over.store(true, Ordering::SeqCst);
        });
        begin.wait();
        while !over.load(Ordering::SeqCst) {
            transmitter.acquire(LONG).unwrap().unwrap().submit(16384, None).unwrap();
            let _ = transmitter.drain(Duration::from_millis(250)).unwrap();
        }
    });
    // A busy machine may cause delays, but not sleeping without an interrupt.
    assert_eq!(interrupt.overslept.load(Ordering::SeqCst), 0);
}
