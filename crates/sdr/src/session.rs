//! A board and its event page, on which it reports filled and played buffers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onehop_os::{Deadline, HostMem, Mapped};
use onehop_radio::event::{self, EventEntry, RxReport};
use onehop_radio::{BUFFERS, Broken, regs};

use crate::{Card, Error, Result};

/// Maximum wait for an interrupt, in case one is lost.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The event page, and events that were read but not yet consumed.
struct Page {
    memory: HostMem,
    /// Number of events read, modulo twice the entries of the page.
    read: u32,
    filled: VecDeque<RxReport>,
    played: u64,
    /// Whether a thread waits for the interrupt. It wakes the others.
    has_waiter: bool,
}

/// An open board that reports events. There is at most one session per board.
pub struct Session {
    pub(crate) card: Card,
    page: Mutex<Page>,
    events: Condvar,
    has_rx: AtomicBool,
    has_tx: AtomicBool,
    // Dropped last: the board may write to the page until it has stopped.
    mapped: Option<Mapped>,
}

/// Exclusive use of the board's receiver or transmitter, until this is dropped.
pub(crate) struct DirectionClaim(Arc<Session>, bool);

impl DirectionClaim {
    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.0
    }
}

impl Drop for DirectionClaim {
    fn drop(&mut self) {
        self.0.flag(self.1).store(false, Ordering::SeqCst);
    }
}

impl Session {
    /// Stops the board and sets up its event page.
    ///
    /// # Errors
    /// When the board is gone or does not stop, or has no 32-bit address for host memory.
    pub fn open(card: Card) -> Result<Arc<Self>> {
        stop_rx(&card)?;
        stop_tx(&card)?;
        let memory = card.mapper.alloc(event::PAGE_BYTES)?;
        memory.fill(0, event::PAGE_BYTES, 0xff)?;
        let mapped = card.mapper.map(&memory)?;
        let addr = mapped.contiguous()?.0;
        if !addr.is_multiple_of(4096) {
            return Err(Broken::Alignment { buffer: 0, addr }.into());
        }
        let low = u32::try_from(addr).ok().filter(|_| addr <= card.profile.rx.last_addr());
        let low = low.ok_or(Broken::Mask { buffer: 0, addr, bits: card.profile.rx.mask_bits })?;
        card.write(regs::NOTIFY_PAGE, low);
        for what in [event::RX, event::TX] {
            card.write(regs::ROUTE, regs::route(what, 0));
        }
        let filled = VecDeque::new();
        let page = Mutex::new(Page { memory, read: 0, filled, played: 0, has_waiter: false });
        let (events, has_rx, has_tx) = Default::default();
        Ok(Arc::new(Self { card, page, events, has_rx, has_tx, mapped: Some(mapped) }))
    }

    /// The board.
    #[must_use]
    pub fn card(&self) -> &Card {
        &self.card
    }

    fn flag(&self, rx: bool) -> &AtomicBool {
        if rx { &self.has_rx } else { &self.has_tx }
    }

    pub(crate) fn claim(self: &Arc<Self>, rx: bool) -> Result<DirectionClaim> {
        if self.flag(rx).swap(true, Ordering::SeqCst) {
            let what = if rx { "receiver" } else { "transmitter" };
            return Err(Error::Busy { board: self.card.name.clone(), what });
        }
        Ok(DirectionClaim(self.clone(), rx))
    }

