//! VFIO's ioctls for type1 containers, groups and devices, as in `linux/vfio.h`.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// VFIO's ioctls encode no size: `_IO(';', 100 + n)`.
pub(super) const fn request(n: u32) -> libc::Ioctl {
    ((b';' as u32) << 8 | (100 + n)) as libc::Ioctl
}

const GET_API_VERSION: libc::Ioctl = request(0);
const CHECK_EXTENSION: libc::Ioctl = request(1);
const SET_IOMMU: libc::Ioctl = request(2);
const GROUP_GET_STATUS: libc::Ioctl = request(3);
const GROUP_SET_CONTAINER: libc::Ioctl = request(4);
const GROUP_GET_DEVICE_FD: libc::Ioctl = request(6);
const DEVICE_GET_INFO: libc::Ioctl = request(7);
const DEVICE_GET_REGION_INFO: libc::Ioctl = request(8);
const DEVICE_RESET: libc::Ioctl = request(11);
const IOMMU_GET_INFO: libc::Ioctl = request(12);
const IOMMU_MAP_DMA: libc::Ioctl = request(13);
const IOMMU_UNMAP_DMA: libc::Ioctl = request(14);

/// The only version of the interface.
pub(super) const API_VERSION: i32 = 0;
/// Version 2 of the type1 IOMMU: mappings can only be undone as they were made.
pub(super) const TYPE1_V2: i32 = 3;
/// The region of a PCI device's config space; the BARs are before it.
pub(super) const CONFIG_REGION: u32 = 7;

const GROUP_VIABLE: u32 = 1;
const DEVICE_CAN_RESET: u32 = 1;
const REGION_CAN_MAP: u32 = 1 << 2;
const IOMMU_HAS_CAPS: u32 = 1 << 1;
const CAP_IOVA_RANGES: u16 = 1;
/// Upper limit of an answer with capabilities.
const MAX_INFO: usize = 64 << 10;

#[repr(C)]
#[derive(Default)]
struct GroupStatus {
    argsz: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct DeviceInfo {
    argsz: u32,
    flags: u32,
    regions: u32,
    irqs: u32,
    cap_offset: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Default)]
struct RegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    size: u64,
    offset: u64,
}

#[repr(C)]
struct DmaMap {
    argsz: u32,
    flags: u32,
    vaddr: u64,
    iova: u64,
    size: u64,
}

#[repr(C)]
struct DmaUnmap {
    argsz: u32,
    flags: u32,
    iova: u64,
    size: u64,
}

/// `READ | WRITE`: the device may do both.
const MAP_BOTH: u32 = 3;

/// A region of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct VfioRegion {
    pub(super) size: u64,
    /// Its offset in the device's file.
    pub(super) offset: u64,
    pub(super) can_map: bool,
}

/// # Safety
/// `arg` is what the request expects.
unsafe fn call(file: &impl AsRawFd, request: libc::Ioctl, arg: *mut libc::c_void) -> io::Result<i32> {
    // SAFETY: the caller passes what the request expects.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), request, arg) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done) }
}

/// # Safety
/// The request takes a pointer to a `T`, and reads and writes no more than that: if it needs the size, the first field
/// contains it. Addresses in it are those of memory that the request may use.
pub(super) unsafe fn with<T>(file: &impl AsRawFd, request: libc::Ioctl, value: &mut T) -> io::Result<i32> {
    // SAFETY: the caller's promise; the value lives across the call.
    unsafe { call(file, request, (&raw mut *value).cast()) }
}

/// # Safety
/// The request takes a number in place of the pointer.
unsafe fn number(file: &impl AsRawFd, request: libc::Ioctl, value: i32) -> io::Result<i32> {
    // SAFETY: the caller's promise.
    unsafe { call(file, request, value as usize as *mut libc::c_void) }
}

pub(super) const fn size_of<T>() -> u32 {
    std::mem::size_of::<T>() as u32
}

pub(super) fn api_version(container: &File) -> io::Result<i32> {
    // SAFETY: the request takes a number.
    unsafe { number(container, GET_API_VERSION, 0) }
}

pub(super) fn has_type1_v2(container: &File) -> io::Result<bool> {
    // SAFETY: the request takes a number.
    let answer = unsafe { number(container, CHECK_EXTENSION, TYPE1_V2) }?;
    Ok(answer > 0)
}

pub(super) fn set_iommu(container: &File) -> io::Result<()> {
    // SAFETY: the request takes a number.
    unsafe { number(container, SET_IOMMU, TYPE1_V2) }.map(drop)
}

/// Whether no other program drives a device of the group.
pub(super) fn is_viable(group: &File) -> io::Result<bool> {
    let mut status = GroupStatus { argsz: size_of::<GroupStatus>(), flags: 0 };
    // SAFETY: this is the request's structure, with its size.
    unsafe { with(group, GROUP_GET_STATUS, &mut status) }?;
    Ok(status.flags & GROUP_VIABLE != 0)
}

pub(super) fn set_container(group: &File, container: &File) -> io::Result<()> {
    // SAFETY: the request takes a pointer to a descriptor.
    unsafe { with(group, GROUP_SET_CONTAINER, &mut container.as_raw_fd()) }.map(drop)
}

