//! Dma-bufs of plain memory, for where something wants a dma-buf and there is no device that has one.

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};

use crate::{Error, HostMem, Result};

const NAME: &str = "/dev/udmabuf";
const CREATE: Opcode = opcode::write::<Request>(b'u', 0x42);

#[repr(C)]
struct Request {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

struct Create(Request);

// SAFETY: the kernel reads the structure, keeps nothing of it, and returns a new descriptor.
unsafe impl Ioctl for Create {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        CREATE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(&mut self.0).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        if out < 0 {
            return Err(Errno::BADF);
        }
        // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

/// New zeroed memory of whole pages, and a dma-buf of all of it.
///
/// # Errors
/// When the system has no `/dev/udmabuf` for us (`CONFIG_UDMABUF`), or no memory.
pub fn udmabuf(bytes: usize) -> Result<(HostMem, OwnedFd)> {
    let failed = |call: &'static str| move |e: Errno| Error::system(call, e);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = rustix::fs::memfd_create("onehop dma-buf", flags).map_err(failed("memfd_create"))?;
    rustix::fs::ftruncate(&memfd, bytes as u64).map_err(failed("ftruncate of a memfd"))?;
    rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK).map_err(failed("sealing a memfd"))?;
    let device = File::options().read(true).write(true).open(NAME);
    let device = device.map_err(|e| Error::system(format!("opening {NAME}"), e))?;
    let request = Request { memfd: memfd.as_raw_fd() as u32, flags: 1, offset: 0, size: bytes as u64 };
    // SAFETY: as `Create` says; the memfd is open across the call.
    let buf = unsafe { ioctl(&device, Create(request)) }.map_err(failed("making a dma-buf of a memfd"))?;
    Ok((HostMem::of_file(&File::from(memfd), bytes)?, buf))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_a_dma_buf_too_or_it_is_said_why_not() {
        match udmabuf(8192) {
            Ok((mem, buf)) => {
                mem.write(4096, b"bytes").unwrap();
                let same = HostMem::of_device(&buf, 0, 8192).unwrap();
                assert_eq!(same.to_vec(4096, 5).unwrap(), b"bytes");
            }
            Err(error) => assert!(error.to_string().contains("dma-buf") || error.to_string().contains(NAME)),
        }
    }
}
