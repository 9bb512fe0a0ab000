//! From jobs to work items: which commands, where their data lies, and the lists that describe it.

use onehop_proto::Sqe;
use onehop_proto::kernel::Work;

use super::GpuJob;
use crate::command::{ListSlot, Pointers, list_pages, max_blocks, protection};
use crate::drive::Inner;
use crate::ring::Dma;
use crate::{Buffer, Error, Namespace, Op, Result};

/// Most commands that are described at once.
const MOST_COMMANDS: u64 = 16384;
/// Most bytes of PRP lists for them.
const MOST_LISTS: u64 = 64 << 20;

/// The commands of some jobs, a batch at a time.
pub(super) struct Plan<'a> {
    drive: &'a Inner,
    op: Op,
    ns: &'a Namespace,
    jobs: std::slice::Iter<'a, GpuJob>,
    /// What is left of the job that was begun, and how many were begun.
    left: GpuJob,
    begun: usize,
    buffer: &'a Buffer,
    pointers: Pointers,
    /// Blocks of one command.
    step: u64,
    /// List pages of one command.
    pages: u64,
    /// Commands in all.
    pub(super) commands: u64,
    /// Bytes in all.
    pub(super) bytes: u64,
}

/// Commands that are carried out together.
pub(super) struct Batch {
    /// Each command, the job that it is of, and where in the buffer its data starts.
    pub(super) works: Vec<(Work, usize, u64)>,
    pub(super) lists: Dma,
    /// Whether the lists' memory was allocated for it.
    pub(super) is_new: bool,
}

impl<'a> Plan<'a> {
    /// A plan for jobs that all lie within the namespace.
    pub(super) fn new(
        drive: &'a Inner,
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
                sgl: false,
            },
            step,
            pages: list_pages(identity.page_shift, identity.max_transfer),
            commands,
            bytes,
        })
    }

    /// The next commands; none when all were planned. Takes the spare list memory, if it is long enough.
    pub(super) fn next_batch(&mut self, spare: &mut Option<Dma>) -> Result<Option<Batch>> {
        let page_shift = self.pointers.page_shift;
        let most = (MOST_LISTS >> page_shift).checked_div(self.pages).map_or(MOST_COMMANDS, |fit| fit.max(1));
        let mut pieces = Vec::new();
        while (pieces.len() as u64) < most.min(MOST_COMMANDS)
            && let Some(piece) = self.next_piece()
        {
            pieces.push(piece);
        }
        if pieces.is_empty() {
            return Ok(None);
        }
        let bytes = (pieces.len() as u64 * self.pages).max(1) << page_shift;
        let spare = spare.take().filter(|lists| lists.mem.len() as u64 >= bytes);
        let is_new = spare.is_none();
        let lists = match spare {
            Some(lists) => lists,
            None => Dma::alloc(&*self.drive.control.port.mapper, bytes as usize, page_shift)?,
        };
        let works = pieces
            .into_iter()
            .enumerate()
            .map(|(i, (job, piece))| {
                let slot = ListSlot { lists: &lists, first_page: i as u64 * self.pages, page_shift };
                Ok((self.describe(&piece, &slot)?, job, piece.offset))
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Some(Batch { works, lists, is_new }))
    }

    /// What one command moves, and of which job.
    fn next_piece(&mut self) -> Option<(usize, GpuJob)> {
        while self.left.blocks == 0 {
            self.left = *self.jobs.next()?;
            self.begun += 1;
        }
        let piece = GpuJob { blocks: self.left.blocks.min(self.step), ..self.left };
        self.left = GpuJob {
            lba: piece.lba + piece.blocks,
            blocks: self.left.blocks - piece.blocks,
            offset: piece.offset + self.ns.format.transfer_bytes(piece.blocks).unwrap_or(0),
        };
        Some((self.begun - 1, piece))
    }

    fn describe(&self, piece: &GpuJob, list: &ListSlot<'_>) -> Result<Work> {
        let bytes = self.ns.format.transfer_bytes(piece.blocks).unwrap_or(u64::MAX);
        let pointed = self.pointers.point(Sqe::default(), (self.buffer, piece.offset), bytes, list)?;
        Ok(Work {
            lba: piece.lba,
            prp1: pointed.prp1(),
            prp2: pointed.prp2(),
            blocks: piece.blocks as u32,
            control: u32::from(self.op.opcode()) | protection(self.op, self.ns.format.pi, false),
        })
    }
}
