//! What rows are compared with: limits (the links on the path, where the system or the user names them) and references
//! (the copy engine, memory).

use std::sync::Barrier;
use std::time::Instant;

use onehop_bench::results::{IoType, RateLimit};
use onehop_doctor::Virtual;
use onehop_gpu::Place;
use onehop_gpu::cuda::Nvml;
use onehop_pci::{Address, Link, Root, Speed, Tree};

use crate::error::{CliError, Result};
use crate::gpus::Chosen;

/// Memory that rates are measured with.
const MEASURED: usize = 16 << 20;
/// Copies by each thread in one try.
const COPIES: usize = 4;
/// Tries of a reference, of which the best counts.
pub(super) const TRIES: usize = 5;

/// The limits of a drive or file and a GPU.
#[derive(Default)]
pub(super) struct BenchLimits {
    /// As given on the command line.
    said: Option<RateLimit>,
    drive: Option<RateLimit>,
    gpu: Option<RateLimit>,
    copy: Option<RateLimit>,
    /// For simulated parts, which move bytes by copying them in memory.
    memory: Option<RateLimit>,
}

impl BenchLimits {
    /// Reads the rates of the links, and measures the rest.
    pub(super) fn find(drive: Option<(&str, bool)>, gpu: &Chosen, said: Option<f64>) -> Result<Self> {
        let root = Root::here();
        // The ports and emulated devices of a virtual machine need not show the real links, so they bound nothing.
        let real = Virtual::read(&root).is_real();
        let tree = real.then(|| Tree::scan(&root).ok()).flatten();
        let hard = |what: String, gbps: f64| RateLimit { what, gbps, hard: true };
        let simulated = gpu.gpu.simulated() || drive.is_some_and(|(_, simulated)| simulated);
        let copy = if gpu.gpu.simulated() { None } else { Some(copy_rate(gpu)?) };
        let address = |name: &str| name.split('?').next().and_then(|name| name.parse::<Address>().ok());
        let of_drive = drive.and_then(|(name, _)| link(tree.as_ref()?, address(name)?, false));
        Ok(Self {
            said: said.map(|gbps| hard("the link, as given by --link".into(), gbps)),
            drive: of_drive.map(|(words, gbps)| hard(format!("the drive's link, {words}"), gbps)),
            gpu: gpu_link(gpu, tree.as_ref())
                .map(|(words, gbps)| hard(format!("the GPU's link, {words}"), gbps)),
            memory: simulated.then(memory_rate).transpose()?,
            copy,
        })
    }

    /// All of them.
    pub(super) fn all(&self) -> Vec<RateLimit> {
        [&self.said, &self.drive, &self.gpu, &self.copy, &self.memory]
            .into_iter()
            .flatten()
            .cloned()
            .collect()
    }

    /// The lowest that applies to a route.
    pub(super) fn of(&self, route: &str, io: IoType) -> Option<RateLimit> {
        let copied = matches!(route, "cpu/pinned" | "cpu/memcpy" | "cpu/cached") && !io.writes();
        let holds = [
            (&self.said, true),
            (&self.drive, route != "cpu/cached"),
            (&self.gpu, route != "gpu/tier1"),
            (&self.copy, copied),
            (&self.memory, true),
        ];
        let of = holds.into_iter().filter(|(_, holds)| *holds).filter_map(|(limit, _)| limit.as_ref());
        of.min_by(|a, b| a.gbps.total_cmp(&b.gbps)).cloned()
    }
}

/// What the GPU's copy engine does by itself.
fn copy_rate(gpu: &Chosen) -> Result<RateLimit> {
    let ring = gpu.gpu.alloc(Place::PinnedHost, MEASURED)?;
    let gbps = onehop_gpu::copy_rate(&*gpu.gpu, &ring)? / 1e9;
    Ok(RateLimit { what: "the copy engine (measured)".into(), gbps, hard: false })
}

/// How fast all CPUs together copy in memory, the best of some tries.
pub(super) fn memory_rate() -> Result<RateLimit> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let gbps = best_of(TRIES, || copy_at_once(threads))?;
    let what = format!("copies in memory by all CPUs, the best of {TRIES}");
    Ok(RateLimit { what, gbps, hard: false })
}

/// The highest of several measurements: a reference that is low by chance would flatter what is compared with it.
pub(super) fn best_of(tries: usize, mut one: impl FnMut() -> Result<f64>) -> Result<f64> {
    (0..tries).try_fold(0.0, |best: f64, _| Ok(best.max(one()?)))
}

