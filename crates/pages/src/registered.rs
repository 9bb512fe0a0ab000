//! Parts of the file that are registered with the GPU.
//!
//! The GPU keeps using registered pages after a truncation, a punched hole or a write past the page cache. It would then read
//! old bytes, and what it writes would be lost. So nothing is registered without a lease of the file: the kernel makes programs
//! that would open or truncate it wait until the lease is released. A thread polls for them, and releases it as soon as the
//! copies under way have ended.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use onehop_gpu::{CopyRange, Gpu, Place, RangeCopier, Region};
use onehop_os::file_writes::{SET_ID, has_capabilities};
use onehop_os::page_cache::cached_bytes;
use onehop_os::{FileLease, Guard, HostMem};
use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, fstatfs, statx};

use crate::staged::StagedPart;
use crate::windows::{FoundWindow, WindowMemory, Windows};
use crate::{FilePage, PageDirection, PagesOptions, Result, lock};

/// Bytes of a window, which are registered at once.
pub(crate) const WINDOW: u64 = 64 << 20;
const PAGE: u64 = 4096;
/// How often to poll for programs that wait for the file.
const POLL: Duration = Duration::from_millis(10);
/// How long to wait before a lease is taken again.
const PAUSE: Duration = Duration::from_millis(250);
/// Why there is no lease.
const OPEN_ELSEWHERE: &str = "the file is open elsewhere";
/// Threads that register windows: most of the time is the kernel's, which maps page after page.
const THREADS: usize = 4;
/// How long a program may wait for all of a file to be registered.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(120);
/// Below this, a kernel copies between pages of 4 KiB and the GPU faster than the copy engine.
const KERNEL_BELOW: usize = 1 << 20;
/// Bytes of pages that are moved before the lease is checked again, and the most pages.
const SLICE: usize = 128 << 20;
const MOST_PAGES: usize = 1 << 16;
/// Copiers that are kept, for as many threads as usually move pages at a time.
const COPIERS: usize = 16;

const NOT_CACHED: &str = "not all of its part of the file is in memory";

/// See the module.
pub(crate) struct Registrations {
    file: Arc<File>,
    gpu: Arc<dyn Gpu>,
    options: PagesOptions,
    window: u64,
    /// A lease that nobody waits for lasts at least as long as this.
    lease_time: Duration,
    leased: RwLock<Option<Leased>>,
    /// When to try to take a lease.
    next: Mutex<Instant>,
    why: Mutex<Option<Arc<str>>>,
    copiers: Mutex<Vec<Box<dyn RangeCopier>>>,
    /// Copiers that failed. As long as the GPU has not ended what they started, the lease remains.
    failed: Mutex<Vec<Box<dyn RangeCopier>>>,
    wanted: Mutex<Wanted>,
    /// No thread registers windows any more.
    done: Condvar,
    weak: Weak<Registrations>,
}

/// Numbers of windows to be registered, by threads that end when there are none.
#[derive(Default)]
struct Wanted {
    numbers: VecDeque<u64>,
    threads: usize,
}

/// A lease, and what is registered as long as it lasts.
struct Leased {
    lease: FileLease,
    windows: Mutex<Windows>,
}

impl Registrations {
    /// With windows of so many bytes, whole pages.
    pub(crate) fn new(file: Arc<File>, gpu: Arc<dyn Gpu>, options: PagesOptions, window: u64) -> Arc<Self> {
        Arc::new_cyclic(|weak| Self {
            file,
            gpu,
            options,
            window,
            lease_time: lease_time(),
            leased: RwLock::default(),
            next: Mutex::new(Instant::now()),
            why: Mutex::default(),
            copiers: Mutex::default(),
            failed: Mutex::default(),
            wanted: Mutex::default(),
            done: Condvar::new(),
            weak: weak.clone(),
        })
    }

