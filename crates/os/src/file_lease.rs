//! Leases: before another program may open, truncate or punch a file, the kernel makes it wait for this one.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use rustix::fs::{OFlags, fcntl_getfl};

/// Which signal a broken lease raises; the crate `libc` lacks it.
const F_SETSIG: libc::c_int = 10;

/// A lease of an open file. While it lasts, no other program can change the file. A write lease, of a file that is open for
/// writing, excludes all other openings. A read lease excludes writers.
///
/// A program that would open it so waits until the lease is dropped, or for `/proc/sys/fs/lease-break-time` seconds.
pub struct FileLease {
    file: File,
    kind: libc::c_int,
    process: u32,
}

impl FileLease {
    /// Takes a lease of a file that is open for reading, or for reading and writing. It belongs to this opening, and
    /// its duplicates.
    ///
    /// # Errors
    /// When the file is open elsewhere (`EAGAIN`), belongs to another user (`EACCES`), or its file system has no leases
    /// (`EINVAL`).
    pub fn take(file: &File) -> io::Result<Self> {
        let writes = fcntl_getfl(file)? & OFlags::RWMODE == OFlags::RDWR;
        let kind = if writes { libc::F_WRLCK } else { libc::F_RDLCK };
        let file = file.try_clone()?;
        // Instead of SIGIO, which would end a program that does not expect it. This one is ignored.
        control(&file, F_SETSIG, libc::SIGURG)?;
        control(&file, libc::F_SETLEASE, kind)?;
        Ok(Self { file, kind, process: std::process::id() })
    }

    /// Whether another program waits for the file, or no longer does because it waited too long.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        control(&self.file, libc::F_GETLEASE, 0).ok() != Some(self.kind)
    }
}

impl Drop for FileLease {
    fn drop(&mut self) {
        // A child has the same opening, and the lease is its parent's.
        if self.process == std::process::id() {
            let _ = control(&self.file, libc::F_SETLEASE, libc::F_UNLCK);
        }
    }
}

fn control(file: &File, command: libc::c_int, argument: libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: none of these commands takes a pointer.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::path::PathBuf;
    use std::time::{Duration, Instant};

    use super::*;

    struct TestPath(PathBuf);

    impl TestPath {
        fn new(name: &str) -> Self {
            let path = PathBuf::from(format!("/dev/shm/onehop-lease-{name}-{}", std::process::id()));
            std::fs::write(&path, [1; 4096]).unwrap();
            Self(path)
        }

        fn open(&self, writes: bool) -> File {
            File::options().read(true).write(writes).open(&self.0).unwrap()
        }
    }

    impl Drop for TestPath {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn an_open_file_cannot_be_leased() {
        let path = TestPath::new("open");
        for (other, own) in [(false, true), (true, true), (true, false)] {
            let _other = path.open(other);
            let error = FileLease::take(&path.open(own)).err().unwrap();
            assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "{other} {own}");
        }
        let _reader = path.open(false);
        assert!(FileLease::take(&path.open(false)).is_ok());
    }

    #[test]
    fn programs_that_open_or_truncate_it_wait() {
        let path = TestPath::new("wait");
        for own in [true, false] {
            for truncates in [true, false] {
                let file = path.open(own);
                let lease = FileLease::take(&file).unwrap();
                assert!(!lease.is_wanted());
                std::thread::scope(|scope| {
                    let other = scope.spawn(|| {
                        let begun = Instant::now();
                        if truncates {
                            let name = std::ffi::CString::new(path.0.to_str().unwrap()).unwrap();
                            // SAFETY: the name is a string that ends with a zero.
                            assert_eq!(unsafe { libc::truncate(name.as_ptr(), 4096) }, 0);
                        } else {
                            path.open(true);
                        }
                        begun.elapsed()
                    });
                    let begun = Instant::now();
                    while !lease.is_wanted() {
                        assert!(begun.elapsed() < Duration::from_secs(10));
                        std::thread::yield_now();
                    }
                    std::thread::sleep(Duration::from_millis(50));
                    assert!(!other.is_finished());
                    drop(lease);
                    let waited = other.join().unwrap();
                    assert!(waited >= Duration::from_millis(50), "{waited:?}");
                });
            }
        }
    }
}
