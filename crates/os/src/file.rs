//! A file's kind, and what only ioctls report: its extents, its generation, its file system.

use std::os::fd::AsFd;

use rustix::fs::FileType;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use crate::{Error, Result};

/// A name for what is not a regular file.
#[must_use]
pub fn oddity(kind: FileType) -> &'static str {
    match kind {
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        FileType::BlockDevice => "a block device",
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        _ => "of a kind that is not known",
    }
}

/// Extents per call: more are not faster.
const PER_CALL: usize = 128;
const FIEMAP_FLAG_SYNC: u32 = 1;

/// The flags of [`FileExtent::flags`], as the kernel numbers them.
pub mod extent_flag {
    /// The file's last extent.
    pub const LAST: u32 = 0x1;
    /// The location is unknown.
    pub const UNKNOWN: u32 = 0x2;
    /// Not allocated yet.
    pub const DELALLOC: u32 = 0x4;
    /// It can only be read through the file system.
    pub const ENCODED: u32 = 0x8;
    /// It is encrypted.
    pub const DATA_ENCRYPTED: u32 = 0x80;
    /// Offsets are not multiples of the block size.
    pub const NOT_ALIGNED: u32 = 0x100;
    /// It is stored among metadata.
    pub const DATA_INLINE: u32 = 0x200;
    /// It shares its block with other files' ends.
    pub const DATA_TAIL: u32 = 0x400;
    /// Allocated but never written: reads as zeros.
    pub const UNWRITTEN: u32 = 0x800;
    /// The file system has no extents; the kernel merged adjacent blocks.
    pub const MERGED: u32 = 0x1000;
    /// Shared with other files.
    pub const SHARED: u32 = 0x2000;
}

/// Contiguous bytes of a file, as FIEMAP reports them.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FileExtent {
    /// The first byte in the file.
    pub logical: u64,
    /// The first byte on the file system's device.
    pub physical: u64,
    /// How many.
    pub len: u64,
    reserved64: [u64; 2],
    /// See [`extent_flag`].
    pub flags: u32,
    reserved: [u32; 3],
}

impl FileExtent {
    /// An extent as the kernel would report it, for tests.
    #[must_use]
    pub fn new(logical: u64, physical: u64, len: u64, flags: u32) -> Self {
        Self { logical, physical, len, flags, ..Self::default() }
    }
}

/// The fixed part of FIEMAP's argument, whose size is in the ioctl number.
#[repr(C)]
#[derive(Default)]
struct FiemapHead {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
}

#[repr(C)]
struct FiemapRequest {
    head: FiemapHead,
    extents: [FileExtent; PER_CALL],
}

const FIEMAP: Opcode = opcode::read_write::<FiemapHead>(b'f', 11);
/// Declared with a `long`, though file systems write an `int`.
const GETVERSION: Opcode = opcode::read::<u64>(b'v', 1);
const GETFSUUID: Opcode = opcode::read::<FsUuid>(0x15, 0);
const FSGETXATTR: Opcode = opcode::read::<FsXattr>(b'X', 31);

#[repr(C)]
#[derive(Default)]
struct FsUuid {
    len: u8,
    bytes: [u8; 16],
}

#[repr(C)]
#[derive(Default)]
struct FsXattr {
    flags: u32,
    rest: [u32; 6],
}

/// An ioctl's report about a file. The value starts as zeroes, because a FUSE daemon may report success and return
/// fewer bytes than requested.
///
/// # Safety
/// The ioctl writes no more than a `T`, and a `T` consists of integers.
pub(crate) unsafe fn query<const CALL: Opcode, T: Default>(file: impl AsFd) -> rustix::io::Result<T> {
    let mut value = T::default();
    // SAFETY: the caller's promise; all bits are valid.
    unsafe { ioctl(file, Updater::<CALL, T>::new(&mut value)) }?;
    Ok(value)
}

