//! Writes of a file, several at a time, and which of them go through a mapping of it.
//!
//! The kernel lets one `pwrite` at a time into a file. A write that would have to wait for another one goes through a
//! shared mapping instead, unless a program could see a difference: see `Unmapped`. So does, on a disk, one of many in a
//! row.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::fs::{
    AtFlags, OFlags, StatxAttributes, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, fcntl_getfl,
    fgetxattr, futimens, statx,
};
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use crate::page_cache::cached_bytes;
use crate::{Error, FileMapping, HostMem};

const PAGE: u64 = 4096;
/// Pages that are populated at once.
const WINDOW: u64 = 2 << 20;
/// Mapped bytes in multiples of the machine's memory, and the most. Page tables take a 512th of what they map.
const MOST_MAPPED: (u64, u64) = (2, 1 << 40);
/// Holes count for this part of their length: all mappings together have at most so many times the most above, far less
/// than there are addresses.
const HOLES: u64 = 32;
/// Mappings at once: a process may have 65 530.
const MOST_MAPPINGS: u64 = 8192;
/// A file may grow by this much before it is mapped anew.
const GROWTH: u64 = 64 << 20;
/// Set-user-ID and set-group-ID bits of a mode, which a write clears.
pub const SET_ID: u32 = 0o6000;

/// Why a write goes by `pwrite`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unmapped {
    /// No other write of the opening is under way, and on a disk, there was none before it within the same tick.
    Alone,
    /// Shorter than a page.
    Short,
    /// It makes the file longer, or reaches its last page, which is not whole.
    Grows,
    /// Not all of it is in the page cache: there are holes, or a mapping would read from the disk first.
    Uncached,
    /// A write has to clear the file's set-id bits, or its capabilities.
    Privileged,
    /// The file must not be changed, or only be appended to.
    Protected,
    /// Its file system is none of tmpfs, ext4 and XFS.
    FileSystem,
    /// It is open for writing only, past the page cache, or so that each write is on the disk when it ends.
    OpenMode,
    /// A limit on the size of files is in force.
    FileLimit,
    /// It belongs to somebody else, and this process is not root's: it cannot set the time of the write.
    NotOwner,
    /// The user's share of mapped bytes is used up.
    Budget,
    /// The system refused: a container may forbid `process_vm_readv`, or the file was truncated meanwhile.
    Refused,
}

impl Unmapped {
    const ALL: [Self; 12] = [
        Self::Alone,
        Self::Short,
        Self::Grows,
        Self::Uncached,
        Self::Privileged,
        Self::Protected,
        Self::FileSystem,
        Self::OpenMode,
        Self::FileLimit,
        Self::NotOwner,
        Self::Budget,
        Self::Refused,
    ];

    const fn why(self) -> &'static str {
        match self {
            Self::Alone => "no other write of the file is under way",
            Self::Short => "the write is shorter than a page",
            Self::Grows => "the file grows, or its last page is written",
            Self::Uncached => "not all of the range is in the page cache",
            Self::Privileged => "the file has set-id bits or capabilities",
            Self::Protected => "the file is immutable or append-only",
            Self::FileSystem => "the file system is none of tmpfs, ext4 and XFS",
            Self::OpenMode => "the file is open for writing only, or with O_DIRECT or O_SYNC",
            Self::FileLimit => "the process has a limit on the size of files",
            Self::NotOwner => "the file belongs to another user than the process's",
            Self::Budget => "the user has as many bytes mapped as are allowed",
            Self::Refused => "the system refused, or the file was truncated meanwhile",
        }
    }
}

/// Takes so many bytes of a user's share, until the result is dropped; `None` if there is no room.
pub type MappingBudget = Box<dyn Fn(u32, u64) -> Option<TakenBytes> + Send + Sync>;
/// What was taken of a share.
pub type TakenBytes = Box<dyn Send + Sync>;

/// Writes of files by route, and the budget for their mappings.
pub struct WriteRoutes {
    mapped: RouteCount,
    unmapped: [RouteCount; Unmapped::ALL.len()],
    budget: MappingBudget,
    growth: u64,
}

/// Bytes of [`WriteRoutes::unshared`] that are mapped.
static TAKEN: AtomicU64 = AtomicU64::new(0);

struct UnsharedBytes(u64);