/// GB/s of this many threads that copy at the same time, each into memory of its own.
fn copy_at_once(threads: usize) -> Result<f64> {
    let together = Barrier::new(threads);
    let one = || -> Result<(Instant, Instant)> {
        let memory = onehop_os::HostMem::touched(MEASURED);
        let data = vec![7; MEASURED];
        // Even if the allocation failed: the others wait for this thread.
        together.wait();
        let (memory, begun) = (memory?, Instant::now());
        (0..COPIES).try_for_each(|_| memory.write(0, &data))?;
        Ok((begun, Instant::now()))
    };
    let spans: Result<Vec<_>> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        let panicked = |_| CliError::Failed("a thread that copies memory panicked".into());
        all.into_iter().map(|thread| thread.join().map_err(panicked)?).collect()
    });
    Ok(rate_of(MEASURED * COPIES, &spans?))
}

/// GB/s of threads that moved `bytes` each: all bytes, from the first start to the last end.
pub(super) fn rate_of(bytes: usize, spans: &[(Instant, Instant)]) -> f64 {
    let first = spans.iter().map(|(begun, _)| *begun).min();
    let last = spans.iter().map(|(_, ended)| *ended).max();
    let took = first.zip(last).map_or(0.0, |(first, last)| last.duration_since(first).as_secs_f64());
    (bytes * spans.len()) as f64 / 1e9 / took.max(1e-9)
}

/// The narrowest link above a device; a GPU's at its best, as it slows down when it has nothing to do.
fn link(tree: &Tree, address: Address, at_best: bool) -> Option<(String, f64)> {
    let device = tree.get(address)?;
    // A cable's ports report Gen1 x4 at any rate, so they bound nothing.
    if device.behind_cable {
        return None;
    }
    let own = device.best_link();
    let links = std::iter::once(own)
        .chain(device.parents.iter().filter_map(|port| Some(tree.get(*port)?.best_link())));
    let rate = |link: &Link| if at_best { link.max_rate() } else { link.rate() };
    let words = |link: &Link| if at_best { link.best() } else { link.now() };
    let known = links.filter_map(|link| Some((words(&link)?, rate(&link)? / 1e9)));
    known.min_by(|a, b| a.1.total_cmp(&b.1))
}

/// By NVML, which knows what both GPU and slot support; else by the bus.
fn gpu_link(gpu: &Chosen, tree: Option<&Tree>) -> Option<(String, f64)> {
    let (_, pci) = gpu.gpu.name().rsplit_once(" at ")?;
    let by_nvml = || {
        let health = Nvml::load().ok()?.health(pci).ok()?;
        let speed = Speed::of_generation(u8::try_from(health.max_link_generation?).ok()?)?;
        let lanes = health.max_link_lanes.filter(|lanes| (1..=32).contains(lanes))?;
        Some((format!("{speed} x{lanes}"), speed.bytes_per_second() * f64::from(lanes) / 1e9))
    };
    by_nvml().or_else(|| link(tree?, pci.parse().ok()?, true))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_reference_is_the_best_of_its_tries() {
        let mut rates = [1.0, 3.0, 2.0].into_iter();
        assert_eq!(best_of(3, || Ok(rates.next().unwrap_or(9.0))).ok(), Some(3.0));
        assert!(best_of(2, || Err(CliError::Failed("no".into()))).is_err());
    }

    #[test]
    fn threads_that_take_turns_are_not_added_up() {
        let (begun, second) = (Instant::now(), Duration::from_secs(1));
        let [first, then] = [(begun, begun + second), (begun + second, begun + second * 2)];
        assert_eq!(rate_of(1_000_000_000, &[first, then]), 1.0);
        assert_eq!(rate_of(1_000_000_000, &[first, first]), 2.0);
        let measured = memory_rate().ok().filter(|limit| limit.gbps > 0.0 && limit.kind() == "reference");
        assert!(measured.is_some_and(|limit| limit.what.contains("best of 5")));
    }

    #[test]
    fn a_route_is_compared_with_the_lowest_limit_that_applies() {
        let limit = |what: &str, gbps, hard| Some(RateLimit { what: what.into(), gbps, hard });
        let limits = BenchLimits {
            drive: limit("drive", 7.0, true),
            gpu: limit("gpu", 3.0, true),
            copy: limit("copy", 2.5, false),
            ..BenchLimits::default()
        };
        let of = |route: &str, io| limits.of(route, io).map(|limit| limit.what);
        assert_eq!(of("gpu/tier1", IoType::Read).as_deref(), Some("drive"), "its bytes stay in host memory");
        assert_eq!(of("gpu/tier3", IoType::Read).as_deref(), Some("gpu"));
        assert_eq!(of("cpu/cached", IoType::Read).as_deref(), Some("copy"));
        assert_eq!(of("cpu/cached", IoType::Write).as_deref(), Some("gpu"));
        assert_eq!(BenchLimits::default().of("cufile", IoType::Read), None);
    }
}
