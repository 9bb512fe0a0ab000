//! Threads that may block: for transfers between files and host memory that cannot be done at once, and for calls that
//! would delay the kernel's other requests.

use std::fs::File;
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use onehop_os::{HostMem, ThreadStarter};
use onehop_target::shares::Shares;
use onehop_target::tree::TransferMemory;
use onehop_target::turns::{Divisible, Next, Queue};
use rustix::io::Errno;

use super::job::{ChunkBundle, JobChunk, QueuedTransfers, complete};
use super::{failure, refused};
use crate::lock;
use crate::table::LinkContent;

/// Threads, half of which one person may hold: enough requests in flight to keep a drive busy.
const THREADS: u64 = 64;
/// Further threads, for users who find the others taken, and how many each gets.
const RESERVE: (u64, u64) = (192, 4);
const MAX: usize = (THREADS + RESERVE.0) as usize;
/// An idle thread ends after this time.
const IDLE: Duration = Duration::from_secs(10);

/// Work for such a thread.
pub(crate) trait PoolTask: Divisible + Send + 'static {
    fn run(part: Self::Part);

    /// Completes work that cannot be done any more with an error.
    fn refuse(part: Self::Part);
}

impl PoolTask for QueuedTransfers {
    fn run(chunks: ChunkBundle) {
        let chunks = read_cached(chunks);
        chunks.end_each(|chunk| chunk.refused().unwrap_or_else(|| transfer(chunk)));
    }

    fn refuse(chunks: ChunkBundle) {
        chunks.end_each(|_| refused(Errno::CANCELED));
    }
}

/// A call that may block.
pub(crate) struct SlowCall(pub Box<dyn FnOnce() + Send>);

impl Divisible for SlowCall {
    type Part = Self;

    fn divide(self) -> (Option<Self>, Option<Self>) {
        (Some(self), None)
    }
}

impl PoolTask for SlowCall {
    fn run(Self(call): Self) {
        call();
    }

    /// Dropping the call replies EIO to the kernel.
    fn refuse(_: Self) {}
}

/// Threads that are started on demand. Users, usually persons, take turns.
pub(crate) struct ThreadPool<T, K = u32>(Arc<PoolThreads<T, K>>);

/// A key by which turns are taken.
pub(crate) trait PoolUser: Eq + Hash + Copy + Send + Sync + 'static {}

impl<K: Eq + Hash + Copy + Send + Sync + 'static> PoolUser for K {}