    /// Releases the lease, and returns what is to be unregistered.
    pub(crate) fn release(&self) -> Option<Mutex<Windows>> {
        let mut leased = self.leased.write().unwrap_or_else(PoisonError::into_inner);
        let leased = leased.take()?;
        if self.is_settled() {
            return Some(leased.release());
        }
        // The GPU may still write to the file, until the process ends.
        std::mem::forget(leased);
        None
    }

    pub(crate) fn why(&self) -> Option<String> {
        lock(&self.why).as_deref().map(str::to_owned)
    }

    fn note(&self, why: &Arc<str>) {
        let mut noted = lock(&self.why);
        if noted.as_deref() != Some(why) {
            *noted = Some(why.clone());
        }
    }

    /// Moves what is registered, and returns the rest, and the bytes moved.
    pub(crate) fn transfer(
        &self,
        direction: PageDirection,
        memories: &[Region],
        pages: &[FilePage],
    ) -> Result<(Vec<StagedPart>, u64)> {
        let (mut staged, mut moved, mut first) = (Vec::new(), 0, 0);
        while first < pages.len() {
            // A program that waits for the file does not wait for the end of a long call.
            let mut bytes = 0;
            let fits = |page: &&FilePage| {
                let is_within = bytes < SLICE;
                bytes += page.bytes;
                is_within
            };
            let slice = &pages[first..];
            let slice = &slice[..slice.iter().take(MOST_PAGES).take_while(fits).count()];
            self.take_lease();
            match self.transfer_slice(direction, memories, (first, slice))? {
                Some(mut batch) => {
                    moved += batch.bytes();
                    staged.append(&mut batch.staged);
                }
                None => {
                    let all = slice.iter().enumerate();
                    staged.extend(all.map(|(number, page)| page.staged(first + number)));
                }
            }
            first += slice.len();
        }
        Ok((staged, moved))
    }

    /// The same for some pages, of which the first has this number; none if all of them have to be staged.
    fn transfer_slice(
        &self,
        direction: PageDirection,
        memories: &[Region],
        (first, pages): (usize, &[FilePage]),
    ) -> Result<Option<RegisteredBatch>> {
        let leased = self.leased.read().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        let Some(leased) = leased.as_ref().filter(|leased| !leased.lease.is_wanted()) else {
            return Ok(None);
        };
        let Some(size) = self.size_for(direction) else { return Ok(None) };
        let mut batch = RegisteredBatch {
            direction,
            memories: memories.to_vec(),
            guards: Vec::new(),
            ranges: Vec::new(),
            staged: Vec::new(),
            windows: HashMap::new(),
        };
        let (mut new, mut dropped) = (Vec::new(), Vec::new());
        {
            let mut windows = lock(&leased.windows);
            let mut find = |number| {
                let found = windows.find(number, self.possible(number, size), &mut dropped);
                if found.is_new {
                    new.push(number);
                }
                found
            };
            for (number, page) in pages.iter().enumerate() {
                batch.divide((first + number, page), self.window, &mut find, |why| self.note(why));
            }
        }
        drop(dropped);
        if !new.is_empty() {
            self.want(new);
        }
        self.copy(&batch)?;
        // Otherwise the bytes may be those of pages that no longer belong to the file. They are moved again.
        let is_lost = batch.guards.iter().any(|guard| guard.is_lost());
        let is_sure = begun.elapsed() < self.lease_time
            && !is_lost
            && self.size_for(direction).is_some_and(|now| now >= size);
        if is_sure || batch.ranges.is_empty() {
            return Ok(Some(batch));
        }
        self.note(&"the file was changed while its pages were moved".into());
        if is_lost {
            let lost = std::mem::take(&mut *lock(&leased.windows));
            drop(lost);
        }
        Ok(None)
    }

