//! Admin commands through the kernel's NVMe driver.

use std::fs::File;
use std::os::fd::AsFd;

use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use crate::{Error, Result};

/// Bytes of the Identify data.
const IDENTIFY_BYTES: usize = 4096;
const IDENTIFY: u8 = 6;
const CONTROLLER: u32 = 1;
const PATIENCE_MS: u32 = 1000;

/// `struct nvme_admin_cmd`.
#[repr(C)]
#[derive(Default)]
struct AdminCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    nsid: u32,
    cdw2: [u32; 2],
    metadata: u64,
    data: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10: u32,
    rest: [u32; 5],
    timeout_ms: u32,
    result: u32,
}

const ADMIN_CMD: Opcode = opcode::read_write::<AdminCommand>(b'N', 0x41);

/// Sends Identify Controller to a controller of the kernel (`/dev/nvme0`). Needs root.
///
/// # Errors
/// When it cannot be opened, or the command fails.
pub fn identify(path: &str) -> Result<Box<[u8; IDENTIFY_BYTES]>> {
    let file = File::open(path).map_err(|e| Error::system(format!("opening {path}"), e))?;
    let mut answer = Box::new([0_u8; IDENTIFY_BYTES]);
    let mut command = AdminCommand {
        opcode: IDENTIFY,
        data: answer.as_mut_ptr() as u64,
        data_len: IDENTIFY_BYTES as u32,
        cdw10: CONTROLLER,
        timeout_ms: PATIENCE_MS,
        ..AdminCommand::default()
    };
    // SAFETY: NVME_IOCTL_ADMIN_CMD reads and writes this struct of 72 bytes, and writes `data_len` bytes at `data`, which
    // lives across the call. Identify changes nothing on the drive.
    let done = unsafe { ioctl(file.as_fd(), Updater::<ADMIN_CMD, AdminCommand>::new(&mut command)) };
    done.map_err(|e| Error::system(format!("Identify of {path}"), e))?;
    // A status of the drive is not an error of the call; but then there is no data.
    if answer.iter().all(|byte| *byte == 0) {
        return Err(Error::system(format!("Identify of {path}"), std::io::ErrorKind::InvalidData));
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_has_the_kernels_number() {
        assert_eq!((ADMIN_CMD, size_of::<AdminCommand>()), (0xC048_4E41, 72));
        assert!(identify("/nonexistent").is_err() && identify("/dev/null").is_err());
    }
}
