//! Threads that wait for disks: transfers between files and host memory that could not be done at once, and calls that would
//! keep the kernel's other requests waiting.

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

use super::job::{JobChunk, Rest};
use super::{failure, refused};
use crate::lock;
use crate::table::LinkContent;

/// Threads. One person's work holds half of them: as many transfers as a drive needs at once to be busy.
const THREADS: u64 = 64;
/// More of them, for users who come when others have those: so many each.
const RESERVE: (u64, u64) = (192, 4);
const MOST: usize = (THREADS + RESERVE.0) as usize;
/// A thread that had nothing to do for so long ends.
const IDLE: Duration = Duration::from_secs(10);

/// What such a thread does.
pub(crate) trait PoolTask: Divisible + Send + 'static {
    fn run(part: Self::Part);

    /// Has what cannot be done any more end with an error.
    fn refuse(part: Self::Part);
}

impl PoolTask for Rest {
    fn run(piece: JobChunk) {
        let result = piece.refused().unwrap_or_else(|| transfer(&piece));
        piece.end(result);
    }

    fn refuse(piece: JobChunk) {
        piece.end(refused(Errno::CANCELED));
    }
}

/// A call that may take long.
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

    /// A call that is never done drops its answer to the kernel, which is EIO then.
    fn refuse(_: Self) {}
}

/// The threads, started as they are needed. Those who have turns at them are persons, mostly.
pub(crate) struct ThreadPool<T, K = u32>(Arc<PoolThreads<T, K>>);

/// Who has turns at threads.
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
    /// One could not be started since somebody tried again.
    is_missing: AtomicBool,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl<T: PoolTask, K: PoolUser> PoolThreads<T, K> {
    fn start(self: &Arc<Self>) {
        if self.running.fetch_add(1, Ordering::AcqRel) >= MOST {
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
            // Others do the work; where there are none it is done when there can be.
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

    /// Threads of which no user's work holds more than so many.
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

    /// Has work done by a thread. After the end it is refused: the process may be gone before such a thread begins.
    pub fn add(&self, user: K, work: T) {
        match self.0.queue.offer(user, work) {
            Ok(true) => self.0.start(),
            Ok(false) => {}
            Err(late) => late.divide().0.into_iter().for_each(T::refuse),
        }
    }

    /// Starts a thread if one could not be started before: there may be work and nobody who does it.
    pub fn try_again(&self) {
        if self.0.is_missing.swap(false, Ordering::AcqRel) {
            self.0.start();
        }
    }

    /// Does what is there, and ends.
    pub fn end(&self) {
        let Self(threads) = self;
        threads.queue.end();
        if threads.running.load(Ordering::Acquire) == 0 {
            threads.start();
        }
        loop {
            // A thread may have started another.
            let Some(thread) = lock(&threads.handles).pop() else { break };
            let _ = thread.join();
        }
        // What is left where no thread could be started.
        while let Next::Work(part, _) = threads.queue.next(Duration::ZERO) {
            T::refuse(part);
        }
    }
}

fn transfer(piece: &JobChunk) -> i64 {
    let LinkContent::Host(mem) = &piece.job.buffer.what else {
        return -i64::from(rustix::io::Errno::INVAL.raw_os_error());
    };
    let (file, stats) = (piece.job.open.file(), &piece.job.shared().stats);
    let memory = TransferMemory { mem, at: piece.offset(), len: piece.len as usize, shared: true };
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
        let (say, said) = channel();
        for uid in 0..40 {
            for _ in 0..100 {
                let (gate, say) = (gate.clone(), say.clone());
                pool.add(
                    uid,
                    SlowCall(Box::new(move || {
                        let _ = say.send(uid);
                        drop(gate.read());
                    })),
                );
            }
        }
        let mut begun = std::collections::HashSet::new();
        while begun.len() < 40 {
            let uid = said.recv_timeout(LONG);
            begun.insert(uid.unwrap_or_else(|_| panic!("calls of {begun:?} only have begun")));
        }
        let (see, seen) = channel();
        pool.add(40, SlowCall(Box::new(move || see.send(()).unwrap())));
        assert!(seen.recv_timeout(LONG).is_ok(), "one more user has to wait");
        assert!(pool.0.running.load(Ordering::Acquire) <= MOST);
        drop(closed);
        pool.end();
    }

    #[test]
    fn work_that_comes_after_the_end_is_refused() {
        let pool = ThreadPool::new(&Arc::new(ThreadStarter::new().unwrap()));
        let add = || {
            let (say, said) = channel();
            pool.add(1, SlowCall(Box::new(move || say.send(()).unwrap())));
            said.recv_timeout(Duration::from_secs(60))
        };
        assert_eq!(add(), Ok(()));
        pool.end();
        // It was dropped, with what it would have answered by.
        assert_eq!(add(), Err(RecvTimeoutError::Disconnected));
    }

    /// Run by [`work_is_done_once_there_can_be_threads`], in a process of its own.
    #[test]
    fn without_threads() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        if std::env::var_os("ONEHOP_TEST_NO_THREADS").is_none() {
            return;
        }
        let pool = ThreadPool::new(&Arc::new(ThreadStarter::new().unwrap()));
        let ((say, said), before) = (channel(), getrlimit(Resource::As));
        let ended = ThreadPool::new(&Arc::new(ThreadStarter::new().unwrap()));
        let (never, refused) = channel::<()>();
        // No addresses for a stack.
        setrlimit(Resource::As, Rlimit { current: Some(0), ..before }).unwrap();
        pool.add(1, SlowCall(Box::new(move || say.send(()).unwrap())));
        pool.try_again();
        ended.add(1, SlowCall(Box::new(move || never.send(()).unwrap())));
        ended.end();
        setrlimit(Resource::As, before).unwrap();
        assert_eq!(refused.try_recv(), Err(TryRecvError::Disconnected), "a call that cannot be done waits");
        assert!(lock(&pool.0.handles).is_empty(), "a thread was started");
        pool.try_again();
        assert!(said.recv_timeout(Duration::from_secs(60)).is_ok(), "the work is not done");
        pool.end();
    }

    #[test]
    fn work_is_done_once_there_can_be_threads() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "io::pool::tests::without_threads"]);
        let output = alone.env("ONEHOP_TEST_NO_THREADS", "yes").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }
}
