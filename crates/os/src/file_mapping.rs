//! Writes to a file through a shared mapping of it.
//!
//! The kernel lets one `pwrite` at a time into a file. Stores to its pages do not wait for each other.

use std::fs::File;
use std::io;

use crate::{HostMem, Result};

/// A shared mapping of a file from its start. The file may be shorter, grow, and be truncated at any time: only the
/// kernel accesses the mapping, which returns an error where a store of this process would raise SIGBUS.
pub struct FileMapping(HostMem);

impl FileMapping {
    /// Maps the first `bytes` bytes, whole pages, of a file that is open for reading and writing.
    ///
    /// # Errors
    /// When it cannot be mapped.
    pub fn new(file: &File, bytes: usize) -> Result<Self> {
        HostMem::of_growing_file(file, bytes).map(Self)
    }

    /// How many bytes it has.
    #[expect(clippy::len_without_is_empty, reason = "it always has a page")]
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Prepares a range of pages that are in memory to be accessed, all at once. On a file system in memory they can then be
    /// written without a fault each. Does nothing if the kernel cannot do that.
    pub fn populate(&self, at: usize, bytes: usize) {
        if self.0.check_writable_range(at, bytes).is_ok() {
            let from = self.0.host_ptr().wrapping_add(at);
            // SAFETY: the range lies within the mapping; this changes no byte of it.
            let _ = unsafe { rustix::mm::madvise(from.cast(), bytes, rustix::mm::Advice::LinuxPopulateRead) };
        }
    }

    /// Copies bytes of memory into the file, within the mapping. Returns how many; they are fewer where the file has been
    /// truncated, its disk is full, or the memory is gone.
    ///
    /// # Errors
    /// When a range does not lie within its memory, or the kernel refuses: `EFAULT` if there is nothing to copy to or
    /// from.
    pub fn write(&self, at: usize, from: &HostMem, offset: usize, bytes: usize) -> io::Result<usize> {
        self.0.check_writable_range(at, bytes).map_err(io::Error::other)?;
        let from = from.slice(offset..offset.saturating_add(bytes)).map_err(io::Error::other)?;
        let vector = |base: *mut u8| libc::iovec { iov_base: base.cast(), iov_len: bytes };
        let (to, from) = (vector(self.0.host_ptr().wrapping_add(at)), vector(from.host_ptr()));
        // The mapping is the local side, which the kernel writes as a process does: through its page tables, so that the file
        // system is asked first. It may not be the remote one: ext4 loses pages that are written behind its back.
        // SAFETY: both ranges lie within mappings that outlive &self and `from`; the kernel accesses them as a device does.
        let copied =
            unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
        usize::try_from(copied).map_err(|_| io::Error::last_os_error())
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const PAGE: usize = 4096;

    fn memory_file(pages: usize) -> File {
        let file = File::from(rustix::fs::memfd_create("mapped", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len((pages * PAGE) as u64).unwrap();
        file
    }

    #[test]
    fn bytes_arrive_in_the_file() {
        let file = memory_file(4);
        let mapping = FileMapping::new(&file, 4 * PAGE).unwrap();
        let from = HostMem::anonymous(2 * PAGE).unwrap();
        let bytes: Vec<u8> = (0..2 * PAGE).map(|at| (at * 31 % 251) as u8).collect();
        from.write(0, &bytes).unwrap();
        assert_eq!(mapping.write(PAGE + 5, &from, 3, PAGE + 7).unwrap(), PAGE + 7);
        let mut found = vec![9; 4 * PAGE];
        file.read_exact_at(&mut found, 0).unwrap();
        let mut expected = vec![0; 4 * PAGE];
        expected[PAGE + 5..][..PAGE + 7].copy_from_slice(&bytes[3..][..PAGE + 7]);
        assert!(found == expected);
    }

    #[test]
    fn nothing_outside_is_written_or_read() {
        let file = memory_file(2);
        let mapping = FileMapping::new(&file, 2 * PAGE).unwrap();
        let from = HostMem::anonymous(PAGE).unwrap();
        for (at, offset, bytes) in [(PAGE + 1, 0, PAGE), (usize::MAX, 0, 2), (0, 1, PAGE), (0, usize::MAX, 2)]
        {
            assert!(mapping.write(at, &from, offset, bytes).is_err(), "{at} {offset} {bytes}");
        }
        assert!(FileMapping::new(&file, 0).is_err() && FileMapping::new(&file, 100).is_err());
    }

    #[test]
    fn a_file_may_grow_into_its_mapping() {
        let file = memory_file(1);
        let mapping = FileMapping::new(&file, 4 * PAGE).unwrap();
        let from = HostMem::anonymous(PAGE).unwrap();
        assert!(mapping.write(2 * PAGE, &from, 0, PAGE).is_err());
        file.set_len(3 * PAGE as u64).unwrap();
        assert_eq!(mapping.write(2 * PAGE, &from, 0, PAGE).unwrap(), PAGE);
    }

    #[test]
    fn what_is_truncated_ends_a_write() {
        let (file, memory) = (memory_file(4), memory_file(2));
        let mapping = FileMapping::new(&file, 4 * PAGE).unwrap();
        let from = HostMem::of_file(&memory, 2 * PAGE).unwrap();
        from.fill(0, 2 * PAGE, 7).unwrap();
        file.set_len(3 * PAGE as u64).unwrap();
        assert_eq!(mapping.write(2 * PAGE, &from, 0, 2 * PAGE).unwrap(), PAGE);
        let refused = mapping.write(3 * PAGE, &from, 0, PAGE).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EFAULT));
        memory.set_len(PAGE as u64).unwrap();
        assert_eq!(mapping.write(0, &from, 0, 2 * PAGE).unwrap(), PAGE);
        assert_eq!(file.metadata().unwrap().len(), 3 * PAGE as u64);
    }
}
