//! The GPU's side: owner and shared queues of an NVIDIA GPU against the null controller, which runs as a kernel beside
//! them on the same GPU. Nothing is measured that is not checked: every entry by its seal, every outcome by the host.

use std::time::{Duration, Instant};

use onehop_controller::layout::{REPORT_BYTES, control, flag};
use onehop_controller::{Pair, Report, sealed};
use onehop_gpu::cuda::{Code, CudaGpu, Rig, Started};
use onehop_gpu::{Gpu, KernelJob, KernelQueue, Launch, Place, Region, Rings};
use onehop_proto::kernel::{Exit, MAX_WINDOW, Outcome, Work, scratch_bytes};
use onehop_proto::queue::SharedLayout;
use onehop_proto::{Cqe, Sqe, Status, nvm};

use crate::stats::median;
use crate::{Error, Result, Row};

/// How long anything here may take.
const LIMIT: Duration = Duration::from_secs(60);
/// How long the controller measures itself.
const FEED_TIME: Duration = Duration::from_millis(20);
/// Launches of a row; the median of them is given.
const LAUNCHES: usize = 5;
/// Entries of a ring at least: a queue of one command has room to write the next entry ahead.
const LEAST_ENTRIES: u32 = 16;
/// The namespace of all commands.
const NSID: u32 = 1;
/// Doorbells lie on lines of their own.
const LINE: usize = 128;
const PAGE: usize = 4096;

/// How the GPU's threads use the queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// A warp for each queue.
    Owner,
    /// So many threads on one queue.
    Shared(u32),
}

/// What is to be measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    /// How threads use the queues.
    pub mode: Mode,
    /// How many queues.
    pub queues: u32,
    /// Commands in flight on each.
    pub depth: u32,
    /// Commands of a launch.
    pub commands: u32,
    /// Where the rings lie.
    pub rings: Place,
    /// Whether each batch is completed last command first.
    pub reverse: bool,
}

/// A GPU with the controller's kernels loaded.
pub struct GpuBench {
    gpu: CudaGpu,
    code: Code,
}

/// The memory of a plan.
struct Bed {
    rings: Region,
    _doors: Region,
    _control: Region,
    pairs: Region,
    reports: Region,
    word: Region,
    works: Region,
    outcomes: Region,
    queues: Vec<KernelQueue>,
    plan: Plan,
}

impl GpuBench {
    /// Loads the controller for this GPU.
    ///
    /// # Errors
    /// When it cannot be compiled.
    pub fn new(gpu: CudaGpu) -> Result<Self> {
        let code = gpu.load_rig()?;
        Ok(Self { gpu, code })
    }

