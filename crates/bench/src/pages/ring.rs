//! Pages by rings of `onehop mount`.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_usrbio::buffer::{Buffer, Ring};
use onehop_usrbio::gpu::{AnyGpu, SharedGpuMemory};
use onehop_usrbio::mount::Mount;
use onehop_usrbio::ring::Request;
use onehop_usrbio::wire::{self, Answer, Ask};
use onehop_usrbio::{Error as Usrbio, Id, Name, Priority, RingName};

use super::file::failed;
use super::{PageBuffer, PageMover, PageRound, own_cpu_time};
use crate::stats::Quantiles;
use crate::{Error, Result};

/// How long a ring may be without a completion.
const SILENCE: Duration = Duration::from_secs(30);
const NAP: Duration = Duration::from_millis(1);

/// Moves pages by two rings, one for each direction.
pub struct RingMover {
    mount: Arc<Mount>,
    /// Rings may use files that their user has open.
    _file: File,
    inode: u64,
    buffer: PageBuffer,
    memory: RegisteredMemory,
    rings: [Ring; 2],
    daemon: u32,
}

/// What the daemon knows the memory by.
enum RegisteredMemory {
    Host(Buffer),
    Gpu { name: Name, _memory: SharedGpuMemory },
}

fn wrong(error: Usrbio) -> Error {
    Error::Setup(error.to_string())
}

impl RingMover {
    /// Registers a buffer of `bytes` bytes with the daemon of a mount, whose process is `daemon`: in GPU memory, or else in
    /// host memory. `depth` is the most pages in flight.
    ///
    /// # Errors
    /// When the mount refuses it, or the file cannot be opened.
    pub fn new(
        point: &Path,
        file: &Path,
        gpu: Option<&Arc<AnyGpu>>,
        bytes: usize,
        depth: usize,
        daemon: u32,
    ) -> Result<Self> {
        let open =
            File::options().read(true).write(true).open(file).map_err(|e| failed("opening", file, e))?;
        let inode = open.metadata().map_err(|e| failed("reading", file, e))?.ino();
        let mount = Arc::new(Mount::open(point).map_err(wrong)?);
        let (memory, buffer) = match gpu {
            None => {
                let buffer = Buffer::create(&mount, bytes, 0, None).map_err(wrong)?;
                let mem = buffer.memory().clone();
                (RegisteredMemory::Host(buffer), PageBuffer::Host(mem))
            }
            Some(gpu) => register(&mount, gpu, bytes)?,
        };
        let ring = |read| {
            let name =
                RingName { read, depth: 0, priority: Priority::Normal, timeout: Duration::ZERO, flags: 0 };
            Ring::create(&mount, depth as i32, name, None).map_err(wrong)
        };
        let rings = [ring(true)?, ring(false)?];
        Ok(Self { mount, _file: open, inode, buffer, memory, rings, daemon })
    }

    fn id(&self) -> Id {
        match &self.memory {
            RegisteredMemory::Host(buffer) => buffer.id(),
            RegisteredMemory::Gpu { name, .. } => name.id,
        }
    }
}

fn register(mount: &Mount, gpu: &Arc<AnyGpu>, bytes: usize) -> Result<(RegisteredMemory, PageBuffer)> {
    let socket = mount.socket().ok_or_else(|| Error::Setup("the mount takes no GPU memory".into()))?;
    let memory = SharedGpuMemory::create(gpu, bytes).map_err(wrong)?;
    let id = Id::random().map_err(wrong)?;
    let name = Name { gpu: Some(0), ..Name::buffer(id, 0) };
    let offer = memory.offer().map_err(wrong)?;
    match wire::ask(&socket, Ask::Register { id, device: 0, block: 0, offer }).map_err(wrong)? {
        Answer::Registered { .. } => {}
        _ => return Err(Error::Setup("the daemon's answer does not match the request".into())),
    }
    let buffer = PageBuffer::Gpu(memory.region().clone());
    Ok((RegisteredMemory::Gpu { name, _memory: memory }, buffer))
}

impl Drop for RingMover {
    fn drop(&mut self) {
        if let RegisteredMemory::Gpu { name, .. } = &self.memory {
            // Fails if the daemon is gone.
            let _ = self.mount.withdraw(name);
        }
    }
}

impl PageMover for RingMover {
    fn name(&self) -> &'static str {
        "ring"
    }

    fn buffer(&self) -> &PageBuffer {
        &self.buffer
    }

    fn round(&mut self, round: &PageRound<'_>, latencies: &mut Quantiles) -> Result<Duration> {
        let (ring, id) = (&self.rings[usize::from(round.writes)], self.id());
        let mut begun = vec![Instant::now(); round.places.len()];
        let (mut next, mut left, mut done) = (0, round.places.len(), Vec::new());
        let (start, mut heard) = (Instant::now(), Instant::now());
        while left > 0 {
            let in_flight = next - (round.places.len() - left);
            let new = (round.depth - in_flight).min(round.places.len() - next);
            for _ in 0..new {
                let (offset, len) = ((next * round.page) as u64, round.page as u64);
                let (at, userdata) = (round.places[next], next as u64);
                let request = Request { buffer: id, offset, inode: self.inode, at, len, userdata };
                begun[next] = Instant::now();
                ring.prepare(&request).map_err(wrong)?;
                next += 1;
            }
            ring.submit();
            done.clear();
            // A quarter at a time: a wake-up for each page would cost more than small pages do.
            let least = (round.depth / 4).clamp(1, left);
            let until = std::time::SystemTime::now() + Duration::from_secs(1);
            ring.wait(&mut done, (least, round.depth), Some(until), NAP).map_err(wrong)?;
            let now = Instant::now();
            for one in &done {
                if one.result != round.page as i64 {
                    let at = round.places[one.userdata as usize];
                    return Err(Error::Wrong(format!("a page at {at} returned {}", one.result)));
                }
                latencies.add((now - begun[one.userdata as usize]).as_nanos() as u64);
            }
            left -= done.len();
            if !done.is_empty() {
                heard = now;
            } else if heard.elapsed() > SILENCE {
                return Err(Error::Wrong(format!("the ring did not complete a page within {SILENCE:?}")));
            }
        }
        Ok(start.elapsed())
    }

    fn cpu_time(&self) -> Result<Duration> {
        let path = format!("/proc/{}/stat", self.daemon);
        let text = std::fs::read_to_string(&path).map_err(|e| failed("reading", Path::new(&path), e))?;
        // Behind the name, which may contain anything: user and system time are the 12th and 13th.
        let fields = text.rsplit_once(')').map_or("", |(_, rest)| rest).split_ascii_whitespace();
        let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        let per_second = rustix::param::clock_ticks_per_second().max(1);
        Ok(own_cpu_time() + Duration::from_secs_f64(ticks as f64 / per_second as f64))
    }
}