    fn page(&self) -> MutexGuard<'_, Page> {
        self.page.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads new events from the page. The board is not trusted, so the number of events is bounded.
    fn read_events(&self) -> Result<MutexGuard<'_, Page>> {
        let mut page = self.page();
        // Bounded: only a defective board always has more events.
        for _ in 0..event::ENTRIES {
            let at = (page.read % event::ENTRIES) as usize * event::ENTRY_BYTES;
            let first = page.memory.word(at)?.load(Ordering::Acquire);
            if !EventEntry([first, 0, 0, 0]).is(page.read) {
                break;
            }
            let mut words = [first, 0, 0, 0];
            for (i, word) in words.iter_mut().enumerate().skip(1) {
                *word = page.memory.word(at + i * 4)?.load(Ordering::Relaxed);
            }
            page.read = (page.read + 1) % (2 * event::ENTRIES);
            if page.read.is_multiple_of(event::ACK_EVERY) {
                self.card.write(regs::NOTIFY_ACK, regs::ack(0, page.read));
            }
            page.record(EventEntry(words));
            if page.filled.len() > BUFFERS as usize {
                let what = format!("more than {BUFFERS} buffers are filled without being released");
                return Err(Error::ImpossibleReport { board: self.card.name.clone(), what });
            }
        }
        Ok(page)
    }

    /// The next filled buffer.
    pub(crate) fn filled(&self, deadline: Deadline) -> Result<Option<RxReport>> {
        self.wait(deadline, |page| page.filled.pop_front())
    }

    /// The number of played buffers, once it is at least `least`.
    pub(crate) fn played(&self, least: u64, deadline: Deadline) -> Result<Option<u64>> {
        self.wait(deadline, |page| (page.played >= least).then_some(page.played))
    }

    /// Waits until the board has filled a buffer that the receiver has not acquired; returns whether it has. Unlike
    /// [`Receiver::acquire`](crate::Receiver::acquire), this needs no exclusive access to the receiver.
    ///
    /// # Errors
    /// When the board is gone or reports something impossible.
    pub fn wait_filled(&self, limit: Duration) -> Result<bool> {
        let filled = self.wait(Deadline::after(limit), |page| (!page.filled.is_empty()).then_some(()))?;
        Ok(filled.is_some())
    }

    fn wait<T>(
        &self,
        deadline: Deadline,
        mut condition: impl FnMut(&mut Page) -> Option<T>,
    ) -> Result<Option<T>> {
        loop {
            let mut page = self.read_events()?;
            if let Some(found) = condition(&mut page) {
                return Ok(Some(found));
            }
            if deadline.passed() {
                drop(page);
                self.card.check()?;
                return Ok(None);
            }
            self.sleep(page, deadline.left().min(POLL_INTERVAL));
        }
    }

    /// Sleeps until there may be new events. The board has one interrupt for both directions, and it wakes only one
    /// thread. So one thread waits for it and wakes the others.
    fn sleep(&self, mut page: MutexGuard<'_, Page>, limit: Duration) {
        if page.has_waiter {
            drop(self.events.wait_timeout(page, limit));
            return;
        }
        page.has_waiter = true;
        drop(page);
        self.card.interrupt.wait(limit);
        self.page().has_waiter = false;
        self.events.notify_all();
    }

    /// Discards reports of filled buffers.
    pub(crate) fn discard_filled(&self) -> Result<()> {
        self.read_events()?.filled.clear();
        Ok(())
    }

    /// Resets the count of played buffers.
    pub(crate) fn reset_played(&self) -> Result<()> {
        self.read_events()?.played = 0;
        Ok(())
    }
}

impl Page {
    fn record(&mut self, entry: EventEntry) {
        match entry.event() {
            event::RX => self.filled.push_back(RxReport::from_data(entry.data())),
            event::TX => self.played += 1,
            _ => {}
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Receiver and transmitter hold the session, so both have been dropped.
        for what in [event::RX, event::TX] {
            self.card.write(regs::ROUTE, what);
        }
        self.card.write(regs::NOTIFY_PAGE, 0);
        let stopped = stop_rx(&self.card).and_then(|()| stop_tx(&self.card));
        if stopped.is_err() {
            // The board may still write to the page, so it stays allocated.
            std::mem::forget((self.mapped.take(), self.page().memory.clone()));
        }
    }
}

/// Time limit for a board to finish a transfer.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// Stops the receiver; no transfer is in flight afterwards.
pub(crate) fn stop_rx(card: &Card) -> Result<()> {
    card.write(regs::RX_CONTROL, 0);
    card.front(regs::front::ORDER, regs::front::STOP);
    wait_until(card, || !regs::RxStatus(card.read(regs::RX_STATUS)).active())
}

/// Stops the transmitter; no transfer is in flight afterwards.
pub(crate) fn stop_tx(card: &Card) -> Result<()> {
    card.write(regs::TX_CONTROL, 0);
    wait_until(card, || card.read(regs::TX_STATUS) & regs::TX_BUSY == 0)
}

fn wait_until(card: &Card, mut is_idle: impl FnMut() -> bool) -> Result<()> {
    let deadline = Deadline::after(STOP_TIMEOUT);
    loop {
        if regs::RxStatus(card.read(regs::RX_STATUS)).gone() {
            return Err(Error::Gone { board: card.name.clone() });
        }
        if is_idle() {
            return Ok(());
        }
        if deadline.passed() {
            return Err(Error::DoesNotStop { board: card.name.clone(), waited: STOP_TIMEOUT });
        }
        std::thread::yield_now();
    }
}
