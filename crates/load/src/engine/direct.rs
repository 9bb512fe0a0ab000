//! The threads that read past the page cache. Each has a small slot of the ring: it reads a part of a chunk into it, copies
//! that, and goes on with the next.
//!
//! The slots are small because what a disk writes, or a hypervisor's thread in its stead, is dearer the more memory it goes
//! to: it has to stay in the caches until the GPU has fetched it. And several threads begin their reads sooner than one that
//! looks after all of them. docs/benchmarks.md has the figures of both.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::iter;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onehop_os::{Finished, HostMem, Reads};

use super::choice::{Direct, Opened};
use super::crew::{Job, Lane, Marks, Shared};
use crate::error::{Error, Result};
use crate::plan::{Chunk, Read};

/// So many threads, unless it was said how many.
pub(super) const THREADS: usize = 16;
/// Bytes of a slot at most, and so of a read: what drives take in one command, or near it.
pub(super) const SLOT: usize = 512 << 10;
/// Reads that a thread has under way at most: the parts of some chunks lie in pieces.
const UNDER_WAY: usize = 8;
/// How long a thread sleeps before it looks whether the load was given up.
const LOOK: Duration = Duration::from_millis(50);
/// How long a thread asks again and again whether its copy is over, how long it sleeps in between after that, and how long a
/// copy may take: a thousand times what it does.
const SHORT: Duration = Duration::from_micros(30);
const NAP: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_secs(60);

/// Where the chunks come from.
#[derive(Clone)]
pub(super) enum Supply {
    /// They are all these threads' own.
    All,
    /// Others have not found them in the page cache.
    Found(Arc<Mutex<Receiver<Job>>>),
}

impl Supply {
    /// What others have not found.
    pub(super) fn found(by: Receiver<Job>) -> Self {
        Self::Found(Arc::new(Mutex::new(by)))
    }

    /// The next one; none when there will be none, or the load was given up.
    fn next(&self, shared: &Shared) -> Option<Job> {
        match self {
            Self::All => shared.next(),
            // Who waits here keeps the others from it, who would only wait as well.
            Self::Found(found) => coming(&found.lock().unwrap_or_else(PoisonError::into_inner), shared),
        }
    }
}

