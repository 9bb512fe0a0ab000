//! Many reads and writes of files at once, straight between the disk and shared memory: io_uring with `O_DIRECT`.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, squeue, types};

use crate::{Error, HostMem, Result};

/// The kernel's limit of a buffer.
const MOST_REGISTERED: usize = 1 << 30;

/// How long to wait for the end of abandoned reads. After that their memory is leaked.
const ABANDONED_LIMIT: Duration = Duration::from_secs(60);
/// How long to wait before the kernel is asked again after an error.
const PAUSE: Duration = Duration::from_millis(10);

/// A finished read or write.
#[derive(Debug)]
pub struct Finished {
    /// Its caller-chosen name.
    pub name: u64,
    /// How many bytes were moved. Fewer than requested: the file's end, a full disk, or an interruption.
    pub result: std::io::Result<usize>,
}

/// A read in flight.
struct PendingRead {
    name: u64,
    /// Open until it has ended.
    _file: Arc<File>,
}

/// Reads into one memory region, and writes out of it. Dropping it waits for them, as the kernel uses that memory.
pub struct Reads {
    ring: IoUring,
    memory: HostMem,
    /// Why the kernel pins the memory again for each read.
    unregistered: Option<std::io::Error>,
    pending: Vec<Option<PendingRead>>,
    free: Vec<usize>,
    unsubmitted: usize,
}

impl Reads {
    /// For up to `depth` reads at once into `memory`, which is registered with the kernel if allowed: it counts against
    /// the limit of locked memory.
    ///
    /// # Errors
    /// When io_uring is not available.
    pub fn new(memory: HostMem, depth: u32) -> Result<Self> {
        let depth = depth.clamp(1, 4096);
        let ring = IoUring::new(depth.next_power_of_two()).map_err(|e| Error::System {
            call: "io_uring_setup".into(),
            hint: if e.kind() == std::io::ErrorKind::OutOfMemory { NO_ROOM } else { HINT },
            source: e,
        })?;
        if !ring.params().is_feature_ext_arg() {
            return Err(Error::System {
                call: "io_uring_setup".into(),
                source: std::io::ErrorKind::Unsupported.into(),
                hint: "; waiting for a time needs Linux 5.11",
            });
        }
        let mut this = Self {
            ring,
            unregistered: None,
            pending: (0..depth).map(|_| None).collect(),
            free: (0..depth as usize).collect(),
            memory,
            unsubmitted: 0,
        };
        let buffer = libc::iovec { iov_base: this.memory.host_ptr().cast(), iov_len: this.memory.len() };
        if this.memory.len() <= MOST_REGISTERED && this.memory.is_writable() {
            // SAFETY: the memory is mapped as long as `this` has it, and the ring is dropped before it.
            this.unregistered = unsafe { this.ring.submitter().register_buffers(&[buffer]) }.err();
        } else {
            this.unregistered = Some(std::io::ErrorKind::Unsupported.into());
        }
        Ok(this)
    }

    /// Why the memory is not registered, which would spare the kernel from pinning it for each read.
    #[must_use]
    pub fn why_unregistered(&self) -> Option<&std::io::Error> {
        self.unregistered.as_ref()
    }