impl Drop for UnsharedBytes {
    fn drop(&mut self) {
        TAKEN.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Writes, and their bytes.
#[derive(Default)]
struct RouteCount {
    writes: AtomicU64,
    bytes: AtomicU64,
}

/// Writes that went through a mapping, or did not for one reason.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WriteSum {
    /// Why not through a mapping.
    pub why: Option<&'static str>,
    /// How many there were.
    pub writes: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl WriteSum {
    /// `mapping`, or `pwrite`.
    #[must_use]
    pub fn by(&self) -> &'static str {
        if self.why.is_some() { "pwrite" } else { "mapping" }
    }
}

impl WriteRoutes {
    /// Counts from zero. `budget` makes the budget for this many mapped bytes.
    #[must_use]
    pub fn new(budget: impl FnOnce(u64) -> MappingBudget) -> Self {
        let memory = rustix::system::sysinfo();
        let bytes = u64::from(memory.mem_unit).saturating_mul(memory.totalram as u64);
        let most = bytes.saturating_mul(MOST_MAPPED.0).min(MOST_MAPPED.1);
        let growth = GROWTH.max(most / MOST_MAPPINGS);
        let (mapped, unmapped) = Default::default();
        Self { mapped, unmapped, budget: budget(most), growth }
    }

    /// Without shares of users: all files of this process take from one budget.
    #[must_use]
    pub fn unshared() -> Self {
        Self::new(|most| {
            Box::new(move |_, bytes| {
                let more = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= most);
                TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
                Some(Box::new(UnsharedBytes(bytes)))
            })
        })
    }

    /// The routes that were used.
    #[must_use]
    pub fn sums(&self) -> Vec<WriteSum> {
        let sum = |why, count: &RouteCount| WriteSum {
            why,
            writes: count.writes.load(Ordering::Relaxed),
            bytes: count.bytes.load(Ordering::Relaxed),
        };
        let all = Unmapped::ALL.into_iter();
        let all = all.map(|why| sum(Some(why.why()), &self.unmapped[why as usize]));
        let mapped = sum(None, &self.mapped);
        std::iter::once(mapped).chain(all).filter(|sum| sum.writes > 0).collect()
    }

    fn count(&self, route: Result<(), Unmapped>, bytes: usize) {
        let count = route.map_or_else(|why| &self.unmapped[why as usize], |()| &self.mapped);
        count.writes.fetch_add(1, Ordering::Relaxed);
        count.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Writes of an open file, several at a time.
pub struct FileWrites {
    routes: Arc<WriteRoutes>,
    /// For whom mapped bytes count.
    uid: u32,
    under_way: AtomicU32,
    /// Whether the file is on a disk, or why this opening is never mapped.
    place: OnceLock<Result<bool, Unmapped>>,
    mapping: RwLock<Option<Arc<KeptMapping>>>,
    /// The system refuses this process what a mapped write needs.
    is_refused: AtomicBool,
    /// The time of the last write that set the file's, by the clock that the kernel uses for it.
    stamp: AtomicU64,
}

/// Bytes of memory that are written to a file.
#[derive(Clone, Copy)]
pub struct FileSource<'a> {
    /// The memory.
    pub mem: &'a HostMem,
    /// The offset in it.
    pub at: usize,
    /// The length.
    pub len: usize,
}

/// A mapping, which [windows](WINDOW) of it have been populated, and what it takes of the budget.
struct KeptMapping {
    mapping: FileMapping,
    populated: Vec<AtomicBool>,
    /// A file with more bytes than this is mapped anew.
    allowed: u64,
    _share: TakenBytes,
}

impl KeptMapping {
    fn new(file: &File, bytes: usize, (allowed, _share): (u64, TakenBytes)) -> crate::Result<Self> {
        let windows = bytes.div_ceil(WINDOW as usize);
        let populated = (0..windows).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { mapping: FileMapping::new(file, bytes)?, populated, allowed, _share })
    }

    /// Populates the windows of a range that have no holes, once. Populating a hole would fill it.
    fn populate(&self, file: &File, range: std::ops::Range<u64>) {
        for number in range.start / WINDOW..range.end.div_ceil(WINDOW) {
            let Some(populated) = self.populated.get(number as usize) else { return };
            if populated.load(Ordering::Relaxed) || populated.swap(true, Ordering::Relaxed) {
                continue;
            }
            if cached_bytes(file, number * WINDOW, WINDOW).ok() == Some(WINDOW) {
                self.mapping.populate((number * WINDOW) as usize, WINDOW as usize);
            }
        }
    }
}

/// Counts a write that is under way.
struct UnderWay<'a> {
    count: &'a AtomicU32,
    /// Whether it was the only one when it began.
    is_alone: bool,
}

