//! A million random operations with all kinds of faults, against a shadow copy in memory. `ONEHOP_TORTURE_OPS` and
//! `ONEHOP_TORTURE_SEED` choose another run.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use onehop_drive::{
    Buffer, Drive, GpuJob, GpuMode, GpuSetup, Io, IoQueue, Namespace, Op, Options, Placement, Token,
};
use onehop_sim::Sim;

use crate::common::{self, Bed};
use crate::suite::Rng;

const BLOCK: usize = 512;
const MOST: u64 = 8;
const DEPTH: usize = 48;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// The expected content of a drive: for each block, the seed of its bytes.
struct Shadow {
    blocks: Vec<u64>,
    busy: Vec<bool>,
}

fn content(lba: u64, version: u64) -> [u8; BLOCK] {
    let mut out = [0; BLOCK];
    if version != 0 {
        let mut rng = Rng(lba << 40 ^ version);
        out.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&rng.next().to_le_bytes()));
    }
    out
}

struct Pending {
    token: Token,
    op: Op,
    lba: u64,
    blocks: u64,
    version: u64,
    slot: usize,
}

struct Torture<'a> {
    ns: &'a Namespace,
    queue: &'a IoQueue,
    buffer: Buffer,
    shadow: Shadow,
    rng: Rng,
    free: Vec<usize>,
    pending: VecDeque<Pending>,
    errors: u64,
}

impl Torture<'_> {
    fn slot_offset(slot: usize) -> u64 {
        (slot * MOST as usize * BLOCK) as u64
    }

    /// Starts one operation on blocks that no other operation uses.
    fn begin(&mut self, version: u64) {
        let (lba, blocks, range) = loop {
            let blocks = 1 + self.rng.below(MOST);
            let lba = self.rng.below(self.shadow.blocks.len() as u64 - blocks);
            let range = lba as usize..(lba + blocks) as usize;
            if !self.shadow.busy[range.clone()].contains(&true) {
                break (lba, blocks, range);
            }
        };
        let op = match self.rng.below(20) {
            0 => Op::Flush,
            1 => Op::WriteZeroes,
            2..=8 => Op::Write,
            _ => Op::Read,
        };
        let slot = self.free.pop().unwrap();
        if op == Op::Write {
            let host = self.buffer.host().unwrap();
            for i in 0..blocks {
                let at = Self::slot_offset(slot) as usize + i as usize * BLOCK;
                host.write(at, &content(lba + i, version)).unwrap();
            }
        }
        self.shadow.busy[range].fill(true);
        self.submit(Pending { token: Token::default(), op, lba, blocks, version, slot });
    }

    fn submit(&mut self, mut pending: Pending) {
        let offset = Self::slot_offset(pending.slot);
        let mut io = Io::new(pending.op, pending.lba, pending.blocks as u32, &self.buffer, offset);
        io.fua = self.rng.below(10) == 0;
        pending.token = self.queue.submit(self.ns, &io).unwrap();
        self.pending.push_back(pending);
    }

    fn finish_one(&mut self) {
        let pending = self.pending.pop_front().unwrap();
        if let Err(error) = self.queue.wait(pending.token) {
            // Its outcome is unknown: repeat it, so that it is known.
            self.errors += 1;
            assert!(self.errors < 10_000, "nothing works any more: {error}");
            return self.submit(pending);
        }
        let range = pending.lba as usize..(pending.lba + pending.blocks) as usize;
        match pending.op {
            Op::Write => self.shadow.blocks[range.clone()].fill(pending.version),
            Op::WriteZeroes => self.shadow.blocks[range.clone()].fill(0),
            Op::Read => self.compare(&pending),
            _ => {}
        }
        self.shadow.busy[range].fill(false);
        self.free.push(pending.slot);
    }

    fn compare(&self, pending: &Pending) {
        for i in 0..pending.blocks {
            let lba = pending.lba + i;
            let at = Self::slot_offset(pending.slot) as usize + i as usize * BLOCK;
            let got = self.buffer.host().unwrap().to_vec(at, BLOCK).unwrap();
            let version = self.shadow.blocks[lba as usize];
            assert!(got == content(lba, version), "block {lba} does not hold version {version}");
        }
    }

    fn drain(&mut self) {
        while !self.pending.is_empty() {
            self.finish_one();
        }
    }
}