    /// How many more can be started.
    #[must_use]
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// How many are in flight.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.pending.len() - self.free.len()
    }

    /// Starts reading bytes of a file from `at` on into the memory at `offset`. It is in flight after [`Self::submit`]
    /// or [`Self::wait`].
    ///
    /// # Errors
    /// When the range does not lie within the memory or is 4 GiB or longer, or there is no room.
    pub fn begin(&mut self, name: u64, file: &Arc<File>, at: u64, offset: usize, bytes: usize) -> Result<()> {
        self.memory.check_writable_range(offset, bytes)?;
        self.push(name, file, offset, bytes, |fd, to, length, registered| match registered {
            true => opcode::ReadFixed::new(fd, to, length, 0).offset(at).build(),
            false => opcode::Read::new(fd, to, length).offset(at).build(),
        })
    }

    /// Starts writing bytes of the memory, from `offset` on, to a file at `at`. It is in flight as a read is. The
    /// memory must not change before it has ended, or the file gets a mixture.
    ///
    /// # Errors
    /// As for [`Self::begin`].
    pub fn begin_write(
        &mut self,
        name: u64,
        file: &Arc<File>,
        at: u64,
        offset: usize,
        bytes: usize,
    ) -> Result<()> {
        self.memory.slice(offset..offset.saturating_add(bytes))?;
        self.push(name, file, offset, bytes, |fd, from, length, registered| match registered {
            true => opcode::WriteFixed::new(fd, from, length, 0).offset(at).build(),
            false => opcode::Write::new(fd, from, length).offset(at).build(),
        })
    }

    /// Queues an entry for a range of the memory, which was checked.
    fn push(
        &mut self,
        name: u64,
        file: &Arc<File>,
        offset: usize,
        bytes: usize,
        entry: impl FnOnce(types::Fd, *mut u8, u32, bool) -> squeue::Entry,
    ) -> Result<()> {
        let full = || Error::System {
            call: "io_uring".into(),
            source: std::io::Error::other("as many are under way as there is room for"),
            hint: "",
        };
        let length =
            u32::try_from(bytes).map_err(|_| Error::OutOfRange { offset, bytes, len: u32::MAX as usize })?;
        let Some(slot) = self.free.pop() else { return Err(full()) };
        let memory = self.memory.host_ptr().wrapping_add(offset);
        let entry = entry(types::Fd(file.as_raw_fd()), memory, length, self.unregistered.is_none());
        self.pending[slot] = Some(PendingRead { name, _file: file.clone() });
        // SAFETY: the range lies within memory that `self` keeps mapped, and the file is kept open, until the read or
        // write has ended. Dropping `self` waits for that and, where it takes too long, leaks the memory to the kernel.
        if unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) }.is_err() {
            self.pending[slot] = None;
            self.free.push(slot);
            return Err(full());
        }
        self.unsubmitted += 1;
        Ok(())
    }

    /// Submits what was started to the kernel.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub fn submit(&mut self) -> Result<()> {
        self.enter(0, None)
    }

    /// Waits until a read has ended, or the limit.
    ///
    /// # Errors
    /// When the kernel refuses to wait.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        if self.ring.completion().is_empty() && self.under_way() > 0 {
            return self.enter(1, Some(limit));
        }
        self.enter(0, None)
    }

    fn enter(&mut self, want: usize, limit: Option<Duration>) -> Result<()> {
        let time;
        let mut args = types::SubmitArgs::new();
        if let Some(limit) = limit {
            time = types::Timespec::from(limit);
            args = args.timespec(&time);
        }
        if want == 0 && self.unsubmitted == 0 {
            return Ok(());
        }
        match self.ring.submitter().submit_with_args(want, &args) {
            Ok(count) => {
                self.unsubmitted = self.unsubmitted.saturating_sub(count);
                Ok(())
            }
            // Timed out, or a signal came: the caller polls again. What was not submitted stays in the ring.
            Err(e)
                if [libc::ETIME, libc::EINTR, libc::EBUSY, libc::EAGAIN]
                    .contains(&e.raw_os_error().unwrap_or(0)) =>
            {
                self.unsubmitted = self.ring.submission().len();
                Ok(())
            }
            Err(e) => Err(Error::system("io_uring_enter", e)),
        }
    }

    /// A read or write that has ended.
    pub fn ended(&mut self) -> Option<Finished> {
        let entry = self.ring.completion().next()?;
        let slot = entry.user_data() as usize;
        let pending = self.pending.get_mut(slot)?.take()?;
        self.free.push(slot);
        let result = match entry.result() {
            error if error < 0 => Err(std::io::Error::from_raw_os_error(-error)),
            bytes => Ok(bytes as usize),
        };
        Some(Finished { name: pending.name, result })
    }
}

/// What may prevent io_uring.
const NO_ROOM: &str = "; its ring counts against the limit of locked memory (ulimit -l)";
const HINT: &str = "; io_uring may be switched off (sysctl kernel.io_uring_disabled) or kept from containers";

