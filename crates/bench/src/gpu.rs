//! Owner and shared queues of an NVIDIA GPU against the null controller, which runs as a kernel on the same GPU.
//! Everything that is measured is checked: every entry by its seal, every outcome by the host.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_controller::Report;
use onehop_controller::layout::flag;
use onehop_gpu::cuda::{CudaGpu, RigCode};
use onehop_gpu::{Gpu, KernelJob, Launch};
use onehop_os::StopSignal;
use onehop_proto::Status;
use onehop_proto::kernel::{Exit, ItemOutcome, MAX_WINDOW, scratch_bytes};
use onehop_proto::queue::SharedLayout;

use crate::bed::{Bed, BedSize, Controller, ControllerRun, LINE, NSID, RingsAt, wrong};
use crate::stats::median;
use crate::times::{self, Times};
use crate::{Error, QueueCost, Result};

/// How long each step here may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
/// How long the controller measures itself.
const FEED_TIME: Duration = Duration::from_millis(20);
/// How often it does so; the best counts.
const CEILINGS: usize = 3;
/// Launches of a row; the result is their median.
const LAUNCHES: usize = 5;
/// Threads of a warp.
const WARP: u32 = 32;
/// Minimum entries of a ring: a queue of one command has room to write the next entry ahead.
const LEAST_ENTRIES: u32 = 16;

/// How the GPU's threads use the queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueueMode {
    /// A warp for each queue.
    Owner,
    /// This many threads on one queue.
    Shared(u32),
}

/// What to measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueRun {
    /// How threads use the queues.
    pub mode: QueueMode,
    /// How many queues.
    pub queues: u32,
    /// Commands in flight on each.
    pub depth: u32,
    /// Commands of a launch.
    pub commands: u32,
    /// Where the rings lie.
    pub rings: RingsAt,
    /// Whether each batch is completed last command first.
    pub reverse: bool,
    /// Where the controller runs.
    pub controller: Controller,
}

impl QueueRun {
    fn size(&self) -> Result<BedSize> {
        let shared = matches!(self.mode, QueueMode::Shared(_));
        let mut entries = self.depth.saturating_add(1).max(LEAST_ENTRIES);
        if shared {
            entries = entries.next_power_of_two();
        }
        if self.queues == 0 || self.depth == 0 || self.commands == 0 || entries > MAX_WINDOW + 1 {
            return Err(Error::Setup(format!(
                "a GPU queue is 1 to {MAX_WINDOW} deep, and there is at least one, with one command"
            )));
        }
        let control = match SharedLayout::new(entries, entries) {
            Some(layout) if shared => layout.bytes(),
            _ => scratch_bytes(entries - 1),
        };
        let Self { queues, depth: window, commands, rings, .. } = *self;
        let times = times::bytes(commands, self.warps());
        Ok(BedSize { queues, entries, window, control: control as usize, commands, rings, times })
    }

    /// How many warps drive the queues.
    fn warps(&self) -> u32 {
        match self.mode {
            QueueMode::Owner => self.queues,
            QueueMode::Shared(threads) => threads.div_ceil(WARP),
        }
    }

    fn launch(&self, bed: &Bed) -> Launch {
        match self.mode {
            QueueMode::Owner => Launch::Owner(bed.queues.clone()),
            QueueMode::Shared(threads) => Launch::Shared(bed.queues.clone(), threads),
        }
    }
}

/// A GPU with the controller's kernels loaded.
pub struct GpuBench {
    pub(crate) gpu: CudaGpu,
    /// The same, with kernels that measure times.
    metered: Arc<dyn Gpu>,
    pub(crate) code: RigCode,
    limit: Duration,
    stop: StopSignal,
}

impl GpuBench {
    /// Loads the controller for this GPU.
    ///
    /// # Errors
    /// When it cannot be compiled.
    pub fn new(gpu: CudaGpu) -> Result<Self> {
        let code = gpu.load_rig()?;
        let metered = gpu.instruments()?.metered()?;
        Ok(Self { gpu, metered, code, limit: LIMIT, stop: StopSignal::default() })
    }

    /// The same, with this much time for each measurement: its controller ends by itself then.
    #[must_use]
    pub fn within(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// The same, which begins no further launch once `stop` is set.
    #[must_use]
    pub fn stopped_by(self, stop: StopSignal) -> Self {
        Self { stop, ..self }
    }

    fn check_stop(&self) -> Result<()> {
        if self.stop.is_set() { Err(Error::Stopped) } else { Ok(()) }
    }

    /// Commands per second of the null controller alone with this many queues: the best of three measurements. It is a
    /// reference: a queue that is kept full may exceed it a little.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn ceiling(&self, plan: &QueueRun) -> Result<f64> {
        let all = (0..CEILINGS).map(|_| self.ceiling_once(plan)).collect::<Result<Vec<_>>>()?;
        Ok(all.into_iter().fold(0.0, f64::max))
    }

    fn ceiling_once(&self, plan: &QueueRun) -> Result<f64> {
        self.check_stop()?;
        let bed = Bed::new(&self.gpu, &plan.size()?)?;
        bed.fill_rings()?;
        let started = bed.start(plan.controller, &self.run(flag::FEED, FEED_TIME))?;
        bed.end(started, false)?;
        let rate = |report: &Report| report.commands as f64 / (report.elapsed.max(1) as f64 / 1e9);
        Ok(bed.reports()?.iter().map(rate).sum())
    }

