//! The module's ioctls, as in `kmod/onehop.h`.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use rustix::event::{PollFd, PollFlags, poll};

/// The interface version of these structures.
pub(super) const ABI: u32 = 1;

/// Bits of [`RawInfo::flags`].
pub(super) const INFO_RESET: u32 = 1;
pub(super) const INFO_DMA_ON: u32 = 2;
pub(super) const INFO_RESET_NEEDED: u32 = 4;

/// Bits of [`Map::flags`].
pub(super) const MAP_READ: u32 = 1;
pub(super) const MAP_WRITE: u32 = 2;
pub(super) const MAP_NOPIN: u32 = 4;
pub(super) const MAP_CHUNKED: u32 = 8;

/// Values of [`Map::why`].
pub(super) const WHY_ROOM: u32 = 1;
pub(super) const WHY_MASK: u32 = 2;
pub(super) const WHY_CHUNK: u32 = 3;
pub(super) const WHY_BOUNCE: u32 = 4;
pub(super) const WHY_SHORT: u32 = 5;

/// Of [`StartArg::flags`].
pub(super) const START_UNRESET: u32 = 1;

/// `struct oh_info`
#[repr(C)]
#[derive(Clone, Default)]
pub(super) struct RawInfo {
    pub(super) abi: u32,
    pub(super) flags: u32,
    pub(super) missing: u32,
    pub(super) stopped: u32,
    pub(super) epoch: u32,
    pub(super) vectors: u32,
    pub(super) vendor: u16,
    pub(super) device: u16,
    pub(super) class_code: u32,
    pub(super) mappings: u32,
    pub(super) mask_bits: u32,
    pub(super) charged: u64,
    pub(super) bar_len: [u64; 6],
    reserved: [u64; 8],
}

/// `struct oh_seg`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Seg {
    pub(super) addr: u64,
    pub(super) len: u64,
}

/// `struct oh_map`
#[repr(C)]
#[derive(Clone, Default)]
pub(super) struct Map {
    pub(super) flags: u32,
    pub(super) fd: i32,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) chunk: u64,
    pub(super) segs: u64,
    pub(super) room: u32,
    pub(super) nsegs: u32,
    pub(super) id: u32,
    pub(super) why: u32,
    pub(super) bad_addr: u64,
    pub(super) bad_offset: u64,
    pub(super) bad_len: u64,
    pub(super) domain: u32,
    pub(super) bus: u8,
    pub(super) devfn: u8,
    pub(super) bar: u16,
    pub(super) reserved: [u64; 4],
}

#[repr(C)]
#[derive(Default)]
struct Unmap {
    id: u32,
    reserved: u32,
}

#[repr(C)]
#[derive(Default)]
struct StartArg {
    flags: u32,
    epoch: u32,
}

#[repr(C)]
#[derive(Default)]
struct Mask {
    bits: u32,
    reserved: u32,
}

#[repr(C)]
#[derive(Default)]
struct Irqs {
    fds: u64,
    count: u32,
    reserved: u32,
}

const READ: u32 = 2;
const WRITE: u32 = 1;

/// `_IOC(direction, 0xEB, number, sizeof(T))`
const fn request<T>(direction: u32, number: u32) -> libc::Ioctl {
    (direction << 30 | (size_of::<T>() as u32) << 16 | 0xEB << 8 | number) as libc::Ioctl
}

const INFO: libc::Ioctl = request::<RawInfo>(READ, 0x20);
const MAP_USER: libc::Ioctl = request::<Map>(READ | WRITE, 0x21);
const MAP_DMABUF: libc::Ioctl = request::<Map>(READ | WRITE, 0x22);
const MAP_PEER: libc::Ioctl = request::<Map>(READ | WRITE, 0x23);
const UNMAP: libc::Ioctl = request::<Unmap>(WRITE, 0x24);
const RESET: libc::Ioctl = request::<()>(0, 0x25);
const START: libc::Ioctl = request::<StartArg>(WRITE, 0x26);
const STOP: libc::Ioctl = request::<()>(0, 0x27);
const MASK: libc::Ioctl = request::<Mask>(WRITE, 0x28);
const IRQS: libc::Ioctl = request::<Irqs>(WRITE, 0x29);

/// Offset of a BAR in the device's file.
pub(super) const fn bar_offset(bar: u8) -> u64 {
    (bar as u64) << 44
}

/// # Safety
/// `value` is the structure of this request, whose size is part of the request's number; addresses in it are those of
/// memory that the request may use.
unsafe fn with<T>(file: &File, request: libc::Ioctl, value: &mut T) -> io::Result<()> {
    // SAFETY: the caller's promise; the value lives across the call.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut *value) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

pub(super) fn info(file: &File) -> io::Result<RawInfo> {
    let mut info = RawInfo::default();
    // SAFETY: this is the request's structure.
    unsafe { with(file, INFO, &mut info) }?;
    Ok(info)
}

pub(super) fn reset(file: &File) -> io::Result<()> {
    // SAFETY: the request takes nothing.
    unsafe { with(file, RESET, &mut ()) }
}

pub(super) fn start(file: &File, flags: u32, epoch: u32) -> io::Result<()> {
    // SAFETY: this is the request's structure.
    unsafe { with(file, START, &mut StartArg { flags, epoch }) }
}

pub(super) fn stop(file: &File) -> io::Result<()> {
    // SAFETY: the request takes nothing.
    unsafe { with(file, STOP, &mut ()) }
}

pub(super) fn mask(file: &File, bits: u32) -> io::Result<()> {
    // SAFETY: this is the request's structure.
    unsafe { with(file, MASK, &mut Mask { bits, reserved: 0 }) }
}

pub(super) fn unmap(file: &File, id: u32) -> io::Result<()> {
    // SAFETY: this is the request's structure.
    unsafe { with(file, UNMAP, &mut Unmap { id, reserved: 0 }) }
}

/// Sets an event fd for each vector; an empty list removes all.
pub(super) fn irqs(file: &File, fds: &[RawFd]) -> io::Result<()> {
    let at = if fds.is_empty() { 0 } else { fds.as_ptr() as u64 };
    // SAFETY: this is the request's structure; the descriptors live across the call, which reads them.
    unsafe { with(file, IRQS, &mut Irqs { fds: at, count: fds.len() as u32, reserved: 0 }) }
}

/// The kind of memory to map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum MemoryKind {
    User,
    DmaBuf,
    Peer,
}