    /// The size of the file; none if its pages must not be moved so, because a write has to change more than bytes.
    fn size_for(&self, direction: PageDirection) -> Option<u64> {
        let found = self.file.metadata().ok()?;
        if direction == PageDirection::Write {
            if found.mode() & SET_ID != 0 {
                self.note(&"the file has set-id bits".into());
                return None;
            }
            if has_capabilities(&self.file) {
                self.note(&"the file has capabilities".into());
                return None;
            }
        }
        Some(found.len())
    }

    fn copy(&self, batch: &RegisteredBatch) -> Result<()> {
        if batch.ranges.is_empty() {
            return Ok(());
        }
        let idle = lock(&self.copiers).pop();
        let mut copier = idle.map_or_else(|| self.gpu.range_copier(KERNEL_BELOW), Ok)?;
        let copied = copier.start(&batch.memories, &batch.ranges).and_then(|()| copier.wait());
        match copied {
            Ok(()) => {
                let mut copiers = lock(&self.copiers);
                if copiers.len() < COPIERS {
                    copiers.push(copier);
                }
                Ok(())
            }
            Err(error) => {
                lock(&self.failed).push(copier);
                Err(error.into())
            }
        }
    }

    /// Whether the GPU has ended everything that failed copiers started.
    fn is_settled(&self) -> bool {
        let mut failed = lock(&self.failed);
        failed.retain_mut(|copier| copier.wait().is_err_and(|error| error.is_under_way()));
        failed.is_empty()
    }

    /// Bytes of a window that may be registered: the kernel does not store what is written behind the end of the last page.
    fn possible(&self, number: u64, size: u64) -> u64 {
        let end = if self.options.writes { size / PAGE * PAGE } else { size.next_multiple_of(PAGE) };
        end.saturating_sub(number * self.window).min(self.window)
    }

    fn size(&self) -> u64 {
        self.file.metadata().map_or(0, |found| found.len())
    }

    fn want(&self, numbers: impl IntoIterator<Item = u64>) {
        let mut wanted = lock(&self.wanted);
        wanted.numbers.extend(numbers);
        while wanted.threads < THREADS.min(wanted.numbers.len()) {
            let this = self.weak.clone();
            let register = move || {
                if let Some(this) = this.upgrade() {
                    this.register_wanted();
                }
            };
            if let Err(error) = std::thread::Builder::new().name("onehop register".into()).spawn(register) {
                self.note(&format!("no thread could be started: {error}").into());
                return;
            }
            wanted.threads += 1;
        }
    }

    fn register_wanted(&self) {
        loop {
            let mut wanted = lock(&self.wanted);
            let Some(number) = wanted.numbers.pop_front() else {
                wanted.threads -= 1;
                if wanted.threads == 0 {
                    self.done.notify_all();
                }
                return;
            };
            drop(wanted);
            let leased = self.leased.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(leased) = leased.as_ref().filter(|leased| !leased.lease.is_wanted()) {
                self.register(&leased.windows, number);
            }
        }
    }

    fn register(&self, windows: &Mutex<Windows>, number: u64) {
        let (start, mut dropped) = (number * self.window, Vec::new());
        let bytes = self.possible(number, self.size());
        if bytes == 0 || cached_bytes(&self.file, start, bytes).ok() != Some(bytes) {
            lock(windows).put_off(number, NOT_CACHED);
            return;
        }
        let most = self.options.registered;
        let reserved = lock(windows).reserve(number, bytes, most, &mut dropped);
        drop(dropped);
        let Some(more) = reserved else {
            lock(windows).put_off(number, &format!("no more than {most} bytes may be registered at once"));
            return;
        };
        let mapped = HostMem::of_file_range(&self.file, start, bytes as usize, self.options.writes);
        let adopted = mapped.map_err(onehop_gpu::Error::from).and_then(|mem| {
            let guard = if self.gpu.simulated() { Some(Arc::new(Guard::new(&mem)?)) } else { None };
            mem.populate();
            Ok(WindowMemory { guard, region: self.gpu.adopt(Place::PinnedHost, mem)? })
        });
        let former = match adopted {
            Ok(memory) => lock(windows).insert(number, (memory, bytes), more),
            Err(error) => {
                let mut windows = lock(windows);
                windows.release(more);
                windows.put_off(number, &error.to_string());
                None
            }
        };
        // Not while the windows are locked: unregistering may take a while.
        drop(former);
    }

