//! Pages between one file and memory, the traffic of KV caches: by the library, by a ring of a mount, and by plain threads
//! beside them.
//!
//! 1. [`PageFile::create`] makes the file, whose every word is known.
//! 2. [`LibraryMover`], [`RingMover`] and [`ThreadMover`] move pages between it and a [`PageBuffer`].
//! 3. [`measure`] times rounds of pages at random places, and compares every byte outside of the measured time.

mod file;
mod library;
mod ring;
mod threads;

use std::time::{Duration, Instant};

use onehop_gpu::Region;
use onehop_os::HostMem;
use serde::Serialize;

pub use file::PageFile;
pub use library::LibraryMover;
pub use ring::RingMover;
pub use threads::ThreadMover;

use crate::stats::{Quantiles, median};
use crate::{Error, Result};

/// The most bytes of a round, and the most pages.
const ROUND: (usize, usize) = (128 << 20, 8192);

/// Memory that pages are moved to and from: host memory, or a GPU's.
#[derive(Clone)]
pub enum PageBuffer {
    /// Host memory.
    Host(HostMem),
    /// GPU memory.
    Gpu(Region),
}

impl PageBuffer {
    fn bytes(&self) -> usize {
        match self {
            Self::Host(mem) => mem.len(),
            Self::Gpu(region) => region.len(),
        }
    }

    fn read(&self, at: usize, out: &mut [u8]) -> Result<()> {
        match self {
            Self::Host(mem) => Ok(mem.read(at, out)?),
            Self::Gpu(region) => Ok(region.read(at, out)?),
        }
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Host(mem) => Ok(mem.write(at, bytes)?),
            Self::Gpu(region) => Ok(region.write(at, bytes)?),
        }
    }
}

/// Pages to move: the n-th lies at `places[n]` in the file, and at `n * page` in the buffer.
pub struct PageRound<'a> {
    /// Bytes of a page.
    pub page: usize,
    /// Where each lies in the file.
    pub places: &'a [u64],
    /// How many are in flight.
    pub depth: usize,
    /// Whether they are written to the file.
    pub writes: bool,
}

