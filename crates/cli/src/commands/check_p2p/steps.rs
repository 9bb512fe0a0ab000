//! The steps: transfers and what they need beforehand, each with its own time limit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, GpuJob, GpuSetup, Io, Namespace, Op, Options, Placement};
use onehop_gpu::{Gpu, Place};
use onehop_os::{ControllerBackend, StopSignal};
use serde::{Serialize, Serializer};

use super::registers;
use crate::error::{CliError, Result};
use crate::stop::StopFlag;

/// What is in memory before a read. At least one of the two fills differs from what the drive holds.
const BEFORE: [u8; 2] = [0xa5, 0x5a];

/// The state of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum StepState {
    Yes,
    No,
    Untested,
}

impl StepState {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::Untested => "untested",
        }
    }
}

/// A step and its result.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StepResult {
    pub id: &'static str,
    pub what: &'static str,
    #[serde(rename = "verdict")]
    pub state: StepState,
    /// Why it does not work, or what shows that it does; empty where the step's name says it all.
    pub why: String,
    #[serde(rename = "seconds", serialize_with = "seconds")]
    pub took: Duration,
    /// It was reported as done, but the bytes differ from the drive's.
    pub wrong_bytes: bool,
}

impl StepResult {
    fn untested(id: &'static str, what: &'static str, why: String) -> Self {
        Self { id, what, state: StepState::Untested, why, took: Duration::ZERO, wrong_bytes: false }
    }

    /// One that was not tried because one before it failed.
    fn after(before: &str, id: &'static str, what: &'static str) -> Self {
        Self::untested(id, what, format!("not tested, because '{before}' failed"))
    }
}

fn seconds<S: Serializer>(took: &Duration, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_f64(took.as_secs_f64())
}

/// A kind of step: its name, what it shows, and the function that does it.
type StepSpec = (&'static str, &'static str, fn(&mut CheckSetup) -> Result<()>);

/// In this order: what a step needs was shown by those before it.
const STEPS: [StepSpec; 11] = [
    ("registers", "the CPU reads the drive's registers (BAR0)", CheckSetup::registers),
    ("bring-up", "the drive initializes and identifies itself", CheckSetup::bring_up),
    ("host-read", "the drive writes a block into host memory", CheckSetup::host_read),
    ("doorbell-map", "the drive's doorbells are mapped for the GPU", CheckSetup::doorbells),
    ("gpu-rings", "the GPU rings a doorbell, and the drive executes the command", CheckSetup::gpu_rings),
    ("vram-write", "the drive writes a block into GPU memory", CheckSetup::vram_write),
    ("vram-read", "the drive reads GPU memory (Compare)", CheckSetup::vram_read),
    ("data-vram", "the GPU submits commands, with data in GPU memory", CheckSetup::data_in_vram),
    ("cq-vram", "completion queue in GPU memory", CheckSetup::cq_in_vram),
    ("sq-vram", "submission queue in GPU memory", CheckSetup::sq_in_vram),
    ("sq-cmb", "submission queue in the drive's memory (CMB)", CheckSetup::sq_in_cmb),
];

/// Without these, nothing else can be tried.
const NEEDED: [&str; 3] = ["registers", "bring-up", "host-read"];

/// The first failed step of those that all others need.
pub(crate) fn first_needed(rows: &[StepResult]) -> Option<String> {
    let row = rows.iter().find(|row| row.state == StepState::No && NEEDED.contains(&row.id))?;
    Some(format!("{}: {}", row.what, row.why))
}

/// A drive, a GPU, and what the steps need.
pub(crate) struct CheckSetup {
    pub(super) port: ControllerBackend,
    pub(super) gpu: Arc<dyn Gpu>,
    nsid: u32,
    lba: u64,
    pub(super) patience: Duration,
    /// Whether the GPU is to read registers.
    reads: bool,
    stop: StopSignal,
    drive: Option<(Drive, Namespace)>,
    /// The block as the CPU read it into host memory.
    block: Vec<u8>,
}

impl CheckSetup {
    pub(crate) fn new(
        port: ControllerBackend,
        gpu: Arc<dyn Gpu>,
        (nsid, lba): (u32, u64),
        patience: Duration,
        reads: bool,
    ) -> Self {
        let stop = StopSignal::default();
        Self { port, gpu, nsid, lba, patience, reads, stop, drive: None, block: Vec::new() }
    }

    /// Tries every step that the ones before it allow.
    pub(crate) fn run(&mut self, stop: &StopFlag) -> Result<Vec<StepResult>> {
        self.stop = stop.signal();
        let mut rows = Vec::new();
        let mut gone: Option<&'static str> = None;
        for (id, what, step) in STEPS {
            stop.check()?;
            if let Some(before) = gone {
                rows.push(StepResult::after(before, id, what));
                continue;
            }
            let begun = Instant::now();
            let tried = step(self);
            let took = begun.elapsed();
            let row = |state, why, wrong_bytes| StepResult { id, what, state, why, took, wrong_bytes };
            rows.push(match &tried {
                Ok(()) => row(StepState::Yes, String::new(), false),
                // The arguments were wrong; no machine could do it.
                Err(CliError::Drive(Error::Range { .. } | Error::NoNamespace { .. })) => {
                    return tried.map(|()| rows);
                }
                Err(error) => row(StepState::No, error.to_string(), matches!(error, CliError::Mismatch(_))),
            });
            let is_needed = NEEDED.contains(&id);
            let dead = matches!(&tried, Err(CliError::Drive(Error::Gone { .. } | Error::Dead { .. })));
            if (is_needed && tried.is_err()) || dead {
                gone = Some(id);
            }
        }
        stop.check()?;
        // Last, because nothing may work after it.
        rows.push(match gone {
            Some(before) => StepResult::after(before, registers::ID, registers::WHAT),
            None if self.reads => self.gpu_reads(),
            None => StepResult::untested(registers::ID, registers::WHAT, registers::UNASKED.to_owned()),
        });
        Ok(rows)
    }