/// The extents of a file from byte `start` on, as many as one call returns; empty if there are no more. Data that is
/// only in memory is written to the device first.
///
/// # Errors
/// When the file system does not report them.
pub fn extents(file: impl AsFd, start: u64) -> Result<Vec<FileExtent>> {
    let head = FiemapHead {
        start,
        length: u64::MAX - start,
        flags: FIEMAP_FLAG_SYNC,
        count: PER_CALL as u32,
        ..FiemapHead::default()
    };
    let mut request = FiemapRequest { head, extents: [FileExtent::default(); PER_CALL] };
    // SAFETY: FIEMAP takes this head, and writes it and at most `count` extents behind it: both are in `request`, whose
    // fields are integers, for which all bits are valid.
    let done = unsafe { ioctl(file, Updater::<FIEMAP, FiemapRequest>::new(&mut request)) };
    done.map_err(|e| Error::system("FIEMAP of the file", e))?;
    let mapped = (request.head.mapped as usize).min(PER_CALL);
    Ok(request.extents[..mapped].to_vec())
}

/// The file's generation: distinguishes files that had the same inode number.
///
/// # Errors
/// When the file system has no generations.
pub fn generation(file: impl AsFd) -> Result<u32> {
    let mut value = [0_u32; 2];
    // SAFETY: FS_IOC_GETVERSION writes an int, or a long in file systems that follow its declaration: `value` has room
    // for both, and is initialised for the first.
    let done = unsafe { ioctl(file, Updater::<GETVERSION, [u32; 2]>::new(&mut value)) };
    done.map_err(|e| Error::system("FS_IOC_GETVERSION of the file", e))?;
    Ok(value[0])
}

/// The identifier of the file system that a file is on.
///
/// # Errors
/// When the file system or the kernel (before 6.9) does not report it.
pub fn fs_uuid(file: impl AsFd) -> Result<[u8; 16]> {
    // SAFETY: FS_IOC_GETFSUUID writes one `fsuuid2` at most, which `FsUuid` is.
    let value = unsafe { query::<GETFSUUID, FsUuid>(file) };
    let value = value.map_err(|e| Error::system("FS_IOC_GETFSUUID of the file", e))?;
    if usize::from(value.len) != value.bytes.len() {
        return Err(Error::system("FS_IOC_GETFSUUID of the file", std::io::ErrorKind::InvalidData));
    }
    Ok(value.bytes)
}

/// Whether XFS stores a file on its realtime device, which extents do not show.
///
/// # Errors
/// When the file system does not report it.
pub fn is_realtime(file: impl AsFd) -> Result<bool> {
    const REALTIME: u32 = 1;
    // SAFETY: FS_IOC_FSGETXATTR writes one `fsxattr` of 28 bytes at most, which `FsXattr` is.
    let value = unsafe { query::<FSGETXATTR, FsXattr>(file) };
    let value = value.map_err(|e| Error::system("FS_IOC_FSGETXATTR of the file", e))?;
    let _ = value.rest;
    Ok(value.flags & REALTIME != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_calls_have_the_kernels_numbers() {
        assert_eq!(FIEMAP, 0xC020_660B);
        assert_eq!(GETVERSION, 0x8008_7601);
        assert_eq!(GETFSUUID, 0x8011_1500);
        assert_eq!(FSGETXATTR, 0x801C_581F);
        assert_eq!(size_of::<FileExtent>(), 56);
        assert_eq!(size_of::<FsXattr>(), 28);
    }

    /// As a FUSE daemon may.
    #[test]
    fn unwritten_results_of_a_call_are_zero() {
        // FIOCLEX, which takes nothing and writes nothing.
        const NOTHING: Opcode = 0x5451;
        let file = std::fs::File::open("/dev/null").unwrap();
        for _ in 0..100 {
            let used = std::hint::black_box([0xa5_u8; 4096]);
            // SAFETY: the call writes nothing.
            let value = unsafe { query::<NOTHING, FsXattr>(&file) }.unwrap();
            assert!(value.flags == 0 && value.rest == [0; 6] && used[0] == 0xa5);
        }
    }

    #[test]
    fn a_file_of_this_machine_has_extents_or_the_file_system_says_no() {
        let path = std::env::temp_dir().join(format!("onehop-os-file-{}", std::process::id()));
        let mut file =
            std::fs::File::options().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
        file.write_all(&vec![7; 100_000]).unwrap();
        if let Ok(found) = extents(&file, 0) {
            assert!(!found.is_empty() && found[0].logical == 0);
            assert!(found.iter().map(|e| e.len).sum::<u64>() >= 100_000);
            assert_ne!(found.last().unwrap().flags & extent_flag::LAST, 0);
            assert_eq!(extents(&file, 1 << 40).unwrap(), []);
        }
        std::fs::remove_file(path).unwrap();
    }
}
