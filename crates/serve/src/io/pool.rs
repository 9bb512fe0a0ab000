//! Threads that wait for disks: transfers between files and host memory that could not be done at once, and calls that would
//! keep the kernel's other requests waiting.

use std::fs::File;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use onehop_os::HostMem;
use onehop_target::tree::Memory;
use onehop_target::turns::{Next, Queue};

use super::failure;
use super::job::Piece;
use crate::lock;
use crate::table::What;

/// Threads at most: as many transfers as a drive needs at once to be busy.
const MOST: usize = 32;
/// A thread that had nothing to do for so long ends.
const IDLE: Duration = Duration::from_secs(10);

/// What such a thread does.
pub(crate) trait PoolTask: Send + 'static {
    fn run(self);
}

impl PoolTask for Piece {
    fn run(self) {
        let result = transfer(&self);
        self.end(result);
    }
}

/// A call that may take long.
pub(crate) type Call = Box<dyn FnOnce() + Send>;

impl PoolTask for Call {
    fn run(self) {
        self();
    }
}

/// The threads, started as they are needed.
pub(crate) struct Pool<T> {
    queue: Arc<Queue<T>>,
    running: Arc<AtomicUsize>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self { queue: Arc::default(), running: Arc::default(), threads: Mutex::default() }
    }
}

impl<T: PoolTask> Pool<T> {
    pub fn add(&self, uid: u32, work: impl IntoIterator<Item = T>) {
        if self.queue.add(uid, work) && self.running.load(Ordering::Acquire) < MOST {
            self.start();
        }
    }

    fn start(&self) {
        let (queue, running) = (self.queue.clone(), self.running.clone());
        running.fetch_add(1, Ordering::AcqRel);
        let thread = std::thread::Builder::new().name("usrbio disk".into()).spawn(move || {
            while let Next::Work(work) = queue.next(IDLE) {
                work.run();
            }
            running.fetch_sub(1, Ordering::AcqRel);
        });
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        match thread {
            Ok(thread) => threads.push(thread),
            // Others do the work; where there are none it is done when there can be.
            Err(_) => {
                self.running.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Does what is there, and ends.
    pub fn end(&self) {
        self.queue.end();
        if self.running.load(Ordering::Acquire) == 0 {
            self.start();
        }
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            let _ = thread.join();
        }
    }
}

fn transfer(piece: &Piece) -> i64 {
    let What::Host(mem) = &piece.job.buffer.what else {
        return -i64::from(rustix::io::Errno::INVAL.raw_os_error());
    };
    let (file, stats) = (piece.job.open.file(), &piece.job.shared().stats);
    let memory = Memory { mem, at: piece.offset(), len: piece.len as usize, shared: true };
    let (way, done) = if piece.job.reads() {
        (&stats.host_waited, file.read(memory, piece.at()))
    } else {
        (&stats.host_written, file.write(memory, piece.at()))
    };
    match done {
        Ok(count) => {
            way.count(count as u64);
            count as i64
        }
        Err(error) => failure(&error),
    }
}

/// Where zeroes come from that the kernel writes.
pub(crate) struct Zeroes(File);

impl Zeroes {
    pub fn open() -> std::io::Result<Self> {
        File::open("/dev/zero").map(Self)
    }

    pub fn read_into(&self, mem: &HostMem, from: usize, bytes: usize) -> std::io::Result<()> {
        match mem.read_file(from, bytes, &self.0, 0) {
            Ok(_) => Ok(()),
            Err(error) => Err(error
                .errno()
                .map_or_else(|| std::io::Error::other(error), std::io::Error::from_raw_os_error)),
        }
    }
}
