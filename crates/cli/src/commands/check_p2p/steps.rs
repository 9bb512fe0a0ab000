//! The steps: transfers and their preparation, each with a time limit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, GpuJob, GpuSetup, Io, Namespace, Op, Options, Placement};
use onehop_gpu::{Gpu, Place};
use onehop_os::{ControllerBackend, StopSignal};
use serde::{Serialize, Serializer};

use super::registers;
use crate::error::{CliError, Result};
use crate::stop::StopFlag;

/// Memory contents before a read. At least one of the two differs from the drive's bytes.
const FILLS: [u8; 2] = [0xa5, 0x5a];

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
    /// Why it does not work, or what shows that it does; may be empty.
    pub why: String,
    #[serde(rename = "seconds", serialize_with = "seconds")]
    pub took: Duration,
    /// Whether it was reported as done, but with wrong bytes.
    pub wrong_bytes: bool,
}

impl StepResult {
    fn untested(id: &'static str, what: &'static str, why: String) -> Self {
        Self { id, what, state: StepState::Untested, why, took: Duration::ZERO, wrong_bytes: false }
    }

    /// A step that was skipped because an earlier one failed.
    fn skipped(failed: &str, id: &'static str, what: &'static str) -> Self {
        Self::untested(id, what, format!("not tested, because '{failed}' failed"))
    }
}

fn seconds<S: Serializer>(took: &Duration, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_f64(took.as_secs_f64())
}

/// A step: its name, what it shows, and its function.
type StepSpec = (&'static str, &'static str, fn(&mut CheckSetup) -> Result<()>);

/// In this order, because a step relies on the ones before it.
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

/// If one of these fails, the others cannot be tried.
const REQUIRED: [&str; 3] = ["registers", "bring-up", "host-read"];

/// The first failed one of the required steps.
pub(crate) fn first_required_failure(rows: &[StepResult]) -> Option<String> {
    let row = rows.iter().find(|row| row.state == StepState::No && REQUIRED.contains(&row.id))?;
    Some(format!("{}: {}", row.what, row.why))
}

