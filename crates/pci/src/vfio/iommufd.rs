//! Ioctls of iommufd, and of VFIO for devices bound to it, as in `linux/iommufd.h` and `linux/vfio.h`.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::sys::{request, size_of, with};

const DEVICE_BIND: libc::Ioctl = request(18);
const DEVICE_ATTACH: libc::Ioctl = request(19);
const IOAS_ALLOC: libc::Ioctl = request(0x81 - 100);
const IOAS_RANGES: libc::Ioctl = request(0x84 - 100);
const IOAS_MAP: libc::Ioctl = request(0x85 - 100);
const IOAS_UNMAP: libc::Ioctl = request(0x86 - 100);
const IOAS_MAP_FILE: libc::Ioctl = request(0x8f - 100);

/// At the requested address, readable and writable by the device.
const MAP_FIXED_BOTH: u32 = 7;
/// Upper limit of ranges. A machine has a handful, around the addresses of its interrupts.
const MAX_RANGES: usize = 1024;

#[repr(C)]
struct Bind {
    argsz: u32,
    flags: u32,
    iommufd: i32,
    device: u32,
}

#[repr(C)]
struct Attach {
    argsz: u32,
    flags: u32,
    table: u32,
}

#[repr(C)]
struct Alloc {
    size: u32,
    flags: u32,
    space: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IovaRange {
    first: u64,
    last: u64,
}

#[repr(C)]
struct Ranges {
    size: u32,
    space: u32,
    count: u32,
    reserved: u32,
    at: u64,
    alignment: u64,
}

#[repr(C)]
struct IoasMap {
    size: u32,
    flags: u32,
    space: u32,
    reserved: u32,
    vaddr: u64,
    length: u64,
    iova: u64,
}

#[repr(C)]
struct MapFile {
    size: u32,
    flags: u32,
    space: u32,
    fd: i32,
    start: u64,
    length: u64,
    iova: u64,
}

#[repr(C)]
struct IoasUnmap {
    size: u32,
    space: u32,
    iova: u64,
    length: u64,
}

/// Binds a device to an iommufd. Closing the device unbinds it.
pub(super) fn bind(device: &File, iommufd: &File) -> io::Result<()> {
    let mut bind = Bind { argsz: size_of::<Bind>(), flags: 0, iommufd: iommufd.as_raw_fd(), device: 0 };
    // SAFETY: this is the request's structure, with its size.
    unsafe { with(device, DEVICE_BIND, &mut bind) }.map(drop)
}

/// Creates an address space.
pub(super) fn space(iommufd: &File) -> io::Result<u32> {
    let mut alloc = Alloc { size: size_of::<Alloc>(), flags: 0, space: 0 };
    // SAFETY: this is the request's structure, with its size.
    unsafe { with(iommufd, IOAS_ALLOC, &mut alloc) }?;
    Ok(alloc.space)
}

/// Attaches the device to the address space.
pub(super) fn attach(device: &File, space: u32) -> io::Result<()> {
    let mut attach = Attach { argsz: size_of::<Attach>(), flags: 0, table: space };
    // SAFETY: this is the request's structure, with its size.
    unsafe { with(device, DEVICE_ATTACH, &mut attach) }.map(drop)
}

/// The bus addresses that can be mapped, as first and last of each range. Attaching more devices may remove some.
pub(super) fn ranges(iommufd: &File, space: u32) -> io::Result<Vec<(u64, u64)>> {
    let mut found = vec![IovaRange::default(); 16];
    loop {
        let mut ask = Ranges {
            size: size_of::<Ranges>(),
            space,
            count: found.len() as u32,
            reserved: 0,
            at: found.as_mut_ptr() as u64,
            alignment: 0,
        };
        // SAFETY: this is the request's structure, with its size. The kernel writes at most as many ranges as there is
        // room for behind the pointer, and returns their number.
        match unsafe { with(iommufd, IOAS_RANGES, &mut ask) } {
            Ok(_) => found.truncate(ask.count as usize),
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => {
                let wanted = ask.count as usize;
                if wanted <= found.len() || wanted > MAX_RANGES {
                    return Err(error);
                }
                found = vec![IovaRange::default(); wanted];
                continue;
            }
            Err(error) => return Err(error),
        }
        found.retain(|range| range.first <= range.last);
        return Ok(found.iter().map(|range| (range.first, range.last)).collect());
    }
}

/// Maps memory of this process for the space's devices at `iova`.
///
/// # Safety
/// The memory stays mapped in this process until it is unmapped here, and is not subject to Rust's aliasing
/// rules meanwhile: the device may change it at any moment.
pub(super) unsafe fn map(
    iommufd: &File,
    space: u32,
    vaddr: *mut u8,
    iova: u64,
    length: u64,
) -> io::Result<()> {
    let (size, vaddr) = (size_of::<IoasMap>(), vaddr as u64);
    let mut map = IoasMap { size, flags: MAP_FIXED_BOTH, space, reserved: 0, vaddr, length, iova };
    // SAFETY: this is the request's structure, with its size; the caller vouches for the memory.
    unsafe { with(iommufd, IOAS_MAP, &mut map) }.map(drop)
}

/// Maps a part of a dma-buf, `(start, iova, length)`, for the space's devices; the kernel holds the buffer.
pub(super) fn map_file(
    iommufd: &File,
    space: u32,
    file: BorrowedFd<'_>,
    (start, iova, length): (u64, u64, u64),
) -> io::Result<()> {
    let (size, fd) = (size_of::<MapFile>(), file.as_raw_fd());
    let mut map = MapFile { size, flags: MAP_FIXED_BOTH, space, fd, start, length, iova };
    // SAFETY: this is the request's structure, with its size.
    unsafe { with(iommufd, IOAS_MAP_FILE, &mut map) }.map(drop)
}

pub(super) fn unmap(iommufd: &File, space: u32, iova: u64, length: u64) -> io::Result<()> {
    let mut unmap = IoasUnmap { size: size_of::<IoasUnmap>(), space, iova, length };
    // SAFETY: this is the request's structure, with its size.
    unsafe { with(iommufd, IOAS_UNMAP, &mut unmap) }?;
    if unmap.length == length { Ok(()) } else { Err(io::Error::other("only a part of it was mapped")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_those_of_the_interface() {
        let sizes = [size_of::<Bind>(), size_of::<Attach>(), size_of::<Alloc>(), size_of::<Ranges>()];
        assert_eq!(sizes, [16, 12, 12, 32]);
        assert_eq!([size_of::<IoasMap>(), size_of::<MapFile>(), size_of::<IoasUnmap>()], [40, 40, 24]);
        assert_eq!((IOAS_MAP, IOAS_MAP_FILE), (0x3b85, 0x3b8f));
    }
}
