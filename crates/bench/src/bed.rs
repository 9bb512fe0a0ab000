//! Queues in a GPU's memory, the null controller that serves them, and the commands that go through them.

use std::time::Duration;

use onehop_controller::layout::{REPORT_BYTES, control, flag};
use onehop_controller::{Pair, Report, Violation, sealed};
use onehop_gpu::cuda::{CudaGpu, Rig, RigCode, Started};
use onehop_gpu::{Gpu, KernelQueue, Place, Region};
use onehop_proto::kernel::{ItemOutcome, WorkItem};
use onehop_proto::{Cqe, GpuAddr, Sqe, nvm};

use crate::host::{HostControllers, HostPair, ServeOptions, host_memory};
use crate::{Error, Result};

/// The namespace of all commands.
pub(crate) const NSID: u32 = 1;
/// Each doorbell has a cache line of its own.
pub(crate) const LINE: usize = 128;
const PAGE: usize = 4096;

/// Where the null controller runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Controller {
    /// As a kernel on the same GPU.
    Gpu,
    /// On CPU threads, for rings in host memory.
    Cpu,
}

/// Where rings lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RingsAt {
    /// In the GPU's memory.
    Vram,
    /// In host memory.
    Host,
    /// Submission queue and doorbells in host memory, which the GPU only writes; completion queue in the GPU's, which the
    /// controller only writes: neither CPU nor GPU waits for a read across the bus.
    Posted,
}

impl RingsAt {
    /// Where submission queues and doorbells lie, and where completion queues.
    fn places(self) -> [Place; 2] {
        match self {
            Self::Vram => [Place::Vram; 2],
            Self::Host => [Place::PinnedHost; 2],
            Self::Posted => [Place::PinnedHost, Place::Vram],
        }
    }
}

/// A running controller.
pub(crate) enum Serving {
    Gpu(Started),
    Cpu(HostControllers),
}

/// How a controller runs.
pub(crate) struct ControllerRun<'a> {
    pub(crate) gpu: &'a CudaGpu,
    pub(crate) code: &'a RigCode,
    /// Of [`onehop_controller::layout::flag`].
    pub(crate) flags: u32,
    pub(crate) limit: Duration,
}

/// The sizes of a bed.
pub(crate) struct BedSize {
    pub(crate) queues: u32,
    /// Of each ring.
    pub(crate) entries: u32,
    /// Commands in flight on each queue.
    pub(crate) window: u32,
    /// Bytes of each queue's account.
    pub(crate) control: usize,
    /// Commands of a launch.
    pub(crate) commands: u32,
    /// Where rings and doorbells lie.
    pub(crate) rings: RingsAt,
    /// Bytes behind the outcomes.
    pub(crate) times: usize,
}

/// The memory of a plan.
pub(crate) struct Bed {
    sqs: Region,
    cqs: Region,
    doors: Region,
    _control: Region,
    pairs: Region,
    reports: Region,
    pub(crate) word: Region,
    pub(crate) works: Region,
    pub(crate) outcomes: Region,
    pub(crate) queues: Vec<KernelQueue>,
    commands: u32,
    /// Whether a controller on the GPU reads the submission queues across the bus.
    far: bool,
}

impl Bed {
    pub(crate) fn new(gpu: &CudaGpu, size: &BedSize) -> Result<Self> {
        let (count, entries) = (size.queues as usize, size.entries);
        let sq_bytes = (entries as usize * Sqe::BYTES).next_multiple_of(PAGE);
        let cq_bytes = (entries as usize * Cqe::BYTES).next_multiple_of(PAGE);
        let control_bytes = size.control.next_multiple_of(LINE);
        let [sq_at, cq_at] = size.rings.places();
        let (sqs, cqs) = (gpu.alloc(sq_at, count * sq_bytes)?, gpu.alloc(cq_at, count * cq_bytes)?);
        let doors = gpu.alloc(sq_at, count * 2 * LINE)?;
        let control = gpu.alloc(Place::Vram, count * control_bytes)?;
        let queue = |i: usize| {
            let door = i * 2 * LINE;
            KernelQueue {
                sq: sqs.addr().plus((i * sq_bytes) as u64),
                cq: cqs.addr().plus((i * cq_bytes) as u64),
                sq_door: doors.addr().plus(door as u64),
                cq_door: doors.addr().plus((door + LINE) as u64),
                control: control.addr().plus((i * control_bytes) as u64),
                sq_entries: entries,
                cq_entries: entries,
                window: size.window,
                zero: 0,
            }
        };
        Ok(Self {
            queues: (0..count).map(queue).collect(),
            pairs: gpu.alloc(Place::Vram, count * Pair::BYTES as usize)?,
            reports: gpu.alloc(Place::Vram, count * REPORT_BYTES as usize)?,
            word: gpu.alloc(Place::Vram, PAGE)?,
            works: gpu.alloc(Place::Vram, size.commands as usize * WorkItem::BYTES as usize)?,
            outcomes: gpu
                .alloc(Place::Vram, size.commands as usize * ItemOutcome::BYTES as usize + size.times)?,
            sqs,
            cqs,
            doors,
            _control: control,
            commands: size.commands,
            far: sq_at != Place::Vram,
        })
    }

    /// Commands, all different, each with its seal.
    pub(crate) fn write_works(&self) -> Result<()> {
        let mut bytes = Vec::with_capacity(self.works.len());
        for i in 0..self.commands {
            for word in command(i).words() {
                bytes.extend(word.to_le_bytes());
            }
        }
        Ok(self.works.write(0, &bytes)?)
    }

