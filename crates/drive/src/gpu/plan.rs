//! Turns jobs into work items: commands, the places of their data, and the PRP lists.

use onehop_proto::kernel::WorkItem;

use super::GpuJob;
use crate::command::{ListSlot, Pointers, UseSgl, list_pages, max_blocks, protection};
use crate::drive::DriveInner;
use crate::ring::Dma;
use crate::{Buffer, Error, Namespace, Op, Result};

/// Most commands of a batch.
const MOST_COMMANDS: u64 = 8192;
/// Most bytes of PRP lists for them.
const MOST_LISTS: u64 = 32 << 20;
/// Most commands of the first batch, which is described while no kernel runs.
const FIRST: u64 = 256;
/// A batch is described while the one before runs, which is much faster than a drive executes as many commands.
const GROWTH: u64 = 4;

/// The commands of some jobs, a batch at a time.
pub(super) struct BatchPlan<'a> {
    drive: &'a DriveInner,
    op: Op,
    ns: &'a Namespace,
    jobs: std::slice::Iter<'a, GpuJob>,
    /// The rest of the current job, and how many were begun.
    left: GpuJob,
    begun: usize,
    buffer: &'a Buffer,
    pointers: Pointers,
    /// Blocks of one command.
    step: u64,
    /// List pages of one command.
    pages: u64,
    /// Most commands of the next batch.
    next: u64,
    /// Commands in all.
    pub(super) commands: u64,
    /// Bytes in all.
    pub(super) bytes: u64,
}

/// A part of a job that one command moves, and the job's index.
type JobSlice = (usize, GpuJob);

/// Commands of one launch.
pub(super) struct CommandBatch {
    /// Each command, the index of its job, and the offset of its data in the buffer.
    pub(super) works: Vec<(WorkItem, usize, u64)>,
    pub(super) bytes: u64,
    pub(super) lists: Dma,
}

impl<'a> BatchPlan<'a> {
    /// A plan for jobs that all lie within the namespace.
    pub(super) fn new(
        drive: &'a DriveInner,
        op: Op,
        ns: &'a Namespace,
        jobs: &'a [GpuJob],
        buffer: &'a Buffer,
    ) -> Result<Self> {
        let identity = drive.identity();
        if ns.format.has_separate_metadata() {
            let why = "GPU-driven transfers do not carry separate metadata; format the namespace without, or extended";
            return Err(Error::Unsupported { drive: drive.name().to_owned(), why: why.into() });
        }
        let step = u64::from(max_blocks(&ns.format, identity.max_transfer));
        let (mut commands, mut bytes) = (0u64, 0u64);
        for job in jobs {
            onehop_proto::format::check_range(ns.blocks, job.lba, job.blocks)
                .map_err(|source| Error::Range { nsid: ns.nsid, source })?;
            // A range of a namespace has a length that 64 bits hold.
            let need = ns.format.transfer_bytes(job.blocks).unwrap_or(u64::MAX);
            buffer.check(job.offset, need)?;
            commands = commands.saturating_add(job.blocks.div_ceil(step));
            bytes = bytes.saturating_add(need);
        }
        Ok(Self {
            drive,
            op,
            ns,
            jobs: jobs.iter(),
            left: GpuJob { lba: 0, blocks: 0, offset: 0 },
            begun: 0,
            buffer,
            pointers: Pointers {
                page_shift: identity.page_shift,
                max_transfer: identity.max_transfer,
                sgl: UseSgl::Never,
            },
            step,
            pages: list_pages(identity.page_shift, identity.max_transfer),
            next: FIRST,
            commands,
            bytes,
        })
    }

    /// Most commands of a batch.
    pub(super) fn room(&self) -> usize {
        let lists = MOST_LISTS >> self.pointers.page_shift;
        let fit = lists.checked_div(self.pages).map_or(MOST_COMMANDS, |fit| fit.max(1));
        fit.min(MOST_COMMANDS).min(self.commands) as usize
    }

    /// Whether it takes more than one batch.
    pub(super) fn is_long(&self) -> bool {
        self.commands > FIRST
    }

    /// Bytes of the lists of a batch.
    pub(super) fn list_bytes(&self) -> u64 {
        (self.room() as u64 * self.pages).max(1) << self.pointers.page_shift
    }

    /// Memory for the lists of a batch.
    pub(super) fn alloc_lists(&self) -> Result<Dma> {
        let page_shift = self.pointers.page_shift;
        Dma::alloc(&*self.drive.control.port.mapper, self.list_bytes() as usize, page_shift)
    }

    /// The slices of the next batch; `None` when all are planned.
    pub(super) fn next_slices(&mut self) -> Option<Vec<JobSlice>> {
        let most = self.room().min(self.next as usize);
        self.next = self.next.saturating_mul(GROWTH);
        let slices: Vec<_> = std::iter::from_fn(|| self.next_slice()).take(most).collect();
        (!slices.is_empty()).then_some(slices)
    }

    /// The commands that move these slices of jobs, with lists in memory for a batch.
    pub(super) fn describe_all(&self, slices: Vec<JobSlice>, lists: Dma) -> Result<CommandBatch> {
        let page_shift = self.pointers.page_shift;
        let bytes =
            slices.iter().map(|(_, slice)| self.ns.format.transfer_bytes(slice.blocks).unwrap_or(0)).sum();
        let works = slices
            .into_iter()
            .enumerate()
            .map(|(i, (job, slice))| {
                let list = || ListSlot { lists: &lists, first_page: i as u64 * self.pages, page_shift };
                Ok((self.describe(&slice, list)?, job, slice.offset))
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(CommandBatch { works, bytes, lists })
    }

    /// The slice that the next command moves.
    fn next_slice(&mut self) -> Option<JobSlice> {
        while self.left.blocks == 0 {
            self.left = *self.jobs.next()?;
            self.begun += 1;
        }
        let slice = GpuJob { blocks: self.left.blocks.min(self.step), ..self.left };
        self.left = GpuJob {
            lba: slice.lba + slice.blocks,
            blocks: self.left.blocks - slice.blocks,
            offset: slice.offset + self.ns.format.transfer_bytes(slice.blocks).unwrap_or(0),
        };
        Some((self.begun - 1, slice))
    }

    fn describe<'l>(&self, slice: &GpuJob, list: impl FnOnce() -> ListSlot<'l>) -> Result<WorkItem> {
        let bytes = self.ns.format.transfer_bytes(slice.blocks).unwrap_or(u64::MAX);
        let [prp1, prp2] = self.pointers.point((self.buffer, slice.offset), bytes, list)?.halves;
        Ok(WorkItem {
            lba: slice.lba,
            prp1,
            prp2,
            blocks: slice.blocks as u32,
            control: u32::from(self.op.opcode()) | protection(self.op, self.ns.format.pi),
        })
    }
}
