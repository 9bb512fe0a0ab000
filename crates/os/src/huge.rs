//! Host memory for pinning: in huge pages if available, and populated before use.

use std::io::ErrorKind;
use std::sync::RwLock;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use crate::{Error, HostMem, Result};

/// A huge page of the CPUs that matter here.
const HUGE: usize = 2 << 20;

/// Minimum share of a thread: it takes half a millisecond or more, so that starting the thread costs little in
/// comparison.
const SHARE: usize = 4 << 20;

/// Maximum threads that populate pages: for 84 MiB one needs 10 ms or more, sixteen less than 3.
const MOST_THREADS: usize = 16;

impl HostMem {
    /// Prepares all of its pages to be accessed, at once instead of one fault each. Does nothing where the kernel cannot do that.
    pub fn populate(&self) {
        let how = if self.is_writable() { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
        // SAFETY: the range lies within the mapping; this changes no byte of it.
        let _ = unsafe { madvise(self.host_ptr().cast(), self.len(), how) };
    }

    /// Zeroed memory of this process with all pages populated, in huge pages if available.
    ///
    /// It is private and not inherited by child processes: a device keeps writing the pages it was given, and after a
    /// fork one side would have copies that the device does not know. A child may drop its copy of the result, and do
    /// nothing else with it.
    ///
    /// # Errors
    /// When memory is short.
    pub fn touched(bytes: usize) -> Result<Self> {
        let refused = || Error::OutOfRange { offset: 0, bytes, len: 0 };
        let unit = if bytes >= HUGE { HUGE } else { 4096 };
        let len = bytes.max(1).checked_next_multiple_of(unit).ok_or_else(refused)?;
        // Huge pages need an aligned start, which only newer kernels choose on their own.
        let mapped = if unit == HUGE { len.checked_add(HUGE).ok_or_else(refused)? } else { len };
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            mmap_anonymous(std::ptr::null_mut(), mapped, access, MapFlags::PRIVATE)
        }
        .map_err(|e| Error::system(format!("mmap of {mapped} bytes"), e))?;
        let whole = Self::whole(base.cast(), mapped, true)?;
        whole.keep_from_children()?;
        let start = (whole.host_ptr() as usize).next_multiple_of(unit) - whole.host_ptr() as usize;
        let mem = whole.slice(start..start + len)?;
        if unit == HUGE {
            // Without huge pages the kernel refuses, and ordinary ones suffice.
            let _ = advise(&mem, Advice::LinuxHugepage);
        }
        touch(&mem)?;
        Ok(mem)
    }
}

pub(crate) fn advise(mem: &HostMem, advice: Advice) -> Result<()> {
    // SAFETY: the range is that of a mapping that `mem` keeps alive, and none of the advice used here changes its
    // content.
    unsafe { madvise(mem.host_ptr().cast(), mem.len(), advice) }
        .map_err(|e| Error::system(format!("madvise of {} bytes", mem.len()), e))
}

fn touch(mem: &HostMem) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (mem.len() / SHARE).clamp(1, MOST_THREADS.min(cores));
    if threads == 1 {
        return touch_part(mem);
    }
    let share = (mem.len() / threads).next_multiple_of(HUGE);
    // Starting a thread while others populate pages is slow: both change the process's mappings. So all start first.
    let gate = RwLock::new(());
    std::thread::scope(|scope| {
        let closed = gate.write();
        let parts = (0..mem.len()).step_by(share.max(1)).map(|at| mem.slice(at..mem.len().min(at + share)));
        let mut running = Vec::with_capacity(threads);
        for part in parts {
            let (part, gate) = (part?, &gate);
            let touching = move || {
                drop(gate.read());
                touch_part(&part)
            };
            running.push(std::thread::Builder::new().spawn_scoped(scope, touching));
        }
        drop(closed);
        for thread in running {
            let thread = thread.map_err(|e| Error::system("starting a thread that touches memory", e))?;
            let lost = || Error::system("touching memory", std::io::Error::other("its thread ended early"));
            thread.join().map_err(|_| lost())??;
        }
        Ok(())
    })
}

fn touch_part(part: &HostMem) -> Result<()> {
    match advise(part, Advice::LinuxPopulateWrite) {
        // Kernels before 5.14 do not support this advice: storing into each page has the same effect.
        Err(Error::System { source, .. }) if source.kind() == ErrorKind::InvalidInput => {}
        done => return done,
    }
    for at in (0..part.len()).step_by(4096) {
        part.word(at)?.store(0, std::sync::atomic::Ordering::Relaxed);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touched_memory_is_zero_and_aligned() {
        for bytes in [1, 5000, HUGE, HUGE + 1, 3 * SHARE + 4096] {
            let mem = HostMem::touched(bytes).unwrap();
            let unit = if bytes >= HUGE { HUGE } else { 4096 };
            assert_eq!(mem.len(), bytes.next_multiple_of(unit));
            assert!((mem.host_ptr() as usize).is_multiple_of(unit));
            mem.write(mem.len() - 1, &[9]).unwrap();
            assert_eq!(mem.to_vec(mem.len() - 2, 2).unwrap(), [0, 9]);
        }
        assert!(HostMem::touched(usize::MAX).is_err());
    }
}