impl Drop for Reads {
    fn drop(&mut self) {
        // A wait returns at each completion and each signal.
        let end = Instant::now() + ABANDONED_LIMIT;
        while self.under_way() > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                std::mem::forget(self.memory.clone());
                return;
            }
            if self.wait(left).is_err() {
                std::thread::sleep(PAUSE);
            }
            while self.ended().is_some() {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::page_cache::{cached_bytes, open_direct};

    fn file(bytes: usize) -> (File, Vec<u8>) {
        let path =
            std::env::current_dir().unwrap().join(format!("onehop-reads-{}-{bytes}", std::process::id()));
        let data: Vec<u8> = (0..bytes).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 11) as u8).collect();
        let mut file =
            File::options().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
        file.write_all(&data).unwrap();
        file.sync_all().unwrap();
        std::fs::remove_file(&path).unwrap();
        (file, data)
    }

    fn ring(mem: &HostMem, depth: u32) -> Option<Reads> {
        match Reads::new(mem.clone(), depth) {
            Ok(ring) => Some(ring),
            Err(error) => {
                println!("SKIP: {error}");
                None
            }
        }
    }

    #[test]
    fn reads_come_back_whole_and_short_at_the_end() {
        let (file, data) = file(1 << 20 | 5000);
        let mem = HostMem::touched(2 << 20).unwrap();
        assert_eq!(mem.read_file(100, 1 << 20, &file, 7).unwrap(), 1 << 20);
        assert_eq!(mem.to_vec(100, 1 << 20).unwrap(), data[7..7 + (1 << 20)]);
        assert_eq!(mem.read_file(0, 10_000, &file, 1 << 20).unwrap(), 5000);
        assert!(mem.read_file(1 << 20, 2 << 20, &file, 0).is_err());

        let (direct, rules) = open_direct(&file)
            .unwrap()
            .unwrap_or((file.try_clone().unwrap(), crate::page_cache::DirectRules { memory: 1, offset: 1 }));
        assert!(rules.offset <= 4096);
        let direct = Arc::new(direct);
        let Some(mut ring) = ring(&mem, 8) else { return };
        mem.fill(0, 2 << 20, 0).unwrap();
        let mut names = Vec::new();
        let mut begun = 0u64;
        while names.len() < 17 {
            while begun < 17 && ring.room() > 0 {
                let at = begun * 65536;
                ring.begin(begun, &direct, at, at as usize, 65536).unwrap();
                begun += 1;
            }
            ring.wait(Duration::from_secs(5)).unwrap();
            while let Some(done) = ring.ended() {
                let want = if done.name == 16 { 5000 } else { 65536 };
                assert_eq!(done.result.unwrap(), want);
                names.push(done.name);
            }
        }
        names.sort_unstable();
        assert!(names.into_iter().eq(0..17));
        assert_eq!(mem.to_vec(0, data.len()).unwrap(), data);
    }

    #[test]
    fn what_is_written_is_in_the_file() {
        let (file, mut data) = file(1 << 20);
        let mem = HostMem::touched(64 << 10).unwrap();
        let Some(mut ring) = ring(&mem, 2) else { return };
        let more: Vec<u8> = data[..64 << 10].iter().map(|byte| !byte).collect();
        mem.write(0, &more).unwrap();
        data[8192..40960].copy_from_slice(&more[4096..36864]);
        let file = Arc::new(file);
        ring.begin_write(7, &file, 8192, 4096, 32768).unwrap();
        assert!(ring.begin_write(8, &file, 0, 60 << 10, 8192).is_err(), "no such memory");
        ring.wait(Duration::from_secs(5)).unwrap();
        let done = ring.ended().unwrap();
        assert_eq!((done.name, done.result.unwrap()), (7, 32768));
        let all = HostMem::touched(1 << 20).unwrap();
        assert_eq!(all.read_file(0, 1 << 20, &file, 0).unwrap(), 1 << 20);
        assert_eq!(all.to_vec(0, 1 << 20).unwrap(), data);
    }

    #[test]
    fn reads_in_flight_end_before_the_memory_is_dropped() {
        let (file, _) = file(4 << 20);
        let mem = HostMem::touched(4 << 20).unwrap();
        let Some(mut ring) = ring(&mem, 4) else { return };
        let file = Arc::new(file);
        for i in 0..4 {
            ring.begin(i, &file, i << 20, (i as usize) << 20, 1 << 20).unwrap();
        }
        assert!(ring.begin(9, &file, 0, 0, 4096).is_err(), "no room");
        assert!(ring.begin(9, &file, 0, 4 << 20, 1).is_err(), "no such memory");
        ring.submit().unwrap();
        drop(ring);
    }

    #[test]
    fn reads_that_end_one_by_one_do_not_leak_the_memory() {
        const READS: u64 = 128;
        let (gone, is_gone) = std::sync::mpsc::channel::<()>();
        let mem = HostMem::touched(4096).unwrap().on_last_drop(move || drop(gone));
        let Some(mut ring) = ring(&mem, READS as u32) else { return };
        drop(mem);
        let (from, mut to) = std::io::pipe().unwrap();
        let from = Arc::new(File::from(std::os::fd::OwnedFd::from(from)));
        for i in 0..READS {
            ring.begin(i, &from, 0, i as usize, 1).unwrap();
        }
        ring.submit().unwrap();
        let writer = std::thread::spawn(move || {
            for _ in 0..READS {
                std::thread::sleep(Duration::from_millis(2));
                to.write_all(&[7]).unwrap();
            }
        });
        drop(ring);
        assert_eq!(is_gone.try_recv(), Err(std::sync::mpsc::TryRecvError::Disconnected));
        writer.join().unwrap();
    }

    #[test]
    fn the_page_cache_says_what_it_has() {
        let (file, _) = file(1 << 20);
        let cached = cached_bytes(&file, 0, 1 << 20).unwrap();
        println!("{cached} bytes of a file that was just written");
        assert!(cached <= 1 << 20);
        assert_eq!(cached_bytes(&file, 4096, 0).unwrap(), 0);
    }
}
