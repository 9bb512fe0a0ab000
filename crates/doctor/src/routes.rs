//! The route table: for each GPU, device and direction, which routes work, which do not and why, and which are
//! untested. Also the most useful change for each.

pub(crate) mod needs;

use serde::Serialize;

use crate::facts::Facts;
use crate::facts::drive::DriveFacts;
use crate::facts::gpu::GpuFacts;
use crate::pair::DevicePair;
use needs::{Need, NeedState, Needs};

/// The direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From the device into GPU memory.
    ToGpu,
    /// From GPU memory to the device.
    FromGpu,
}

impl Direction {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ToGpu => "to_gpu",
            Self::FromGpu => "from_gpu",
        }
    }
}

/// Whether a route works.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It was tried and worked.
    Yes,
    /// Something that it needs is missing.
    No,
    /// Nothing known prevents it, but it was not tried.
    Untested,
}

impl Verdict {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::Untested => "untested",
        }
    }
}

/// A route for a GPU, a device and a direction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RouteRow {
    /// The GPU's address.
    pub gpu: String,
    /// The device's address.
    pub device: String,
    /// The kind of device: `nvme`, `rdma`, `sdr`.
    pub kind: &'static str,
    /// The direction of the bytes.
    pub direction: Direction,
    /// The route.
    pub route: &'static str,
    /// Whether it works.
    pub verdict: Verdict,
    /// The reason.
    pub reason: String,
    /// How to fix or test it.
    pub fix: Option<String>,
    /// Number of missing needs, and of doubtful ones.
    #[serde(skip)]
    missing: (usize, usize),
}

/// The recommendation for a GPU, a device and a direction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// The GPU's address.
    pub gpu: String,
    /// The device's address.
    pub device: String,
    /// The direction of the bytes.
    pub direction: Direction,
    /// The best route that was tried and works.
    pub now: Option<&'static str>,
    /// A better route.
    pub next: Option<&'static str>,
    /// The change or test that enables the better route.
    pub change: Option<String>,
}

/// Routes of a drive, the best first.
const NVME: [&str; 8] =
    ["gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1", "cpu/direct", "cpu/pinned", "cpu/cached", "cufile"];
/// Routes of an RDMA card or SDR board, which the CPU controls.
const CARD: [&str; 2] = ["cpu/direct", "cpu/pinned"];
const BOTH: [Direction; 2] = [Direction::ToGpu, Direction::FromGpu];

/// All rows for a machine.
pub(crate) fn table(facts: &Facts) -> Vec<RouteRow> {
    let mut rows = Vec::new();
    for gpu in &facts.gpus {
        for drive in &facts.drives {
            let pair = drive.address.and_then(|address| DevicePair::new(facts, gpu, address));
            rows.extend(pair.iter().flat_map(|pair| drive_rows(pair, drive)));
        }
        for address in facts.nics.iter().filter_map(|nic| nic.address) {
            rows.extend(DevicePair::new(facts, gpu, address).iter().flat_map(|pair| card_rows(pair, "rdma")));
        }
        for sdr in &facts.sdrs {
            rows.extend(
                DevicePair::new(facts, gpu, sdr.address).iter().flat_map(|pair| card_rows(pair, "sdr")),
            );
        }
    }
    rows
}

fn drive_rows(pair: &DevicePair<'_>, drive: &DriveFacts) -> Vec<RouteRow> {
    let rows = |direction| {
        NVME.map(|route| row(pair, "nvme", direction, route, drive_needs(pair, drive, direction, route)))
    };
    BOTH.into_iter().flat_map(rows).collect()
}

fn card_rows(pair: &DevicePair<'_>, kind: &'static str) -> Vec<RouteRow> {
    let rows = |direction| {
        CARD.map(|route| row(pair, kind, direction, route, card_needs(pair, kind, direction, route)))
    };
    BOTH.into_iter().flat_map(rows).collect()
}

/// What a route needs, in the order in which to fix it.
fn drive_needs(pair: &DevicePair<'_>, drive: &DriveFacts, direction: Direction, route: &str) -> Vec<Need> {
    let needs = Needs { pair, drive: Some(drive) };
    let mut list = vec![needs.cuda()];
    if route == "cufile" {
        list.push(needs.cufile());
        return list;
    }
    if route == "cpu/pinned" && is_detached_from_kernel(pair) {
        list.extend([needs.awake(), needs.claimable(), needs.copies()]);
        return list;
    }
    if matches!(route, "cpu/pinned" | "cpu/cached") {
        list.extend([needs.block_device(), needs.copies()]);
        return list;
    }
    list.extend([needs.awake(), needs.not_used(), needs.claimable(), needs.namespaces()]);
    if route.starts_with("gpu/") {
        list.push(needs.doorbells());
    }
    if route != "gpu/tier1" {
        list.push(needs.window());
        // The drive writes data or completions into GPU memory, unless the CPU drives it and the data leaves the GPU.
        if direction == Direction::ToGpu || matches!(route, "gpu/tier3" | "gpu/posted") {
            list.push(needs.writes());
        }
        // The drive reads queue entries in GPU memory, and data that leaves the GPU.
        if direction == Direction::FromGpu || route == "gpu/tier3" {
            list.push(needs.reads());
        }
    }
    list
}

