//! Host memory that a device shares.
//!
//! Another thread or a device may write it while it is read. So it is only accessed by atomic words and by copying in
//! and out; references to its bytes are never handed out.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::huge::advise;
use crate::{DmaMemory, Error, Marks, Result};

/// Mappings are whole pages of this size.
const PAGE: usize = 4096;

/// A mapping, unmapped with the last [`HostMem`] on it.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Whether it can be written; a store into a read-only mapping would raise SIGSEGV.
    writable: bool,
    /// The process that has it, if its children do not; otherwise 0.
    process: AtomicU32,
    /// Whether other code has allocated it.
    is_borrowed: bool,
}

// SAFETY: a Mapping is an address range that stays mapped until drop, and is not tied to a thread.
unsafe impl Send for Mapping {}
// SAFETY: references handed out are to atomics. Users of the bare pointer access registers by volatile loads and
// stores, give it to the kernel or a driver, copy through memory that no other clone of theirs touches
// meanwhile, or give it to the C program whose memory it is. Accesses of different sizes may overlap, which Rust
// does not define; x86-64 and aarch64 do: every byte is one store's.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.is_borrowed || is_of_parent(*self.process.get_mut()) {
            // In a child, memory of its parent is not mapped, or belongs to something else by now.
            return;
        }
        // SAFETY: base and len came from mmap, and no pointer into the range is left.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Whether memory that children do not inherit belongs to another process than this; 0 is memory of all.
pub(crate) fn is_of_parent(process: u32) -> bool {
    process != 0 && process != std::process::id()
}

