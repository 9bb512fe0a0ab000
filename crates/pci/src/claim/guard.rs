//! The guardian: a child process that restores a device when this process ends in any way.
//!
//! It is forked before anything is changed, and sleeps until a pipe has a byte, at a drop, or this process has
//! ended, by an exit, a panic, or a signal that cannot be caught. The pipe closes then, unless a process that
//! was forked from this one has it open, so the guardian also polls a pidfd. Only the guardian restores devices,
//! so there is one way of doing it.

use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{PidfdFlags, getpid, pidfd_open};

use crate::claim::steps::SysfsWrite;
use crate::{Address, Error, Result};

/// Time limit for restoring before the guardian is left to finish alone: a driver may take long to probe.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(20);

/// A step in the guardian's form: nothing may be allocated after a fork.
struct PreparedStep {
    path: CString,
    bytes: Vec<u8>,
    offset: Option<i64>,
    must: bool,
    complaint: Vec<u8>,
}

/// Everything that the guardian needs.
struct GuardianWork {
    steps: Vec<PreparedStep>,
    /// The device's folder, and the message if it is gone: a device that has left the bus is not restored.
    device: CString,
    left: Vec<u8>,
}

/// The parent's handle on the guardian.
pub(crate) struct Guard {
    /// The guardian sleeps until this end has a byte or is closed.
    pipe: Option<OwnedFd>,
    /// The pipe's other end: writing would raise SIGPIPE if the guardian, which has it too, was killed.
    _read: OwnedFd,
    child: libc::pid_t,
    /// The process that started it. One that was forked from that has a copy of this, and releases nothing.
    owner: u32,
    address: Address,
}

impl Guard {
    /// Starts the guardian. `folder` stands for `/`; the descriptors in `kept` stay open as long as it lives.
    pub(crate) fn start(
        folder: &Path,
        address: Address,
        steps: &[SysfsWrite],
        kept: &[BorrowedFd<'_>],
    ) -> Result<Self> {
        let work = prepare(folder, address, steps)?;
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|e| Error::call("pipe2", e.into()))?;
        // Before Linux 5.3 there is only the pipe; `poll` ignores a negative descriptor.
        let parent = pidfd_open(getpid(), PidfdFlags::empty()).ok();
        let parent_fd = parent.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let mut keep: Vec<RawFd> = kept.iter().map(AsRawFd::as_raw_fd).collect();
        keep.extend([0, 1, 2, read.as_raw_fd()]);
        keep.extend(parent.as_ref().map(AsRawFd::as_raw_fd));
        keep.sort_unstable();
        keep.dedup();
        let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        let mut old = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: both sets are written by these calls before they are read. No signal may reach the child while it has
        // its parent's handlers; it keeps all signals blocked.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
        }
        // SAFETY: fork runs the handlers that libraries of this process have registered, ours among them: those
        // take locks before the fork and release them in the child, which POSIX allows, and free memory there,
        // which glibc allows. After that the child only calls async-signal-safe functions on memory that was
        // allocated before, and never returns.
        let child = unsafe { libc::fork() };
        let failed = std::io::Error::last_os_error();
        if child == 0 {
            // SAFETY: this is the child of the fork above.
            unsafe { watch([read.as_raw_fd(), write.as_raw_fd()], parent_fd, &keep, &work) }
        }
        // SAFETY: `old` was written by the first call.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut()) };
        if child < 0 {
            return Err(Error::call("fork of the process that will rebind the device", failed));
        }
        Ok(Self { pipe: Some(write), _read: read, child, owner: std::process::id(), address })
    }

    /// The end of the pipe that a forked process would have.
    #[cfg(test)]
    pub(crate) fn copy_of_pipe(&self) -> OwnedFd {
        self.pipe.as_ref().unwrap().try_clone().unwrap()
    }

    /// Lets the guardian restore the device now, and waits for it.
    pub(crate) fn finish(&mut self) -> Result<()> {
        let Some(pipe) = self.pipe.take() else { return Ok(()) };
        if self.owner != std::process::id() {
            return Ok(());
        }
        // Closing it is not enough while another process has it open.
        let _ = rustix::io::write(&pipe, &[1]);
        drop(pipe);
        let begun = Instant::now();
        loop {
            let mut status = 0;
            // SAFETY: `status` is written by the call; the child is ours and has not been waited for.
            let done = unsafe { libc::waitpid(self.child, &raw mut status, libc::WNOHANG) };
            if done == self.child && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0 {
                return Ok(());
            }
            // A process that ignores SIGCHLD gets no exit status of its children.
            if done < 0 {
                return Ok(());
            }
            let why = if done == self.child {
                "stderr has the failed step"
            } else if begun.elapsed() >= RELEASE_TIMEOUT {
                "it takes too long, and continues in the background"
            } else {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            };
            return Err(Error::Refused {
                what: format!("rebinding {} to its driver", self.address),
                why: why.into(),
                fix: format!(
                    "See `dmesg`, and try `onehop drive unbind -d {0}`; for a drive that does not respond, `onehop drive recover -d {0}`",
                    self.address
                ),
            });
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // The guardian has reported failures on stderr.
        let _ = self.finish();
    }
}