impl<T, K> Clone for ThreadPool<T, K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct PoolThreads<T, K> {
    starter: Arc<ThreadStarter>,
    queue: Queue<T, K>,
    running: AtomicUsize,
    /// A thread could not be started since the last `try_again`.
    is_missing: AtomicBool,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl<T: PoolTask, K: PoolUser> PoolThreads<T, K> {
    fn start(self: &Arc<Self>) {
        if self.running.fetch_add(1, Ordering::AcqRel) >= MAX {
            self.running.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let this = self.clone();
        let thread = self.starter.spawn("usrbio disk", move || {
            let mut worker = this.queue.worker();
            while let Next::Work(part, is_short) = worker.next(IDLE) {
                if is_short {
                    this.start();
                }
                T::run(part);
            }
            this.running.fetch_sub(1, Ordering::AcqRel);
        });
        let mut handles = lock(&self.handles);
        handles.retain(|thread| !thread.is_finished());
        match thread {
            Ok(thread) => handles.push(thread),
            // Other threads do the work, or the next `try_again` starts one.
            Err(_) => {
                self.running.fetch_sub(1, Ordering::AcqRel);
                self.is_missing.store(true, Ordering::Release);
            }
        }
    }
}

impl<T: PoolTask, K: PoolUser> ThreadPool<T, K> {
    pub fn new(starter: &Arc<ThreadStarter>) -> Self {
        Self::with_limit(starter, u64::MAX)
    }

    /// A pool in which one user's work holds at most this many threads.
    pub fn with_limit(starter: &Arc<ThreadStarter>, most: u64) -> Self {
        let shares = Shares::new(THREADS).with_reserve(RESERVE.0, RESERVE.1).with_limit(most);
        let (starter, queue) = (starter.clone(), Queue::with_shares(shares));
        Self(Arc::new(PoolThreads {
            starter,
            queue,
            running: AtomicUsize::new(0),
            is_missing: AtomicBool::new(false),
            handles: Mutex::default(),
        }))
    }

    /// Queues work. After [`Self::end`] it is refused: the process may exit before a thread starts it.
    pub fn add(&self, user: K, work: T) {
        match self.0.queue.offer(user, work) {
            Ok(true) => self.0.start(),
            Ok(false) => {}
            Err(late) => {
                let mut left = Some(late);
                while let Some((part, rest)) = left.map(T::divide) {
                    part.into_iter().for_each(T::refuse);
                    left = rest;
                }
            }
        }
    }

    /// Starts a thread if one could not be started before: work may be queued without a thread.
    pub fn try_again(&self) {
        if self.0.is_missing.swap(false, Ordering::AcqRel) {
            self.0.start();
        }
    }

    /// Finishes queued work, and ends.
    pub fn end(&self) {
        let Self(threads) = self;
        threads.queue.end();
        if threads.running.load(Ordering::Acquire) == 0 {
            threads.start();
        }
        loop {
            // A thread may have started another one.
            let Some(thread) = lock(&threads.handles).pop() else { break };
            let _ = thread.join();
        }
        // Work that is left because no thread could be started.
        while let Next::Work(part, _) = threads.queue.next(Duration::ZERO) {
            T::refuse(part);
        }
    }
}

/// Of several reads, does those that need not wait for a disk, and returns one of the others. The rest get other threads.
fn read_cached(ChunkBundle(chunks): ChunkBundle) -> ChunkBundle {
    let Some(job) = chunks.first().map(|chunk| chunk.job.clone()) else { return ChunkBundle(chunks) };
    let LinkContent::Host(mem) = &job.buffer.what else { return ChunkBundle(chunks) };
    if !job.reads() || chunks.len() == 1 {
        return ChunkBundle(chunks);
    }
    let read = |chunk: &JobChunk| {
        if chunk.refused().is_some() {
            return None;
        }
        let to = TransferMemory { mem, at: chunk.offset(), len: chunk.len as usize, shared: true };
        let count = chunk.job.open.file().read_now(to, chunk.at()).ok()??;
        (count as u64 == chunk.len).then_some(count as i64)
    };
    let (mut ended, mut slow) = (Vec::new(), Vec::new());
    for chunk in chunks {
        match read(&chunk) {
            Some(count) => {
                job.shared().stats.host_now.count(count as u64);
                ended.extend(chunk.end(count));
            }
            None => slow.push(chunk),
        }
    }
    complete(ended);
    let own = Vec::from_iter(slow.pop());
    if !slow.is_empty() {
        job.shared().ring_reads.add(job.lane_user().0, QueuedTransfers::one_by_one(slow));
    }
    ChunkBundle(own)
}

fn transfer(chunk: &JobChunk) -> i64 {
    let LinkContent::Host(mem) = &chunk.job.buffer.what else {
        return -i64::from(rustix::io::Errno::INVAL.raw_os_error());
    };
    let (file, stats) = (chunk.job.open.file(), &chunk.job.shared().stats);
    let memory = TransferMemory { mem, at: chunk.offset(), len: chunk.len as usize, shared: true };
    let (counters, done) = if chunk.job.reads() {
        (&stats.host_waited, file.read(memory, chunk.at()))
    } else {
        (&stats.host_written, file.write(memory, chunk.at()))
    };
    match done {
        Ok(count) => {
            counters.count(count as u64);
            count as i64
        }
        Err(error) => failure(&error),
    }
}

/// `/dev/zero`, from which the kernel zeroes memory.
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

#[cfg(test)]
mod tests {
    use std::sync::RwLock;
    use std::sync::mpsc::{RecvTimeoutError, TryRecvError, channel};

    use super::*;

    #[test]
    fn there_are_threads_for_many_users_whose_calls_wait() {
        const LONG: Duration = Duration::from_secs(60);
        let pool = ThreadPool::new(&Arc::new(ThreadStarter::new().unwrap()));
        let gate = Arc::new(RwLock::new(()));
        let closed = gate.write().unwrap();
        let (tx, rx) = channel();
        for uid in 0..40 {
            for _ in 0..100 {
                let (gate, tx) = (gate.clone(), tx.clone());
                pool.add(
                    uid,
                    SlowCall(Box::new(move || {
                        let _ = tx.send(uid);
                        drop(gate.read());
                    })),
                );
            }
        }
        let mut begun = std::collections::HashSet::new();
        while begun.len() < 40 {
            let uid = rx.recv_timeout(LONG);
            begun.insert(uid.unwrap_or_else(|_| panic!("calls of {begun:?} only have begun")));
        }
        let (see, seen) = channel();
        pool.add(40, SlowCall(Box::new(move || see.send(()).unwrap())));
        assert!(seen.recv_timeout(LONG).is_ok(), "another user has to wait");
        assert!(pool.0.running.load(Ordering::Acquire) <= MAX);
        drop(closed);
        pool.end();
    }

    #[test]
    fn work_after_the_end_is_refused() {
        let pool = ThreadPool::new(&Arc::new(ThreadStarter::new().unwrap()));
        let add = || {
            let (tx, rx) = channel();
            pool.add(1, SlowCall(Box::new(move || tx.send(()).unwrap())));
            rx.recv_timeout(Duration::from_secs(60))
        };
        assert_eq!(add(), Ok(()));
        pool.end();
        // The call was dropped, with the sender in it.
        assert_eq!(add(), Err(RecvTimeoutError::Disconnected));
    }

    /// Run in a child process by [`work_is_done_once_threads_can_be_started`].
    #[test]
    fn without_threads() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        if std::env::var_os("ONEHOP_TEST_NO_THREADS").is_none() {
            return;
        }
        let pool = ThreadPool::new(&Arc::new(ThreadStarter::new().unwrap()));
        let ((tx, rx), before) = (channel(), getrlimit(Resource::As));
        let ended = ThreadPool::new(&Arc::new(ThreadStarter::new().unwrap()));
        let (never, refused) = channel::<()>();
        // No address space for a stack.
        setrlimit(Resource::As, Rlimit { current: Some(0), ..before }).unwrap();
        pool.add(1, SlowCall(Box::new(move || tx.send(()).unwrap())));
        pool.try_again();
        ended.add(1, SlowCall(Box::new(move || never.send(()).unwrap())));
        ended.end();
        setrlimit(Resource::As, before).unwrap();
        assert_eq!(refused.try_recv(), Err(TryRecvError::Disconnected), "a call that cannot be done waits");
        assert!(lock(&pool.0.handles).is_empty(), "a thread was started");
        pool.try_again();
        assert!(rx.recv_timeout(Duration::from_secs(60)).is_ok(), "the work is not done");
        pool.end();
    }

    #[test]
    fn work_is_done_once_threads_can_be_started() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "io::pool::tests::without_threads"]);
        let output = alone.env("ONEHOP_TEST_NO_THREADS", "yes").output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
    }
}
