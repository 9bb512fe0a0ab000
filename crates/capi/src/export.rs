//! An exported queue, with the data memory that its commands may use.

use std::sync::mpsc;
use std::time::Duration;

use onehop_drive::{ExportedQueue, GpuMode, GpuSetup, Placement};
use onehop_gpu::{Emulated, Region};
use onehop_proto::kernel::{Answer, DeviceOp};

use crate::error::{Error, Result};
use crate::handles::{Drive, Gpu};

/// `struct onehop_lend_options`: zero selects a default.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct ExportOptions {
    data_bytes: u64,
    nsid: u32,
    writable: u32,
    placement: u32,
    depth: u32,
    stall_ms: u32,
    limit_ms: u32,
}

const _: () = assert!(size_of::<ExportOptions>() == 32 && align_of::<ExportOptions>() == 8);

/// `struct onehop_lent_info`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ExportInfo {
    blocks: u64,
    data_bytes: u64,
    block_bytes: u32,
    recoveries: u32,
}

const _: () = assert!(size_of::<ExportInfo>() == 24 && align_of::<ExportInfo>() == 8);

/// An exported queue.
pub struct ExportedQueueObject {
    queue: ExportedQueue,
    region: Region,
    emulated: Option<Emulated>,
    blocks: u64,
    block_bytes: u32,
}

/// The offset of a range within memory; an error if it is outside.
pub(crate) fn range_within(region: &Region, offset: u64, bytes: usize) -> Result<usize> {
    let (offset, len) = (usize::try_from(offset).unwrap_or(usize::MAX), region.len());
    if offset.checked_add(bytes).is_none_or(|end| end > len) {
        return Err(onehop_gpu::Error::Memory(onehop_os::Error::OutOfRange { offset, bytes, len }).into());
    }
    Ok(offset)
}

/// `value`, or the default if it is zero.
pub(crate) fn or(value: u32, usual: u32) -> u32 {
    if value == 0 { usual } else { value }
}

/// An `onehop_placement`.
pub(crate) fn placement(number: u32) -> Result<Placement> {
    match number {
        0 => Ok(Placement::TIER1),
        1 => Ok(Placement::TIER2),
        2 => Ok(Placement::TIER3),
        3 => Ok(Placement::POSTED),
        other => Err(Error::Argument(format!("there is no placement {other}"))),
    }
}

impl ExportedQueueObject {
    pub(crate) fn new(drive: &Drive, gpu: &Gpu, options: &ExportOptions) -> Result<Self> {
        let placement = placement(options.placement)?;
        let setup = GpuSetup {
            mode: GpuMode::Shared { threads: 1 },
            depth: or(options.depth, 1023),
            stall: Duration::from_millis(or(options.stall_ms, 5000).into()),
            limit: Duration::from_millis(or(options.limit_ms, 60_000).into()),
            ..GpuSetup::new(placement)
        };
        let bytes = usize::try_from(options.data_bytes).ok().filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or_else(|| Error::Argument("the data memory has no bytes".into()))?;
        let drive = &drive.drive;
        let ns = drive.namespace(or(options.nsid, 1))?;
        let (region, buffer) = drive.gpu_buffer(&*gpu.gpu, placement.data, bytes)?;
        let queue = drive.gpu_queues(gpu.gpu.clone(), setup)?.export(ns, &buffer, options.writable != 0)?;
        let block_bytes = ns.format.transfer_bytes(1).and_then(|bytes| u32::try_from(bytes).ok());
        let emulated = gpu.emulated.clone();
        Ok(Self { queue, region, emulated, blocks: ns.blocks, block_bytes: block_bytes.unwrap_or(0) })
    }

    pub(crate) fn queue(&self) -> u64 {
        self.queue.handle().0
    }

    pub(crate) fn data(&self) -> u64 {
        self.region.addr().0
    }

    pub(crate) fn info(&self) -> ExportInfo {
        ExportInfo {
            blocks: self.blocks,
            data_bytes: self.region.len() as u64,
            block_bytes: self.block_bytes,
            recoveries: self.queue.recoveries(),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        Ok(self.queue.check()?)
    }

    /// The offset of a range within the data memory.
    pub(crate) fn check_range(&self, offset: u64, bytes: usize) -> Result<usize> {
        range_within(&self.region, offset, bytes)
    }

    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        Ok(self.region.read(offset, out)?)
    }

    pub(crate) fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        Ok(self.region.write(offset, data)?)
    }

    /// Runs one function on one thread of the emulated GPU.
    pub(crate) fn emulate(&self, op: DeviceOp, (lba, blocks, offset): (u64, u32, u64)) -> Result<Answer> {
        let Some(gpu) = &self.emulated else {
            return Err(Error::NotPossible(
                "this queue is exported to a real GPU: its kernels use it".into(),
            ));
        };
        let handle = self.queue.handle();
        let (sender, receiver) = mpsc::channel();
        let running = gpu.start(1, move |thread, _| {
            let answer = onehop_proto::kernel::DeviceQueue::open(thread, handle)
                .map_or(Answer::NoHandle, |queue| queue.run(thread, op, lba, blocks, offset));
            // The receiver below lives until this thread has ended.
            let _ = sender.send(answer);
        })?;
        running.join()?;
        receiver.recv().map_err(|_| Error::Panicked("an emulated thread returned nothing".into()))
    }

    pub(crate) fn stop(&self) {
        self.queue.stop();
    }

    pub(crate) fn close(self) -> Result<()> {
        Ok(self.queue.revoke()?)
    }
}