/// The GPU reads everything while nothing is in flight, and must find the shadow's content.
fn gpu_reads_all(
    bed: Bed,
    drive: &Drive,
    torture: &mut Torture<'_>,
    (mode, placement): (GpuMode, Placement),
) {
    torture.drain();
    let (gpu, reaches_vram) = (common::gpu(), bed == Bed::Resident);
    let placement = common::placed(&*gpu, placement, reaches_vram);
    let setup =
        GpuSetup { mode, queues: 2, depth: 16, stall: Duration::from_millis(30), ..GpuSetup::new(placement) };
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    let blocks = torture.shadow.blocks.len() as u64;
    let (region, buffer) =
        drive.gpu_buffer(&*gpu, common::data_at(&*gpu, reaches_vram), blocks as usize * BLOCK).unwrap();
    let jobs: Vec<_> =
        (0..blocks / 8).map(|i| GpuJob { lba: i * 8, blocks: 8, offset: i * 8 * BLOCK as u64 }).collect();
    while let Err(error) = queues.read(torture.ns, &jobs, &buffer) {
        torture.errors += 1;
        assert!(torture.errors < 10_000, "nothing works any more: {error}");
    }
    let mut got = vec![0; blocks as usize * BLOCK];
    region.read(0, &mut got).unwrap();
    for (lba, (got, version)) in got.chunks_exact(BLOCK).zip(&torture.shadow.blocks).enumerate() {
        assert!(
            got == content(lba as u64, *version),
            "{mode:?} {placement:?}: block {lba}, version {version}"
        );
    }
}

#[test]
fn a_million_operations_with_faults() {
    let faults = [
        "late@p=0.0003,delay=3ms",
        "late@p=0.00003,delay=120ms",
        "reorder@p=0.01,by=3,delay=2ms",
        "lost@p=0.00005",
        "torn@p=0.0005,delay=300us",
        "torn@p=0.0005,delay=100us,order=last-first",
        "torn@p=0.0005,delay=100us,order=random",
        "fail-once@p=0.001",
        "fail-once@p=0.00002,crd=1",
        "wrong-cid@p=0.00002",
        "dup@p=0.00002",
        "stale-phase@p=0.0005,delay=100us",
        "sqhd-lag@p=0.3,by=5",
        "cfs@p=0.00001",
        "abort-ignored@q=0,p=0.3",
        "slow-start@p=0.2,delay=20ms",
    ];
    torment(Bed::Sim, number("ONEHOP_TORTURE_OPS", 1_000_000), &faults);
}

/// The same on a controller that the GPU runs, which has no random faults.
#[test]
fn operations_with_faults_on_the_gpu() {
    let faults = [
        "reorder@every=101,by=3,delay=2ms",
        "lost@every=2003",
        "torn@every=601,delay=300us",
        "fail-once@every=307",
        "wrong-cid@every=5003",
        "dup@every=4001",
        "stale-phase@every=499,delay=100us",
        "cfs@every=7001",
        "abort-ignored@q=0,p=0.3",
        "slow-start@p=0.2,delay=20ms",
    ];
    torment(Bed::Resident, number("ONEHOP_TORTURE_OPS", 1_000_000) / 50, &faults);
}

/// Prints the state of both sides of a failed run.
struct Witness {
    sim: Sim,
    drive: Drive,
}

impl Drop for Witness {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("incidents: {:#?}", self.drive.incidents());
            println!("simulator: {:?}, breaches: {:#?}", self.sim.stats(), self.sim.violations());
        }
    }
}

