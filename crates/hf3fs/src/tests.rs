//! The exported functions, called within one process, so that the sanitizers of `.ci/sanitize` can check them. There is
//! no daemon: the folder of links is an ordinary one.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use onehop_os::{HostMem, Semaphore};

use crate::gpu::*;
use crate::host::*;
use crate::rings::*;
use crate::types::{Cqe, GPU_MARK, GpuHandle, Ior, Iov, PATH_BYTES};

/// A folder that looks like a mount.
struct Folder {
    top: PathBuf,
    semaphore: PathBuf,
}

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("onehop-hf3fs-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let top = std::env::temp_dir().join(&name);
        let semaphore = PathBuf::from(format!("/dev/shm/sem.{name}"));
        std::fs::create_dir_all(top.join("3fs-virt/iovs")).unwrap();
        let file = File::options().read(true).write(true).create_new(true).open(&semaphore).unwrap();
        file.set_len(Semaphore::BYTES as u64).unwrap();
        Semaphore::at(&HostMem::of_shared(&file).unwrap(), 0).unwrap().initialise().unwrap();
        for link in ["submit-ios", "submit-ios.ph", "submit-ios.pl"] {
            std::os::unix::fs::symlink(&semaphore, top.join("3fs-virt/iovs").join(link)).unwrap();
        }
        Self { top, semaphore }
    }

    fn name(&self) -> CString {
        CString::new(self.top.as_os_str().as_bytes()).unwrap()
    }

    /// The number of buffers and rings that are published here.
    fn published(&self) -> usize {
        std::fs::read_dir(self.top.join("3fs-virt/iovs")).unwrap().count() - 3
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.top);
        let _ = std::fs::remove_file(&self.semaphore);
    }
}

/// A structure with all bytes set to `byte`.
fn filled<T>(byte: u8) -> MaybeUninit<T> {
    let mut made = MaybeUninit::<T>::uninit();
    // SAFETY: the memory is that of a T.
    unsafe { made.as_mut_ptr().cast::<u8>().write_bytes(byte, size_of::<T>()) };
    made
}

fn iov(byte: u8) -> Iov {
    // SAFETY: its fields are numbers and pointers, so any bytes are valid.
    unsafe { filled::<Iov>(byte).assume_init() }
}

fn ior(byte: u8) -> Ior {
    // SAFETY: as above.
    unsafe { filled::<Ior>(byte).assume_init() }
}

/// A copy, as C programs make by assignment.
fn copy<T>(of: &T) -> T {
    // SAFETY: these structures own nothing.
    unsafe { std::ptr::read(of) }
}

const INVALID: c_int = -libc::EINVAL;

/// Calls every function that takes a structure, with invalid structures or null.
fn refuse(iov: *mut Iov, ior: *mut Ior) {
    let (mut handle, mut cqe) = (filled::<GpuHandle>(1), filled::<Cqe>(2));
    let mut bytes = [7u8; 64];
    // SAFETY: both are null or structures, and the rest lives across the calls.
    unsafe {
        assert_eq!(hf3fs_prep_io(ior, iov, true, bytes.as_mut_ptr().cast(), 0, 0, 1, null()), INVALID);
        assert_eq!(hf3fs_submit_ios(ior), INVALID);
        assert_eq!(hf3fs_wait_for_ios(ior, cqe.as_mut_ptr(), 1, 1, null()), INVALID);
        assert!(!hf3fs_iov_is_gpu(iov));
        assert_eq!(hf3fs_iov_gpu_device(iov), -1);
        assert_eq!(hf3fs_iovsync_gpu(iov, 0), INVALID);
        assert_eq!(hf3fs_iov_export_gpu(iov, handle.as_mut_ptr()), INVALID);
        assert_eq!(onehop_iov_read(iov, 0, bytes.as_mut_ptr().cast(), usize::MAX), INVALID);
        assert_eq!(onehop_iov_write(iov, 0, bytes.as_ptr().cast(), usize::MAX), INVALID);
        hf3fs_iovunlink(iov);
        hf3fs_iovunlink_gpu(iov);
        hf3fs_iovdestroy_gpu(iov);
        hf3fs_iovdestroy(iov);
        hf3fs_iordestroy(ior);
        let read = handle.assume_init().data;
        assert!(read.iter().all(|byte| *byte == 1) && bytes == [7; 64]);
    }
}

#[test]
fn structures_that_name_nothing_are_refused() {
    refuse(null_mut(), null_mut());
    for byte in [0, 0x5a, 0xff] {
        for numa in [-1, GPU_MARK] {
            let mut iov = iov(byte);
            iov.numa = numa;
            refuse(&mut iov, &mut ior(byte));
        }
    }
}

