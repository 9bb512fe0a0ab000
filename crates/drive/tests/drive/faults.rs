//! Every fault on CPU and GPU queues in every placement and mode: what the caller sees, and how long detection and
//! recovery take. `ONEHOP_FAULT_TABLE=FILE` writes the rows of docs/faults.md.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, GpuJob, GpuMode, GpuSetup, Options, Placement, Recovery};
use onehop_gpu::Place;
use onehop_sim::Sim;

use crate::common::{self, Bed};

const BLOCKS: u64 = 64;
const TIMEOUT: Duration = Duration::from_millis(60);

/// What drives the queues, and where they are.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Mode {
    Cpu,
    Gpu(GpuMode, Placement),
}

const MODES: [Mode; 9] = [
    Mode::Cpu,
    Mode::Gpu(GpuMode::Owner, Placement::TIER1),
    Mode::Gpu(GpuMode::Owner, Placement::TIER2),
    Mode::Gpu(GpuMode::Owner, Placement::TIER3),
    Mode::Gpu(GpuMode::Owner, Placement::POSTED_CMB),
    Mode::Gpu(GpuMode::Shared { threads: 8 }, Placement::TIER1),
    Mode::Gpu(GpuMode::Shared { threads: 8 }, Placement::TIER2),
    Mode::Gpu(GpuMode::Shared { threads: 64 }, Placement::TIER3),
    Mode::Gpu(GpuMode::Shared { threads: 8 }, Placement::POSTED),
];

/// What the caller must see.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Sees {
    /// The right data, without a recovery.
    Data,
    /// The right data, after a recovery.
    DataAfterRecovery,
    /// The command's own error.
    CommandError,
    /// That the command was not completed.
    TimedOut,
    /// That the device is gone.
    Gone,
    /// Wrong data without an error: no row may.
    WrongData,
}

struct Row {
    fault: &'static str,
    sees: Sees,
}

const fn row(fault: &'static str, sees: Sees) -> Row {
    Row { fault, sees }
}

const ROWS: &[Row] = &[
    row("late@n=5,delay=10ms", Sees::Data),
    row("late@n=5,delay=400ms", Sees::DataAfterRecovery),
    row("reorder@every=3,by=2,delay=5ms", Sees::Data),
    row("lost@n=5", Sees::DataAfterRecovery),
    row("lost@lba=9-9", Sees::TimedOut),
    row("torn@n=5,delay=30ms", Sees::Data),
    row("torn@n=5,delay=15ms,order=last-first", Sees::Data),
    row("torn@n=5,delay=5ms,order=random", Sees::Data),
    row("fail-once@n=5", Sees::Data),
    row("fail-once@n=5,crd=1", Sees::Data),
    row("fail-once@n=4&fault=lost@n=5", Sees::DataAfterRecovery),
    row("garbled@n=5", Sees::Data),
    row("garbled@lba=9-9&fault=torn@lba=9-9,n=2,delay=15ms", Sees::Data),
    row("fail@lba=9-9", Sees::CommandError),
    row("media@lba=9-9", Sees::CommandError),
    row("wrong-cid@n=5", Sees::DataAfterRecovery),
    row("other-cid@n=5", Sees::DataAfterRecovery),
    row("dup@n=5", Sees::DataAfterRecovery),
    row("stale-phase@n=5", Sees::Data),
    row("sqhd-lag@every=1,by=3", Sees::Data),
    row("cfs@n=5", Sees::DataAfterRecovery),
    row("gone@n=5", Sees::Gone),
    row("power-loss@n=5", Sees::DataAfterRecovery),
    row("lost@n=5&fault=abort-ignored@q=0", Sees::DataAfterRecovery),
    row("cfs@n=5&fault=slow-start@n=2,delay=200ms", Sees::DataAfterRecovery),
    row("cfs@n=5&fault=stuck-rdy@on=enable,n=2", Sees::DataAfterRecovery),
    row("cfs@n=5&fault=stuck-rdy@on=disable,n=1", Sees::DataAfterRecovery),
];

struct Seen {
    sees: Sees,
    text: String,
    took: Duration,
    recovery: Option<Recovery>,
    recovering: Duration,
}

fn options() -> Options {
    Options {
        writable: true,
        timeout: TIMEOUT,
        abort_wait: Duration::from_millis(40),
        admin_timeout: Duration::from_millis(500),
        ready_limit: Duration::from_millis(600),
        retries: 2,
        ..Options::default()
    }
}

fn pattern() -> Vec<u8> {
    (0..BLOCKS * 512).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 7) as u8 | 1).collect()
}

