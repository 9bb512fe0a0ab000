//! What rows are held against: the links on the way where the system or its user tells of them, the copy engine, memory.

use std::time::Instant;

use onehop_bench::results::{IoType, Limit};
use onehop_doctor::Virtual;
use onehop_gpu::Place;
use onehop_gpu::cuda::Nvml;
use onehop_pci::{Address, Link, Root, Speed, Tree};

use crate::error::{CliError, Result};
use crate::gpus::Chosen;

/// Memory that rates are measured with.
const MEASURED: usize = 16 << 20;

/// The limits of a drive or file and a GPU.
#[derive(Default)]
pub(super) struct Limits {
    /// As said on the command line.
    said: Option<Limit>,
    drive: Option<Limit>,
    gpu: Option<Limit>,
    copy: Option<Limit>,
    /// Of models, which move bytes by copying them in memory.
    memory: Option<Limit>,
}

impl Limits {
    /// Looks at the links, and measures the rest.
    pub(super) fn find(drive: Option<(&str, bool)>, gpu: &Chosen, said: Option<f64>) -> Result<Self> {
        let root = Root::here();
        // A virtual machine's ports, and devices that it emulates, need not show the real links: that bounds nothing.
        let real = Virtual::read(&root).is_real();
        let tree = real.then(|| Tree::scan(&root).ok()).flatten();
        let hard = |what: String, gbps: f64| Limit { what, gbps, hard: true };
        let simulated = gpu.gpu.simulated() || drive.is_some_and(|(_, simulated)| simulated);
        let copy = if gpu.gpu.simulated() { None } else { Some(copy_rate(gpu)?) };
        let address = |name: &str| name.split('?').next().and_then(|name| name.parse::<Address>().ok());
        let of_drive = drive.and_then(|(name, _)| link(tree.as_ref()?, address(name)?, false));
        Ok(Self {
            said: said.map(|gbps| hard("the link, as said by --link".into(), gbps)),
            drive: of_drive.map(|(words, gbps)| hard(format!("the drive's link, {words}"), gbps)),
            gpu: gpu_link(gpu, tree.as_ref())
                .map(|(words, gbps)| hard(format!("the GPU's link, {words}"), gbps)),
            memory: simulated.then(memory_rate).transpose()?,
            copy,
        })
    }

    /// All of them.
    pub(super) fn all(&self) -> Vec<Limit> {
        [&self.said, &self.drive, &self.gpu, &self.copy, &self.memory]
            .into_iter()
            .flatten()
            .cloned()
            .collect()
    }

    /// The lowest of those that hold for a route.
    pub(super) fn of(&self, route: &str, io: IoType) -> Option<Limit> {
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
fn copy_rate(gpu: &Chosen) -> Result<Limit> {
    let ring = gpu.gpu.alloc(Place::PinnedHost, MEASURED)?;
    let gbps = onehop_gpu::copy_rate(&*gpu.gpu, &ring)? / 1e9;
    Ok(Limit { what: "the copy engine, as measured".into(), gbps, hard: false })
}

/// How fast all processors together copy in memory: what every byte of a model costs at least once.
pub(super) fn memory_rate() -> Result<Limit> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let one = || -> Result<f64> {
        let memory = onehop_os::HostMem::touched(MEASURED)?;
        let data = vec![7; MEASURED];
        let mut best = 0.0_f64;
        for _ in 0..4 {
            let start = Instant::now();
            memory.write(0, &data)?;
            best = best.max(MEASURED as f64 / 1e9 / start.elapsed().as_secs_f64().max(1e-9));
        }
        Ok(best)
    };
    let rates: Result<Vec<f64>> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        let panicked = |_| CliError::Failed("a thread that copies memory panicked".into());
        all.into_iter().map(|thread| thread.join().map_err(panicked)?).collect()
    });
    let what = "copies in memory by all processors, as measured".into();
    Ok(Limit { what, gbps: rates?.iter().sum(), hard: false })
}

/// The narrowest link above a device; a GPU's at its best, as it slows down when it has nothing to do.
fn link(tree: &Tree, address: Address, at_best: bool) -> Option<(String, f64)> {
    let device = tree.get(address)?;
    // A cable's ports say Gen1 x4 whatever passes it: that bounds nothing.
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

/// By NVML, which knows what GPU and slot both can; else by the bus.
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
    use super::*;

    #[test]
    fn a_route_is_held_against_the_lowest_that_holds_for_it() {
        let limit = |what: &str, gbps, hard| Some(Limit { what: what.into(), gbps, hard });
        let limits = Limits {
            drive: limit("drive", 7.0, true),
            gpu: limit("gpu", 3.0, true),
            copy: limit("copy", 2.5, false),
            ..Limits::default()
        };
        let of = |route: &str, io| limits.of(route, io).map(|limit| limit.what);
        assert_eq!(of("gpu/tier1", IoType::Read).as_deref(), Some("drive"), "its bytes stay in host memory");
        assert_eq!(of("gpu/tier3", IoType::Read).as_deref(), Some("gpu"));
        assert_eq!(of("cpu/cached", IoType::Read).as_deref(), Some("copy"));
        assert_eq!(of("cpu/cached", IoType::Write).as_deref(), Some("gpu"));
        assert_eq!(Limits::default().of("cufile", IoType::Read), None);
    }
}
