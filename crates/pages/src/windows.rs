//! Which parts of a file are registered.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_gpu::Region;
use onehop_os::Guard;

/// Pause before a window is tried again.
const PAUSE: Duration = Duration::from_millis(250);
/// How long a window must have been unused before it makes room for another: registering one takes as long as moving thousands
/// of its pages by threads.
const UNUSED: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 2000 });
/// The most windows that are known, but not registered.
const MOST_UNREGISTERED: usize = 1 << 16;

pub(crate) const UNDER_WAY: &str = "its part of the file is being registered";

/// The memory of a window.
#[derive(Clone)]
pub(crate) struct WindowMemory {
    /// Where the CPU copies: it would end the process with SIGBUS if the file was truncated in a way that breaks no lease.
    pub(crate) guard: Option<Arc<Guard>>,
    pub(crate) region: Region,
}

/// The windows of a file by their numbers.
#[derive(Default)]
pub(crate) struct Windows {
    all: BTreeMap<u64, RegisteredWindow>,
    /// Bytes that are registered, or about to be.
    bytes: u64,
}

/// A part of the file.
struct RegisteredWindow {
    memory: Option<WindowMemory>,
    /// Registered bytes from its start on.
    bytes: u64,
    /// Whether a thread is to register it.
    is_wanted: bool,
    /// When it may be tried again.
    retry: Instant,
    used: Instant,
    /// Why no more of it is registered.
    why: Arc<str>,
}

impl RegisteredWindow {
    fn new(now: Instant) -> Self {
        Self { memory: None, bytes: 0, is_wanted: false, retry: now, used: now, why: UNDER_WAY.into() }
    }

    fn registered(&self) -> u64 {
        if self.memory.is_some() { self.bytes } else { 0 }
    }
}

/// A window as a batch finds it.
pub(crate) struct FoundWindow {
    /// What is registered of it.
    pub(crate) memory: Option<WindowMemory>,
    pub(crate) bytes: u64,
    /// Why no more is.
    pub(crate) why: Arc<str>,
    /// Whether a thread is now to register it.
    pub(crate) is_new: bool,
}

impl Windows {
    /// Bytes that are registered, or about to be.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Finds a window of a file in which it could have so many bytes. Memory behind the end of the file is dropped.
    pub(crate) fn find(
        &mut self,
        number: u64,
        possible: u64,
        dropped: &mut Vec<WindowMemory>,
    ) -> FoundWindow {
        if self.all.len() > MOST_UNREGISTERED {
            self.all.retain(|_, window| window.memory.is_some() || window.is_wanted);
        }
        let now = Instant::now();
        if self.all.get(&number).is_some_and(|window| window.registered() > possible) {
            dropped.extend(self.remove(number));
        }
        let window = self.all.entry(number).or_insert_with(|| RegisteredWindow::new(now));
        window.used = now;
        let is_new = window.registered() < possible && !window.is_wanted && now >= window.retry;
        if is_new {
            (window.is_wanted, window.why) = (true, UNDER_WAY.into());
        }
        FoundWindow {
            memory: window.memory.clone(),
            bytes: window.registered(),
            why: window.why.clone(),
            is_new,
        }
    }

    /// Reserves room for a window of so many bytes, and returns how many it adds. Removes others that have not been used for a
    /// while, the longest unused first.
    pub(crate) fn reserve(
        &mut self,
        number: u64,
        bytes: u64,
        most: u64,
        dropped: &mut Vec<WindowMemory>,
    ) -> Option<u64> {
        let more = bytes.saturating_sub(self.all.get(&number).map_or(0, RegisteredWindow::registered));
        if bytes > most {
            return None;
        }
        while self.bytes + more > most {
            let registered =
                self.all.iter().filter(|(other, window)| **other != number && window.memory.is_some());
            let unused = registered.filter(|(_, window)| window.used.elapsed() >= UNUSED);
            let oldest = unused.min_by_key(|(_, window)| window.used).map(|(other, _)| *other)?;
            dropped.extend(self.remove(oldest));
        }
        self.bytes += more;
        Some(more)
    }

    /// Gives up what was reserved.
    pub(crate) fn release(&mut self, more: u64) {
        self.bytes -= more;
    }

    /// A window is registered, for which `more` bytes were reserved. Returns its former memory.
    pub(crate) fn insert(
        &mut self,
        number: u64,
        (memory, bytes): (WindowMemory, u64),
        more: u64,
    ) -> Option<WindowMemory> {
        let now = Instant::now();
        let window = self.all.entry(number).or_insert_with(|| RegisteredWindow::new(now));
        // What it has may be other than when room was reserved.
        self.bytes = self.bytes + bytes - more - window.registered();
        (window.bytes, window.is_wanted, window.retry) = (bytes, false, now + PAUSE);
        window.why = "the file grows, or it is its last page, which is not whole".into();
        window.memory.replace(memory)
    }

    /// A window could not be registered. What it has remains.
    pub(crate) fn put_off(&mut self, number: u64, why: &str) {
        let now = Instant::now();
        let window = self.all.entry(number).or_insert_with(|| RegisteredWindow::new(now));
        (window.is_wanted, window.retry, window.why) = (false, now + PAUSE, why.into());
    }

    /// Marks as wanted those of so many windows that could have more bytes, and returns them.
    pub(crate) fn want_all(&mut self, count: u64, possible: impl Fn(u64) -> u64) -> Vec<u64> {
        let now = Instant::now();
        let is_missing = |number: &u64| {
            let window = self.all.entry(*number).or_insert_with(|| RegisteredWindow::new(now));
            let is_missing = window.registered() < possible(*number) && !window.is_wanted;
            window.is_wanted |= is_missing;
            is_missing
        };
        (0..count).filter(is_missing).collect()
    }

    fn remove(&mut self, number: u64) -> Option<WindowMemory> {
        let window = self.all.get_mut(&number)?;
        self.bytes -= window.registered();
        window.memory.take()
    }
}