    pub(crate) fn run(&self, flags: u32, limit: Duration) -> ControllerRun<'_> {
        ControllerRun { gpu: &self.gpu, code: &self.code, flags, limit }
    }

    /// Measures a plan.
    ///
    /// # Errors
    /// When the GPU fails, or an entry or outcome is wrong.
    pub fn row(&self, plan: &QueueRun) -> Result<QueueCost> {
        let ceiling = self.ceiling(plan)?;
        let (mut rates, regs) = self.rates(plan, LAUNCHES)?;
        let iops = median(&mut rates);
        let (timed, times) = self.times(plan, 1)?;
        let (mode, threads) = match plan.mode {
            QueueMode::Owner => ("owner", 32),
            QueueMode::Shared(threads) => ("shared", threads),
        };
        Ok(QueueCost {
            side: "gpu",
            mode,
            queues: plan.queues,
            depth: plan.depth,
            threads,
            block: 4096,
            iops,
            ns_per_command: 1e9 / iops,
            p50_ns: times.p50_ns,
            p99_ns: times.p99_ns,
            latency_of: "command",
            latency_samples: times.samples,
            cycles_submit: Some(times.cycles_submit),
            cycles_complete: Some(times.cycles_complete),
            timed_iops: Some(timed),
            controller_ns: Some(1e9 / ceiling),
            regs: Some(regs),
        })
    }

    /// Commands per second of each of `launches` launches, after one that warms up, and the registers of a thread.
    ///
    /// # Errors
    /// When the GPU fails, or an entry or outcome is wrong.
    pub fn rates(&self, plan: &QueueRun, launches: usize) -> Result<(Vec<f64>, u32)> {
        let (rates, bed) = self.launches(&self.gpu, plan, launches)?;
        Ok((rates, self.gpu.kernel_registers(&plan.launch(&bed))?))
    }

    /// One launch of the metering kernels, without evaluating the times: checks that they were written.
    ///
    /// # Errors
    /// When the GPU fails, or an entry or outcome is wrong.
    pub fn times_once(&self, plan: &QueueRun) -> Result<()> {
        self.times(plan, 0).map(drop)
    }

    /// Measures the times of the last of some launches; returns them and the launch's commands per second.
    fn times(&self, plan: &QueueRun, launches: usize) -> Result<(f64, Times)> {
        let (rates, bed) = self.launches(&*self.metered, plan, launches)?;
        let times = times::read(&bed.outcomes, plan.commands, plan.warps())?;
        Ok((rates.first().copied().unwrap_or(0.0), times))
    }

    /// Launches one after the other, by one of the two sets of kernels, after one that warms up.
    fn launches(&self, gpu: &dyn Gpu, plan: &QueueRun, launches: usize) -> Result<(Vec<f64>, Bed)> {
        let bed = Bed::new(&self.gpu, &plan.size()?)?;
        bed.write_works()?;
        let launch = plan.launch(&bed);
        gpu.prepare(&launch)?;
        let flags = if plan.reverse { flag::REVERSE } else { 0 };
        let controller = bed.start(plan.controller, &self.run(flags, self.limit))?;
        let once = |_| self.check_stop().and_then(|()| launch_once(gpu, &bed, plan, &launch));
        let rates: Result<Vec<_>> = (0..=launches).map(once).collect();
        bed.end(controller, true)?;
        let mut rates = rates?;
        bed.check(u64::from(plan.commands) * (launches as u64 + 1))?;
        rates.remove(0);
        Ok((rates, bed))
    }
}

/// Runs a launch to its end; returns commands per second.
fn launch_once(gpu: &dyn Gpu, bed: &Bed, plan: &QueueRun, launch: &Launch) -> Result<f64> {
    bed.outcomes.fill(0, bed.outcomes.len(), 0)?;
    let job = KernelJob {
        works: bed.works.addr(),
        outcomes: bed.outcomes.addr(),
        count: plan.commands,
        nsid: NSID,
        retries: 3,
        stall: KernelJob::nanos(Duration::from_secs(2)),
        limit: KernelJob::nanos(LIMIT / 4),
        poison: bed.word.addr().plus(LINE as u64),
        ..KernelJob::default()
    };
    let running = gpu.launch(launch, &job)?;
    let start = Instant::now();
    while !running.is_done() && start.elapsed() < LIMIT {
        // Controllers on CPU threads need every CPU.
        std::thread::sleep(Duration::from_micros(50));
    }
    let took = running.took();
    let exits = running.join()?;
    if let Some(exit) = exits.iter().find(|exit| **exit != Exit::Finished) {
        return Err(wrong(&format!("a launch ended with {exit:?}; {:?}", bed.reports()?.first())));
    }
    let took = took.ok_or_else(|| wrong("this GPU has no clock"))?;
    check_outcomes(bed, plan.commands)?;
    Ok(f64::from(plan.commands) / took.as_secs_f64())
}

/// Checks that every command succeeded.
fn check_outcomes(bed: &Bed, commands: u32) -> Result<()> {
    let good = u64::from(ItemOutcome::Done(Status::SUCCESS).word());
    let mut bytes = vec![0; commands as usize * ItemOutcome::BYTES as usize];
    bed.outcomes.read(0, &mut bytes)?;
    let bad = bytes.chunks_exact(8).position(|outcome| outcome != good.to_le_bytes());
    match bad {
        None => Ok(()),
        Some(i) => Err(wrong(&format!("command {i} ended with {:02x?}", &bytes[i * 8..i * 8 + 8]))),
    }
}