/// Whether the drive is bound to a driver that serves onehop rather than the kernel.
fn is_detached_from_kernel(pair: &DevicePair<'_>) -> bool {
    matches!(pair.device.driver.as_deref(), Some("vfio-pci" | "onehop"))
}

fn card_needs(pair: &DevicePair<'_>, kind: &str, direction: Direction, route: &str) -> Vec<Need> {
    let needs = Needs { pair, drive: None };
    let mut list = vec![needs.cuda()];
    if route == "cpu/pinned" {
        list.extend([needs.card_driver(kind), needs.copies()]);
        return list;
    }
    list.push(needs.awake());
    list.push(if kind == "sdr" { needs.sdr_mapping() } else { needs.rdma_mapping() });
    if kind == "sdr" {
        list.push(needs.mask());
    }
    list.push(if direction == Direction::ToGpu { needs.writes() } else { needs.reads() });
    list
}

fn row(
    pair: &DevicePair<'_>,
    kind: &'static str,
    direction: Direction,
    route: &'static str,
    needs: Vec<Need>,
) -> RouteRow {
    let count = |state: NeedState| needs.iter().filter(|need| need.state == state).count();
    let missing = (count(NeedState::Missing), count(NeedState::Doubtful));
    let first = |state: NeedState| needs.iter().find(|need| need.state == state);
    let worst = first(NeedState::Missing)
        .or_else(|| first(NeedState::Doubtful))
        .or_else(|| first(NeedState::Unknown));
    let all_tried = needs.iter().all(|need| matches!(need.state, NeedState::Tried));
    let (verdict, reason, fix) = match worst {
        Some(need) if need.state == NeedState::Missing => {
            (Verdict::No, need.reason.clone(), need.fix.clone())
        }
        Some(need) => (
            Verdict::Untested,
            need.reason.clone(),
            need.fix.clone().or_else(|| test_command(pair, kind, direction, route)),
        ),
        None if all_tried => (Verdict::Yes, last_reason(&needs), None),
        None => {
            let reason = "nothing known prevents it; only a transfer with compared bytes proves it";
            (Verdict::Untested, reason.to_owned(), test_command(pair, kind, direction, route))
        }
    };
    let (gpu, device) = (pair.gpu.address.to_string(), pair.device.address.to_string());
    RouteRow { gpu, device, kind, direction, route, verdict, reason, fix, missing }
}

fn last_reason(needs: &[Need]) -> String {
    needs.last().map_or_else(String::new, |need| need.reason.clone())
}

/// The command that tests a route, if there is one.
fn test_command(pair: &DevicePair<'_>, kind: &str, direction: Direction, route: &str) -> Option<String> {
    if kind != "nvme" || route == "cpu/cached" {
        return None;
    }
    let gpu = pair.gpu.ordinal.map_or_else(|| pair.gpu.address.to_string(), |ordinal| ordinal.to_string());
    let via = match (pair.facts.kernel.has("onehop"), pair.facts.tree.group_of(pair.device)) {
        (true, _) => "?via=kmod",
        (false, None) => "?via=pagemap",
        (false, Some(_)) => "",
    };
    let device = format!("'{}{via}'", pair.device.address);
    Some(match (route, direction) {
        ("cufile", Direction::ToGpu) => {
            format!("Measure it: onehop bench sweep --file FILE -g {gpu} --route cufile")
        }
        ("cufile", Direction::FromGpu) => {
            format!("Measure it: onehop bench sweep --create FILE --io write -g {gpu} --route cufile")
        }
        ("cpu/pinned", _) if !is_detached_from_kernel(pair) => {
            format!("Test it: onehop read FILE -g {gpu} --route {route} --verify")
        }
        (_, Direction::ToGpu) => {
            format!(
                "Test it: onehop read -d {device} --lba 0 --blocks 2048 -g {gpu} --route {route} --verify"
            )
        }
        (_, Direction::FromGpu) => format!(
            "Test it on blocks whose contents you can lose: onehop write -d {device} --lba N --in FILE --serial S --yes -g {gpu} \
             --route {route}, then read them back"
        ),
    })
}

/// For each GPU, device and direction: the best route that works, and the smallest change for a better one.
pub(crate) fn advice(rows: &[RouteRow]) -> Vec<Advice> {
    let key = |row: &RouteRow| (row.gpu.clone(), row.device.clone(), row.direction);
    rows.chunk_by(|a, b| key(a) == key(b)).map(advise).collect()
}

fn advise(rows: &[RouteRow]) -> Advice {
    let best = rows.iter().position(|row| row.verdict == Verdict::Yes);
    let better = rows[..best.unwrap_or(rows.len())].iter().filter(|row| row.fix.is_some());
    // The route with the fewest missing needs; of those, the better one.
    let next = better.min_by_key(|row| row.missing);
    let first = &rows[0];
    Advice {
        gpu: first.gpu.clone(),
        device: first.device.clone(),
        direction: first.direction,
        now: best.map(|at| rows[at].route),
        next: next.map(|row| row.route),
        change: next.and_then(|row| row.fix.clone()),
    }
}

/// A GPU's display name.
pub(crate) fn gpu_title(gpu: &GpuFacts) -> String {
    match gpu.ordinal {
        Some(ordinal) => format!("GPU {ordinal} {} ({})", gpu.name, gpu.address),
        None => format!("GPU {} ({})", gpu.name, gpu.address),
    }
}