/// One read of 64 blocks, one command a block, on a drive with this fault.
fn meet(bed: Bed, mode: Mode, fault: &str) -> (Sim, Seen) {
    let spec = format!("mem:1M?mdts=1&queues=8&cmb=1M&to=1&crdt=1&crdt_unit=100ms&fault={fault}");
    let (sim, port) = bed.open(&spec);
    let data = pattern();
    sim.write_media(1, 0, &data).unwrap();
    // One block a command: a fault meets the fifth of 64.
    let drive = Drive::open(port, options()).unwrap();
    let start = Instant::now();
    let (result, got) = match mode {
        Mode::Cpu => by_cpu(&drive),
        Mode::Gpu(gpu_mode, placement) => by_gpu(bed, &drive, gpu_mode, placement),
    };
    let took = start.elapsed();
    let incidents = drive.incidents();
    let recovery = incidents.last().map(|i| i.recovery);
    let recovering = incidents.iter().map(|i| i.took).sum();
    let (sees, text) = match result {
        Ok(()) if got != data => (Sees::WrongData, "wrong data, no error".to_owned()),
        Ok(()) if incidents.is_empty() => (Sees::Data, "the data".to_owned()),
        Ok(()) => (Sees::DataAfterRecovery, "the data".to_owned()),
        Err(error) => {
            let sees = match &error {
                Error::Command { .. } => Sees::CommandError,
                Error::TimedOut { .. } => Sees::TimedOut,
                Error::Gone { .. } => Sees::Gone,
                other => panic!("{fault} in {mode:?}: {other}"),
            };
            (sees, error.to_string())
        }
    };
    // After any fault the drive goes on working, unless it is gone.
    if sees != Sees::Gone {
        let queue = drive.queue().unwrap();
        let ns = drive.namespace(1).unwrap();
        let buffer = drive.buffer(512).unwrap();
        queue
            .read(ns, BLOCKS + 8, 1, &buffer, 0)
            .unwrap_or_else(|e| panic!("after {fault} in {mode:?}: {e}"));
    }
    (sim, Seen { sees, text, took, recovery, recovering })
}

fn by_cpu(drive: &Drive) -> (Result<(), Error>, Vec<u8>) {
    let ns = drive.namespace(1).unwrap();
    let queue = drive.queue().unwrap();
    let buffer = drive.buffer((BLOCKS * 512) as usize).unwrap();
    let mut tokens = Vec::new();
    for lba in 0..BLOCKS {
        let io = onehop_drive::Io::new(onehop_drive::Op::Read, lba, 1, &buffer, lba * 512);
        match queue.submit(ns, &io) {
            Ok(token) => tokens.push(token),
            Err(error) => return (Err(error), Vec::new()),
        }
    }
    let mut result = Ok(());
    for token in tokens {
        result = result.and(queue.wait(token).map(|_| ()));
    }
    (result, buffer.host().unwrap().to_vec(0, (BLOCKS * 512) as usize).unwrap())
}

fn by_gpu(bed: Bed, drive: &Drive, mode: GpuMode, placement: Placement) -> (Result<(), Error>, Vec<u8>) {
    let ns = drive.namespace(1).unwrap();
    let gpu = common::gpu();
    let placement = common::placed(&*gpu, placement, bed == Bed::Resident);
    let setup = GpuSetup { mode, queues: 1, depth: 15, stall: TIMEOUT, ..GpuSetup::new(placement) };
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    let (region, buffer) = drive.gpu_buffer(&*gpu, placement.data, (BLOCKS * 512) as usize).unwrap();
    assert!(placement.data != Place::Cmb);
    let jobs: Vec<_> = (0..BLOCKS).map(|lba| GpuJob { lba, blocks: 1, offset: lba * 512 }).collect();
    let result = queues.read(ns, &jobs, &buffer).map(|_| ());
    let mut got = vec![0; (BLOCKS * 512) as usize];
    region.read(0, &mut got).unwrap();
    (result, got)
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Cpu => "CPU",
        Mode::Gpu(GpuMode::Owner, _) => "GPU, owner",
        Mode::Gpu(GpuMode::Shared { .. }, _) => "GPU, shared",
    }
}

fn placement_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Cpu => "host",
        Mode::Gpu(_, Placement::POSTED_CMB) => "posted, sq in cmb",
        Mode::Gpu(_, p) => p.route().map_or("other", |route| route.trim_start_matches("gpu/")),
    }
}

/// One line of the table: a fault in a mode, over all placements.
#[derive(Default)]
struct Line {
    placements: Vec<&'static str>,
    sees: &'static str,
    recoveries: Vec<String>,
    noticed: Vec<String>,
    recovered: Vec<String>,
}

