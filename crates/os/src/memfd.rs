//! Memory that processes share by a file descriptor.

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::io::Errno;

use crate::{Error, HostMem, Result};

const PAGE: usize = 4096;

/// A file in memory that nobody can truncate: accessing what is cut off would end the process.
#[derive(Debug)]
pub struct Memfd {
    file: File,
    bytes: usize,
}

impl Memfd {
    /// New, zeroed memory, rounded up to whole pages.
    ///
    /// # Errors
    /// When memory is short.
    pub fn new(name: &str, bytes: usize) -> Result<Self> {
        let failed = |call| move |e| Error::system(call, e);
        let bytes = bytes.max(1).checked_next_multiple_of(PAGE).unwrap_or(usize::MAX);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create(name, flags).map_err(failed("memfd_create"))?);
        ftruncate(&file, bytes as u64).map_err(failed("ftruncate of a memfd"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(failed("sealing a memfd"))?;
        Ok(Self { file, bytes })
    }

    /// One of another process.
    ///
    /// # Errors
    /// When it could be truncated, or is no memfd.
    pub fn of_other(file: OwnedFd) -> Result<Self> {
        let file = File::from(file);
        let seals = match fcntl_get_seals(&file) {
            Err(Errno::INVAL) => SealFlags::empty(),
            seals => seals.map_err(|e| Error::system("fcntl(F_GET_SEALS)", e))?,
        };
        if !seals.contains(SealFlags::SHRINK) {
            return Err(Error::system("using a file that can be truncated as shared memory", Errno::INVAL));
        }
        let bytes = file.metadata().map_err(|e| Error::system("fstat of a memfd", e))?.len();
        Ok(Self { file, bytes: usize::try_from(bytes).unwrap_or(usize::MAX) })
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Maps all of it.
    ///
    /// # Errors
    /// When it cannot be mapped, or is empty.
    pub fn map(&self) -> Result<HostMem> {
        HostMem::of_shared(&self.file)
    }

    /// A descriptor for another process.
    ///
    /// # Errors
    /// When this process has too many files open.
    pub fn duplicate(&self) -> Result<OwnedFd> {
        Ok(self.file.try_clone().map_err(|e| Error::system("dup of a memfd", e))?.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_map_the_same_bytes() {
        let mine = Memfd::new("test", 5000).unwrap();
        assert_eq!(mine.bytes(), 8192);
        let theirs = Memfd::of_other(mine.duplicate().unwrap()).unwrap();
        mine.map().unwrap().write(4999, b"here").unwrap();
        let mut got = [0; 4];
        theirs.map().unwrap().read(4999, &mut got).unwrap();
        assert_eq!(&got, b"here");
        assert!(rustix::fs::ftruncate(&theirs.file, 4096).is_err());
    }

    #[test]
    fn files_that_can_be_truncated_are_refused() {
        let unsealed = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        assert!(Memfd::of_other(unsealed).is_err());
        assert!(Memfd::of_other(File::open("/dev/null").unwrap().into()).is_err());
    }
}