pub(super) fn device(group: &File, name: &std::ffi::CStr) -> io::Result<OwnedFd> {
    // SAFETY: the request takes a string that ends in a zero byte, and only reads it.
    let fd = unsafe { call(group, GROUP_GET_DEVICE_FD, name.as_ptr().cast_mut().cast()) }?;
    // SAFETY: the request returns a new descriptor, which is ours.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(super) fn can_reset(device: &File) -> io::Result<bool> {
    let mut info = DeviceInfo { argsz: size_of::<DeviceInfo>(), ..DeviceInfo::default() };
    // SAFETY: this is the request's structure, with its size.
    unsafe { with(device, DEVICE_GET_INFO, &mut info) }?;
    Ok(info.flags & DEVICE_CAN_RESET != 0)
}

pub(super) fn reset(device: &File) -> io::Result<()> {
    // SAFETY: the request takes nothing.
    unsafe { number(device, DEVICE_RESET, 0) }.map(drop)
}

pub(super) fn region(device: &File, index: u32) -> io::Result<VfioRegion> {
    let mut info = RegionInfo { argsz: size_of::<RegionInfo>(), index, ..RegionInfo::default() };
    // SAFETY: this is the request's structure, with its size.
    unsafe { with(device, DEVICE_GET_REGION_INFO, &mut info) }?;
    Ok(VfioRegion { size: info.size, offset: info.offset, can_map: info.flags & REGION_CAN_MAP != 0 })
}

/// Maps memory of this process for the container's devices at `iova`.
///
/// # Safety
/// The memory stays mapped in this process until it is unmapped here, and is not subject to Rust's aliasing
/// rules meanwhile: the device may change it at any moment.
pub(super) unsafe fn map(container: &File, vaddr: *mut u8, iova: u64, size: u64) -> io::Result<()> {
    let (argsz, vaddr) = (size_of::<DmaMap>(), vaddr as u64);
    let mut map = DmaMap { argsz, flags: MAP_BOTH, vaddr, iova, size };
    // SAFETY: this is the request's structure, with its size; the caller vouches for the memory.
    unsafe { with(container, IOMMU_MAP_DMA, &mut map) }.map(drop)
}

pub(super) fn unmap(container: &File, iova: u64, size: u64) -> io::Result<()> {
    let mut unmap = DmaUnmap { argsz: size_of::<DmaUnmap>(), flags: 0, iova, size };
    // SAFETY: this is the request's structure, with its size.
    unsafe { with(container, IOMMU_UNMAP_DMA, &mut unmap) }?;
    if unmap.size == size { Ok(()) } else { Err(io::Error::other("only a part of it was mapped")) }
}

/// The bus addresses that the IOMMU can map, as first and last of each range; empty if not reported.
pub(super) fn iova_ranges(container: &File) -> io::Result<Vec<(u64, u64)>> {
    // A vector of words, so that it is aligned for the structure.
    let mut words = vec![0_u64; 16];
    loop {
        let bytes = words.len() * 8;
        words[0] = bytes as u64;
        // SAFETY: the structure starts with its size, and the kernel writes no more than that.
        unsafe { call(container, IOMMU_GET_INFO, words.as_mut_ptr().cast()) }?;
        let wanted = words[0] as u32 as usize;
        if wanted <= bytes || wanted > MAX_INFO {
            break;
        }
        words = vec![0; wanted.div_ceil(8)];
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    Ok(parse_ranges(&bytes))
}

/// `struct vfio_iommu_type1_info`: argsz, flags, page sizes, offset of the first capability; each of these an id, a version
/// and the next one's offset, here with a count and pairs.
pub(crate) fn parse_ranges(info: &[u8]) -> Vec<(u64, u64)> {
    let word = |at: usize| info.get(at..at + 4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
    let wide = |at: usize| Some(u64::from(word(at)?) | u64::from(word(at + 4)?) << 32);
    let mut ranges = Vec::new();
    if word(4).unwrap_or(0) & IOMMU_HAS_CAPS == 0 {
        return ranges;
    }
    let mut at = word(16).unwrap_or(0) as usize;
    // Ends even for a circular list.
    for _ in 0..64 {
        let (Some(id), Some(next), true) = (word(at), word(at + 4), at != 0) else { break };
        if id as u16 == CAP_IOVA_RANGES {
            let count = word(at + 8).unwrap_or(0) as usize;
            let pair = |i: usize| Some((wide(at + 16 + i * 16)?, wide(at + 24 + i * 16)?));
            ranges.extend((0..count.min(MAX_INFO / 16)).map_while(pair));
        }
        at = next as usize;
    }
    ranges.retain(|(first, last)| first <= last);
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(flags: u32, first: u32, caps: &[u32]) -> Vec<u8> {
        let mut words = vec![0, flags, 0, 0, first, 0];
        words.extend(caps);
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn ranges_are_found_among_the_capabilities() {
        let other = [3, 40, 7, 0];
        let ranges = [1 | 1 << 16, 0, 2, 0, 0, 0, 0xfedf_ffff, 0, 0xfef0_0000, 0, 0xffff_ffff, 0x7f];
        let both: Vec<u32> = other.iter().chain(&ranges).copied().collect();
        let found = vec![(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)];
        assert_eq!(parse_ranges(&info(3, 24, &both)), found);
        assert_eq!(parse_ranges(&info(1, 24, &both)), []);
    }

    #[test]
    fn nonsense_ends() {
        let circle = [1, 24, u32::MAX, 0, 5, 0, 4, 0];
        assert!(parse_ranges(&info(2, 24, &circle)).is_empty());
        assert!(parse_ranges(&info(2, u32::MAX, &circle)).is_empty());
        assert!(parse_ranges(&info(2, 40, &circle)).is_empty());
        assert!(parse_ranges(&[1, 2, 3]).is_empty() && parse_ranges(&[]).is_empty());
    }
}
