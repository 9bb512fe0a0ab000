//! Reads of files into shared memory: through the page cache, past it, and only from it.

use std::fs::File;
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{Access, AtFlags, CWD, OFlags, StatxFlags, accessat, fstat, statx};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use rustix::process::geteuid;

use crate::{Error, HostMem, Result};

/// The most that one call reads: the kernel's limit is a little below 2 GiB.
const MOST: usize = 1 << 30;

impl HostMem {
    /// Reads bytes of a file from `at` on into this memory at `offset`; returns how many there were before the file's
    /// end.
    ///
    /// # Errors
    /// When the range does not lie within the memory, it cannot be written, or the file cannot be read.
    pub fn read_file(&self, offset: usize, bytes: usize, file: &File, at: u64) -> Result<usize> {
        self.check_writable_range(offset, bytes)?;
        let mut done = 0;
        while done < bytes {
            match self.read_some(offset + done, bytes - done, file, at + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::system("pread", error)),
            }
        }
        Ok(done)
    }

    /// The same by one call, which may also return fewer bytes before the file's end.
    ///
    /// # Errors
    /// As for [`Self::read_file`], or when the call was interrupted.
    pub fn read_some(&self, offset: usize, bytes: usize, file: &File, at: u64) -> std::io::Result<usize> {
        self.check_writable_range(offset, bytes).map_err(std::io::Error::other)?;
        let (to, count) = (self.host_ptr().wrapping_add(offset), bytes.min(MOST));
        // SAFETY: the range lies within the mapping, which is writable and outlives &self; the kernel writes it as a
        // device does, and references to its bytes are of atomics alone.
        let read = unsafe { libc::pread(file.as_raw_fd(), to.cast(), count, at as i64) };
        usize::try_from(read).map_err(|_| std::io::Error::last_os_error())
    }
}

impl HostMem {
    /// Reads only what is in the page cache. Returns the number of bytes, which is lower if the rest is not cached or
    /// the file ends; `None` if the first byte is not cached, or the file system cannot report that.
    ///
    /// # Errors
    /// When the range does not lie within the memory, it cannot be written, or the file cannot be read.
    #[inline]
    pub fn read_cached(&self, offset: usize, bytes: usize, file: &File, at: u64) -> Result<Option<usize>> {
        self.check_writable_range(offset, bytes)?;
        let vector = libc::iovec { iov_base: self.host_ptr().wrapping_add(offset).cast(), iov_len: bytes };
        // SAFETY: as in `read_some`; the vector lives across the call.
        let read =
            unsafe { libc::preadv2(file.as_raw_fd(), &raw const vector, 1, at as i64, libc::RWF_NOWAIT) };
        if read >= 0 {
            return Ok(Some(read as usize));
        }
        let error = std::io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EOPNOTSUPP | libc::EINTR) => Ok(None),
            _ => Err(Error::system("preadv2", error)),
        }
    }

    /// Writes bytes of this memory to a file at `at`; returns how many were written before the disk was full.
    ///
    /// # Errors
    /// When the range does not lie within the memory, or the file cannot be written.
    pub fn write_file(&self, offset: usize, bytes: usize, file: &File, at: u64) -> Result<usize> {
        let whole = self.slice(offset..offset.saturating_add(bytes))?;
        let mut done = 0;
        while done < bytes {
            let from = whole.host_ptr().wrapping_add(done);
            let count = (bytes - done).min(MOST);
            // SAFETY: the range lies within the mapping, which outlives &self; the kernel reads it as a device does.
            let written =
                unsafe { libc::pwrite(file.as_raw_fd(), from.cast(), count, (at + done as u64) as i64) };
            match written {
                0 => break,
                written if written > 0 => done += written as usize,
                _ => {
                    let error = std::io::Error::last_os_error();
                    match error.kind() {
                        std::io::ErrorKind::Interrupted => {}
                        // Reports the bytes that were written, as pwrite does.
                        _ if done > 0 => break,
                        _ => return Err(Error::system("pwrite", error)),
                    }
                }
            }
        }
        Ok(done)
    }
}

/// Alignment for reads past the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirectRules {
    /// Alignment of memory addresses.
    pub memory: u32,
    /// Alignment of offsets and lengths.
    pub offset: u32,
}

