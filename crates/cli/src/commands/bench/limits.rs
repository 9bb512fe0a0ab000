//! What rows are compared with: limits (known links on the path) and references (measured rates of the copy engine and
//! of memory).

use std::sync::Barrier;
use std::time::Instant;

use onehop_bench::results::{IoType, RateLimit};
use onehop_doctor::Virtual;
use onehop_gpu::Place;
use onehop_gpu::cuda::Nvml;
use onehop_pci::{Address, Link, Root, Speed, Tree};

use crate::error::{CliError, Result};
use crate::gpus::Chosen;

/// Bytes of memory used to measure rates.
const BUFFER_BYTES: usize = 16 << 20;
/// Copies per thread in one measurement.
const COPIES: usize = 4;
/// Measurements of a reference; the best one is used.
pub(super) const TRIES: usize = 5;

/// The limits of a drive or file and a GPU.
#[derive(Default)]
pub(super) struct BenchLimits {
    /// From the command line.
    given: Option<RateLimit>,
    drive: Option<RateLimit>,
    gpu: Option<RateLimit>,
    copy: Option<RateLimit>,
    /// For simulated parts, which copy bytes in memory.
    memory: Option<RateLimit>,
}

impl BenchLimits {
    /// Reads the rates of the links, and measures the references.
    pub(super) fn find(drive: Option<(&str, bool)>, gpu: &Chosen, given: Option<f64>) -> Result<Self> {
        let root = Root::here();
        // The PCI tree of a virtual machine may not show the real links, so it gives no limits.
        let is_real = Virtual::read(&root).is_real();
        let tree = is_real.then(|| Tree::scan(&root).ok()).flatten();
        let hard = |what: String, gbps: f64| RateLimit { what, gbps, hard: true };
        let simulated = gpu.gpu.simulated() || drive.is_some_and(|(_, simulated)| simulated);
        let copy = if gpu.gpu.simulated() { None } else { Some(copy_rate(gpu)?) };
        let address = |name: &str| name.split('?').next().and_then(|name| name.parse::<Address>().ok());
        let of_drive = drive.and_then(|(name, _)| link(tree.as_ref()?, address(name)?, false));
        Ok(Self {
            given: given.map(|gbps| hard("the link, as given by --link".into(), gbps)),
            drive: of_drive.map(|(words, gbps)| hard(format!("the drive's link, {words}"), gbps)),
            gpu: gpu_link(gpu, tree.as_ref())
                .map(|(words, gbps)| hard(format!("the GPU's link, {words}"), gbps)),
            memory: simulated.then(memory_rate).transpose()?,
            copy,
        })
    }

    /// All limits and references.
    pub(super) fn all(&self) -> Vec<RateLimit> {
        [&self.given, &self.drive, &self.gpu, &self.copy, &self.memory]
            .into_iter()
            .flatten()
            .cloned()
            .collect()
    }

    /// The lowest one that applies to a route.
    pub(super) fn of(&self, route: &str, io: IoType) -> Option<RateLimit> {
        let copied = matches!(route, "cpu/pinned" | "cpu/memcpy" | "cpu/cached") && !io.writes();
        let applies = [
            (&self.given, true),
            (&self.drive, route != "cpu/cached"),
            (&self.gpu, route != "gpu/tier1"),
            (&self.copy, copied),
            (&self.memory, true),
        ];
        let limits =
            applies.into_iter().filter(|(_, applies)| *applies).filter_map(|(limit, _)| limit.as_ref());
        limits.min_by(|a, b| a.gbps.total_cmp(&b.gbps)).cloned()
    }
}

/// The rate of the GPU's copy engine.
fn copy_rate(gpu: &Chosen) -> Result<RateLimit> {
    let ring = gpu.gpu.alloc(Place::PinnedHost, BUFFER_BYTES)?;
    let gbps = onehop_gpu::copy_rate(&*gpu.gpu, &ring)? / 1e9;
    Ok(RateLimit { what: "the copy engine (measured)".into(), gbps, hard: false })
}

/// The rate at which all CPUs together copy memory, the best of several measurements.
pub(super) fn memory_rate() -> Result<RateLimit> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let gbps = best_of(TRIES, || copy_at_once(threads))?;
    let what = format!("copies in memory by all CPUs, the best of {TRIES}");
    Ok(RateLimit { what, gbps, hard: false })
}

/// The highest of several measurements: a reference that is low by chance would make rows look better than they are.
pub(super) fn best_of(tries: usize, mut one: impl FnMut() -> Result<f64>) -> Result<f64> {
    (0..tries).try_fold(0.0, |best: f64, _| Ok(best.max(one()?)))
}

/// GB/s of threads that copy at the same time, each into its own memory.
fn copy_at_once(threads: usize) -> Result<f64> {
    let together = Barrier::new(threads);
    let one = || -> Result<(Instant, Instant)> {
        let memory = onehop_os::HostMem::touched(BUFFER_BYTES);
        let data = vec![7; BUFFER_BYTES];
        // Also if the allocation failed, because the other threads wait for this one.
        together.wait();
        let (memory, start) = (memory?, Instant::now());
        (0..COPIES).try_for_each(|_| memory.write(0, &data))?;
        Ok((start, Instant::now()))
    };
    let spans: Result<Vec<_>> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        let panicked = |_| CliError::Failed("a thread that copies memory panicked".into());
        all.into_iter().map(|thread| thread.join().map_err(panicked)?).collect()
    });
    Ok(rate_of(BUFFER_BYTES * COPIES, &spans?))
}

/// Combined GB/s of threads that moved `bytes` each, from the first start to the last end.
pub(super) fn rate_of(bytes: usize, spans: &[(Instant, Instant)]) -> f64 {
    let first = spans.iter().map(|(start, _)| *start).min();
    let last = spans.iter().map(|(_, end)| *end).max();
    let took = first.zip(last).map_or(0.0, |(first, last)| last.duration_since(first).as_secs_f64());
    (bytes * spans.len()) as f64 / 1e9 / took.max(1e-9)
}

/// The narrowest link above a device. `at_best` uses maximum speeds, because an idle GPU lowers its link speed.
fn link(tree: &Tree, address: Address, at_best: bool) -> Option<(String, f64)> {
    let device = tree.get(address)?;
    // Ports behind a cable report Gen1 x4 at any speed, so they are no limit.
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

/// The GPU's link according to NVML, which knows what GPU and slot support; otherwise according to the PCI tree.
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
    fn a_reference_is_the_best_measurement() {
        let mut rates = [1.0, 3.0, 2.0].into_iter();
        assert_eq!(best_of(3, || Ok(rates.next().unwrap_or(9.0))).ok(), Some(3.0));
        assert!(best_of(2, || Err(CliError::Failed("no".into()))).is_err());
    }

    #[test]
    fn rates_of_sequential_threads_are_not_added() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let [first, then] = [(start, start + second), (start + second, start + second * 2)];
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