impl Line {
    fn add(&mut self, mode: Mode, seen: &Seen) {
        self.placements.push(placement_name(mode));
        self.sees = seen.sees.text();
        let recovery = seen.recovery.map_or("none".to_owned(), |r| r.to_string());
        if !self.recoveries.contains(&recovery) {
            self.recoveries.push(recovery);
        }
        let ms = |time: Duration| format!("{:.0}", time.as_secs_f64() * 1e3);
        self.noticed.push(ms(seen.took.saturating_sub(seen.recovering)));
        self.recovered.push(if seen.recovery.is_some() { ms(seen.recovering) } else { "–".to_owned() });
    }

    fn write(&self, fault: &str, mode: &str, table: &mut String) {
        let fault = shown(fault);
        let (placements, recoveries) = (self.placements.join(" / "), self.recoveries.join("; "));
        let (noticed, recovered) = (self.noticed.join(" / "), self.recovered.join(" / "));
        let _ = writeln!(
            table,
            "| `{fault}` | {mode} | {noticed} | {recovered} | {placements} | {} | {recoveries} |",
            self.sees
        );
    }
}

/// A fault as the table shows it.
fn shown(fault: &str) -> String {
    fault.replace("&fault=", "` and `")
}

impl Sees {
    fn text(self) -> &'static str {
        match self {
            Self::Data | Self::DataAfterRecovery => "data",
            Self::CommandError => "*command failed*",
            Self::TimedOut => "*timed out*",
            Self::Gone => "*gone*",
            Self::WrongData => "**wrong data**",
        }
    }
}

/// Rules that a fault itself breaks: a completion that is posted twice may find no room, and a power loss cannot be
/// known before it shows.
fn is_the_faults_own(fault: &str, rule: onehop_sim::Rule) -> bool {
    use onehop_sim::Rule::{CqOverrun, DoorbellNotReady};
    fault.starts_with("dup") && rule == CqOverrun
        || fault.starts_with("power-loss") && rule == DoorbellNotReady
}

/// Runs every row in every mode; returns the table.
fn every_fault(bed: Bed) -> String {
    let mut table = String::new();
    // The GPU's controller writes a command's data in no order of its own.
    let rows = ROWS.iter().filter(|row| bed == Bed::Sim || !row.fault.contains("order="));
    for row in rows {
        for same in MODES.chunk_by(|a, b| mode_name(*a) == mode_name(*b)) {
            let mut line = Line::default();
            for mode in same {
                line.add(*mode, &meet_as_expected(bed, row, *mode));
            }
            line.write(row.fault, mode_name(same[0]), &mut table);
        }
    }
    table
}

#[test]
fn every_fault_in_every_mode() {
    let table = every_fault(Bed::Sim);
    if let Some(path) = std::env::var_os("ONEHOP_FAULT_TABLE") {
        std::fs::write(path, table).unwrap();
    }
}

/// The same on a controller that the GPU runs: it must report the same errors.
#[test]
fn every_fault_on_the_gpu() {
    print!("{}", every_fault(Bed::Resident));
}

fn meet_as_expected(bed: Bed, row: &Row, mode: Mode) -> Seen {
    let (mut sim, mut seen) = meet(bed, mode, row.fault);
    // A machine that is busy otherwise may keep a thread waiting for longer than the time-out.
    for _ in 0..3 {
        if (row.sees, seen.sees) == (Sees::Data, Sees::DataAfterRecovery) {
            (sim, seen) = meet(bed, mode, row.fault);
        }
    }
    if common::is_real() {
        // A log of a run on a GPU should show how far it came.
        println!("{} in {mode:?}: {} after {:?}", row.fault, seen.text, seen.took);
    }
    assert_eq!(seen.sees, row.sees, "{} in {mode:?}: {} after {:?}", row.fault, seen.text, seen.took);
    // Nothing hangs: detection and every recovery are bounded.
    assert!(seen.took < Duration::from_secs(10), "{} in {mode:?} took {:?}", row.fault, seen.took);
    let mut broken = sim.violations();
    broken.retain(|v| !is_the_faults_own(row.fault, v.rule));
    assert!(broken.is_empty(), "{} in {mode:?}: {broken:?}", row.fault);
    seen
}

/// Every kind of fault that the simulator knows has a row.
#[test]
fn no_fault_is_left_out() {
    for kind in onehop_sim::FaultKind::ALL {
        let named = ROWS
            .iter()
            .any(|row| row.fault.split("&fault=").any(|fault| fault.split('@').next() == Some(kind.name())));
        assert!(named, "no row for {}", kind.name());
    }
}

/// The table in the docs has a line for every row here.
#[test]
fn the_docs_have_every_row() {
    let docs = include_str!("../../../../docs/faults.md");
    for row in ROWS {
        let name = format!("| `{}` |", shown(row.fault));
        assert_eq!(docs.matches(&name).count(), 3, "docs/faults.md and {name}");
    }
}