/// Reopens a descriptor's file for reading. The new one has its own advice, which clones of the descriptor would share.
///
/// # Errors
/// When it can no longer be opened.
pub fn open_again(file: &File) -> std::io::Result<File> {
    // Through the descriptor: the path may lead to another file by now.
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Reopens a descriptor's file for reads past the page cache, and returns their alignment; `None` if its file system
/// does not support that.
///
/// # Errors
/// When it cannot be opened although its file system supports it.
pub fn open_direct(file: &File) -> Result<Option<(File, DirectRules)>> {
    past_the_cache(file, false)
}

/// The same, also for writing.
///
/// # Errors
/// As for [`open_direct`].
pub fn open_direct_writable(file: &File) -> Result<Option<(File, DirectRules)>> {
    past_the_cache(file, true)
}

fn past_the_cache(file: &File, writable: bool) -> Result<Option<(File, DirectRules)>> {
    // Through the descriptor: the path may lead to another file by now.
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    let flags = OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NOCTTY;
    let opened = File::options().read(true).write(writable).custom_flags(flags.bits() as i32).open(&path);
    let direct = match opened {
        Ok(direct) => direct,
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(None),
        Err(error) => return Err(Error::system("opening a file with O_DIRECT", error)),
    };
    let rules = statx(&direct, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0)
        .map(|stat| DirectRules { memory: stat.stx_dio_mem_align, offset: stat.stx_dio_offset_align });
    Ok(match rules {
        // The file system does not support it for this file.
        Some(DirectRules { offset: 0, .. }) => None,
        Some(rules) => Some((direct, rules)),
        // Older kernels do not report it; a page always suffices.
        None => Some((direct, DirectRules { memory: 4096, offset: 4096 })),
    })
}

#[repr(C)]
struct CachestatRange {
    off: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// How many bytes of a range of a file are in the page cache, in whole pages.
///
/// The kernel reveals nothing about a file that we may neither write nor own. Then some bytes of the range are read
/// with a non-blocking read, and the result is an estimate; for bytes that are not cached the kernel then starts
/// reading.
///
/// # Errors
/// When the kernel does not report it.
pub fn cached_bytes(file: &File, at: u64, bytes: u64) -> Result<u64> {
    if bytes == 0 {
        return Ok(0);
    }
    let reported = match cachestat(file, at, bytes) {
        // It counts the pages of the overlay's own inode, which has none: the file below holds the bytes.
        Ok(0) if is_on_overlay(file) => Err(Errno::OPNOTSUPP),
        reported => reported,
    };
    let reported = match reported {
        // As if the call did not exist: kernels before 6.5, and containers that do not know it.
        Err(Errno::NOSYS | Errno::OPNOTSUPP) if can_see_cache(file) => {
            return Ok(mincore(file, at, bytes)?.min(bytes));
        }
        Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::PERM) => sampled(file, at, bytes),
        reported => reported,
    };
    Ok(reported.map_err(|e| Error::system("asking what of a file is in the page cache", e))?.min(bytes))
}

/// Whether memory may be swapped out, so that reading it may wait for a disk. True where the system does not say. It is
/// asked once a second at most.
#[must_use]
pub fn may_swap() -> bool {
    const ASK: Duration = Duration::from_secs(1);
    /// The first line is the table's head.
    const HEAD: usize = 1;
    static KNOWN: Mutex<Option<(Instant, bool)>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    match *known {
        Some((since, may_swap)) if since.elapsed() < ASK => may_swap,
        _ => {
            let table = std::fs::read_to_string("/proc/swaps");
            let may_swap = !table.is_ok_and(|table| table.lines().count() == HEAD);
            *known = Some((Instant::now(), may_swap));
            may_swap
        }
    }
}

/// The page size. From the C library: rustix faults under valgrind, where it follows addresses of the auxiliary vector.
#[must_use]
pub fn page_size() -> usize {
    // SAFETY: the call reads a number of the system's.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// Queries the file's cached pages: since Linux 6.5.
fn cachestat(file: &File, at: u64, bytes: u64) -> rustix::io::Result<u64> {
    /// The same on all architectures: it is newer than the unified tables.
    const CACHESTAT: libc::c_long = 451;
    let (range, mut stat) = (CachestatRange { off: at, len: bytes }, Cachestat::default());
    // SAFETY: both structures are the kernel's and live across the call, which retains neither.
    let rc = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut stat, 0_u32) };
    match rc {
        0 => Ok(stat.cached * page_size() as u64),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// Whether the kernel reveals which pages of a file are cached. For others `mincore` reports all of it.
fn can_see_cache(file: &File) -> bool {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let may_write = accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS).is_ok();
    may_write || fstat(file).is_ok_and(|stat| stat.st_uid == geteuid().as_raw())
}

/// An estimate from samples of the range: a byte of each is read if it is cached.
fn sampled(file: &File, at: u64, bytes: u64) -> rustix::io::Result<u64> {
    const PLACES: u64 = 3;
    let mut there = 0;
    for place in 0..PLACES {
        let from = at + (bytes - 1) * (2 * place + 1) / (2 * PLACES);
        match preadv2(file, &mut [IoSliceMut::new(&mut [0])], from, ReadWriteFlags::NOWAIT) {
            Ok(read) => there += read as u64,
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes * there / PLACES)
}

/// Which pages of a mapped range are in memory.
///
/// # Safety
/// The range is mapped until this returns.
unsafe fn residency(base: *mut libc::c_void, length: usize) -> std::io::Result<Vec<bool>> {
    let mut there = vec![0_u8; length.div_ceil(page_size())];
    // SAFETY: the caller's promise, and there is a byte for each page. Where the range does not begin with a page nothing is written.
    match unsafe { libc::mincore(base, length, there.as_mut_ptr()) } {
        0 => Ok(there.iter().map(|page| page & 1 != 0).collect()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

impl HostMem {
    /// Whether all pages of a range of whole pages are in memory, so that pinning them takes none. If the kernel does not say,
    /// they are not.
    #[must_use]
    pub fn is_resident(&self, range: Range<usize>) -> bool {
        let Ok(part) = self.slice(range) else { return false };
        // SAFETY: `part` is mapped as long as it lives.
        let there = unsafe { residency(part.host_ptr().cast(), part.len()) };
        there.is_ok_and(|there| there.into_iter().all(|is_there| is_there))
    }
}

/// Queries a mapping of the file: on older kernels.
fn mincore(file: &File, at: u64, bytes: u64) -> Result<u64> {
    let page = page_size() as u64;
    let start = at / page * page;
    let length = (at + bytes - start).next_multiple_of(page) as usize;
    let failed = |call: &str| Error::system(call, std::io::Error::last_os_error());
    // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing, and nobody accesses it.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            start as i64,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(failed("mmap of a file"));
    }
    // SAFETY: the range is the mapping.
    let there = unsafe { residency(base, length) }.map_err(|error| Error::system("mincore", error));
    // SAFETY: base and length are those of the mapping, and it is no longer used.
    unsafe { libc::munmap(base, length) };
    Ok(there?.iter().filter(|is_there| **is_there).count() as u64 * page)
}

/// Whether a file is seen through overlayfs, as those of a container's image are.
fn is_on_overlay(file: &File) -> bool {
    const OVERLAYFS: u64 = 0x794c_7630;
    rustix::fs::fstatfs(file).is_ok_and(|fs| fs.f_type as u64 == OVERLAYFS)
}

/// Whether a file's bytes are only in memory, with nothing behind the page cache.
#[must_use]
pub fn is_in_memory(file: &File) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    const HUGETLBFS: u64 = 0x9584_58f6;
    rustix::fs::fstatfs(file).is_ok_and(|fs| [TMPFS, RAMFS, HUGETLBFS].contains(&(fs.f_type as u64)))
}

const _: () = assert!(size_of::<Cachestat>() == 40 && size_of::<CachestatRange>() == 16);

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::fs::{Advice, fadvise, fsync};

    use super::*;

    const BYTES: u64 = 1 << 20;

    /// An unlinked file on a disk; `None` if temporary files are in memory.
    fn file() -> Option<File> {
        let name = format!("onehop-page-cache-{}-{:?}", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.write_all(&vec![7; BYTES as usize]).unwrap();
        fsync(&file).unwrap();
        if is_in_memory(&file) {
            skipped("temporary files lie in memory here, which no page cache is in front of");
            return None;
        }
        Some(file)
    }

    fn skipped(why: &str) {
        let _ = std::io::stderr().write_all(format!("SKIPPED: {why}\n").as_bytes());
    }

    /// Drops cached pages; pages being read are dropped afterwards. The file is open for writing: for other files not
    /// everyone can see what is cached.
    fn forget(file: &File) {
        for _ in 0..1000 {
            fadvise(file, 0, None, Advice::DontNeed).unwrap();
            if cachestat(file, 0, BYTES).map_or(true, |bytes| bytes == 0) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        panic!("this file system keeps what it is to drop");
    }

    #[test]
    fn reads_are_in_the_page_cache_until_forgotten() {
        let Some(file) = file() else { return };
        assert_eq!(cached_bytes(&file, 0, BYTES).unwrap(), BYTES);
        assert_eq!((can_see_cache(&file), mincore(&file, 0, BYTES).unwrap()), (true, BYTES));
        assert_eq!(sampled(&file, 0, BYTES).unwrap(), BYTES);
        assert_eq!(cached_bytes(&file, 5000, 0).unwrap(), 0);
        forget(&file);
        assert_eq!((cached_bytes(&file, 0, BYTES).unwrap(), mincore(&file, 0, BYTES).unwrap()), (0, 0));
        // A non-blocking read still starts read-ahead, and a fast disk may answer before the call returns.
        let mut tries = (0..1000).map(|_| {
            forget(&file);
            sampled(&file, 0, BYTES).unwrap()
        });
        assert!(tries.any(|bytes| bytes == 0));
    }

    /// A file seen through a real overlay; `None` if this machine does not allow mounting one.
    fn on_overlay() -> Option<(Overlay, File)> {
        let name = format!("onehop-overlay-{}", std::process::id());
        let overlay = Overlay(std::env::temp_dir().join(name));
        let [one, other, at] = ["one", "other", "at"].map(|name| overlay.0.join(name));
        [&one, &other, &at].into_iter().for_each(|dir| std::fs::create_dir_all(dir).unwrap());
        let mut below = File::create(one.join("file")).unwrap();
        below.write_all(&vec![7; BYTES as usize]).unwrap();
        fsync(&below).unwrap();
        if is_in_memory(&below) {
            skipped("temporary files lie in memory here, which no page cache is in front of");
            return None;
        }
        let layers = format!("lowerdir={}:{}", one.display(), other.display());
        let layers = std::ffi::CString::new(layers).unwrap();
        if let Err(why) =
            rustix::mount::mount("overlay", &at, "overlay", rustix::mount::MountFlags::RDONLY, &*layers)
        {
            skipped(&format!("an overlay cannot be mounted here: {why}"));
            return None;
        }
        let file = File::open(at.join("file")).unwrap();
        Some((overlay, file))
    }

    struct Overlay(std::path::PathBuf);

    impl Drop for Overlay {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(self.0.join("at"), rustix::mount::UnmountFlags::DETACH);
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_an_overlay_shows_is_in_the_page_cache_of_the_file_below() {
        let Some((_overlay, file)) = on_overlay() else { return };
        assert!(is_on_overlay(&file) && can_see_cache(&file));
        assert_eq!(cached_bytes(&file, 0, BYTES).unwrap(), BYTES);
        assert_eq!(cached_bytes(&file, 5000, 10_000).unwrap(), 10_000);
        forget(&file);
        assert_eq!(cached_bytes(&file, 0, BYTES).unwrap(), 0);
        let mut some = [0; 4096];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut some, BYTES / 2).unwrap();
        assert!(some == [7; 4096]);
        let there = cached_bytes(&file, 0, BYTES).unwrap();
        assert!((4096..=BYTES).contains(&there), "{there}");
    }

    #[test]
    fn cached_bytes_of_other_users_files_are_estimated() {
        let Some(written) = file() else { return };
        if !geteuid().is_root() {
            skipped("only root can access its files as another user");
            return;
        }
        // The kernel reveals it to those who have it open for writing.
        let file = open_again(&written).unwrap();
        let looked = move || {
            const NOBODY: libc::c_long = 65534;
            // SAFETY: the call of the kernel itself, so that only this thread changes its user; it ends right after.
            let rc = unsafe { libc::syscall(libc::SYS_setresuid, -1_i64, NOBODY, -1_i64) };
            assert_eq!(rc, 0);
            assert!(!can_see_cache(&file));
            assert_eq!(mincore(&file, 0, BYTES).unwrap(), BYTES);
            let warm = cached_bytes(&file, 0, BYTES).unwrap();
            // As above, a fast disk may answer first, and nearly always does.
            let misses_some = (0..1000).any(|_| {
                forget(&written);
                // This is why mincore is not used.
                assert_eq!(mincore(&file, 0, BYTES).unwrap(), BYTES);
                cached_bytes(&file, 0, BYTES).unwrap() < BYTES
            });
            (warm, misses_some)
        };
        let (warm, misses_some) = std::thread::spawn(looked).join().unwrap();
        assert_eq!(warm, BYTES);
        assert!(misses_some);
    }

    #[test]
    fn files_in_memory_are_known() {
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(is_in_memory(&File::from(memory)) && !is_in_memory(&File::open("/proc/self/maps").unwrap()));
        let table = std::fs::read_to_string("/proc/swaps").unwrap();
        assert_eq!(may_swap(), table.lines().count() > 1, "{table}");
    }
}
