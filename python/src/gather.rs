//! Rows of files into GPU memory that stays allocated for as long as the GPU writes to it.
#![allow(unsafe_code, reason = "a copy to any address of a GPU needs a promise about the memory there")]

use std::sync::{Arc, Mutex};

use onehop_gpu::Region;
use onehop_load::engine::calls::{CallEngine, Destination, GatherError, RowFile, Target};

use crate::device::GpuDevice;
use crate::error::{Error, Result};

/// The process that made the engine, and the engine. A forked child has none of its threads, and makes its own.
static ENGINE: Mutex<Option<(u32, CallEngine)>> = Mutex::new(None);

/// The engine of this process, which all tables share.
fn engine() -> Result<CallEngine> {
    // Another thread may have held the lock at a fork.
    let Ok(mut engine) = ENGINE.try_lock() else { return Ok(CallEngine::new()?) };
    match &*engine {
        Some((process, engine)) if *process == std::process::id() => return Ok(engine.clone()),
        _ => {}
    }
    let new = CallEngine::new()?;
    // The parent's is never dropped: its threads are not here.
    std::mem::forget(engine.replace((std::process::id(), new.clone())));
    Ok(new)
}

/// Gathers into the memory of one GPU.
pub(crate) struct Gatherer {
    engine: CallEngine,
    target: Target,
    device: GpuDevice,
}

impl Gatherer {
    pub(crate) fn new(device: GpuDevice) -> Result<Self> {
        let engine = engine()?;
        let all = match (&device.cuda, &device.emulated) {
            // SAFETY: the only use of this is `gather`, which holds the memory that is written until the call has returned, and
            // after an error for ever.
            (Some(cuda), _) => unsafe { cuda.all_memory() }?,
            (None, Some(emulated)) => emulated.all_memory(),
            (None, None) => return Err(Error::Asked("this device cannot gather".into())),
        };
        let target = engine.add_gpu(&*device.gpu, all)?;
        Ok(Self { engine, target, device })
    }

    pub(crate) fn device(&self) -> &GpuDevice {
        &self.device
    }

    /// New memory for as many bytes, which must be written before they are read.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<Region> {
        Ok(self.device.gpu.arena_to_fill(bytes.max(1), &[])?)
    }

    /// Writes these rows to memory of this GPU.
    pub(crate) fn gather(&self, rows: &Arc<RowFile>, ids: Vec<u64>, to: Region) -> Result<Region> {
        let need = ids.len().saturating_mul(rows.layout().bytes);
        if to.len() < need {
            return Err(Error::Asked(format!("{need} bytes of rows do not fit into {} bytes", to.len())));
        }
        let there = Destination { target: self.target.clone(), at: to.addr().0 as usize, is_there: None };
        match self.engine.gather(rows, ids, there) {
            Ok(()) => Ok(to),
            Err(error @ GatherError::NoRow { .. }) => Err(error.into()),
            Err(error) => {
                // The GPU may still write to it.
                std::mem::forget(to);
                Err(error.into())
            }
        }
    }
}
