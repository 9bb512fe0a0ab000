//! Parts of the file that are registered with the GPU.
//!
//! Registered pages stay in memory, and the GPU goes on using them when somebody truncates the file, punches a hole into it or
//! writes past the page cache: it would read old bytes, and what it writes would be lost. So nothing is registered without a
//! lease of the file: the kernel makes programs that would open or truncate it wait until the lease is given back. A thread
//! looks for them and gives it back as soon as the copies under way have ended.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use onehop_gpu::{CopyRange, Gpu, Place, RangeCopier, Region};
use onehop_os::page_cache::cached_bytes;
use onehop_os::{FileLease, HostMem};
use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, fstatfs, statx};

use crate::staged::StagedPart;
use crate::{FilePage, PageDirection, PagesOptions, Result, lock};

/// Bytes that are registered at once.
pub(crate) const WINDOW: u64 = 64 << 20;
const PAGE: u64 = 4096;
/// How often to look for programs that wait for the file.
const LOOK: Duration = Duration::from_millis(10);
/// How long to wait before a lease is taken again, or a window registered that could not be.
const PAUSE: Duration = Duration::from_millis(250);
/// How long a window must have been unused before it makes room for another: registering one takes as long as moving thousands
/// of its pages by threads.
const UNUSED: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 2000 });
/// Threads that register windows: most of the time is the kernel's, which maps page after page.
const THREADS: usize = 4;
/// How long a program may wait for all of a file to be registered.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(120);
/// Longer than anything lives.
const CLOSED: Duration = Duration::from_secs(1 << 32);
/// Bits of a mode: to execute, or as another user. A write has to clear some of them.
const EXECUTABLE: u16 = 0o6111;

/// Bytes of ranges that the copy engine copies as fast as a kernel does.
const KERNEL_BELOW: usize = 1 << 20;

const NOT_CACHED: &str = "not all of its part of the file is in memory";
const UNDER_WAY: &str = "its part of the file is being registered";
const TAIL: &str = "the file grows, or it is its last page, which is not whole";

/// See the module.
pub(crate) struct Registrations {
    file: Arc<File>,
    gpu: Arc<dyn Gpu>,
    options: PagesOptions,
    window: u64,
    leased: RwLock<Option<Leased>>,
    /// When to try to take a lease.
    next: Mutex<Instant>,
    why: Mutex<Option<String>>,
    copiers: Mutex<Vec<Box<dyn RangeCopier>>>,
    wanted: Mutex<Wanted>,
    /// Nothing is wanted any more.
    done: Condvar,
    itself: Weak<Registrations>,
}

/// Windows to be registered, by threads that end when there are none.
#[derive(Default)]
struct Wanted {
    names: VecDeque<u64>,
    threads: usize,
}

/// A lease, and what is registered as long as it lasts.
struct Leased {
    windows: Mutex<Windows>,
    lease: FileLease,
}

#[derive(Default)]
struct Windows {
    all: BTreeMap<u64, RegisteredWindow>,
    /// Bytes that are registered, or about to be.
    bytes: u64,
}

/// A part of the file.
struct RegisteredWindow {
    memory: Option<Region>,
    /// Registered bytes.
    bytes: u64,
    /// Whether a thread is to register it.
    is_wanted: bool,
    /// When it may be tried again.
    retry: Instant,
    used: Instant,
}

impl Registrations {
    /// With windows of so many bytes, whole pages.
    pub(crate) fn new(file: Arc<File>, gpu: Arc<dyn Gpu>, options: PagesOptions, window: u64) -> Arc<Self> {
        Arc::new_cyclic(|itself| Self {
            file,
            gpu,
            options,
            window,
            leased: RwLock::default(),
            next: Mutex::new(Instant::now()),
            why: Mutex::default(),
            copiers: Mutex::default(),
            wanted: Mutex::default(),
            done: Condvar::new(),
            itself: itself.clone(),
        })
    }