    /// What the null controller itself can answer with so many queues, commands per second.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn ceiling(&self, plan: &Plan) -> Result<f64> {
        let bed = Bed::new(&self.gpu, *plan)?;
        bed.fill_rings()?;
        let started = bed.start(self, flag::FEED, FEED_TIME)?;
        started.wait()?;
        let rate = |report: &Report| report.commands as f64 / (report.elapsed.max(1) as f64 / 1e9);
        Ok(bed.reports()?.iter().map(rate).sum())
    }

    /// Measures a plan.
    ///
    /// # Errors
    /// When the GPU fails, or anything comes out other than it should.
    pub fn row(&self, plan: &Plan) -> Result<Row> {
        let ceiling = self.ceiling(plan)?;
        let bed = Bed::new(&self.gpu, *plan)?;
        bed.write_works()?;
        let launch = match plan.mode {
            Mode::Owner => Launch::Owner(bed.queues.clone()),
            Mode::Shared(threads) => Launch::Shared(bed.queues.clone(), threads),
        };
        self.gpu.prepare(&launch)?;
        let flags = if plan.reverse { flag::REVERSE } else { 0 };
        let controller = bed.start(self, flags, LIMIT)?;
        let mut rates = Vec::new();
        let measured = (0..=LAUNCHES).try_for_each(|_| {
            rates.push(self.launch(&bed, &launch)?);
            Ok::<_, Error>(())
        });
        bed.word.signal(0, control::STOP)?;
        controller.wait()?;
        measured?;
        bed.check(LAUNCHES as u64 + 1)?;
        // The first one warms up.
        let iops = median(&mut rates[1..]);
        let regs = self.gpu.kernel_registers(&launch)?;
        let (mode, threads) = match plan.mode {
            Mode::Owner => ("owner", 32),
            Mode::Shared(threads) => ("shared", threads),
        };
        Ok(Row {
            side: "gpu",
            mode,
            queues: plan.queues,
            depth: plan.depth,
            threads,
            block: 4096,
            iops,
            ns_per_command: 1e9 / iops,
            p50_ns: None,
            p99_ns: None,
            cycles_submit: None,
            cycles_complete: None,
            controller_ns: Some(1e9 / ceiling),
            regs: Some(regs),
        })
    }

    /// Runs a launch to its end; gives commands per second.
    fn launch(&self, bed: &Bed, launch: &Launch) -> Result<f64> {
        bed.outcomes.fill(0, bed.outcomes.len(), 0)?;
        let job = KernelJob {
            works: bed.works.addr(),
            outcomes: bed.outcomes.addr(),
            count: bed.plan.commands,
            nsid: NSID,
            retries: 3,
            retry_delay: [Duration::ZERO; 4],
            stall: Duration::from_secs(2),
            limit: LIMIT / 4,
            poison: bed.word.addr().plus(LINE as u64),
        };
        let running = self.gpu.launch(launch, &job)?;
        let start = Instant::now();
        while !running.is_done() && start.elapsed() < LIMIT {
            std::thread::yield_now();
        }
        let took = running.took();
        let exits = running.join()?;
        if let Some(exit) = exits.iter().find(|exit| **exit != Exit::Finished) {
            return Err(wrong(&format!("a launch ended with {exit:?}; {:?}", bed.reports()?.first())));
        }
        let took = took.ok_or_else(|| wrong("this GPU has no clock"))?;
        bed.check_outcomes()?;
        Ok(f64::from(bed.plan.commands) / took.as_secs_f64())
    }
}

impl Bed {
    fn new(gpu: &CudaGpu, plan: Plan) -> Result<Self> {
        let count = plan.queues as usize;
        let shared = matches!(plan.mode, Mode::Shared(_));
        let mut entries = plan.depth.saturating_add(1).max(LEAST_ENTRIES);
        if shared {
            entries = entries.next_power_of_two();
        }
        if plan.queues == 0 || plan.depth == 0 || plan.commands == 0 || entries > MAX_WINDOW + 1 {
            return Err(Error::Setup(format!(
                "a GPU queue is 1 to {MAX_WINDOW} deep, and there is at least one, with one command"
            )));
        }
        let sq_bytes = (entries as usize * Sqe::BYTES).next_multiple_of(PAGE);
        let cq_bytes = (entries as usize * Cqe::BYTES).next_multiple_of(PAGE);
        let control_bytes = match SharedLayout::new(entries, entries) {
            Some(layout) if shared => layout.bytes(),
            _ => scratch_bytes(entries - 1),
        };
        let control_bytes = (control_bytes as usize).next_multiple_of(LINE);
        let rings = gpu.alloc(plan.rings, count * (sq_bytes + cq_bytes))?;
        let doors = gpu.alloc(plan.rings, count * 2 * LINE)?;
        let control = gpu.alloc(Place::Vram, count * control_bytes)?;
        let queue = |i: usize| {
            let (ring, door) = (i * (sq_bytes + cq_bytes), i * 2 * LINE);
            KernelQueue {
                rings: Rings {
                    sq: rings.addr().plus(ring as u64),
                    cq: rings.addr().plus((ring + sq_bytes) as u64),
                    sq_door: doors.addr().plus(door as u64),
                    cq_door: doors.addr().plus((door + LINE) as u64),
                    sq_entries: entries,
                    cq_entries: entries,
                },
                control: control.addr().plus((i * control_bytes) as u64),
                window: plan.depth,
            }
        };
        Ok(Self {
            queues: (0..count).map(queue).collect(),
            pairs: gpu.alloc(Place::Vram, count * Pair::BYTES as usize)?,
            reports: gpu.alloc(Place::Vram, count * REPORT_BYTES as usize)?,
            word: gpu.alloc(Place::Vram, PAGE)?,
            works: gpu.alloc(Place::Vram, plan.commands as usize * Work::BYTES as usize)?,
            outcomes: gpu.alloc(Place::Vram, plan.commands as usize * Outcome::BYTES as usize)?,
            rings,
            _doors: doors,
            _control: control,
            plan,
        })
    }