/// Runs when the last clone of the memory is dropped.
struct OnLast(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Drop for OnLast {
    fn drop(&mut self) {
        if let Some(release) = self.0.take() {
            release();
        }
    }
}

/// Host memory that a device may share. Clones are the same memory.
#[derive(Clone)]
pub struct HostMem {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
    _on_drop: Option<Arc<OnLast>>,
}

impl HostMem {
    /// Zeroed memory of this process, rounded up to whole pages.
    ///
    /// # Errors
    /// When memory is short.
    pub fn anonymous(bytes: usize) -> Result<Self> {
        // Miri has neither shared memory nor other processes.
        Self::new(bytes, if cfg!(miri) { MapFlags::PRIVATE } else { MapFlags::SHARED })
    }

    /// The same, but copied for a forked child. Not for devices: after copy-on-write the device may keep the former
    /// pages.
    ///
    /// # Errors
    /// When memory is short.
    pub fn private(bytes: usize) -> Result<Self> {
        Self::new(bytes, MapFlags::PRIVATE)
    }

    fn new(bytes: usize, share: MapFlags) -> Result<Self> {
        let len = round_up(bytes)?;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, share) }
                .map_err(|e| Error::system(format!("mmap of {len} bytes"), e))?;
        Self::whole(base.cast(), len, true)
    }

    /// A file's first `bytes` bytes, shared with all others that map it.
    ///
    /// # Errors
    /// When the file cannot be mapped, or is shorter.
    pub fn of_file(file: &File, bytes: usize) -> Result<Self> {
        Self::of_file_range(file, 0, bytes, true)
    }

    /// A file's first `bytes` bytes, read-only. The last page may be partial: past the end of the file it reads as
    /// zeroes.
    ///
    /// # Errors
    /// When the file cannot be mapped, or is shorter.
    pub fn of_file_read_only(file: &File, bytes: usize) -> Result<Self> {
        Self::of_file_range(file, 0, bytes, false)
    }

    /// A device's memory: `bytes` bytes from `offset` on of its file, such as sysfs `resource0` or a VFIO device. Only
    /// the caller knows its length.
    ///
    /// Child processes do not inherit it: a mapping keeps its file open, and a device can only be released when no
    /// process has it open, not even another device's guardian. A child may drop its copy of the result, and do nothing
    /// else with it.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub fn of_device(file: impl AsFd, offset: u64, bytes: usize) -> Result<Self> {
        if bytes == 0 || !bytes.is_multiple_of(PAGE) || !offset.is_multiple_of(PAGE as u64) {
            return Err(Error::OutOfRange { offset: offset as usize, bytes, len: 0 });
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, offset) }
            .map_err(|e| Error::system(format!("mmap of {bytes} bytes of a device's memory"), e))?;
        let mem = Self::whole(base.cast(), bytes, true)?;
        mem.keep_from_children()?;
        Ok(mem)
    }

    /// Excludes the whole mapping from child processes from now on.
    pub(crate) fn keep_from_children(&self) -> Result<()> {
        advise(self, Advice::LinuxDontFork)?;
        self.mapping.process.store(std::process::id(), Ordering::Relaxed);
        Ok(())
    }

    /// The process that it is limited to; 0 if children have it, too.
    pub(crate) fn process(&self) -> u32 {
        self.mapping.process.load(Ordering::Relaxed)
    }

    /// All of a file in memory (`/dev/shm`, a memfd), whose length need not be a multiple of pages.
    ///
    /// # Errors
    /// When it cannot be mapped, or is empty.
    pub fn of_shared(file: &File) -> Result<Self> {
        Self::of_shared_within(file, u64::MAX)
    }

    /// The same for a file that may exceed the available address space.
    ///
    /// # Errors
    /// As for [`Self::of_shared`]; `ENOMEM` when it has more than `most` bytes.
    pub fn of_shared_within(file: &File, most: u64) -> Result<Self> {
        let have = file.metadata().map_err(|e| Error::system("fstat of the memory file", e))?.len();
        if have > most {
            let call = format!("mmap of {have} bytes of shared memory, where {most} may be");
            return Err(Error::system(call, rustix::io::Errno::NOMEM));
        }
        let len = usize::try_from(have).unwrap_or(usize::MAX);
        let whole = round_up(len)?;
        if len == 0 {
            return Err(Error::OutOfRange { offset: 0, bytes: 1, len: 0 });
        }
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing. Its last page may be a part of one.
        let base = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            mmap(std::ptr::null_mut(), whole, access, MapFlags::SHARED, file, 0)
        }
        .map_err(|e| Error::system(format!("mmap of {len} bytes of shared memory"), e))?;
        Ok(Self { len, ..Self::whole(base.cast(), whole, true)? })
    }

    /// `bytes` bytes of a file from `offset` on, both multiples of pages, read-only or writable.
    ///
    /// Nobody may truncate the file: accessing pages past its end ends the process.
    ///
    /// # Errors
    /// When the file cannot be mapped, or is shorter.
    pub fn of_file_range(file: &File, offset: u64, bytes: usize, writable: bool) -> Result<Self> {
        let have = file.metadata().map_err(|e| Error::system("fstat of the memory file", e))?.len();
        let longest = if writable { have } else { have.next_multiple_of(PAGE as u64) };
        let end = offset.checked_add(bytes as u64).filter(|_| offset.is_multiple_of(PAGE as u64));
        if end.is_none_or(|end| end > longest) || bytes == 0 || !bytes.is_multiple_of(PAGE) {
            return Err(Error::OutOfRange { offset: offset as usize, bytes, len: have as usize });
        }
        let access = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing; the file is long enough.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, offset) }
            .map_err(|e| Error::system(format!("mmap of {bytes} bytes of the memory file"), e))?;
        Self::whole(base.cast(), bytes, writable)
    }

    /// The first `bytes` bytes, whole pages, of a file that may be shorter: only the kernel may access them, which returns
    /// an error where there is no file.
    pub(crate) fn of_growing_file(file: &File, bytes: usize) -> Result<Self> {
        if bytes == 0 || !bytes.is_multiple_of(PAGE) {
            return Err(Error::OutOfRange { offset: 0, bytes, len: bytes });
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0) }
            .map_err(|e| Error::system(format!("mmap of {bytes} bytes of a file"), e))?;
        Self::whole(base.cast(), bytes, true)
    }

    pub(crate) fn whole(base: *mut u8, len: usize, writable: bool) -> Result<Self> {
        Self::at(base, len, writable, false)
    }

    pub(crate) fn at(base: *mut u8, len: usize, writable: bool, is_borrowed: bool) -> Result<Self> {
        let base = NonNull::new(base)
            .ok_or_else(|| Error::system("mmap", std::io::Error::other("mapped at address zero")))?;
        let mapping = Arc::new(Mapping { base, len, writable, process: AtomicU32::new(0), is_borrowed });
        Ok(Self { mapping, offset: 0, len, _on_drop: None })
    }

    /// The same memory, and runs `release` when the last clone of the result is dropped. What it already runs
    /// then comes afterwards.
    #[must_use]
    pub fn on_last_drop(mut self, release: impl FnOnce() + Send + Sync + 'static) -> Self {
        let former = self._on_drop.take();
        let both = move || {
            release();
            drop(former);
        };
        self._on_drop = Some(Arc::new(OnLast(Some(Box::new(both)))));
        self
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it may be written. Words of read-only memory are only reached by [`HostMem::read`].
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.mapping.writable
    }

    /// A part of it.
    ///
    /// # Errors
    /// When the range does not lie within it.
    pub fn slice(&self, range: Range<usize>) -> Result<Self> {
        let bytes = range.end.saturating_sub(range.start);
        self.check(range.start, bytes)?;
        Ok(Self { offset: self.offset + range.start, len: bytes, ..self.clone() })
    }

    /// Its address in this process. Valid as long as a clone lives; everything behind it is shared with a device.
    #[must_use]
    #[inline]
    pub fn host_ptr(&self) -> *mut u8 {
        self.mapping.base.as_ptr().wrapping_add(self.offset)
    }

    /// The 32-bit word at a byte offset that is a multiple of four.
    ///
    /// # Errors
    /// When it does not lie within the memory, or is not aligned.
    #[inline]
    pub fn word(&self, offset: usize) -> Result<&AtomicU32> {
        self.check(offset, 4)?;
        self.check_writable()?;
        if !self.host_ptr().addr().wrapping_add(offset).is_multiple_of(4) {
            return Err(Error::OutOfRange { offset, bytes: 4, len: self.len });
        }
        // SAFETY: in range and aligned; the mapping outlives &self. References to it are only to atomics; see
        // `Mapping`'s Sync for users of the pointer.
        Ok(unsafe { AtomicU32::from_ptr(self.host_ptr().add(offset).cast()) })
    }

    /// Checks that a range may be written.
    ///
    /// # Errors
    /// When it does not lie within the memory, or that is read-only.
    #[inline]
    pub fn check_writable_range(&self, offset: usize, bytes: usize) -> Result<()> {
        self.check(offset, bytes)?;
        self.check_writable()
    }

    #[inline]
    pub(crate) fn is_writable_range(&self, offset: usize, bytes: usize) -> bool {
        self.mapping.writable && offset <= self.len && bytes <= self.len - offset
    }

    /// Stores sixteen words, in no particular order.
    ///
    /// # Errors
    /// When they do not lie within the memory, or are not aligned.
    #[inline]
    pub fn write_words(&self, offset: usize, words: &[u32; 16]) -> Result<()> {
        let first = self.sixteen_words(offset)?;
        if first.addr().is_multiple_of(8) {
            let first = first.cast::<u64>();
            for (i, pair) in words.as_chunks::<2>().0.iter().enumerate() {
                let [low, high] = if cfg!(target_endian = "little") { *pair } else { [pair[1], pair[0]] };
                // SAFETY: 64 bytes from `first` on are in range and aligned; the mapping outlives &self.
                unsafe { AtomicU64::from_ptr(first.add(i)) }
                    .store(u64::from(low) | u64::from(high) << 32, Ordering::Relaxed);
            }
            return Ok(());
        }
        for (i, value) in words.iter().enumerate() {
            // SAFETY: 64 bytes from `first` on are in range and aligned; the mapping outlives &self.
            unsafe { AtomicU32::from_ptr(first.add(i)) }.store(*value, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Loads sixteen words, in no particular order.
    ///
    /// # Errors
    /// When they do not lie within the memory, or are not aligned.
    #[inline]
    pub fn read_words(&self, offset: usize) -> Result<[u32; 16]> {
        let first = self.sixteen_words(offset)?;
        // SAFETY: 64 bytes from `first` on are in range and aligned; the mapping outlives &self.
        Ok(std::array::from_fn(|i| unsafe { AtomicU32::from_ptr(first.add(i)) }.load(Ordering::Relaxed)))
    }

    /// The address of sixteen words: a pointer to all of them, unlike one made from a reference to the first.
    #[inline]
    fn sixteen_words(&self, offset: usize) -> Result<*mut u32> {
        let first = self.host_ptr().wrapping_add(offset);
        if self.is_writable_range(offset, 64) && first.addr().is_multiple_of(4) {
            return Ok(first.cast());
        }
        self.check_writable()?;
        Err(Error::OutOfRange { offset, bytes: 64, len: self.len })
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// When the range does not lie within the memory.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.check(offset, out.len())?;
        let (head, words) = self.parts(offset, out.len());
        let (first, rest) = out.split_at_mut(head);
        for (i, byte) in first.iter_mut().enumerate() {
            *byte = self.byte(offset + i).load(Ordering::Relaxed);
        }
        let (middle, last) = rest.split_at_mut(words * 8);
        for (i, chunk) in middle.chunks_exact_mut(8).enumerate() {
            chunk.copy_from_slice(&self.qword(offset + head + i * 8).load(Ordering::Relaxed).to_ne_bytes());
        }
        for (i, byte) in last.iter_mut().enumerate() {
            *byte = self.byte(offset + head + words * 8 + i).load(Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// When the range does not lie within the memory.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.check(offset, data.len())?;
        self.check_writable()?;
        let (head, words) = self.parts(offset, data.len());
        let (first, rest) = data.split_at(head);
        for (i, byte) in first.iter().enumerate() {
            self.byte(offset + i).store(*byte, Ordering::Relaxed);
        }
        let (middle, last) = rest.split_at(words * 8);
        for (i, chunk) in middle.chunks_exact(8).enumerate() {
            let mut word = [0; 8];
            word.copy_from_slice(chunk);
            self.qword(offset + head + i * 8).store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        for (i, byte) in last.iter().enumerate() {
            self.byte(offset + head + words * 8 + i).store(*byte, Ordering::Relaxed);
        }
        Ok(())
    }

    pub(crate) fn mark(&self, marks: &Marks) -> Result<()> {
        self.check_writable()?;
        self.marked(marks)?.iter().for_each(|place| place.store(marks.word, Ordering::Relaxed));
        Ok(())
    }

    pub(crate) fn marks_left(&self, marks: &Marks) -> Result<u64> {
        let is_left = |place: &&AtomicU64| place.load(Ordering::Relaxed) == marks.word;
        Ok(self.marked(marks)?.iter().filter(is_left).count() as u64)
    }

    /// The marked words.
    fn marked(&self, marks: &Marks) -> Result<&[AtomicU64]> {
        let (offset, bytes) = (marks.first as usize, marks.span() as usize);
        self.check(offset, bytes)?;
        let first = self.host_ptr().wrapping_add(offset);
        if !first.cast::<AtomicU64>().is_aligned() {
            return Err(Error::OutOfRange { offset, bytes, len: self.len });
        }
        // SAFETY: `count` aligned words from `first` on are in range; the mapping outlives &self. References to it are
        // only to atomics; see `Mapping`'s Sync for users of the pointer.
        Ok(unsafe { std::slice::from_raw_parts(first.cast(), marks.count as usize) })
    }

    /// Sets every byte of a range.
    ///
    /// # Errors
    /// When the range does not lie within the memory.
    pub fn fill(&self, offset: usize, bytes: usize, value: u8) -> Result<()> {
        let block = [value; 512];
        for at in (0..bytes).step_by(block.len()) {
            self.write(offset + at, &block[..block.len().min(bytes - at)])?;
        }
        self.check(offset, bytes)
    }

    /// A copy of a range.
    ///
    /// # Errors
    /// When the range does not lie within the memory.
    pub fn to_vec(&self, offset: usize, bytes: usize) -> Result<Vec<u8>> {
        self.check(offset, bytes)?;
        let mut out = vec![0; bytes];
        self.read(offset, &mut out)?;
        Ok(out)
    }

    #[inline]
    pub(crate) fn check(&self, offset: usize, bytes: usize) -> Result<()> {
        if offset <= self.len && bytes <= self.len - offset {
            Ok(())
        } else {
            Err(Error::OutOfRange { offset, bytes, len: self.len })
        }
    }

    #[inline]
    fn check_writable(&self) -> Result<()> {
        if self.mapping.writable { Ok(()) } else { Err(Error::ReadOnly { bytes: self.len }) }
    }

    /// The number of single bytes before the first aligned word, and the number of words after them.
    fn parts(&self, offset: usize, bytes: usize) -> (usize, usize) {
        let start = self.host_ptr().addr() + offset;
        let head = (start.next_multiple_of(8) - start).min(bytes);
        (head, (bytes - head) / 8)
    }

    fn byte(&self, offset: usize) -> &AtomicU8 {
        // SAFETY: the callers have checked the range; the mapping outlives &self. References to it are only to atomics;
        // see `Mapping`'s Sync for users of the pointer.
        unsafe { AtomicU8::from_ptr(self.host_ptr().add(offset)) }
    }

    pub(crate) fn qword(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the callers have checked the range and aligned the offset; the mapping outlives &self.
        unsafe { AtomicU64::from_ptr(self.host_ptr().add(offset).cast()) }
    }
}

impl DmaMemory for HostMem {
    fn bytes(&self) -> usize {
        self.len
    }

    fn host(&self) -> Option<&HostMem> {
        Some(self)
    }
}

impl std::fmt::Debug for HostMem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostMem({} bytes at {:p})", self.len, self.host_ptr())
    }
}

fn round_up(bytes: usize) -> Result<usize> {
    bytes.max(1).checked_next_multiple_of(PAGE).ok_or(Error::OutOfRange { offset: 0, bytes, len: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_at_every_alignment() {
        let mem = HostMem::anonymous(8192).unwrap();
        // Miri is slow.
        let step = if cfg!(miri) { 7 } else { 1 };
        for offset in (0..17).step_by(step) {
            for len in (0..40).step_by(step) {
                let data: Vec<u8> = (0..len).map(|i| (i * 7 + offset) as u8 | 1).collect();
                mem.fill(0, 128, 0).unwrap();
                mem.write(offset, &data).unwrap();
                assert_eq!(mem.to_vec(offset, len).unwrap(), data);
                assert!(mem.to_vec(0, offset).unwrap().iter().all(|b| *b == 0));
                assert!(mem.to_vec(offset + len, 16).unwrap().iter().all(|b| *b == 0));
            }
        }
    }

    #[test]
    fn ranges_are_checked() {
        let mem = HostMem::anonymous(100).unwrap();
        assert_eq!(mem.len(), 4096);
        assert!(mem.write(4090, &[0; 7]).is_err());
        assert!(mem.read(usize::MAX, &mut [0]).is_err());
        let part = mem.slice(8..16).unwrap();
        assert!(part.word(8).is_err());
        assert!(part.word(2).is_err());
        part.word(4).unwrap().store(5, Ordering::Relaxed);
        assert_eq!(mem.to_vec(12, 1).unwrap(), [5]);
        assert!(mem.slice(10..5000).is_err());
    }

    #[test]
    fn read_only_memory_refuses_stores() {
        let path = std::env::temp_dir().join(format!("onehop-os-read-only-{}", std::process::id()));
        std::fs::write(&path, [7; 5000]).unwrap();
        let mem = HostMem::of_file_read_only(&File::open(&path).unwrap(), 8192).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(!mem.is_writable());
        assert_eq!((mem.to_vec(4999, 2).unwrap(), mem.len()), (vec![7, 0], 8192));
        assert!(matches!(mem.write(0, &[1]), Err(Error::ReadOnly { bytes: 8192 })));
        assert!(matches!(mem.word(0), Err(Error::ReadOnly { .. })));
        assert!(mem.slice(0..8).unwrap().fill(0, 4, 1).is_err());
        assert_eq!(mem.to_vec(0, 1).unwrap(), [7]);
    }

    #[test]
    fn maps_a_part_of_a_file() {
        let path = std::env::temp_dir().join(format!("onehop-os-range-{}", std::process::id()));
        std::fs::write(&path, [[1; PAGE], [2; PAGE], [3; PAGE]].as_flattened()).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let part = HostMem::of_file_range(&file, PAGE as u64, 2 * PAGE, true).unwrap();
        assert_eq!((part.to_vec(0, 1).unwrap(), part.to_vec(PAGE, 1).unwrap()), (vec![2], vec![3]));
        for (offset, bytes) in
            [(2 * PAGE as u64, 2 * PAGE), (1, PAGE), (0, 0), (u64::MAX - 4095, PAGE), (0, 100)]
        {
            assert!(HostMem::of_file_range(&file, offset, bytes, true).is_err(), "{offset} {bytes}");
        }
    }

    #[test]
    fn children_do_not_inherit_device_memory() {
        let fd = rustix::fs::memfd_create("device", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 2 * PAGE as u64).unwrap();
        let mem = HostMem::of_device(&fd, 0, 2 * PAGE).unwrap();
        let start = format!("{:x}-", mem.host_ptr() as usize);
        // The flags of a mapping are its last line; dc is "do not copy".
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let flags =
            maps.lines().skip_while(|line| !line.starts_with(&start)).find(|l| l.starts_with("VmFlags:"));
        assert!(flags.is_some_and(|flags| flags.split(' ').any(|flag| flag == "dc")), "{flags:?}");
    }

    #[test]
    fn a_part_with_a_hook_of_its_own_keeps_that_of_the_whole() {
        let order = Arc::new(std::sync::Mutex::new(Vec::new()));
        let push = |name: &'static str| {
            let order = order.clone();
            move || order.lock().unwrap().push(name)
        };
        let mem = HostMem::anonymous(1).unwrap().on_last_drop(push("whole"));
        let part = mem.slice(0..8).unwrap().on_last_drop(push("part"));
        drop(mem);
        assert!(order.lock().unwrap().is_empty());
        drop(part);
        assert_eq!(*order.lock().unwrap(), ["part", "whole"]);
    }
}