    /// Gives the lease back, and takes no other.
    pub(crate) fn close(&self) {
        *lock(&self.next) = Instant::now() + CLOSED;
        *self.leased.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(crate) fn why(&self) -> Option<String> {
        lock(&self.why).clone()
    }

    fn note(&self, why: impl Into<String> + AsRef<str>) {
        let mut noted = lock(&self.why);
        if noted.as_deref() != Some(why.as_ref()) {
            *noted = Some(why.into());
        }
    }

    /// Moves what is registered, and returns the rest, and the bytes moved.
    pub(crate) fn transfer(
        &self,
        direction: PageDirection,
        memories: &[Region],
        pages: &[FilePage],
        size: u64,
    ) -> Result<(Vec<StagedPart>, u64)> {
        self.take_lease();
        let leased = self.leased.read().unwrap_or_else(PoisonError::into_inner);
        let Some(leased) = leased.as_ref().filter(|leased| !leased.lease.is_wanted()) else {
            return Ok((pages.iter().enumerate().map(|(number, page)| page.staged(number)).collect(), 0));
        };
        let mut batch = RegisteredBatch {
            direction,
            memories: memories.to_vec(),
            ranges: Vec::new(),
            staged: Vec::new(),
        };
        {
            let mut windows = lock(&leased.windows);
            let mut found = HashMap::new();
            let mut find = |name, batch: &mut RegisteredBatch| {
                *found.entry(name).or_insert_with(|| self.find(&mut windows, name, size, batch))
            };
            for (number, page) in pages.iter().enumerate() {
                self.divide(&mut batch, &mut find, (number, page));
            }
        }
        let moved = batch.ranges.iter().map(|range| range.bytes as u64).sum();
        self.copy(&batch)?;
        Ok((batch.staged, moved))
    }

    fn copy(&self, batch: &RegisteredBatch) -> Result<()> {
        if batch.ranges.is_empty() {
            return Ok(());
        }
        let idle = lock(&self.copiers).pop();
        let mut copier = idle.map_or_else(|| self.gpu.range_copier(KERNEL_BELOW), Ok)?;
        // A copier that failed is dropped, and keeps what the GPU may still use.
        copier.start(&batch.memories, &batch.ranges)?;
        copier.wait()?;
        lock(&self.copiers).push(copier);
        Ok(())
    }

    /// Divides a page into parts of windows.
    fn divide(
        &self,
        batch: &mut RegisteredBatch,
        find: &mut impl FnMut(u64, &mut RegisteredBatch) -> FoundWindow,
        (number, page): (usize, &FilePage),
    ) {
        let (mut at, end) = (page.offset, page.offset + page.bytes as u64);
        while at < end {
            let name = at / self.window;
            let until = end.min((name + 1) * self.window);
            let (from, bytes) = ((at - page.offset) as usize, (until - at) as usize);
            let memory = (page.memory.0, page.memory.1 + from);
            let window = find(name, batch);
            if until <= window.until {
                batch.add((window.number, (at - name * self.window) as usize), memory, bytes);
            } else {
                self.note(window.why);
                batch.staged.push(StagedPart { page: number, offset: at, memory, bytes });
            }
            at = until;
        }
    }

    /// Finds a window, and adds its memory to the batch's. If it could have more bytes registered, that is begun.
    fn find(&self, windows: &mut Windows, name: u64, size: u64, batch: &mut RegisteredBatch) -> FoundWindow {
        let (start, now) = (name * self.window, Instant::now());
        let possible = self.whole(size).saturating_sub(start).min(self.window);
        if possible == 0 {
            return FoundWindow { number: 0, until: 0, why: TAIL };
        }
        let window = windows.all.entry(name).or_insert_with(|| RegisteredWindow::new(now));
        window.used = now;
        let mut found = FoundWindow { number: 0, until: 0, why: NOT_CACHED };
        if let Some(memory) = &window.memory {
            batch.memories.push(memory.clone());
            found = FoundWindow { number: batch.memories.len() - 1, until: start + window.bytes, why: TAIL };
        }
        if window.memory.is_none() || window.bytes < possible {
            if !window.is_wanted && now >= window.retry {
                window.is_wanted = true;
                self.want([name]);
            }
            if window.is_wanted {
                found.why = UNDER_WAY;
            }
        }
        found
    }

    /// Bytes of the file from its start on that may be registered: the kernel does not store what is written behind the end of
    /// the last page.
    fn whole(&self, size: u64) -> u64 {
        if self.options.writes { size / PAGE * PAGE } else { size.next_multiple_of(PAGE) }
    }

    fn want(&self, names: impl IntoIterator<Item = u64>) {
        let mut wanted = lock(&self.wanted);
        wanted.names.extend(names);
        while wanted.threads < THREADS.min(wanted.names.len()) {
            let this = self.itself.clone();
            let register = move || {
                if let Some(this) = this.upgrade() {
                    this.register_wanted();
                }
            };
            if let Err(error) = std::thread::Builder::new().name("onehop register".into()).spawn(register) {
                self.note(format!("no thread could be started: {error}"));
                return;
            }
            wanted.threads += 1;
        }
    }

    fn register_wanted(&self) {
        loop {
            let mut wanted = lock(&self.wanted);
            let Some(name) = wanted.names.pop_front() else {
                wanted.threads -= 1;
                if wanted.threads == 0 {
                    self.done.notify_all();
                }
                return;
            };
            drop(wanted);
            let leased = self.leased.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(leased) = leased.as_ref().filter(|leased| !leased.lease.is_wanted()) {
                self.register(&leased.windows, name);
            }
        }
    }

    fn register(&self, windows: &Mutex<Windows>, name: u64) {
        let size = self.file.metadata().map_or(0, |found| found.len());
        let start = name * self.window;
        let bytes = self.whole(size).saturating_sub(start).min(self.window);
        let has_room = self.is_cached(start, bytes) && {
            let mut windows = lock(windows);
            windows.remove(name);
            let has_room = windows.make_room(bytes, self.options.registered);
            windows.bytes += if has_room { bytes } else { 0 };
            if !has_room {
                self.note(format!(
                    "no more than {} bytes may be registered at once",
                    self.options.registered
                ));
            }
            has_room
        };
        if !has_room {
            // An older, shorter registration remains.
            lock(windows).put_off(name);
            return;
        }
        let memory = self.adopt(start, bytes);
        let mut windows = lock(windows);
        match memory {
            Some(memory) => windows.insert(name, memory, bytes),
            None => {
                windows.bytes -= bytes;
                windows.put_off(name);
            }
        }
    }

    fn is_cached(&self, start: u64, bytes: u64) -> bool {
        let is_cached = bytes > 0 && cached_bytes(&self.file, start, bytes).ok() == Some(bytes);
        if !is_cached {
            self.note(NOT_CACHED);
        }
        is_cached
    }

    fn adopt(&self, start: u64, bytes: u64) -> Option<Region> {
        let mapped = HostMem::of_file_range(&self.file, start, bytes as usize, self.options.writes);
        let adopted = mapped.map_err(onehop_gpu::Error::from).and_then(|mem| {
            mem.populate();
            self.gpu.adopt(Place::PinnedHost, mem)
        });
        adopted.map_err(|error| self.note(error.to_string())).ok()
    }

    /// Registers all that may be, and returns how many bytes that is.
    pub(crate) fn register_all(&self) -> u64 {
        self.take_lease();
        let size = self.file.metadata().map_or(0, |found| found.len());
        if let Some(leased) = &*self.leased.read().unwrap_or_else(PoisonError::into_inner) {
            let (mut windows, now) = (lock(&leased.windows), Instant::now());
            let names = 0..self.whole(size).min(self.options.registered).div_ceil(self.window);
            let missing = names.filter(|name| {
                let window = windows.all.entry(*name).or_insert_with(|| RegisteredWindow::new(now));
                let is_missing = window.memory.is_none() && !window.is_wanted;
                window.is_wanted |= is_missing;
                is_missing
            });
            let missing: Vec<u64> = missing.collect();
            drop(windows);
            self.want(missing);
        }
        let end = Instant::now() + REGISTER_TIMEOUT;
        let mut wanted = lock(&self.wanted);
        while wanted.threads > 0 && Instant::now() < end {
            wanted = self.done.wait_timeout(wanted, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(wanted);
        let leased = self.leased.read().unwrap_or_else(PoisonError::into_inner);
        leased.as_ref().map_or(0, |leased| lock(&leased.windows).bytes)
    }

    /// Takes a lease if there is none, unless that was tried a moment ago.
    fn take_lease(&self) {
        let is_leased = || self.leased.read().unwrap_or_else(PoisonError::into_inner).is_some();
        if is_leased() {
            return;
        }
        {
            let mut next = lock(&self.next);
            if Instant::now() < *next {
                return;
            }
            *next = Instant::now() + PAUSE;
        }
        if let Err(why) = self.suits() {
            self.note(why);
            return;
        }
        let mut leased = self.leased.write().unwrap_or_else(PoisonError::into_inner);
        if leased.is_some() {
            return;
        }
        match FileLease::take(&self.file) {
            Ok(lease) => {
                if self.watch() {
                    *leased = Some(Leased { windows: Mutex::default(), lease });
                }
            }
            Err(error) => self.note(match error.kind() {
                std::io::ErrorKind::WouldBlock => "the file is open elsewhere".into(),
                std::io::ErrorKind::PermissionDenied => "the file belongs to another user".into(),
                _ => format!("the kernel gives no lease of the file: {error}"),
            }),
        }
    }

    /// Starts the thread that gives the lease back when another program waits for the file, and ends when it is given back.
    fn watch(&self) -> bool {
        let this = self.itself.clone();
        let watch = move || {
            loop {
                std::thread::sleep(LOOK);
                let Some(this) = this.upgrade() else { return };
                let is_wanted = |leased: &Leased| leased.lease.is_wanted();
                let read = this.leased.read().unwrap_or_else(PoisonError::into_inner);
                match read.as_ref().map(is_wanted) {
                    None => return,
                    Some(false) => continue,
                    Some(true) => {}
                }
                drop(read);
                // Waits for copies.
                let mut write = this.leased.write().unwrap_or_else(PoisonError::into_inner);
                if write.as_ref().is_some_and(is_wanted) {
                    *write = None;
                    *lock(&this.next) = Instant::now() + PAUSE;
                    this.note("another program has opened or truncated the file");
                    return;
                }
            }
        };
        let started = std::thread::Builder::new().name("onehop lease".into()).spawn(watch);
        started.map_err(|error| self.note(format!("no thread could be started: {error}"))).is_ok()
    }

    /// Whether the file's pages may be registered, or why not.
    fn suits(&self) -> std::result::Result<(), String> {
        const TMPFS: u64 = 0x0102_1994;
        const EXT4: u64 = 0xef53;
        const XFS: u64 = 0x5846_5342;
        match fstatfs(&self.file).map_or(0, |fs| fs.f_type as u64) {
            TMPFS => {}
            EXT4 | XFS if !self.options.writes => {}
            EXT4 | XFS => {
                return Err(
                    "the file is on a disk and opened for writing: the kernel lets nobody lock such pages"
                        .into(),
                );
            }
            _ => return Err("its file system is none of tmpfs, ext4 and XFS".into()),
        }
        if !self.options.writes {
            return Ok(());
        }
        let stat =
            statx(&*self.file, "", AtFlags::EMPTY_PATH, StatxFlags::MODE).map_err(|e| e.to_string())?;
        if stat.stx_mode & EXECUTABLE != 0 {
            return Err("the file is executable".into());
        }
        if stat.stx_attributes.intersects(StatxAttributes::IMMUTABLE | StatxAttributes::APPEND) {
            return Err("the file is immutable or append-only".into());
        }
        Ok(())
    }
}

/// A window as a batch finds it.
#[derive(Clone, Copy)]
struct FoundWindow {
    /// The number of its memory in the batch's list.
    number: usize,
    /// Where what is registered of it ends in the file.
    until: u64,
    /// Why no more is.
    why: &'static str,
}

/// The copies of a batch, and the parts that the GPU cannot move by itself.
struct RegisteredBatch {
    direction: PageDirection,
    memories: Vec<Region>,
    ranges: Vec<CopyRange>,
    staged: Vec<StagedPart>,
}

impl RegisteredBatch {
    /// Adds a copy, or lengthens the last one.
    fn add(&mut self, file: (usize, usize), memory: (usize, usize), bytes: usize) {
        let (from, to) = match self.direction {
            PageDirection::Read => (file, memory),
            PageDirection::Write => (memory, file),
        };
        let follows = |end: (usize, usize), bytes, start| (end.0, end.1 + bytes) == start;
        if let Some(last) = self.ranges.last_mut()
            && follows(last.from, last.bytes, from)
            && follows(last.to, last.bytes, to)
        {
            last.bytes += bytes;
            return;
        }
        self.ranges.push(CopyRange { from, to, bytes });
    }
}

impl RegisteredWindow {
    fn new(now: Instant) -> Self {
        Self { memory: None, bytes: 0, is_wanted: false, retry: now, used: now }
    }
}

impl Windows {
    fn remove(&mut self, name: u64) {
        if let Some(window) = self.all.get_mut(&name)
            && window.memory.take().is_some()
        {
            self.bytes -= window.bytes;
        }
    }

    fn insert(&mut self, name: u64, memory: Region, bytes: u64) {
        let window = self.all.entry(name).or_insert_with(|| RegisteredWindow::new(Instant::now()));
        (window.memory, window.bytes, window.is_wanted) = (Some(memory), bytes, false);
    }

    /// It could not be registered.
    fn put_off(&mut self, name: u64) {
        let now = Instant::now();
        let window = self.all.entry(name).or_insert_with(|| RegisteredWindow::new(now));
        (window.is_wanted, window.retry) = (false, now + PAUSE);
    }

    /// Removes windows that have not been used for a while, the longest unused first, until there is room.
    fn make_room(&mut self, bytes: u64, most: u64) -> bool {
        while self.bytes + bytes > most {
            let registered = self.all.iter().filter(|(_, window)| window.memory.is_some());
            let unused = registered.filter(|(_, window)| window.used.elapsed() >= UNUSED);
            let Some(oldest) = unused.min_by_key(|(_, window)| window.used).map(|(name, _)| *name) else {
                return false;
            };
            self.remove(oldest);
        }
        true
    }
}
