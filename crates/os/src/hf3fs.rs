//! Ioctls of a 3FS mount and of ours, and NUMA placement of memory.

use std::os::fd::AsFd;

use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

use crate::file::query;
use crate::{Error, HostMem, Result};

/// The result of [`magic`] for a file of 3FS.
pub const MAGIC: u32 = 0x8f3f_5fff;
/// Bytes of a name in a link's argument, including the terminating zero.
pub const NAME_BYTES: usize = 256;
/// Maximum holes per call.
pub const MOST_HOLES: usize = 1000;

const GET_MAGIC: Opcode = opcode::read::<u32>(b'h', 2);
const HARDLINK: Opcode = opcode::write::<Hardlink>(b'h', 12);
const PUNCH_HOLES: Opcode = opcode::write::<Holes>(b'h', 13);

/// Makes a link in our daemon's folder of links in one request: `symlink` takes three.
pub const MAKE_LINK: Opcode = opcode::write::<LinkTexts>(b'o', 1);
/// Removes one.
pub const REMOVE_LINK: Opcode = opcode::write::<LinkTexts>(b'o', 2);
/// Bytes of its name and its target, each with a terminating zero.
pub const LINK_BYTES: usize = 512;

#[repr(C)]
struct LinkTexts {
    texts: [u8; LINK_BYTES],
}

#[repr(C)]
struct Hardlink {
    folder: u64,
    name: [u8; NAME_BYTES],
}

#[repr(C)]
struct Holes {
    count: i32,
    flags: usize,
    starts: [usize; MOST_HOLES],
    ends: [usize; MOST_HOLES],
}

/// The number by which a file system identifies itself as 3FS or compatible.
///
/// # Errors
/// When it does not answer.
pub fn magic(file: impl AsFd) -> Result<u32> {
    // SAFETY: this ioctl writes a 32-bit number at most.
    unsafe { query::<GET_MAGIC, u32>(file) }.map_err(|e| Error::system("asking for the magic number", e))
}

/// Adds a link to the file, in the folder with that inode number.
///
/// # Errors
/// When the file system refuses, or the name is too long.
pub fn hardlink(file: impl AsFd, folder: u64, name: &[u8]) -> Result<()> {
    let mut request = Hardlink { folder, name: [0; NAME_BYTES] };
    if name.len() >= NAME_BYTES {
        return Err(Error::system("linking a file", rustix::io::Errno::NAMETOOLONG));
    }
    request.name[..name.len()].copy_from_slice(name);
    // SAFETY: this ioctl reads the structure and retains nothing.
    unsafe { ioctl(file, Setter::<HARDLINK, Hardlink>::new(request)) }
        .map_err(|e| Error::system("linking a file", e))
}

/// Makes a link in our daemon's folder of links.
///
/// # Errors
/// When the daemon refuses, or is another that has no such call, or the texts are too long.
pub fn make_link(folder: impl AsFd, name: &[u8], target: &[u8]) -> rustix::io::Result<()> {
    let request = LinkTexts::new(name, target)?;
    // SAFETY: this ioctl reads the structure and retains nothing.
    unsafe { ioctl(folder, Setter::<MAKE_LINK, LinkTexts>::new(request)) }
}

/// Removes a link from our daemon's folder of links.
///
/// # Errors
/// As for [`make_link`].
pub fn remove_link(folder: impl AsFd, name: &[u8]) -> rustix::io::Result<()> {
    let request = LinkTexts::new(name, b"")?;
    // SAFETY: this ioctl reads the structure and retains nothing.
    unsafe { ioctl(folder, Setter::<REMOVE_LINK, LinkTexts>::new(request)) }
}

impl LinkTexts {
    fn new(name: &[u8], target: &[u8]) -> rustix::io::Result<Self> {
        let mut texts = [0; LINK_BYTES];
        let target_at = name.len() + 1;
        let (before, after) = texts.split_at_mut_checked(target_at).ok_or(rustix::io::Errno::NAMETOOLONG)?;
        // The last byte stays zero.
        let room = after.len().saturating_sub(1);
        let after = after.get_mut(..target.len()).filter(|_| target.len() <= room);
        before[..name.len()].copy_from_slice(name);
        after.ok_or(rustix::io::Errno::NAMETOOLONG)?.copy_from_slice(target);
        Ok(Self { texts })
    }
}

/// Punches holes into a file, given as start and end, which then read as zeroes.
///
/// # Errors
/// When the file system refuses, or there are too many.
pub fn punch_holes(file: impl AsFd, ranges: &[(usize, usize)], flags: usize) -> Result<()> {
    if ranges.len() > MOST_HOLES {
        return Err(Error::system("punching holes", rustix::io::Errno::INVAL));
    }
    let mut request =
        Box::new(Holes { count: ranges.len() as i32, flags, starts: [0; MOST_HOLES], ends: [0; MOST_HOLES] });
    for (place, (start, end)) in ranges.iter().enumerate() {
        (request.starts[place], request.ends[place]) = (*start, *end);
    }
    // SAFETY: this ioctl reads the structure and retains nothing.
    unsafe { ioctl(file, Setter::<PUNCH_HOLES, Holes>::new(*request)) }
        .map_err(|e| Error::system("punching holes", e))
}

impl HostMem {
    /// Prefers a NUMA node for the pages of memory that is not used yet. If that node is full they come from elsewhere;
    /// kernels without NUMA ignore this.
    pub fn prefer_node(&self, node: u32) {
        const PREFERRED: i32 = 1;
        let mask = 1_u64.checked_shl(node).unwrap_or(0);
        // SAFETY: the range is that of a mapping that self keeps, and the placement of its pages does not affect
        // its users; the mask lives across the call and has the 64 bits that the call is given as its length.
        unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.host_ptr(),
                self.len(),
                PREFERRED,
                &raw const mask,
                64_u64,
                0_u32,
            )
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calls_have_the_numbers_of_3fs() {
        assert_eq!([GET_MAGIC, HARDLINK, PUNCH_HOLES], [0x8004_6802, 0x4108_680c, 0x7e90_680d]);
    }

    #[test]
    fn links_are_two_texts() {
        assert_eq!([MAKE_LINK, REMOVE_LINK], [0x4200_6f01, 0x4200_6f02]);
        assert_eq!(LinkTexts::new(b"ab", b"/c").unwrap().texts[..6], *b"ab\0/c\0");
        let (whole, long) = ([b'x'; LINK_BYTES - 4], [b'x'; LINK_BYTES]);
        assert!(LinkTexts::new(b"ab", &whole).is_ok_and(|link| link.texts[LINK_BYTES - 2..] == *b"x\0"));
        for (name, target) in [(&b"abc"[..], &whole[..]), (&long, b""), (b"", &long), (&whole, b"abc")] {
            assert!(LinkTexts::new(name, target).is_err());
        }
        assert!(make_link(std::fs::File::open("/dev/null").unwrap(), b"a", b"b").is_err());
    }

    #[test]
    fn other_file_systems_have_no_number() {
        assert!(magic(std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