fn torment(bed: Bed, ops: u64, faults: &[&str]) {
    let seed = number("ONEHOP_TORTURE_SEED", 20_261_121);
    let faults = faults.join("&fault=");
    let spec = format!("mem:2M?mdts=2&queues=8&crdt=1&to=4&vwc=1&seed={seed}&fault={faults}");
    let (sim, port) = bed.open(&spec);
    let options = Options {
        writable: true,
        timeout: Duration::from_millis(40),
        abort_wait: Duration::from_millis(20),
        admin_timeout: Duration::from_millis(500),
        retries: 4,
        ..Options::default()
    };
    let drive = Drive::open(port, options).unwrap();
    let _witness = Witness { sim: sim.clone(), drive: drive.clone() };
    let ns = drive.namespace(1).unwrap();
    let queue = drive.queue().unwrap();
    let mut torture = Torture {
        ns,
        queue: &queue,
        buffer: drive.buffer(DEPTH * MOST as usize * BLOCK).unwrap(),
        shadow: Shadow { blocks: vec![0; ns.blocks as usize], busy: vec![false; ns.blocks as usize] },
        rng: Rng(seed),
        free: (0..DEPTH).collect(),
        pending: VecDeque::new(),
        errors: 0,
    };
    let start = Instant::now();
    let placements = [Placement::TIER1, Placement::TIER2, Placement::TIER3, Placement::POSTED];
    let every = (ops / 16).max(1);
    for op in 1..=ops {
        while torture.free.is_empty() {
            torture.finish_one();
        }
        torture.begin(op);
        if op % every == 0 {
            let round = (op / every) as usize;
            let mode = if round.is_multiple_of(2) { GpuMode::Owner } else { GpuMode::Shared { threads: 12 } };
            gpu_reads_all(bed, &drive, &mut torture, (mode, placements[round % 4]));
        }
    }
    torture.drain();
    let mut steps = std::collections::BTreeMap::new();
    for incident in drive.incidents() {
        *steps.entry(incident.recovery).or_insert(0) += 1;
    }
    let took = start.elapsed();
    println!(
        "{bed:?}, seed {seed}: {ops} operations in {took:.1?}, {} errors seen, recoveries {steps:?}",
        torture.errors
    );
    let stats = sim.stats();
    println!("simulator: {stats:?}");
    assert!(stats.max_in_flight <= 64, "more commands in flight than any queue here holds");
    assert!(steps.len() >= 3 || ops < 500_000, "too few kinds of recovery: {steps:?}");
}

/// A handle works again after its controller was away. A drive that stays away reports that to every caller at once.
#[test]
fn a_drive_that_stays_down_is_dead() {
    let sim = onehop_sim::open("mem:1M?to=1").unwrap();
    let options = Options {
        timeout: Duration::from_millis(50),
        admin_timeout: Duration::from_millis(200),
        ready_limit: Duration::from_millis(200),
        ..Options::default()
    };
    let drive = Drive::open(sim.port(), options).unwrap();
    let ns = drive.namespace(1).unwrap();
    let (one, two) = (drive.queue().unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(4096).unwrap();
    sim.inject(onehop_sim::Fault::parse("cfs@n=1").unwrap());
    sim.inject(onehop_sim::Fault::parse("stuck-rdy@on=enable").unwrap());
    let error = one.read(ns, 0, 1, &buffer, 0).unwrap_err();
    assert!(matches!(error, onehop_drive::Error::Dead { .. }), "{error}");
    let start = Instant::now();
    let error = two.read(ns, 0, 1, &buffer, 0).unwrap_err();
    assert!(matches!(error, onehop_drive::Error::Dead { .. }), "{error}");
    assert!(matches!(drive.queue(), Err(onehop_drive::Error::Dead { .. })));
    assert!(start.elapsed() < Duration::from_millis(50));
}

/// Flushed writes survive a power loss; the handle survives it too.
#[test]
fn a_power_loss_loses_nothing_that_was_flushed() {
    let sim = onehop_sim::open("mem:1M?vwc=1&to=2").unwrap();
    let options = Options { writable: true, timeout: Duration::from_millis(50), ..Options::default() };
    let drive = Drive::open(sim.port(), options).unwrap();
    let ns = drive.namespace(1).unwrap();
    let queue = drive.queue().unwrap();
    let buffer = drive.buffer(8192).unwrap();
    for round in 0..20u8 {
        buffer.host().unwrap().fill(0, 8192, round + 1).unwrap();
        queue.write(ns, 0, 16, &buffer, 0).unwrap();
        if round > 0 {
            // The writes of the last round were lost with the power, and had not been flushed.
            let flushed = queue.flush(ns);
            assert!(matches!(flushed, Err(onehop_drive::Error::WritesLost { .. })), "{flushed:?}");
        }
        queue.flush(ns).unwrap();
        buffer.host().unwrap().fill(0, 8192, 0xff).unwrap();
        queue.write(ns, 32, 16, &buffer, 0).unwrap();
        sim.power_cycle();
        queue.read(ns, 0, 16, &buffer, 0).unwrap();
        let got = buffer.host().unwrap().to_vec(0, 8192).unwrap();
        assert!(got.iter().all(|b| *b == round + 1), "round {round}");
    }
}