    fn registers(&mut self) -> Result<()> {
        self.gone().map_or(Ok(()), |error| Err(error.into()))
    }

    fn bring_up(&mut self) -> Result<()> {
        let (patience, stop) = (self.patience, self.stop.clone());
        let times = Options { timeout: patience, admin_timeout: patience, ..Options::default() };
        let options = Options { queues: 2, retries: 0, stop, ..times };
        let drive = Drive::open(self.port.clone(), options)?;
        let ns = drive.namespace(self.nsid)?.clone();
        self.drive = Some((drive, ns));
        Ok(())
    }

    fn up(&self) -> Result<&(Drive, Namespace)> {
        self.drive.as_ref().ok_or_else(|| CliError::Failed("the drive was not initialized".into()))
    }

    fn block_bytes(&self) -> Result<usize> {
        Ok(self.up()?.1.format.transfer_bytes(1).unwrap_or(512) as usize)
    }

    /// Reads the block over both fills. Both results must be equal, or no data arrived.
    fn host_read(&mut self) -> Result<()> {
        let bytes = self.block_bytes()?;
        let (drive, ns) = self.up()?;
        let (queue, buffer) = (drive.queue()?, drive.buffer(bytes)?);
        let mut seen = Vec::new();
        for fill in BEFORE {
            buffer.host()?.fill(0, bytes, fill)?;
            queue.read(ns, self.lba, 1, &buffer, 0)?;
            seen.push(buffer.host()?.to_vec(0, bytes)?);
        }
        let block = seen.swap_remove(0);
        compare(&block, &seen[0])?;
        self.block = block;
        Ok(())
    }

    fn doorbells(&mut self) -> Result<()> {
        let _doorbells = self.gpu.map_registers(self.port.regs.clone())?;
        Ok(())
    }

    fn gpu_rings(&mut self) -> Result<()> {
        self.by_gpu(Placement::TIER1)
    }

    fn data_in_vram(&mut self) -> Result<()> {
        self.by_gpu(Placement::TIER2)
    }

    fn cq_in_vram(&mut self) -> Result<()> {
        self.by_gpu(Placement::POSTED)
    }

    fn sq_in_vram(&mut self) -> Result<()> {
        self.by_gpu(Placement::TIER3)
    }

    fn sq_in_cmb(&mut self) -> Result<()> {
        self.by_gpu(Placement::POSTED_CMB)
    }

    /// One read, commanded by the GPU.
    fn by_gpu(&self, placement: Placement) -> Result<()> {
        let (drive, ns) = self.up()?;
        self.gpu.load_kernels()?;
        let (stall, limit) = (self.patience, self.patience * 2);
        let setup = GpuSetup { queues: 1, depth: 4, stall, limit, ..GpuSetup::new(placement) };
        let queues = drive.gpu_queues(self.gpu.clone(), setup)?;
        let (region, buffer) = drive.gpu_buffer(&*self.gpu, placement.data, self.block.len())?;
        let job = GpuJob { lba: self.lba, blocks: 1, offset: 0 };
        for fill in BEFORE {
            region.write(0, &vec![fill; self.block.len()])?;
            queues.read(ns, &[job], &buffer)?;
            let mut got = vec![0; self.block.len()];
            region.read(0, &mut got)?;
            compare(&self.block, &got)?;
        }
        Ok(())
    }

    fn vram_write(&mut self) -> Result<()> {
        let (drive, ns) = self.up()?;
        let queue = drive.queue()?;
        let (region, buffer) = drive.gpu_buffer(&*self.gpu, Place::Vram, self.block.len())?;
        for fill in BEFORE {
            region.write(0, &vec![fill; self.block.len()])?;
            queue.read(ns, self.lba, 1, &buffer, 0)?;
            let mut got = vec![0; self.block.len()];
            region.read(0, &mut got)?;
            compare(&self.block, &got)?;
        }
        Ok(())
    }

    /// By the Compare command, which changes nothing. It must report the block as equal, and one with a flipped bit as different.
    fn vram_read(&mut self) -> Result<()> {
        let (drive, ns) = self.up()?;
        if !drive.identity().controller().oncs().compare()
            || ns.format.has_separate_metadata()
            || ns.format.pi != 0
        {
            let why = "the drive has no Compare command for this namespace; 'sq-vram' tests the same";
            return Err(Error::Unsupported { drive: drive.name().to_owned(), why: why.into() }.into());
        }
        let queue = drive.queue()?;
        let (region, buffer) = drive.gpu_buffer(&*self.gpu, Place::Vram, self.block.len())?;
        region.write(0, &self.block)?;
        queue.run(ns, &Io::new(Op::Compare, self.lba, 1, &buffer, 0))?;
        region.write(0, &[self.block[0] ^ 1])?;
        match queue.run(ns, &Io::new(Op::Compare, self.lba, 1, &buffer, 0)) {
            Err(Error::Command { status, .. }) if status.code() == COMPARE_FAILURE => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) => Err(CliError::Mismatch(
                "the drive reported different bytes as equal: it does not read them".into(),
            )),
        }
    }
}

/// Status of a Compare whose bytes differ.
const COMPARE_FAILURE: u16 = 0x285;

fn compare(want: &[u8], got: &[u8]) -> Result<()> {
    match want.iter().zip(got).position(|(a, b)| a != b) {
        None if want.len() == got.len() => Ok(()),
        at => Err(CliError::Mismatch(format!(
            "reported as done, but from byte {} on the bytes differ from the drive's",
            at.unwrap_or(0)
        ))),
    }
}