#[test]
fn arguments_are_checked_at_their_bounds() {
    let longest = CString::new([b'a'; PATH_BYTES - 1]).unwrap();
    let too_long = CString::new([b'a'; PATH_BYTES]).unwrap();
    let id = [3u8; 16];
    let wrap = |at: *mut Iov, id: *const u8, mount: *const c_char| {
        // SAFETY: null or writable, sixteen bytes, and a string.
        unsafe { hf3fs_iovwrap(at, 0x1000 as *mut c_void, id, mount, 4096, 0, -1) }
    };
    // The memory around the structure is not written.
    let mut iovs = [iov(0x5a), iov(0x5a), iov(0x5a)];
    assert_eq!(wrap(&mut iovs[1], id.as_ptr(), longest.as_ptr()), 0);
    assert!(
        iovs[1].mount_point[PATH_BYTES - 2] == b'a' as c_char && iovs[1].mount_point[PATH_BYTES - 1] == 0
    );
    assert!(iovs[1].id == id && iovs[1].handle.is_null() && iovs[1].size == 4096);
    for iov in [&iovs[0], &iovs[2]] {
        assert!(iov.id == [0x5a; 16] && iov.numa == 0x5a5a_5a5a && iov.base.addr() == 0x5a5a_5a5a_5a5a_5a5a);
    }
    let mut iov = iov(0x5a);
    for (at, id, mount) in [
        (null_mut(), id.as_ptr(), longest.as_ptr()),
        (&raw mut iov, null(), longest.as_ptr()),
        (&raw mut iov, id.as_ptr(), null()),
        (&raw mut iov, id.as_ptr(), c"".as_ptr()),
        (&raw mut iov, id.as_ptr(), too_long.as_ptr()),
    ] {
        assert_eq!(wrap(at, id, mount), INVALID);
    }
    assert_eq!((iov.id, iov.numa), ([0x5a; 16], 0x5a5a_5a5a));
    // SAFETY: null, or strings and arrays.
    unsafe {
        assert!(hf3fs_extract_mount_point(null_mut(), 0, null()) == -1);
        assert!(hf3fs_extract_mount_point(null_mut(), -1, c"/".as_ptr()) == -1);
        assert_eq!(hf3fs_hardlink(null(), c"there".as_ptr()), libc::EINVAL);
        assert_eq!(hf3fs_hardlink(c"".as_ptr(), null()), libc::EINVAL);
        assert_eq!(hf3fs_punchhole(-1, 1, null(), null(), 0), libc::EBADF);
        assert_eq!(hf3fs_punchhole(0, c_int::MAX, null(), null(), 0), libc::EINVAL);
        assert_eq!(hf3fs_punchhole(0, -1, null(), null(), 0), libc::EINVAL);
        assert_eq!(hf3fs_punchhole(0, 1, null(), null(), 0), libc::EINVAL);
    }
    for fd in [-1, c_int::MIN, c_int::MAX, 0] {
        assert!(!hf3fs_is_hf3fs(fd) && hf3fs_reg_fd(fd, 0) > 0);
        hf3fs_dereg_fd(fd);
    }
    assert_eq!(hf3fs_ior_size(8), 4144 + 96 * 9);
    assert!(hf3fs_ior_size(c_int::MIN) == 0 && hf3fs_ior_size(c_int::MAX) > 0);
}

#[test]
fn a_transfer_lies_within_its_buffer() {
    let mut buffer = iov(0);
    (buffer.base, buffer.size) = (0x10_000 as *mut u8, 4096);
    let offset = |at: u64, len: u64| offset_in(&buffer, at as *const c_void, len).ok();
    assert_eq!(offset(0x10_000, 4096), Some(0));
    assert_eq!(offset(0x10_fff, 1), Some(4095));
    for (at, len) in [(0x10_000, 4097), (0x10_fff, 2), (0xffff, 1), (0x11_000, 1), (0x10_000, 0), (0, 1)] {
        assert_eq!(offset(at, len), None, "{len} bytes at {at:#x}");
    }
    assert_eq!(offset(0x10_001, u64::MAX), None);
    assert_eq!(offset(u64::MAX, u64::MAX), None);
}

