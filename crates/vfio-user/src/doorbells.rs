//! Doorbells that clients map: a memfd that they write into, and the thread that watches it.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::HostMem;
use onehop_proto::regs::offset;
use onehop_sim::Sim;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use crate::error::{Error, Result};
use crate::model::Mapping;

/// After a write, further ones are looked for without a pause for this long.
const BUSY: Duration = Duration::from_micros(200);
/// After that, this often, for as long as [`WARM`].
const WARM_PAUSE: Duration = Duration::from_micros(50);
const WARM: Duration = Duration::from_millis(20);
/// And this often from then on: what an idle client costs.
const IDLE_PAUSE: Duration = Duration::from_millis(1);

/// What the thread is to do.
#[derive(Default)]
struct Orders {
    stop: AtomicBool,
    /// A client has made the function a bus master: without that it has no queue to ring for.
    active: AtomicBool,
}

/// The memory and its thread, which ends with the value.
pub(crate) struct MappedDoorbells {
    mapping: Mapping,
    orders: Arc<Orders>,
    thread: Option<JoinHandle<()>>,
}

impl MappedDoorbells {
    /// Gives a drive mapped doorbells.
    pub(crate) fn start(sim: &Sim) -> Result<Self> {
        let failed = |call| move |source: io::Error| Error::Doorbells { call, source };
        let first = u64::from(offset::DOORBELLS);
        let end = first + u64::from(sim.doorbell_bytes());
        let file = sealed_file(end)?;
        let mem = HostMem::of_file_range(&file, first, sim.doorbell_bytes() as usize, true)
            .and_then(|mem| sim.map_doorbells(mem));
        mem.map_err(|error| failed("mmap")(io::Error::other(error)))?;
        let orders = Arc::<Orders>::default();
        let (watched, told) = (sim.clone(), orders.clone());
        let thread = std::thread::Builder::new()
            .name("onehop-doorbells".into())
            .spawn(move || watch(&watched, &told))
            .map_err(failed("start of a thread"))?;
        let area = first..end;
        let mapping = Mapping { file: Arc::new(file), areas: vec![area] };
        Ok(Self { mapping, orders, thread: Some(thread) })
    }

    /// Watches them from now on, or no longer.
    pub(crate) fn set_active(&self, active: bool) {
        self.orders.active.store(active, Ordering::Release);
        if let Some(thread) = self.thread.as_ref().filter(|_| active) {
            thread.thread().unpark();
        }
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

impl Drop for MappedDoorbells {
    fn drop(&mut self) {
        self.orders.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// A file in memory that no client can make shorter: reading what is gone would end this process.
fn sealed_file(bytes: u64) -> Result<File> {
    let failed = |call| move |source: io::Error| Error::Doorbells { call, source };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("onehop-doorbells", flags).map_err(|e| failed("memfd_create")(e.into()))?;
    let file = File::from(file);
    file.set_len(bytes).map_err(failed("ftruncate"))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&file, seals).map_err(|e| failed("fcntl F_ADD_SEALS")(e.into()))?;
    Ok(file)
}

/// Delivers what is written until it is told to stop, ever more rarely while nothing is.
fn watch(sim: &Sim, orders: &Orders) {
    let mut last = Instant::now();
    while !orders.stop.load(Ordering::Acquire) {
        if !orders.active.load(Ordering::Acquire) {
            std::thread::park();
            continue;
        }
        if sim.poll_doorbells() {
            last = Instant::now();
        }
        match last.elapsed() {
            quiet if quiet < BUSY => std::thread::yield_now(),
            quiet if quiet < WARM => std::thread::park_timeout(WARM_PAUSE),
            _ => std::thread::park_timeout(IDLE_PAUSE),
        }
    }
}
