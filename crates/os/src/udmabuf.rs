//! Pages of this process as a dma-buf, by the kernel's udmabuf: it replaces a GPU's exporter if there is no GPU. The
//! pages are scattered, so without an IOMMU most engines cannot use such a buffer.

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};

use crate::{DmaBuf, Error, HostMem, Result};

const DEVICE: &str = "/dev/udmabuf";
const PAGE: u64 = 4096;
const CLOEXEC: u32 = 1;

/// Memory that can be exported as dma-bufs.
pub struct Udmabuf {
    device: File,
    file: File,
    memory: HostMem,
}

/// `struct udmabuf_create`.
#[repr(C)]
struct Create {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

// SAFETY: UDMABUF_CREATE reads a `struct udmabuf_create`, writes nothing, and returns a new descriptor.
unsafe impl Ioctl for Create {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::write::<Self>(b'u', 0x42)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(self).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the call succeeded, so this is a new descriptor, which is ours.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

impl Udmabuf {
    /// New memory. By default the kernel exports at most 64 MiB at once.
    ///
    /// # Errors
    /// When this kernel has no udmabuf, or this user may not use it.
    pub fn new(bytes: usize) -> Result<Self> {
        let device = File::options().read(true).write(true).open(DEVICE);
        let device = device.map_err(|e| Error::system(format!("opening {DEVICE}"), e))?;
        let failed = |call| move |e: rustix::io::Errno| Error::system(call, e);
        let fd = memfd_create("vram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(failed("memfd_create"))?;
        let file = File::from(fd);
        let bytes = bytes.next_multiple_of(PAGE as usize);
        file.set_len(bytes as u64).map_err(|e| Error::system("ftruncate of a memfd", e))?;
        fcntl_add_seals(&file, SealFlags::SHRINK).map_err(failed("F_ADD_SEALS of a memfd"))?;
        let memory = HostMem::of_file(&file, bytes)?;
        Ok(Self { device, file, memory })
    }

    /// All of it.
    #[must_use]
    pub fn memory(&self) -> &HostMem {
        &self.memory
    }

    /// A dma-buf of a part of it.
    ///
    /// # Errors
    /// When it is not a part, or the kernel does not export so much.
    pub fn export(&self, part: &HostMem) -> Result<DmaBuf> {
        let (base, len) = (self.memory.host_ptr() as u64, self.memory.len() as u64);
        let (bytes, outside) =
            (part.len() as u64, Error::OutOfRange { offset: 0, bytes: part.len(), len: self.memory.len() });
        let start = (part.host_ptr() as u64).checked_sub(base).filter(|start| start + bytes <= len);
        let Some(start) = start else { return Err(outside) };
        let offset = start / PAGE * PAGE;
        let size = (start + bytes).next_multiple_of(PAGE) - offset;
        let create = Create { memfd: self.file.as_raw_fd().unsigned_abs(), flags: CLOEXEC, offset, size };
        // SAFETY: as `Create` says; the memory belongs to the holders of its descriptors.
        let fd = unsafe { ioctl(&self.device, create) };
        let fd = fd.map_err(|e| Error::system(format!("UDMABUF_CREATE of {size} bytes of a memfd"), e))?;
        Ok(DmaBuf { fd, offset: start - offset, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_exported_in_whole_pages() {
        let Ok(memory) = Udmabuf::new(64 << 10) else {
            println!("SKIPPED: this machine has no {DEVICE}, or not for this user");
            return;
        };
        let part = memory.memory().slice(5000..9000).unwrap();
        let buffer = memory.export(&part).unwrap();
        assert_eq!((buffer.offset, buffer.bytes), (5000 - 4096, 4000));
        part.write(0, b"bytes").unwrap();
        let same = HostMem::of_device(&buffer.fd, 0, 4096).unwrap();
        assert_eq!(same.to_vec(5000 - 4096, 5).unwrap(), b"bytes");
        assert!(memory.export(&HostMem::anonymous(4096).unwrap()).is_err());
    }
}