/// Maps memory and fills `runs`. `map` holds the module's reason if it failed.
///
/// # Safety
/// Memory of this process ([`MemoryKind::User`]) stays mapped in it, and is not subject to Rust's aliasing rules, until it is
/// unmapped here: the device may change it at any moment.
pub(super) unsafe fn map(file: &File, kind: MemoryKind, map: &mut Map, runs: &mut [Seg]) -> io::Result<()> {
    map.segs = runs.as_mut_ptr() as u64;
    map.room = u32::try_from(runs.len()).unwrap_or(u32::MAX);
    let request = match kind {
        MemoryKind::User => MAP_USER,
        MemoryKind::DmaBuf => MAP_DMABUF,
        MemoryKind::Peer => MAP_PEER,
    };
    // SAFETY: this is the structure of all three; `runs` has the room that `map` states and lives across the call, and
    // the caller vouches for the memory.
    unsafe { with(file, request, map) }
}

/// Events on the device's file within this many milliseconds.
pub(super) fn events(file: &File, milliseconds: u32) -> io::Result<PollFlags> {
    let mut fds = [PollFd::new(file, PollFlags::PRI)];
    let limit = rustix::event::Timespec {
        tv_sec: i64::from(milliseconds / 1000),
        tv_nsec: i64::from(milliseconds % 1000) * 1_000_000,
    };
    match poll(&mut fds, Some(&limit)) {
        Ok(_) => Ok(fds[0].revents()),
        Err(rustix::io::Errno::INTR) => Ok(PollFlags::empty()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use super::*;

    /// Prints sizes and offsets in the C compiler's view of the header.
    const PROGRAM: &str = r#"
#include <stdio.h>
#include <stddef.h>
#include "onehop.h"
#define AT(s, f) offsetof(struct s, f)
int main(void) {
    unsigned long n[] = { OH_INFO, OH_MAP_USER, OH_MAP_DMABUF, OH_MAP_PEER, OH_UNMAP, OH_RESET, OH_START, OH_STOP,
        OH_MASK, OH_IRQS, OH_ABI, OH_BAR_OFFSET(3), AT(oh_info, class_code), AT(oh_info, charged), AT(oh_info, bar_len),
        AT(oh_map, chunk), AT(oh_map, nsegs), AT(oh_map, why), AT(oh_map, bad_len), AT(oh_map, domain), AT(oh_map, bar),
        OH_INFO_RESET_NEEDED, OH_MAP_NOPIN, OH_MAP_CHUNKED, OH_WHY_SHORT, OH_START_UNRESET };
    for (unsigned i = 0; i < sizeof(n) / sizeof(*n); i++) printf("%lu ", n[i]);
    return 0;
}"#;

    #[test]
    fn structures_and_numbers_are_the_headers() {
        let folder = std::env::temp_dir().join(format!("onehop-pci-header-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (source, program) = (folder.join("a.c"), folder.join("a"));
        std::fs::write(&source, PROGRAM).unwrap();
        let kmod = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kmod");
        let built = Command::new("cc").arg("-I").arg(kmod).arg(&source).arg("-o").arg(&program).status();
        if built.is_err() {
            let _ = writeln!(io::stderr(), "SKIPPED: cc is not installed");
            return;
        }
        let said = Command::new(&program).output().unwrap().stdout;
        let theirs: Vec<u64> =
            String::from_utf8(said).unwrap().split_whitespace().map(|n| n.parse().unwrap()).collect();
        let calls = [INFO, MAP_USER, MAP_DMABUF, MAP_PEER, UNMAP, RESET, START, STOP, MASK, IRQS];
        let mut ours: Vec<u64> = calls.iter().map(|call| *call as u32 as u64).collect();
        ours.extend([u64::from(ABI), bar_offset(3)]);
        let at = [
            std::mem::offset_of!(RawInfo, class_code),
            std::mem::offset_of!(RawInfo, charged),
            std::mem::offset_of!(RawInfo, bar_len),
            std::mem::offset_of!(Map, chunk),
            std::mem::offset_of!(Map, nsegs),
            std::mem::offset_of!(Map, why),
            std::mem::offset_of!(Map, bad_len),
            std::mem::offset_of!(Map, domain),
            std::mem::offset_of!(Map, bar),
        ];
        ours.extend(at.map(|at| at as u64));
        ours.extend([INFO_RESET_NEEDED, MAP_NOPIN, MAP_CHUNKED, WHY_SHORT, START_UNRESET].map(u64::from));
        assert_eq!(ours, theirs);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