#[test]
fn buffers_and_rings_come_and_go_without_an_answer() {
    let folder = Folder::new();
    let name = folder.name();
    let (mut buffer, mut ring) = (iov(0x5a), ior(0x5a));
    // SAFETY: structures and a string; writes are within the buffer.
    unsafe {
        assert_eq!(hf3fs_iovcreate(&mut buffer, name.as_ptr(), 8192, 4096, -1), 0);
        assert_eq!(hf3fs_iorcreate4(&mut ring, name.as_ptr(), 8, true, 0, 0, -1, 0), 0);
        assert_eq!((folder.published(), hf3fs_io_entries(&ring)), (2, 8));
        buffer.base.write_bytes(7, 8192);
        let mut other = iov(0);
        assert_eq!(hf3fs_iovopen(&mut other, buffer.id.as_ptr(), name.as_ptr(), 8192, 4096, -1), 0);
        assert_eq!(other.base.add(8191).read(), 7);
        hf3fs_iovdestroy(&mut other);
        for size in [0, 8193, usize::MAX] {
            let open = hf3fs_iovopen(&mut other, buffer.id.as_ptr(), name.as_ptr(), size, 4096, -1);
            assert_eq!(open, INVALID, "{size}");
        }
        // The file is not on a mount, and there is no daemon for GPU memory.
        let at = buffer.base.cast();
        assert_eq!(hf3fs_prep_io(&ring, &buffer, true, at, 0, 0, 4096, null()), -libc::EBADF);
        assert_eq!(hf3fs_prep_io(&ring, &buffer, false, at, 0, 0, 4096, null()), INVALID);
        assert_eq!(hf3fs_prep_io(&ring, &buffer, true, at, 0, 0, 8193, null()), INVALID);
        assert!(hf3fs_iovcreate_gpu(&mut other, name.as_ptr(), 4096, 0, 0) < 0);
        assert_eq!(hf3fs_submit_ios(&ring), 0);
        let mut cqe = filled::<Cqe>(0x5a);
        let until = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + Duration::from_millis(20);
        let until = libc::timespec { tv_sec: until.as_secs() as i64, tv_nsec: until.subsec_nanos().into() };
        let begun = Instant::now();
        assert_eq!(hf3fs_wait_for_ios(&ring, cqe.as_mut_ptr(), 1, 1, &until), 0);
        assert!(begun.elapsed() < Duration::from_secs(5));
        assert_eq!(cqe.assume_init().index, 0x5a5a_5a5a);
        let (mut same_buffer, mut same_ring) = (copy(&buffer), copy(&ring));
        // Handles of another kind.
        std::mem::swap(&mut same_buffer.handle, &mut same_ring.handle);
        refuse(&mut same_buffer, &mut same_ring);
        assert_eq!(folder.published(), 2, "a handle of another kind was accepted");
        let (mut same_buffer, mut same_ring) = (copy(&buffer), copy(&ring));
        hf3fs_iordestroy(&mut ring);
        hf3fs_iovdestroy(&mut buffer);
        assert!(buffer.handle.is_null() && ring.handle.is_null());
        assert_eq!(folder.published(), 0);
        refuse(&mut same_buffer, &mut same_ring);
        // Buffers larger than memory, and invalid rings.
        for (size, block) in [(0, 0), (usize::MAX, 0), (4096, 8192)] {
            assert!(hf3fs_iovcreate(&mut buffer, name.as_ptr(), size, block, -1) < 0, "{size} {block}");
        }
        for entries in [0, -1, c_int::MIN, c_int::MAX] {
            assert!(hf3fs_iorcreate(&mut ring, name.as_ptr(), entries, true, 0, -1) < 0, "{entries}");
        }
        for (depth, timeout) in [(c_int::MIN, 0), (9, 0), (0, -1)] {
            let made = hf3fs_iorcreate3(&mut ring, name.as_ptr(), 8, true, depth, 0, timeout, -1);
            assert_eq!(made, INVALID, "{depth} {timeout}");
        }
    }
    assert_eq!(folder.published(), 0);
}

/// Threads share and copy structures: only the first destruction has an effect.
#[test]
fn threads_use_and_destroy_the_same_at_once() {
    const ROUNDS: usize = 30;
    let folder = Folder::new();
    let name = folder.name();
    for _ in 0..ROUNDS {
        let (mut buffer, mut ring) = (iov(0), ior(0));
        // SAFETY: structures and a string.
        unsafe {
            assert_eq!(hf3fs_iovcreate(&mut buffer, name.as_ptr(), 4096, 0, -1), 0);
            assert_eq!(hf3fs_iorcreate(&mut ring, name.as_ptr(), 8, false, 0, -1), 0);
        }
        let numbers = (buffer.handle.addr(), ring.handle.addr());
        std::thread::scope(|scope| {
            for turn in 0..4 {
                let name = &name;
                scope.spawn(move || {
                    let (mut iov, mut ior) = (iov(0), ior(0));
                    iov.handle = std::ptr::without_provenance_mut(numbers.0);
                    ior.handle = std::ptr::without_provenance_mut(numbers.1);
                    // SAFETY: this thread's structures, and a string.
                    unsafe {
                        assert!([0, INVALID].contains(&hf3fs_submit_ios(&ior)));
                        if turn % 2 == 0 {
                            hf3fs_iovunlink(&mut iov);
                            hf3fs_iordestroy(&mut ior);
                            hf3fs_iovdestroy(&mut iov);
                        }
                        assert_eq!(hf3fs_iovcreate(&mut iov, name.as_ptr(), 4096, 0, -1), 0);
                        iov.base.write(1);
                        hf3fs_iovdestroy(&mut iov);
                    }
                });
            }
        });
        refuse(&mut buffer, &mut ring);
    }
    assert_eq!(folder.published(), 0);
}