/// Moves pages.
pub trait PageMover {
    /// Its name in results.
    fn name(&self) -> &'static str;
    /// Its buffer.
    fn buffer(&self) -> &PageBuffer;
    /// Moves pages, and adds the nanoseconds that each took. Returns how long all took.
    ///
    /// # Errors
    /// When one of them fails.
    fn round(&mut self, round: &PageRound<'_>, latencies: &mut Quantiles) -> Result<Duration>;
    /// The CPU time that this process and those that serve it have taken so far.
    ///
    /// # Errors
    /// When the system does not report it.
    fn cpu_time(&self) -> Result<Duration>;
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PagePlan {
    /// Bytes of a page.
    pub page: usize,
    /// Pages in flight.
    pub depth: usize,
    /// Whether pages are written.
    pub writes: bool,
    /// How long each repeat moves pages.
    pub time: Duration,
    /// Repeats, of which the median is the result.
    pub repeats: u32,
}

/// A measured row.
#[derive(Clone, Debug, Serialize)]
pub struct PageRow {
    /// How pages were moved: `registered` or `staged` (both by the library), `ring` or `threads`.
    pub by: &'static str,
    /// `host` or `vram`.
    pub memory: &'static str,
    /// `read` (from the file) or `write`.
    pub io: &'static str,
    /// Bytes of a page.
    pub page: usize,
    /// Pages in flight.
    pub depth: usize,
    /// The median rate of the repeats, in 10^9 bytes per second.
    pub gbps: f64,
    /// The rate of each repeat.
    pub each_gbps: Vec<f64>,
    /// The median latency of a page, in microseconds.
    pub p50_us: Option<f64>,
    /// The 99th percentile.
    pub p99_us: Option<f64>,
    /// CPU seconds of all processes that took part, per 10^9 bytes.
    pub cpu_s_per_gb: f64,
    /// Pages that were moved and compared.
    pub verified: u64,
}

/// Measures one row. Every page of every round is compared.
///
/// # Errors
/// When a page fails or is wrong, or `stop` says so.
pub fn measure(
    mover: &mut dyn PageMover,
    file: &mut PageFile,
    plan: &PagePlan,
    stop: &dyn Fn() -> bool,
) -> Result<PageRow> {
    let most = (ROUND.0 / plan.page).min(ROUND.1).min(mover.buffer().bytes() / plan.page);
    let count = most.min(file.pages(plan.page));
    if count < plan.depth {
        let why = format!("{} pages of {} bytes fit, fewer than are to be in flight", count, plan.page);
        return Err(Error::Setup(why));
    }
    let (mut rates, mut latencies) = (Vec::new(), Quantiles::default());
    let (mut verified, mut cpu, mut moved) = (0, Duration::ZERO, 0_u64);
    // The first round wakes threads and links.
    for repeat in 0..=plan.repeats {
        let (mut taken, mut bytes) = (Duration::ZERO, 0_u64);
        let end = Instant::now() + plan.time * 20;
        loop {
            if stop() {
                return Err(Error::Stopped);
            }
            let places = file.places(plan.page, count);
            let round =
                PageRound { page: plan.page, places: &places, depth: plan.depth, writes: plan.writes };
            let mut of_round = Quantiles::default();
            let before = prepare(mover, file, &round)?;
            let elapsed = mover.round(&round, &mut of_round)?;
            let used = mover.cpu_time()?.saturating_sub(before);
            verify(mover, file, &round)?;
            verified += places.len() as u64;
            if repeat == 0 {
                break;
            }
            latencies.append(&mut of_round);
            taken += elapsed;
            cpu += used;
            bytes += (places.len() * plan.page) as u64;
            if taken >= plan.time || Instant::now() > end {
                break;
            }
        }
        if repeat > 0 {
            rates.push(bytes as f64 / taken.as_secs_f64().max(1e-9) / 1e9);
            moved += bytes;
        }
    }
    let each_gbps = rates.clone();
    let micros = |nanos: Option<f64>| nanos.map(|nanos| nanos / 1e3);
    Ok(PageRow {
        by: mover.name(),
        memory: if matches!(mover.buffer(), PageBuffer::Gpu(_)) { "vram" } else { "host" },
        io: if plan.writes { "write" } else { "read" },
        page: plan.page,
        depth: plan.depth,
        gbps: median(&mut rates),
        each_gbps,
        p50_us: micros(latencies.median()),
        p99_us: micros(latencies.per_mille(990)),
        cpu_s_per_gb: cpu.as_secs_f64() / (moved as f64 / 1e9).max(1e-9),
        verified,
    })
}

/// Fills the buffer with new content of the pages to be written, or else with what no page holds. Returns the CPU time
/// so far.
fn prepare(mover: &dyn PageMover, file: &mut PageFile, round: &PageRound<'_>) -> Result<Duration> {
    if round.writes {
        file.renew(round.places, round.page);
    }
    let (buffer, file) = (mover.buffer(), &*file);
    each_page(round, |n, place, bytes, _| {
        if round.writes {
            file.content(place, bytes);
        } else {
            bytes.fill(0xa5);
        }
        buffer.write(n * round.page, bytes)
    })?;
    mover.cpu_time()
}

/// Compares every byte of the pages that were moved: in the buffer, or in the file.
fn verify(mover: &dyn PageMover, file: &PageFile, round: &PageRound<'_>) -> Result<()> {
    let buffer = mover.buffer();
    each_page(round, |n, place, expected, found| {
        file.content(place, expected);
        if round.writes {
            file.read(place, found)?;
        } else {
            buffer.read(n * round.page, found)?;
        }
        match found.iter().zip(&*expected).position(|(found, expected)| found != expected) {
            Some(at) => Err(Error::WrongBytes { at: place + at as u64 }),
            None => Ok(()),
        }
    })
}

/// Calls `each` by several threads for the number and the place of every page, with two pages of memory.
fn each_page(
    round: &PageRound<'_>,
    each: impl Fn(usize, u64, &mut [u8], &mut [u8]) -> Result<()> + Sync,
) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = round.places.len().div_ceil(threads).max(1);
    let of_thread = |number: usize, places: &[u64]| {
        let mut memory = [vec![0; round.page], vec![0; round.page]];
        let [one, other] = &mut memory;
        let mut numbered = (number * share..).zip(places);
        numbered.try_for_each(|(n, place)| each(n, *place, one, other))
    };
    std::thread::scope(|scope| {
        let shares = round.places.chunks(share).enumerate();
        let of_thread = &of_thread;
        let started: Vec<_> = shares.map(|(i, places)| scope.spawn(move || of_thread(i, places))).collect();
        let panicked = |_| Err(Error::Setup("a thread that compares pages panicked".into()));
        started.into_iter().try_for_each(|one| one.join().unwrap_or_else(panicked))
    })
}

/// The CPU time of this process so far.
fn own_cpu_time() -> Duration {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(clock.tv_sec as u64, clock.tv_nsec as u32)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Moves pages by copies, and spoils a byte of one if told to.
    struct SpoiledMover {
        file: std::fs::File,
        buffer: PageBuffer,
        spoils: bool,
    }

    impl PageMover for SpoiledMover {
        fn name(&self) -> &'static str {
            "copies"
        }

        fn buffer(&self) -> &PageBuffer {
            &self.buffer
        }

        fn round(&mut self, round: &PageRound<'_>, latencies: &mut Quantiles) -> Result<Duration> {
            use std::os::unix::fs::FileExt;
            let start = Instant::now();
            let mut bytes = vec![0; round.page];
            for (n, place) in round.places.iter().enumerate() {
                if round.writes {
                    self.buffer.read(n * round.page, &mut bytes)?;
                    if self.spoils && n == 3 {
                        bytes[17] ^= 1;
                    }
                    self.file.write_all_at(&bytes, *place).unwrap();
                } else {
                    self.file.read_exact_at(&mut bytes, *place).unwrap();
                    if self.spoils && n == 3 {
                        bytes[17] ^= 1;
                    }
                    self.buffer.write(n * round.page, &bytes)?;
                }
                latencies.add(1000);
            }
            Ok(start.elapsed())
        }

        fn cpu_time(&self) -> Result<Duration> {
            Ok(own_cpu_time())
        }
    }

