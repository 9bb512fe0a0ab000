//! A board with its event page: who fills what, as the board tells it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onehop_os::{Deadline, HostMem, Mapped};
use onehop_radio::event::{self, Entry, RxReport};
use onehop_radio::{BUFFERS, Broken, regs};

use crate::{Card, Error, Result};

/// How long the interrupt is waited for before the page is read all the same: one that is lost costs that long.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The board's event page, and what was read from it and not been asked for.
struct Page {
    memory: HostMem,
    /// Events read, over two laps.
    read: u32,
    filled: VecDeque<RxReport>,
    played: u64,
    strange: u64,
    /// Whether a thread waits for the interrupt, and wakes the others.
    awaited: bool,
}

/// A board that tells its events. One at most for each board.
pub struct Session {
    pub(crate) card: Card,
    page: Mutex<Page>,
    news: Condvar,
    has_rx: AtomicBool,
    has_tx: AtomicBool,
    // Behind everything that might still write there.
    mapped: Option<Mapped>,
}

/// A board has one receiver and one transmitter at most; the claim ends when this is dropped.
pub(crate) struct SideClaim(Arc<Session>, bool);

impl SideClaim {
    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.0
    }
}

impl Drop for SideClaim {
    fn drop(&mut self) {
        self.0.flag(self.1).store(false, Ordering::SeqCst);
    }
}

impl Session {
    /// Gives the board its event page. Whatever it did before ends.
    ///
    /// # Errors
    /// When the board is gone or does not stop, or cannot reach host memory by an address of 32 bits.
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
        let page = Mutex::new(Page { memory, read: 0, filled, played: 0, strange: 0, awaited: false });
        let (news, has_rx, has_tx) = Default::default();
        Ok(Arc::new(Self { card, page, news, has_rx, has_tx, mapped: Some(mapped) }))
    }

    /// The board.
    #[must_use]
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// Events of a kind that nobody asked for.
    #[must_use]
    pub fn strange_events(&self) -> u64 {
        self.page().strange
    }

    fn flag(&self, rx: bool) -> &AtomicBool {
        if rx { &self.has_rx } else { &self.has_tx }
    }

    pub(crate) fn claim(self: &Arc<Self>, rx: bool) -> Result<SideClaim> {
        if self.flag(rx).swap(true, Ordering::SeqCst) {
            let what = if rx { "receiver" } else { "transmitter" };
            return Err(Error::Busy { board: self.card.name.clone(), what });
        }
        Ok(SideClaim(self.clone(), rx))
    }

    fn page(&self) -> MutexGuard<'_, Page> {
        self.page.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what there is in the page. A board is a stranger: what it writes is bounded here.
    fn look(&self) -> Result<MutexGuard<'_, Page>> {
        let mut page = self.page();
        // A page that is full of news for ever is a board that makes no sense, not one that is fast.
        for _ in 0..event::ENTRIES {
            let at = (page.read % event::ENTRIES) as usize * event::ENTRY_BYTES;
            let first = page.memory.word(at)?.load(Ordering::Acquire);
            if !Entry([first, 0, 0, 0]).is(page.read) {
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
            page.take(Entry(words));
            if page.filled.len() > BUFFERS as usize {
                let what = format!("more than {BUFFERS} buffers are filled and not given back");
                return Err(Error::Confused { board: self.card.name.clone(), what });
            }
        }
        Ok(page)
    }

    /// The next buffer that was filled.
    pub(crate) fn filled(&self, deadline: Deadline) -> Result<Option<RxReport>> {
        self.wait(deadline, |page| page.filled.pop_front())
    }

    /// How many buffers have been played, once they are `least`.
    pub(crate) fn played(&self, least: u64, deadline: Deadline) -> Result<Option<u64>> {
        self.wait(deadline, |page| (page.played >= least).then_some(page.played))
    }

    /// Waits until the board has filled a buffer that the receiver has not acquired yet; whether it has. A program with several
    /// threads can wait by this without keeping the receiver to itself.
    ///
    /// # Errors
    /// When the board is gone or tells what cannot be.
    pub fn wait_filled(&self, limit: Duration) -> Result<bool> {
        let filled = self.wait(Deadline::after(limit), |page| (!page.filled.is_empty()).then_some(()))?;
        Ok(filled.is_some())
    }

    fn wait<T>(&self, deadline: Deadline, mut what: impl FnMut(&mut Page) -> Option<T>) -> Result<Option<T>> {
        loop {
            let mut page = self.look()?;
            if let Some(found) = what(&mut page) {
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

    /// Sleeps until there may be something in the page. The board has one interrupt for both directions, and it wakes one
    /// thread: so one waits for it, and wakes those that wait for that thread.
    fn sleep(&self, mut page: MutexGuard<'_, Page>, limit: Duration) {
        if page.awaited {
            drop(self.news.wait_timeout(page, limit));
            return;
        }
        page.awaited = true;
        drop(page);
        self.card.interrupt.wait(limit);
        self.page().awaited = false;
        self.news.notify_all();
    }

    /// Forgets what was told of buffers that nobody asked for.
    pub(crate) fn forget_filled(&self) -> Result<()> {
        self.look()?.filled.clear();
        Ok(())
    }

    /// Counts played buffers from zero.
    pub(crate) fn forget_played(&self) -> Result<()> {
        self.look()?.played = 0;
        Ok(())
    }
}

impl Page {
    fn take(&mut self, entry: Entry) {
        match entry.event() {
            event::RX => self.filled.push_back(RxReport::from_data(entry.data())),
            event::TX => self.played += 1,
            _ => self.strange += 1,
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Receiver and transmitter hold the session, so both have stopped.
        for what in [event::RX, event::TX] {
            self.card.write(regs::ROUTE, what);
        }
        self.card.write(regs::NOTIFY_PAGE, 0);
        let stopped = stop_rx(&self.card).and_then(|()| stop_tx(&self.card));
        if stopped.is_err() {
            // A board that does not stop keeps its page.
            std::mem::forget((self.mapped.take(), self.page().memory.clone()));
        }
    }
}

/// How long a board may take to finish what it is writing.
const STOP: Duration = Duration::from_secs(2);

/// Stops the receiver; nothing of it is under way afterwards.
pub(crate) fn stop_rx(card: &Card) -> Result<()> {
    card.write(regs::RX_CONTROL, 0);
    card.front(regs::front::ORDER, regs::front::STOP);
    settle(card, || !regs::RxStatus(card.read(regs::RX_STATUS)).active())
}

/// Stops the transmitter; nothing of it is under way afterwards.
pub(crate) fn stop_tx(card: &Card) -> Result<()> {
    card.write(regs::TX_CONTROL, 0);
    settle(card, || card.read(regs::TX_STATUS) & regs::TX_BUSY == 0)
}

fn settle(card: &Card, mut is_over: impl FnMut() -> bool) -> Result<()> {
    let deadline = Deadline::after(STOP);
    loop {
        if regs::RxStatus(card.read(regs::RX_STATUS)).gone() {
            return Err(Error::Gone { board: card.name.clone() });
        }
        if is_over() {
            return Ok(());
        }
        if deadline.passed() {
            return Err(Error::DoesNotStop { board: card.name.clone(), waited: STOP });
        }
        std::thread::yield_now();
    }
}