fn prepare(folder: &Path, address: Address, steps: &[SysfsWrite]) -> Result<GuardianWork> {
    let steps = steps.iter().map(|step| prepare_step(folder, address, step)).collect::<Result<Vec<_>>>()?;
    let device = file(folder, &format!("/sys/bus/pci/devices/{address}"))?;
    let left = format!(
        "onehop: {address} has left the bus and was not rebound to its driver; `onehop drive recover -d {address}` rescans for it\n"
    );
    Ok(GuardianWork { steps, device, left: left.into_bytes() })
}

fn file(folder: &Path, path: &str) -> Result<CString> {
    let at = folder.join(path.trim_start_matches('/'));
    CString::new(at.as_os_str().as_bytes())
        .map_err(|_| Error::garbage("a name in the system's files", path, "plain path"))
}

fn prepare_step(folder: &Path, address: Address, step: &SysfsWrite) -> Result<PreparedStep> {
    let path = file(folder, &step.path)?;
    let text = String::from_utf8_lossy(&step.bytes);
    let complaint = format!(
        "onehop: {address} could not be rebound to its driver: writing {:?} into {} failed\n",
        text.trim(),
        step.path
    );
    let offset = step.offset.map(|at| at as i64);
    Ok(PreparedStep {
        path,
        bytes: step.bytes.clone(),
        offset,
        must: step.must,
        complaint: complaint.into_bytes(),
    })
}

/// The guardian's life.
///
/// # Safety
/// Only in a freshly forked child, which this call ends.
unsafe fn watch([pipe, write_end]: [RawFd; 2], parent: RawFd, keep: &[RawFd], work: &GuardianWork) -> ! {
    // SAFETY: async-signal-safe calls only, on memory made before the fork and descriptors of this process.
    unsafe {
        // Detached from the terminal's Ctrl-C.
        libc::setsid();
        // Before all others, which only Linux 5.9 closes: this process would wait for itself.
        libc::close(write_end);
        // The child must not keep other pipes and devices of its parent open.
        let mut from = 0;
        for fd in keep {
            if *fd > from {
                libc::syscall(libc::SYS_close_range, from, *fd - 1, 0);
            }
            from = *fd + 1;
        }
        libc::syscall(libc::SYS_close_range, from, libc::c_uint::MAX, 0);
        let event = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds = [event(pipe), event(parent)];
        // A byte, the pipe's end, or the parent's.
        while libc::poll(fds.as_mut_ptr(), 2, -1) < 0 {}
        let mut failed = 0;
        for step in &work.steps {
            if write(step) || !step.must {
                continue;
            }
            if libc::access(work.device.as_ptr(), libc::F_OK) != 0 {
                libc::write(2, work.left.as_ptr().cast(), work.left.len());
                break;
            }
            failed = 1;
            libc::write(2, step.complaint.as_ptr().cast(), step.complaint.len());
        }
        libc::_exit(failed)
    }
}

/// # Safety
/// As for [`watch`].
unsafe fn write(step: &PreparedStep) -> bool {
    // SAFETY: the path ends in a zero byte, and the pointer and length are those of the bytes.
    unsafe {
        let fd = libc::open(step.path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd < 0 {
            return false;
        }
        let (bytes, len) = (step.bytes.as_ptr().cast(), step.bytes.len());
        let written = match step.offset {
            Some(at) => libc::pwrite(fd, bytes, len, at),
            None => libc::write(fd, bytes, len),
        };
        libc::close(fd);
        written == len as isize
    }
}