impl<'a> UnderWay<'a> {
    fn begin(count: &'a AtomicU32) -> Self {
        Self { count, is_alone: count.fetch_add(1, Ordering::Relaxed) == 0 }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The kernel's clock for the times of files: it moves with the timer.
fn tick() -> u64 {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

impl FileWrites {
    /// For a file whose mapped bytes count for this user.
    #[must_use]
    pub fn new(routes: Arc<WriteRoutes>, uid: u32) -> Self {
        Self {
            routes,
            uid,
            under_way: AtomicU32::new(0),
            place: OnceLock::new(),
            mapping: RwLock::new(None),
            is_refused: AtomicBool::new(false),
            stamp: AtomicU64::new(0),
        }
    }

    /// Writes through the mapping, or else by `pwrite`, which is to act as the user who writes. `act` makes the thread do
    /// so until its result is dropped. `file` is always the same one.
    ///
    /// # Errors
    /// As for `pwrite`.
    pub fn write<A>(
        &self,
        file: &File,
        from: FileSource<'_>,
        at: u64,
        act: impl Fn() -> io::Result<A>,
    ) -> io::Result<usize> {
        let under_way = UnderWay::begin(&self.under_way);
        let route = self.map_and_write(file, from, at, under_way.is_alone, &act);
        let count = match route {
            Ok(()) => from.len,
            Err(_) => {
                self.stamp.store(tick(), Ordering::Relaxed);
                let _acting = act()?;
                from.mem.write_file(from.at, from.len, file, at).map_err(Error::into_io)?
            }
        };
        self.routes.count(route, count);
        Ok(count)
    }

    /// Writes all bytes through the mapping of a file whose pages are in memory only, where nothing has to be allocated or
    /// read from a disk, and so nothing depends on who writes; `None` if that is not possible.
    pub fn write_now(&self, file: &File, from: FileSource<'_>, at: u64) -> Option<usize> {
        if self.place.get() != Some(&Ok(false)) {
            return None;
        }
        let _under_way = UnderWay::begin(&self.under_way);
        self.map_and_write(file, from, at, false, || Ok(())).ok()?;
        self.routes.count(Ok(()), from.len);
        Some(from.len)
    }

    /// Writes all bytes through the mapping. If this fails, they may have been written in part.
    fn map_and_write<A>(
        &self,
        file: &File,
        from: FileSource<'_>,
        at: u64,
        is_alone: bool,
        act: impl Fn() -> io::Result<A>,
    ) -> Result<(), Unmapped> {
        if (from.len as u64) < PAGE {
            return Err(Unmapped::Short);
        }
        if self.is_refused.load(Ordering::Relaxed) {
            return Err(Unmapped::Refused);
        }
        if getrlimit(Resource::Fsize).current.is_some() {
            return Err(Unmapped::FileLimit);
        }
        let is_on_disk = (*self.place.get_or_init(|| place(file)))?;
        // A file system of a disk takes longer for `pwrite` than for a page that is mapped already.
        let is_one_of_many = is_on_disk && self.stamp.load(Ordering::Relaxed) == tick();
        if is_alone && !is_one_of_many {
            return Err(Unmapped::Alone);
        }
        let end = at.checked_add(from.len as u64).ok_or(Unmapped::Grows)?;
        let mapping = self.mapping(file, end)?;
        let (first, last) = (at / PAGE * PAGE, end.next_multiple_of(PAGE));
        if cached_bytes(file, first, last - first).ok() != Some(last - first) {
            return Err(Unmapped::Uncached);
        }
        if !is_on_disk {
            mapping.populate(file, at..end);
        }
        let copied = {
            let _acting = act().map_err(|_| Unmapped::Refused)?;
            mapping.mapping.write(at as usize, from.mem, from.at, from.len)
        };
        if copied.as_ref().is_err_and(is_refusal) {
            self.is_refused.store(true, Ordering::Relaxed);
        }
        // Else the bytes may lie behind the end of the file, or in pages that no longer belong to it.
        let is_whole = matches!(copied, Ok(count) if count == from.len) && size_for(file, end).is_ok();
        if !is_whole {
            *write(&self.mapping) = None;
            return Err(Unmapped::Refused);
        }
        // The `pwrite` that follows clears them, also those that the file got meanwhile.
        if has_capabilities(file) {
            return Err(Unmapped::Privileged);
        }
        self.set_time(file)
    }

    /// The mapping, of at least `end` bytes.
    fn mapping(&self, file: &File, end: u64) -> Result<Arc<KeptMapping>, Unmapped> {
        let (size, allocated) = size_for(file, end)?;
        let fits = |kept: &&Arc<KeptMapping>| kept.mapping.len() as u64 >= end && allocated <= kept.allowed;
        if let Some(kept) = read(&self.mapping).as_ref().filter(fits) {
            return Ok(kept.clone());
        }
        let mut kept = write(&self.mapping);
        if let Some(kept) = kept.as_ref().filter(fits) {
            return Ok(kept.clone());
        }
        *kept = None;
        // The file may double: a new mapping has no pages yet.
        let bytes = size.checked_mul(2).and_then(u64::checked_next_power_of_two).ok_or(Unmapped::Budget)?;
        let bytes = bytes.max(self.routes.growth);
        let allowed =
            allocated.saturating_add(allocated / 4).saturating_add(self.routes.growth).max(bytes / HOLES);
        let share = (self.routes.budget)(self.uid, allowed).ok_or(Unmapped::Budget)?;
        let bytes = usize::try_from(bytes.next_multiple_of(PAGE)).map_err(|_| Unmapped::Budget)?;
        let mapping = KeptMapping::new(file, bytes, (allowed, share)).map_err(|_| Unmapped::Refused)?;
        Ok(kept.insert(Arc::new(mapping)).clone())
    }

    /// Sets the file's times as `pwrite` would, where the clock has moved since they were set.
    fn set_time(&self, file: &File) -> Result<(), Unmapped> {
        let now = tick();
        if self.stamp.swap(now, Ordering::Relaxed) == now {
            return Ok(());
        }
        let nanos = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
        let times = Timestamps { last_access: nanos(UTIME_OMIT), last_modification: nanos(UTIME_NOW) };
        // A file system that has been shut down refuses this, and takes bytes through the mapping all the same.
        futimens(file, &times).map_err(|_| {
            self.is_refused.store(true, Ordering::Relaxed);
            Unmapped::Refused
        })
    }
}

/// The size and the allocated bytes of a file whose bytes up to `end` may be written through a mapping.
fn size_for(file: &File, end: u64) -> Result<(u64, u64), Unmapped> {
    let wanted = StatxFlags::SIZE | StatxFlags::BLOCKS | StatxFlags::MODE;
    let stat = statx(file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, wanted)
        .map_err(|_| Unmapped::Refused)?;
    if u32::from(stat.stx_mode) & SET_ID != 0 {
        return Err(Unmapped::Privileged);
    }
    if stat.stx_attributes.intersects(StatxAttributes::IMMUTABLE | StatxAttributes::APPEND) {
        return Err(Unmapped::Protected);
    }
    // A mapping has whole pages.
    if end > stat.stx_size / PAGE * PAGE {
        return Err(Unmapped::Grows);
    }
    Ok((stat.stx_size, stat.stx_blocks.saturating_mul(512)))
}

/// Whether programs get privileges from the file, which a write takes away.
#[must_use]
pub fn has_capabilities(file: &File) -> bool {
    fgetxattr(file, "security.capability", &mut [] as &mut [u8]).is_ok()
}

/// Whether a file is on a disk, or why writes of this opening never go through a mapping.
fn place(file: &File) -> Result<bool, Unmapped> {
    const TMPFS: u64 = 0x0102_1994;
    const EXT4: u64 = 0xef53;
    const XFS: u64 = 0x5846_5342;
    let kind = rustix::fs::fstatfs(file).map_or(0, |fs| fs.f_type as u64);
    if ![TMPFS, EXT4, XFS].contains(&kind) {
        return Err(Unmapped::FileSystem);
    }
    let flags = fcntl_getfl(file).unwrap_or(OFlags::DIRECT);
    let writes_alone = OFlags::DIRECT | OFlags::SYNC | OFlags::DSYNC | OFlags::APPEND;
    if flags & OFlags::RWMODE != OFlags::RDWR || flags.intersects(writes_alone) {
        return Err(Unmapped::OpenMode);
    }
    let user = rustix::process::geteuid();
    let is_ours = user.is_root() || file.metadata().is_ok_and(|found| found.uid() == user.as_raw());
    if is_ours { Ok(kind != TMPFS) } else { Err(Unmapped::NotOwner) }
}

/// Whether the system will refuse this again.
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported)
}

/// Locks for reading. What a thread left that panicked is whole.
fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks for writing, as [`read`] does.
fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