    #[test]
    fn every_byte_of_every_page_is_compared() {
        let path = std::env::temp_dir().join(format!("onehop-pages-{}", std::process::id()));
        let mut file = PageFile::create(&path, 4 << 20).unwrap();
        let plain = || std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let buffer = PageBuffer::Host(HostMem::anonymous(1 << 20).unwrap());
        for writes in [false, true] {
            let plan = PagePlan { page: 4096, depth: 4, writes, time: Duration::from_millis(5), repeats: 2 };
            let mut copies = SpoiledMover { file: plain(), buffer: buffer.clone(), spoils: false };
            let row = measure(&mut copies, &mut file, &plan, &|| false).unwrap();
            assert!(row.gbps > 0.0 && row.each_gbps.len() == 2 && row.verified >= 3 * 256, "{row:?}");
            assert_eq!((row.p50_us, row.memory), (Some(1.0), "host"));
            assert!(matches!(measure(&mut copies, &mut file, &plan, &|| true), Err(Error::Stopped)));
            copies.spoils = true;
            let wrong = measure(&mut copies, &mut file, &plan, &|| false).unwrap_err();
            assert!(matches!(wrong, Error::WrongBytes { at } if at % 4096 == 17), "{wrong}");
            // The file is right again for the next direction.
            file = PageFile::create(&path, 4 << 20).unwrap();
        }
        std::fs::remove_file(&path).unwrap();
    }
}
