//! glibc semaphores in memory that processes share.
//!
//! A named semaphore is a file in `/dev/shm` that holds one. glibc's own calls end the process if that memory is
//! corrupt, and every process that shares it can write it. So counting and waiting is done here, on the words that
//! glibc has used on 64-bit machines since 2.21: the count, and the number of waiters.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::thread::futex;

use crate::{Error, HostMem, Result};

/// One waiter, in the word whose lower half is the count.
const WAITER: u64 = 1 << 32;

/// Where glibc records whether processes share it, and the value if they do.
const PROCESSES: usize = 8;
const SHARED: u32 = 128;

const _: () = assert!(size_of::<libc::sem_t>() == 32 && cfg!(target_endian = "little"));

/// A semaphore in shared memory. Clones are the same one.
#[derive(Clone)]
pub struct Semaphore {
    mem: HostMem,
    offset: usize,
}

impl Semaphore {
    /// Bytes of one.
    pub const BYTES: usize = size_of::<libc::sem_t>();

    /// The semaphore at an offset in memory, which is initialised or will be by [`Self::initialise`].
    ///
    /// # Errors
    /// When it does not lie within the memory, which has to be writable, or is not aligned.
    pub fn at(mem: &HostMem, offset: usize) -> Result<Self> {
        mem.check_writable_range(offset, Self::BYTES)?;
        if !(mem.host_ptr() as usize + offset).is_multiple_of(8) {
            return Err(Error::OutOfRange { offset, bytes: Self::BYTES, len: mem.len() });
        }
        Ok(Self { mem: mem.clone(), offset })
    }

    /// Initialises it to zero.
    ///
    /// # Errors
    /// When the memory is read-only.
    pub fn initialise(&self) -> Result<()> {
        self.mem.write(self.offset, &[0; Self::BYTES])?;
        self.mem.word(self.offset + PROCESSES)?.store(SHARED, Ordering::Release);
        Ok(())
    }

    /// Increments it, and wakes one waiter. A counter at its maximum stays there.
    pub fn post(&self) {
        let word = self.mem.qword(self.offset);
        let up = |seen: u64| (seen as u32 != i32::MAX as u32).then(|| seen.wrapping_add(1));
        let Ok(before) = word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, up) else { return };
        if before >= WAITER
            && let Ok(count) = self.mem.word(self.offset)
        {
            // Memory that is gone has no waiters.
            let _ = futex::wake(count, futex::Flags::empty(), 1);
        }
    }

    /// Decrements it if possible without waiting.
    #[must_use]
    pub fn take(&self) -> bool {
        let down = |seen: u64| (seen as u32 != 0).then(|| seen - 1);
        self.mem.qword(self.offset).fetch_update(Ordering::Acquire, Ordering::Relaxed, down).is_ok()
    }

    /// Sets it to zero; returns whether it was more.
    pub fn take_all(&self) -> bool {
        const COUNT: u64 = u32::MAX as u64;
        self.mem.qword(self.offset).fetch_and(!COUNT, Ordering::Acquire) & COUNT != 0
    }

    /// Waits at most `limit` until it can decrement it; returns whether it did.
    #[must_use]
    pub fn wait(&self, limit: Duration) -> bool {
        if self.take() {
            return true;
        }
        let start = Instant::now();
        let word = self.mem.qword(self.offset);
        word.fetch_add(WAITER, Ordering::AcqRel);
        let taken = loop {
            if self.take() {
                break true;
            }
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                break false;
            }
            let (Ok(time), Ok(count)) = (futex::Timespec::try_from(left), self.mem.word(self.offset)) else {
                break false;
            };
            match futex::wait(count, futex::Flags::empty(), 0, Some(&time)) {
                Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                // Timed out, or the memory is gone.
                Err(_) => break self.take(),
            }
        };
        word.fetch_sub(WAITER, Ordering::AcqRel);
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_one_is_glibc_s() {
        let mem = HostMem::anonymous(4096).unwrap();
        mem.fill(0, 4096, 0x5a).unwrap();
        Semaphore::at(&mem, 64).unwrap().initialise().unwrap();
        mem.fill(128, Semaphore::BYTES, 0).unwrap();
        // SAFETY: the memory is mapped and aligned, and not used by others.
        assert_eq!(unsafe { libc::sem_init(mem.host_ptr().add(128).cast(), 1, 0) }, 0);
        let bytes = |at| mem.to_vec(at, Semaphore::BYTES).unwrap();
        assert_eq!(bytes(64), bytes(128));
    }

    #[test]
    fn glibc_and_this_understand_each_other() {
        let mem = HostMem::anonymous(4096).unwrap();
        let sem = Semaphore::at(&mem, 0).unwrap();
        sem.initialise().unwrap();
        let theirs = mem.host_ptr() as usize;
        let waiter = std::thread::spawn({
            let mem = mem.clone();
            move || {
                let _mem = mem;
                // SAFETY: the semaphore was initialised, and the memory is held.
                unsafe { libc::sem_wait(theirs as *mut libc::sem_t) }
            }
        });
        std::thread::sleep(Duration::from_millis(20));
        sem.post();
        assert_eq!(waiter.join().unwrap(), 0);
        let waiter = std::thread::spawn({
            let sem = sem.clone();
            move || sem.wait(Duration::from_secs(60))
        });
        std::thread::sleep(Duration::from_millis(20));
        // SAFETY: as above.
        assert_eq!(unsafe { libc::sem_post(theirs as *mut libc::sem_t) }, 0);
        assert!(waiter.join().unwrap());
        // SAFETY: as above.
        assert_eq!(unsafe { libc::sem_trywait(theirs as *mut libc::sem_t) }, -1);
    }

    #[test]
    fn it_counts_and_its_waits_end() {
        let mem = HostMem::anonymous(4096).unwrap();
        let sem = Semaphore::at(&mem, 64).unwrap();
        sem.initialise().unwrap();
        assert!(!sem.take() && !sem.wait(Duration::from_millis(2)));
        sem.post();
        sem.clone().post();
        assert!(sem.take() && sem.wait(Duration::from_secs(60)) && !sem.take());
        assert!(!sem.take_all());
        mem.fill(64, 3, 0xff).unwrap();
        assert!(sem.take_all() && !sem.take() && !sem.take_all());
        let waiter = std::thread::spawn({
            let sem = sem.clone();
            move || sem.wait(Duration::from_secs(60))
        });
        sem.post();
        assert!(waiter.join().unwrap());
        assert!(Semaphore::at(&mem, 4096 - 16).is_err() && Semaphore::at(&mem, 3).is_err());
        // With any content of the memory, every call ends in time, without ending the process.
        for byte in [0xff, 0x80, 0x7f] {
            mem.fill(64, 32, byte).unwrap();
            sem.post();
            let _ = sem.take();
            let _ = sem.wait(Duration::from_millis(1));
        }
    }
}