    /// Fills every submission queue, for a controller that feeds itself.
    pub(crate) fn fill_rings(&self) -> Result<()> {
        for queue in &self.queues {
            let mut bytes = Vec::new();
            for i in 0..queue.sq_entries {
                for word in command(i).command(NSID).with_cid(i as u16).dw {
                    bytes.extend(word.to_le_bytes());
                }
            }
            let at = queue.sq.0 - self.sqs.addr().0;
            self.sqs.write(at as usize, &bytes)?;
        }
        Ok(())
    }

    /// Starts the controller.
    pub(crate) fn start(&self, who: Controller, run: &ControllerRun<'_>) -> Result<Serving> {
        self.reports.fill(0, self.reports.len(), 0)?;
        match who {
            Controller::Gpu => self.start_on_gpu(run).map(Serving::Gpu),
            Controller::Cpu => self.start_on_cpu(run).map(Serving::Cpu),
        }
    }

    fn start_on_cpu(&self, run: &ControllerRun<'_>) -> Result<HostControllers> {
        let (sqs, cqs) = (host_memory(&self.sqs)?, host_memory(&self.cqs)?);
        let doors = host_memory(&self.doors)?;
        let within = |at: GpuAddr, region: &Region| (at.0 - region.addr().0) as usize;
        let pair = |(i, queue): (usize, &KernelQueue)| HostPair {
            sqs: sqs.clone(),
            cqs: cqs.clone(),
            doors: doors.clone(),
            sq: within(queue.sq, &self.sqs),
            cq: within(queue.cq, &self.cqs),
            sq_door: within(queue.sq_door, &self.doors),
            cq_door: within(queue.cq_door, &self.doors),
            entries: queue.sq_entries,
            sqid: i as u16 + 1,
        };
        let manner = ServeOptions {
            reverse: run.flags & flag::REVERSE != 0,
            feed: run.flags & flag::FEED != 0,
            limit: run.limit,
        };
        HostControllers::start(self.queues.iter().enumerate().map(pair).collect(), manner)
    }

    fn start_on_gpu(&self, run: &ControllerRun<'_>) -> Result<Started> {
        for (i, queue) in self.queues.iter().enumerate() {
            let pair = Pair {
                sq: queue.sq,
                cq: queue.cq,
                sq_door: queue.sq_door,
                cq_door: queue.cq_door,
                report: self.reports.addr().plus((i * REPORT_BYTES as usize) as u64),
                control: self.word.addr(),
                limit: run.limit.as_nanos() as u64,
                sq_entries: queue.sq_entries,
                cq_entries: queue.cq_entries,
                sqid: i as u32 + 1,
                nsid: NSID,
                flags: run.flags,
                ..Pair::default()
            };
            self.pairs.write(i * Pair::BYTES as usize, &bytes_of(&pair.words()))?;
        }
        self.word.signal(0, control::RUN)?;
        let count = self.queues.len() as u32;
        let rig = if self.far { Rig::NullFar } else { Rig::Null };
        Ok(run.gpu.start_rig(run.code, rig, &self.pairs, count, run.limit)?)
    }

    /// Has the controller end, or waits until it does; its reports are there then.
    pub(crate) fn end(&self, controller: Serving, stop: bool) -> Result<()> {
        match controller {
            Serving::Gpu(started) => {
                if stop {
                    self.word.signal(0, control::STOP)?;
                }
                started.wait()?;
            }
            Serving::Cpu(threads) => {
                for served in threads.join(stop)? {
                    let at = served.index * REPORT_BYTES as usize;
                    self.reports.write(at, &bytes_of(&served.report.words()))?;
                    if let Some(first) = served.first {
                        self.reports.write(at + Report::BYTES as usize, &bytes_of(&first.words()))?;
                    }
                }
            }
        }
        Ok(())
    }

    pub(crate) fn reports(&self) -> Result<Vec<Report>> {
        (0..self.queues.len())
            .map(|i| Ok(Report::from_words(&self.report_words(i * REPORT_BYTES as usize)?)))
            .collect()
    }

    fn report_words<const N: usize>(&self, at: usize) -> Result<[u32; N]> {
        let mut bytes = vec![0; N * 4];
        self.reports.read(at, &mut bytes)?;
        let mut words = [0; N];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
        }
        Ok(words)
    }

    /// Checks that this many commands were executed, and that every entry was intact.
    pub(crate) fn check(&self, wanted: u64) -> Result<()> {
        let reports = self.reports()?;
        let sum = |f: fn(&Report) -> u64| reports.iter().map(f).sum::<u64>();
        let (commands, errors) = (sum(|r| r.commands), sum(|r| r.errors + u64::from(r.violations)));
        if commands == wanted && errors == 0 {
            return Ok(());
        }
        let first = reports.iter().position(|report| report.violations > 0);
        let first = first.map(|i| self.report_words(i * REPORT_BYTES as usize + Report::BYTES as usize));
        let first = first.transpose()?.map(|words| Violation::from_words(&words));
        let rule = first.and_then(|violation| Some((violation.rule()?.name(), violation.detail)));
        Err(wrong(&format!(
            "the controller saw {commands} commands instead of {wanted}, and {errors} errors, the first of them {rule:x?}"
        )))
    }
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The `i`-th command of a launch.
fn command(i: u32) -> WorkItem {
    let lba = u64::from(i.wrapping_mul(0x9e37_79b1)) * 8;
    let work =
        WorkItem { lba, prp1: u64::from(i) << 12, prp2: 0, blocks: 8, control: nvm::opcode::READ.into() };
    sealed(work, NSID)
}

pub(crate) fn wrong(why: &str) -> Error {
    Error::Wrong(why.to_owned())
}