/// What comes next; none when nothing will, or the load was given up.
fn coming<T>(from: &Receiver<T>, shared: &Shared) -> Option<T> {
    while !shared.is_stopped() {
        match from.recv_timeout(LOOK) {
            Ok(it) => return Some(it),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    None
}

/// One of the threads.
pub(super) struct Reader {
    /// Its slot.
    pub(super) ring: HostMem,
    pub(super) supply: Supply,
    /// Whence its copies' way comes once the GPU knows the ring, and which slot of that it has.
    pub(super) lane: Receiver<Arc<Mutex<Lane>>>,
    pub(super) index: usize,
}

impl Reader {
    pub(super) fn run(self, shared: &Shared) -> Result<()> {
        // Many loads find all in the page cache, and get by without a ring of the kernel's.
        let Some(mut job) = self.supply.next(shared) else { return Ok(()) };
        shared.disk_threads.fetch_add(1, Ordering::Relaxed);
        let slot = self.ring.len() as u64;
        let mut disk = Disk { shared, by: By::new(self.ring, shared) };
        let mut lane = None;
        loop {
            for chunk in job.chunk.parts(slot) {
                if !disk.read(&chunk)? {
                    return Ok(());
                }
                let lane = match &lane {
                    Some(lane) => lane,
                    None => match coming(&self.lane, shared) {
                        Some(came) => lane.insert(came),
                        None => return Ok(()),
                    },
                };
                let part = Job { chunk, gpus: job.gpus.clone() };
                let marks = locked(lane).copy(iter::once((self.index, &part)))?;
                if !is_copied(lane, &marks, shared)? {
                    return Ok(());
                }
            }
            if let Some(lane) = &lane {
                locked(lane).tell(job);
            }
            let Some(next) = self.supply.next(shared) else { return Ok(()) };
            job = next;
        }
    }
}

fn locked(lane: &Mutex<Lane>) -> MutexGuard<'_, Lane> {
    lane.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until the slot may be filled again; it may not if the load was given up.
fn is_copied(lane: &Mutex<Lane>, marks: &Marks, shared: &Shared) -> Result<bool> {
    let begun = Instant::now();
    while !shared.is_stopped() {
        if locked(lane).is_over(marks)? {
            return Ok(true);
        }
        match begun.elapsed() {
            waited if waited < SHORT => std::thread::yield_now(),
            waited if waited < LONGEST => std::thread::sleep(NAP),
            _ => {
                let what = "copying what the disk gave to GPU memory".into();
                return Err(onehop_gpu::Error::Silent { what, seconds: LONGEST.as_secs() }.into());
            }
        }
    }
    Ok(false)
}

struct Disk<'a> {
    shared: &'a Shared,
    by: By,
}

/// How a slot is filled.
enum By {
    /// As many reads at once as there is room for.
    Ring(Box<Ring>),
    /// One after the other: where there is no io_uring, as in many containers.
    Calls(HostMem),
}

struct Ring {
    reads: Reads,
    /// What is under way, by the name of its read.
    under_way: [Option<Read>; UNDER_WAY],
}

impl By {
    fn new(slot: HostMem, shared: &Shared) -> Self {
        match Reads::new(slot.clone(), UNDER_WAY as u32) {
            Ok(reads) => Self::Ring(Box::new(Ring { reads, under_way: [None; UNDER_WAY] })),
            Err(why) => {
                shared.why_calls.get_or_init(|| why.to_string());
                Self::Calls(slot)
            }
        }
    }

    /// Begins what it can of what is waiting, and gives what has ended; none when the time to look is over, or nothing is left.
    fn go_on(
        &mut self,
        file: &Arc<File>,
        waiting: &mut VecDeque<Read>,
    ) -> Result<Vec<(Read, io::Result<usize>)>> {
        let Ring { reads, under_way } = match self {
            Self::Ring(ring) => &mut **ring,
            Self::Calls(slot) => {
                let by_call = |read: Read| {
                    (read, slot.read_some(read.slot as usize, read.bytes as usize, file, read.offset))
                };
                return Ok(waiting.pop_front().map(by_call).into_iter().collect());
            }
        };
        for (name, room) in under_way.iter_mut().enumerate().filter(|(_, room)| room.is_none()) {
            let Some(read) = waiting.pop_front() else { break };
            let (to, bytes) = (read.slot as usize, read.bytes as usize);
            let begun = reads.begin(name as u64, file, read.offset, to, bytes);
            begun.map_err(onehop_gpu::Error::from)?;
            *room = Some(read);
        }
        reads.wait(LOOK).map_err(onehop_gpu::Error::from)?;
        let mut ended = Vec::new();
        while let Some(Finished { name, result }) = reads.ended() {
            let read = under_way.get_mut(name as usize).and_then(Option::take);
            ended.extend(read.map(|read| (read, result)));
        }
        Ok(ended)
    }

    /// Whether nothing is under way.
    fn is_idle(&self) -> bool {
        match self {
            Self::Ring(ring) => ring.reads.under_way() == 0,
            Self::Calls(_) => true,
        }
    }
}

impl Disk<'_> {
    /// Fills the slot; not if the load was given up.
    fn read(&mut self, part: &Chunk) -> Result<bool> {
        let source = self.shared.sources.get(part.file).ok_or(Error::Incomplete)?;
        let Direct { file, block } = source.direct.as_ref().ok_or(Error::Incomplete)?;
        let mut waiting: VecDeque<Read> = part.reads.iter().filter(|read| read.valid > 0).copied().collect();
        while !self.shared.is_stopped() {
            if waiting.is_empty() && self.by.is_idle() {
                return Ok(true);
            }
            for (read, result) in self.by.go_on(file, &mut waiting)? {
                waiting.extend(self.left(source, *block, read, result)?);
            }
        }
        Ok(false)
    }

    /// What has to be read again of a read that has ended.
    fn left(
        &self,
        source: &Opened,
        block: u64,
        read: Read,
        result: io::Result<usize>,
    ) -> Result<Option<Read>> {
        let got = match result {
            Ok(got) => read.valid.min(got as u64),
            Err(e) if e.kind() == ErrorKind::Interrupted => return Ok(Some(read)),
            Err(e) => {
                return Err(Error::Read {
                    file: source.name.clone(),
                    offset: read.offset,
                    bytes: read.valid,
                    source: e,
                });
            }
        };
        // What is missing is read again from a block's start. Less than a block is the file's end.
        let whole = if got < read.valid { got / block * block } else { got };
        if whole == 0 {
            return Err(Error::Ended {
                file: source.name.clone(),
                offset: read.offset,
                bytes: read.valid,
                length: source.bytes,
            });
        }
        self.shared.direct_bytes.fetch_add(whole, Ordering::Relaxed);
        Ok((whole < read.valid).then(|| Read {
            slot: read.slot + whole,
            offset: read.offset + whole,
            bytes: read.bytes - whole,
            valid: read.valid - whole,
        }))
    }
}
