//! Gathers rows of files into GPU memory that lives as long as the GPU writes to it.
#![allow(unsafe_code, reason = "a copy to any address of a GPU needs a promise about the memory there")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use onehop_gpu::cuda::CudaGpu;
use onehop_gpu::{Emulated, Region};
use onehop_load::engine::calls::{CallEngine, CallError, Destination, GatherError, RowFile, Target};

use crate::device::{self, GpuDevice};
use crate::error::{Error, Result};

/// The engine that all tables of a process share, and each GPU's place in it.
struct Shared {
    process: u32,
    engine: CallEngine,
    gpus: BTreeMap<i32, (CudaGpu, Target)>,
    cpu: Option<(Emulated, Target)>,
}

static SHARED: Mutex<Option<Shared>> = Mutex::new(None);
/// The process that holds the lock, or 0. At a fork another thread may hold it, which the child does not have.
static HOLDER: AtomicU32 = AtomicU32::new(0);
/// How long to wait for that thread: it opens a GPU.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);

struct SharedGuard(MutexGuard<'static, Option<Shared>>);

impl Drop for SharedGuard {
    fn drop(&mut self) {
        HOLDER.store(0, Ordering::Release);
    }
}

fn lock() -> Result<SharedGuard> {
    let (begun, process) = (Instant::now(), std::process::id());
    loop {
        let guard = match SHARED.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(broken)) => broken.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let holder = HOLDER.load(Ordering::Acquire);
                if holder != 0 && holder != process || begun.elapsed() > OPEN_TIMEOUT {
                    let why = "another thread was opening a table when this process forked: fork after all are open";
                    return Err(Error::Request(why.into()));
                }
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
        };
        HOLDER.store(process, Ordering::Release);
        return Ok(SharedGuard(guard));
    }
}

/// Gathers into the memory of one GPU.
pub(crate) struct Gatherer {
    engine: CallEngine,
    target: Target,
    device: GpuDevice,
}

impl Gatherer {
    pub(crate) fn new(device: GpuDevice) -> Result<Self> {
        let mut guard = lock()?;
        let process = std::process::id();
        if guard.0.as_ref().is_none_or(|shared| shared.process != process) {
            let new = Shared { process, engine: CallEngine::new()?, gpus: BTreeMap::new(), cpu: None };
            // The parent's is never dropped: this process lacks its threads.
            std::mem::forget(guard.0.replace(new));
        }
        let Some(shared) = guard.0.as_mut() else { return Err(Error::Lost) };
        let engine = shared.engine.clone();
        let Some(cuda) = &device.cuda else {
            let (emulated, target) = match shared.cpu.take() {
                Some(cpu) => cpu,
                None => {
                    let emulated = Emulated::private();
                    let target = engine.add_gpu(Arc::new(emulated.clone()), emulated.all_memory())?;
                    (emulated, target)
                }
            };
            shared.cpu = Some((emulated.clone(), target.clone()));
            return Ok(Self { engine, target, device: device::emulated(emulated, device.why) });
        };
        let ordinal = device.dlpack.id;
        let known = shared.gpus.get(&ordinal).filter(|(gpu, _)| !gpu.is_destroyed());
        let target = match known {
            Some((_, target)) => target.clone(),
            None => {
                // SAFETY: only `gather` uses this. It keeps the written memory until the call returns, and forever
                // after an error that may leave the GPU writing to it.
                let all = unsafe { cuda.all_memory() }?;
                let target = engine.add_gpu(Arc::new(cuda.clone()), all)?;
                shared.gpus.insert(ordinal, (cuda.clone(), target.clone()));
                target
            }
        };
        drop(guard);
        Ok(Self { engine, target, device })
    }

    pub(crate) fn device(&self) -> &GpuDevice {
        &self.device
    }

    /// Writes these rows to memory of this GPU.
    pub(crate) fn gather(&self, rows: &Arc<RowFile>, ids: Vec<u64>, to: Region) -> Result<Region> {
        let need = ids.len().saturating_mul(rows.layout().bytes);
        if to.len() < need {
            return Err(Error::Request(format!("{need} bytes of rows do not fit into {} bytes", to.len())));
        }
        let there = Destination { target: self.target.clone(), at: to.addr().0 as usize, is_there: None };
        match self.engine.gather(rows, ids, there) {
            Ok(()) => Ok(to),
            // All copies are over.
            Err(error @ (GatherError::NoRow { .. } | GatherError::Call(CallError::File(_)))) => {
                Err(error.into())
            }
            Err(error) => {
                // The GPU may still write to it.
                std::mem::forget(to);
                Err(error.into())
            }
        }
    }
}