/// The drive, the GPU, and the state of the steps.
pub(crate) struct CheckSetup {
    pub(super) port: ControllerBackend,
    pub(super) gpu: Arc<dyn Gpu>,
    nsid: u32,
    lba: u64,
    pub(super) timeout: Duration,
    /// Whether the GPU may read registers.
    gpu_reads_registers: bool,
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
        timeout: Duration,
        gpu_reads_registers: bool,
    ) -> Self {
        let stop = StopSignal::default();
        Self { port, gpu, nsid, lba, timeout, gpu_reads_registers, stop, drive: None, block: Vec::new() }
    }

    /// Runs all steps; skips the rest once a required one has failed or the drive is gone.
    pub(crate) fn run(&mut self, stop: &StopFlag) -> Result<Vec<StepResult>> {
        self.stop = stop.signal();
        let mut rows = Vec::new();
        let mut stopped_by: Option<&'static str> = None;
        for (id, what, step) in STEPS {
            stop.check()?;
            if let Some(failed) = stopped_by {
                rows.push(StepResult::skipped(failed, id, what));
                continue;
            }
            let start = Instant::now();
            let result = step(self);
            let took = start.elapsed();
            let row = |state, why, wrong_bytes| StepResult { id, what, state, why, took, wrong_bytes };
            rows.push(match &result {
                Ok(()) => row(StepState::Yes, String::new(), false),
                // The arguments are wrong.
                Err(CliError::Drive(Error::Range { .. } | Error::NoNamespace { .. })) => {
                    return result.map(|()| rows);
                }
                Err(error) => row(StepState::No, error.to_string(), matches!(error, CliError::Mismatch(_))),
            });
            let is_required = REQUIRED.contains(&id);
            let dead = matches!(&result, Err(CliError::Drive(Error::Gone { .. } | Error::Dead { .. })));
            if (is_required && result.is_err()) || dead {
                stopped_by = Some(id);
            }
        }
        stop.check()?;
        // Last, because it may break the drive or the GPU.
        rows.push(match stopped_by {
            Some(failed) => StepResult::skipped(failed, registers::ID, registers::WHAT),
            None if self.gpu_reads_registers => self.gpu_reads(),
            None => StepResult::untested(registers::ID, registers::WHAT, registers::NOT_REQUESTED.to_owned()),
        });
        Ok(rows)
    }

    fn registers(&mut self) -> Result<()> {
        self.gone().map_or(Ok(()), |error| Err(error.into()))
    }

    fn bring_up(&mut self) -> Result<()> {
        let (timeout, stop) = (self.timeout, self.stop.clone());
        let times = Options { timeout, admin_timeout: timeout, ..Options::default() };
        let options = Options { queues: 2, retries: 0, stop, ..times };
        let drive = Drive::open(self.port.clone(), options)?;
        let ns = drive.namespace(self.nsid)?.clone();
        self.drive = Some((drive, ns));
        Ok(())
    }

    fn initialized(&self) -> Result<&(Drive, Namespace)> {
        self.drive.as_ref().ok_or_else(|| CliError::Failed("the drive was not initialized".into()))
    }

    fn block_bytes(&self) -> Result<usize> {
        Ok(self.initialized()?.1.format.transfer_bytes(1).unwrap_or(512) as usize)
    }

    /// Reads the block over both fills. If the results differ, no data arrived.
    fn host_read(&mut self) -> Result<()> {
        let bytes = self.block_bytes()?;
        let (drive, ns) = self.initialized()?;
        let (queue, buffer) = (drive.queue()?, drive.buffer(bytes)?);
        let mut seen = Vec::new();
        for fill in FILLS {
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

    /// Reads the block by a command of the GPU.
    fn by_gpu(&self, placement: Placement) -> Result<()> {
        let (drive, ns) = self.initialized()?;
        self.gpu.load_kernels()?;
        let (stall, limit) = (self.timeout, self.timeout * 2);
        let setup = GpuSetup { queues: 1, depth: 4, stall, limit, ..GpuSetup::new(placement) };
        let queues = drive.gpu_queues(self.gpu.clone(), setup)?;
        let (region, buffer) = drive.gpu_buffer(&*self.gpu, placement.data, self.block.len())?;
        let job = GpuJob { lba: self.lba, blocks: 1, offset: 0 };
        for fill in FILLS {
            region.write(0, &vec![fill; self.block.len()])?;
            queues.read(ns, &[job], &buffer)?;
            let mut got = vec![0; self.block.len()];
            region.read(0, &mut got)?;
            compare(&self.block, &got)?;
        }
        Ok(())
    }

    fn vram_write(&mut self) -> Result<()> {
        let (drive, ns) = self.initialized()?;
        let queue = drive.queue()?;
        let (region, buffer) = drive.gpu_buffer(&*self.gpu, Place::Vram, self.block.len())?;
        for fill in FILLS {
            region.write(0, &vec![fill; self.block.len()])?;
            queue.read(ns, self.lba, 1, &buffer, 0)?;
            let mut got = vec![0; self.block.len()];
            region.read(0, &mut got)?;
            compare(&self.block, &got)?;
        }
        Ok(())
    }

    /// Uses the Compare command, which changes nothing. It must report the block as equal, and a block with a flipped
    /// bit as different.
    fn vram_read(&mut self) -> Result<()> {
        let (drive, ns) = self.initialized()?;
        if !drive.identity().controller().oncs().compare()
            || ns.format.has_separate_metadata()
            || ns.format.pi != 0
        {
            let why = "the drive has no Compare command for this namespace; 'sq-vram' also tests reads of GPU memory";
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
                "the drive reported different bytes as equal, so it does not read them".into(),
            )),
        }
    }
}

/// Status of a Compare whose bytes differ.
const COMPARE_FAILURE: u16 = 0x285;

fn compare(expected: &[u8], got: &[u8]) -> Result<()> {
    match expected.iter().zip(got).position(|(a, b)| a != b) {
        None if expected.len() == got.len() => Ok(()),
        at => Err(CliError::Mismatch(format!(
            "reported as done, but the bytes differ from the drive's, first at byte {}",
            at.unwrap_or(0)
        ))),
    }
}