    /// Registers all that may be, and returns how many bytes that is.
    pub(crate) fn register_all(&self) -> u64 {
        let leased = || self.leased.read().unwrap_or_else(PoisonError::into_inner);
        self.take_lease();
        if leased().is_none() && lock(&self.why).as_deref() == Some(OPEN_ELSEWHERE) {
            // A file that somebody has just closed counts as open for a moment.
            let next = *lock(&self.next);
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            self.take_lease();
        }
        let size = self.size();
        if let Some(leased) = &*leased() {
            let count = size.min(self.options.registered).div_ceil(self.window);
            let missing = lock(&leased.windows).want_all(count, |number| self.possible(number, size));
            self.want(missing);
        }
        let end = Instant::now() + REGISTER_TIMEOUT;
        let mut wanted = lock(&self.wanted);
        while wanted.threads > 0 && Instant::now() < end {
            let left = end.saturating_duration_since(Instant::now());
            wanted = self.done.wait_timeout(wanted, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(wanted);
        leased().as_ref().map_or(0, |leased| lock(&leased.windows).bytes())
    }

    /// Takes a lease if there is none, unless that was tried a moment ago.
    fn take_lease(&self) {
        if self.leased.read().unwrap_or_else(PoisonError::into_inner).is_some() {
            return;
        }
        {
            let mut next = lock(&self.next);
            if Instant::now() < *next {
                return;
            }
            *next = Instant::now() + PAUSE;
        }
        if let Err(why) = self.check_suitable() {
            self.note(&why.into());
            return;
        }
        let mut leased = self.leased.write().unwrap_or_else(PoisonError::into_inner);
        if leased.is_some() {
            return;
        }
        match FileLease::take(&self.file) {
            Ok(lease) => {
                if self.watch() {
                    *leased = Some(Leased { lease, windows: Mutex::default() });
                }
            }
            Err(error) => {
                let why = match error.kind() {
                    std::io::ErrorKind::WouldBlock => OPEN_ELSEWHERE.into(),
                    std::io::ErrorKind::PermissionDenied => "the file belongs to another user".into(),
                    _ => format!("the kernel gives no lease of the file: {error}"),
                };
                self.note(&why.into());
            }
        }
    }

    /// Starts the thread that releases the lease when another program waits for the file, and ends when it is released.
    fn watch(&self) -> bool {
        let this = self.weak.clone();
        let watch = move || {
            loop {
                std::thread::sleep(POLL);
                let Some(this) = this.upgrade() else { return };
                let is_wanted = |leased: &Leased| leased.lease.is_wanted();
                let read = this.leased.read().unwrap_or_else(PoisonError::into_inner);
                match read.as_ref().map(is_wanted) {
                    None => return,
                    Some(false) => continue,
                    Some(true) => {}
                }
                drop(read);
                if !this.is_settled() {
                    continue;
                }
                // Waits for copies, of which another may have failed.
                let mut write = this.leased.write().unwrap_or_else(PoisonError::into_inner);
                if lock(&this.failed).is_empty()
                    && write.as_ref().is_some_and(is_wanted)
                    && let Some(leased) = write.take()
                {
                    *lock(&this.next) = Instant::now() + PAUSE;
                    this.note(&"another program has opened or truncated the file".into());
                    let windows = leased.release();
                    drop(write);
                    drop(windows);
                    return;
                }
            }
        };
        let started = std::thread::Builder::new().name("onehop lease".into()).spawn(watch);
        started.map_err(|error| self.note(&format!("no thread could be started: {error}").into())).is_ok()
    }

    /// Whether the file's pages may be registered, or why not.
    fn check_suitable(&self) -> std::result::Result<(), String> {
        const TMPFS: u64 = 0x0102_1994;
        const EXT4: u64 = 0xef53;
        const XFS: u64 = 0x5846_5342;
        if self.options.registered == 0 {
            return Err("nothing is to be registered".into());
        }
        match fstatfs(&self.file).map_or(0, |fs| fs.f_type as u64) {
            TMPFS => {}
            EXT4 | XFS if !self.options.writes => {}
            EXT4 | XFS => {
                return Err(
                    "the file is on a disk and opened for writing: the kernel lets nobody lock such pages"
                        .into(),
                );
            }
            _ => return Err("its file system is not tmpfs, ext4 or XFS".into()),
        }
        if !self.options.writes {
            return Ok(());
        }
        let stat =
            statx(&*self.file, "", AtFlags::EMPTY_PATH, StatxFlags::empty()).map_err(|e| e.to_string())?;
        if stat.stx_attributes.intersects(StatxAttributes::IMMUTABLE | StatxAttributes::APPEND) {
            return Err("the file is immutable or append-only".into());
        }
        Ok(())
    }
}

/// Half of the time after which the kernel takes a lease away from a program that does not release it.
fn lease_time() -> Duration {
    let read = std::fs::read_to_string("/proc/sys/fs/lease-break-time");
    match read.ok().and_then(|text| text.trim().parse().ok()) {
        // It waits for ever.
        Some(0) => Duration::MAX,
        Some(seconds) => Duration::from_secs(seconds) / 2,
        None => Duration::from_secs(22),
    }
}

impl Leased {
    /// Releases the lease first: unregistering takes a while, and the GPU does not use the pages any more.
    fn release(self) -> Mutex<Windows> {
        let Self { lease, windows } = self;
        drop(lease);
        windows
    }
}

/// The copies of a batch, and the parts that the GPU cannot move by itself.
struct RegisteredBatch {
    direction: PageDirection,
    memories: Vec<Region>,
    guards: Vec<Arc<Guard>>,
    ranges: Vec<CopyRange>,
    staged: Vec<StagedPart>,
    /// Windows that it has found.
    windows: HashMap<u64, BatchWindow>,
}

/// A window that a batch has found.
struct BatchWindow {
    /// The number of its memory in the batch's list.
    memory: usize,
    /// Where what is registered of it ends.
    bytes: usize,
    why: Arc<str>,
}

impl RegisteredBatch {
    fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.bytes as u64).sum()
    }

