//! A board has one interrupt, and both directions wait for it: neither sleeps through the other's.

#![allow(clippy::unwrap_used, reason = "a test ends where something fails")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use common::{LONG, gpu, profile};
use onehop_board::{Board, Config};
use onehop_os::Interrupt;
use onehop_radio::{Format, Shape};
use onehop_sdr::{Card, Receiver, Route, RxOptions, Session, Transmitter, TxOptions};

/// An interrupt that wakes the thread that made it, if that waits; the other sleeps on. Of an event fd any of those that read
/// it may be the one.
struct Unfair {
    inner: Arc<dyn Interrupt>,
    favourite: ThreadId,
    waits: AtomicBool,
}

impl Interrupt for Unfair {
    fn wait(&self, limit: Duration) -> bool {
        if std::thread::current().id() == self.favourite {
            self.waits.store(true, Ordering::SeqCst);
            let raised = self.inner.wait(limit);
            self.waits.store(false, Ordering::SeqCst);
            return raised;
        }
        if self.waits.load(Ordering::SeqCst) {
            std::thread::sleep(limit);
            return false;
        }
        self.inner.wait(limit)
    }
}

fn session(board: &Board) -> Arc<Session> {
    let favourite = std::thread::current().id();
    let interrupt = Arc::new(Unfair { inner: board.interrupt(), favourite, waits: AtomicBool::new(false) });
    Session::open(Card::new(&board.port(), interrupt, profile(board))).unwrap()
}

const ROUNDS: u32 = 100;
/// A loser that sleeps through every round takes 20 ms for each. This leaves a busy machine 10 ms.
const MOST: Duration = Duration::from_secs(1);

#[test]
fn the_transmitter_does_not_sleep_through_the_receiver_s_interrupts() {
    let board = Board::new(Config::parse("usdr?rate=2M").unwrap()).unwrap();
    let (session, gpu) = (session(&board), gpu());
    // Blocks of an eighth of a second: the receiver waits nearly all the time.
    let shape = Shape::of_bytes(Format::Ci16, &board.limits(), 1 << 20).unwrap();
    let options = RxOptions { shape, only: Some(Route::Pinned), self_test: None };
    let mut receiver = Receiver::open(&session, &gpu, &options).unwrap();
    let tx = TxOptions { bytes: 4096, only: Some(Route::Pinned), self_test: LONG };
    let mut transmitter = Transmitter::open(&session, &gpu, &tx).unwrap();
    receiver.start().unwrap();
    let (over, begin) = (AtomicBool::new(false), Barrier::new(2));
    let took = std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            begin.wait();
            let begun = Instant::now();
            for _ in 0..ROUNDS {
                transmitter.acquire(LONG).unwrap().unwrap().submit(64, None).unwrap();
                assert!(transmitter.drain(LONG).unwrap());
            }
            over.store(true, Ordering::SeqCst);
            begun.elapsed()
        });
        begin.wait();
        while !over.load(Ordering::SeqCst) {
            let _ = receiver.acquire(Duration::from_secs(1)).unwrap();
        }
        sender.join().unwrap()
    });
    assert!(took < MOST, "{ROUNDS} buffers of 32 microseconds took {took:?}");
}

#[test]
fn the_receiver_does_not_sleep_through_the_transmitter_s_interrupts() {
    // Two milliseconds a block; a buffer is played for a quarter of a second, and the transmitter waits for it.
    let board = Board::new(Config::parse("usdr?rate=64k").unwrap()).unwrap();
    let (session, gpu) = (session(&board), gpu());
    let shape = Shape::of_bytes(Format::Ci16, &board.limits(), 512).unwrap();
    let options = RxOptions { shape, only: Some(Route::Pinned), self_test: None };
    let mut receiver = Receiver::open(&session, &gpu, &options).unwrap();
    let tx = TxOptions { bytes: 64 << 10, only: Some(Route::Pinned), self_test: LONG };
    let mut transmitter = Transmitter::open(&session, &gpu, &tx).unwrap();
    let (over, begin) = (AtomicBool::new(false), Barrier::new(2));
    let late = std::thread::scope(|scope| {
        let listener = scope.spawn(|| {
            begin.wait();
            receiver.start().unwrap();
            let begun = Instant::now();
            let mut late = 0;
            for block in 1..=ROUNDS {
                let _ = receiver.acquire(LONG).unwrap().unwrap();
                late +=
                    u32::from(begun.elapsed() > Duration::from_millis(2) * block + Duration::from_millis(9));
            }
            over.store(true, Ordering::SeqCst);
            late
        });
        begin.wait();
        while !over.load(Ordering::SeqCst) {
            transmitter.acquire(LONG).unwrap().unwrap().submit(16384, None).unwrap();
            let _ = transmitter.drain(Duration::from_millis(250)).unwrap();
        }
        listener.join().unwrap()
    });
    // A block that is slept through is up to 20 ms late, as half of them then are by more than 9.
    assert!(late < ROUNDS / 4, "{late} of {ROUNDS} blocks came late");
}