    /// Commands that no two have in common, each with its seal.
    fn write_works(&self) -> Result<()> {
        let mut bytes = Vec::with_capacity(self.works.len());
        for i in 0..self.plan.commands {
            for word in command(i).words() {
                bytes.extend(word.to_le_bytes());
            }
        }
        Ok(self.works.write(0, &bytes)?)
    }

    /// Fills every submission queue, for a controller that feeds itself.
    fn fill_rings(&self) -> Result<()> {
        for queue in &self.queues {
            let mut bytes = Vec::new();
            for i in 0..queue.rings.sq_entries {
                for word in command(i).command(NSID).with_cid(i as u16).dw {
                    bytes.extend(word.to_le_bytes());
                }
            }
            let at = queue.rings.sq.0 - self.rings.addr().0;
            self.rings.write(at as usize, &bytes)?;
        }
        Ok(())
    }

    /// Starts the controller.
    fn start(&self, bench: &GpuBench, flags: u32, limit: Duration) -> Result<Started> {
        for (i, queue) in self.queues.iter().enumerate() {
            let pair = Pair {
                sq: queue.rings.sq,
                cq: queue.rings.cq,
                sq_door: queue.rings.sq_door,
                cq_door: queue.rings.cq_door,
                report: self.reports.addr().plus((i * REPORT_BYTES as usize) as u64),
                control: self.word.addr(),
                limit: limit.as_nanos() as u64,
                sq_entries: queue.rings.sq_entries,
                cq_entries: queue.rings.cq_entries,
                sqid: i as u32 + 1,
                nsid: NSID,
                flags,
                ..Pair::default()
            };
            let bytes: Vec<u8> = pair.words().iter().flat_map(|word| word.to_le_bytes()).collect();
            self.pairs.write(i * Pair::BYTES as usize, &bytes)?;
        }
        self.reports.fill(0, self.reports.len(), 0)?;
        self.word.signal(0, control::RUN)?;
        Ok(bench.gpu.start_rig(&bench.code, Rig::Null, self.pairs.addr(), self.plan.queues, limit)?)
    }

    fn reports(&self) -> Result<Vec<Report>> {
        let mut reports = Vec::new();
        for i in 0..self.queues.len() {
            let mut bytes = [0; Report::BYTES as usize];
            self.reports.read(i * REPORT_BYTES as usize, &mut bytes)?;
            let mut words = [0; Report::BYTES as usize / 4];
            for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
                *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
            }
            reports.push(Report::from_words(&words));
        }
        Ok(reports)
    }

    /// Every command must have been carried out once for each launch, and no entry be other than it was written.
    fn check(&self, launches: u64) -> Result<()> {
        let reports = self.reports()?;
        let sum = |f: fn(&Report) -> u64| reports.iter().map(f).sum::<u64>();
        let (commands, errors) = (sum(|r| r.commands), sum(|r| r.errors + u64::from(r.violations)));
        let wanted = u64::from(self.plan.commands) * launches;
        if commands != wanted || errors != 0 {
            return Err(wrong(&format!(
                "the controller saw {commands} commands instead of {wanted}, and {errors} errors"
            )));
        }
        Ok(())
    }

    fn check_outcomes(&self) -> Result<()> {
        let good = u64::from(Outcome::Done(Status::SUCCESS).word());
        let mut bytes = vec![0; self.plan.commands as usize * Outcome::BYTES as usize];
        self.outcomes.read(0, &mut bytes)?;
        let bad = bytes.chunks_exact(8).position(|outcome| outcome != good.to_le_bytes());
        match bad {
            None => Ok(()),
            Some(i) => Err(wrong(&format!("command {i} ended with {:02x?}", &bytes[i * 8..i * 8 + 8]))),
        }
    }
}

/// The `i`-th command of a launch.
fn command(i: u32) -> Work {
    let lba = u64::from(i.wrapping_mul(0x9e37_79b1)) * 8;
    let work = Work { lba, prp1: u64::from(i) << 12, prp2: 0, blocks: 8, control: nvm::opcode::READ.into() };
    sealed(work, NSID)
}

fn wrong(why: &str) -> Error {
    Error::Wrong(why.to_owned())
}