    /// Divides a page into parts of windows.
    fn divide(
        &mut self,
        (number, page): (usize, &FilePage),
        window: u64,
        mut find: impl FnMut(u64) -> FoundWindow,
        note: impl Fn(&Arc<str>),
    ) {
        let (mut at, end) = (page.offset, page.offset + page.bytes as u64);
        while at < end {
            let index = at / window;
            let until = end.min((index + 1) * window);
            let (done, bytes) = ((at - page.offset) as usize, (until - at) as usize);
            let (memory, start) = ((page.memory.0, page.memory.1 + done), (at - index * window) as usize);
            let (memories, guards) = (&mut self.memories, &mut self.guards);
            let found = self.windows.entry(index).or_insert_with(|| {
                let FoundWindow { memory, bytes, why, .. } = find(index);
                if let Some(WindowMemory { guard, region }) = memory {
                    memories.push(region);
                    guards.extend(guard);
                }
                BatchWindow { memory: memories.len().saturating_sub(1), bytes: bytes as usize, why }
            });
            if start + bytes <= found.bytes {
                let file = (found.memory, start);
                self.add(file, memory, bytes);
            } else {
                note(&found.why);
                self.staged.push(StagedPart { page: number, offset: at, memory, bytes });
            }
            at = until;
        }
    }

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
