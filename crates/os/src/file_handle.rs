//! File handles, which identify a file in its file system without a descriptor.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

/// Maximum bytes of a handle in Linux.
const MOST: usize = 128;

/// As in the kernel: length, type and bytes.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawFileHandle {
    bytes: u32,
    kind: i32,
    handle: [u8; MOST],
}

/// A file's handle. A new file that reuses an inode number has another handle.
#[derive(PartialEq, Eq)]
pub struct FileHandle {
    kind: i32,
    bytes: Box<[u8]>,
}

/// The handle of an open file, which may be open as a path only.
///
/// # Errors
/// `EOPNOTSUPP` if its file system has none.
pub fn handle_of(file: impl AsFd) -> Result<FileHandle, Errno> {
    let mut raw = RawFileHandle { bytes: MOST as u32, kind: 0, handle: [0; MOST] };
    let mut mount = 0_i32;
    // SAFETY: the structure has room for as many bytes as it says; the call writes there and to `mount`, and retains
    // nothing.
    let done = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_fd().as_raw_fd(),
            c"".as_ptr(),
            &raw mut raw,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    if done < 0 {
        return Err(last());
    }
    let bytes = raw.handle.get(..raw.bytes as usize).ok_or(Errno::OVERFLOW)?.into();
    Ok(FileHandle { kind: raw.kind, bytes })
}

impl FileHandle {
    /// Opens the file as a path; `sibling` is any open file of the same file system, not open as a path.
    ///
    /// # Errors
    /// `ESTALE` when the file is gone; `EPERM` without the capability to search everywhere.
    pub fn open(&self, sibling: impl AsFd) -> Result<OwnedFd, Errno> {
        let mut raw = RawFileHandle { bytes: self.bytes.len() as u32, kind: self.kind, handle: [0; MOST] };
        raw.handle[..self.bytes.len()].copy_from_slice(&self.bytes);
        let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: the structure has as many bytes as it says; the call reads it and retains nothing.
        let opened = unsafe {
            libc::syscall(libc::SYS_open_by_handle_at, sibling.as_fd().as_raw_fd(), &raw mut raw, flags)
        };
        if opened < 0 {
            return Err(last());
        }
        // SAFETY: a new descriptor, which is ours.
        Ok(unsafe { OwnedFd::from_raw_fd(opened as i32) })
    }
}

fn last() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn files_are_found_by_their_handles_until_they_are_gone() {
        let dir = std::env::temp_dir().join(format!("onehop-handle-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("file"), "bytes").unwrap();
        let (sibling, file) = (File::open(&dir).unwrap(), File::open(dir.join("file")).unwrap());
        let found = handle_of(&file).and_then(|handle| Ok((handle.open(&sibling)?, handle)));
        let (opened, handle) = match found {
            Ok(found) => found,
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "SKIPPED: no file is found by its handle here: {error}");
                return std::fs::remove_dir_all(dir).unwrap();
            }
        };
        let path = format!("/proc/self/fd/{}", opened.as_raw_fd());
        let mut text = String::new();
        File::open(path).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "bytes");
        std::fs::rename(dir.join("file"), dir.join("moved")).unwrap();
        handle.open(&sibling).unwrap();
        // Without a name it exists while it is open.
        std::fs::remove_file(dir.join("moved")).unwrap();
        handle.open(&sibling).unwrap();
        drop((opened, file));
        assert_eq!(handle.open(&sibling).err(), Some(Errno::STALE));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
