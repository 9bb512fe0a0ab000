//! Mapped doorbells: a memfd that clients write to, and the thread that polls it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::HostMem;
use onehop_proto::regs::offset;
use onehop_sim::Sim;

use crate::error::{Error, Result};
use crate::memfd::sealed_file;
use crate::model::MappableParts;

/// After a write, the thread polls without a pause for this long.
const BUSY: Duration = Duration::from_micros(200);
/// After that, the pause between polls for as long as [`WARM`].
const WARM_PAUSE: Duration = Duration::from_micros(50);
const WARM: Duration = Duration::from_millis(20);
/// The pause from then on, which limits the cost of an idle client.
const IDLE_PAUSE: Duration = Duration::from_millis(1);

/// Shared with the thread.
#[derive(Default)]
struct Orders {
    stop: AtomicBool,
    /// A client has enabled bus mastering. Before that, it has no queue to ring for.
    active: AtomicBool,
}

/// The memory and its thread, which ends on drop.
pub(crate) struct MappedDoorbells {
    mapping: MappableParts,
    orders: Arc<Orders>,
    thread: Option<JoinHandle<()>>,
}

impl MappedDoorbells {
    /// Sets up mapped doorbells for a drive.
    pub(crate) fn start(sim: &Sim) -> Result<Self> {
        let failed = |call| move |source: io::Error| Error::Doorbells { call, source };
        let first = u64::from(offset::DOORBELLS);
        let end = first + u64::from(sim.doorbell_bytes());
        let file = sealed_file("onehop-doorbells", end).map_err(failed("creation of a memory file"))?;
        let mem = HostMem::of_file_range(&file, first, sim.doorbell_bytes() as usize, true)
            .and_then(|mem| sim.map_doorbells(mem));
        mem.map_err(|error| failed("mmap")(io::Error::other(error)))?;
        let orders = Arc::<Orders>::default();
        let (watched, watcher_orders) = (sim.clone(), orders.clone());
        let thread = std::thread::Builder::new()
            .name("onehop-doorbells".into())
            .spawn(move || watch(&watched, &watcher_orders))
            .map_err(failed("start of a thread"))?;
        let area = first..end;
        let mapping = MappableParts { file: Arc::new(file), areas: vec![area] };
        Ok(Self { mapping, orders, thread: Some(thread) })
    }

    /// Starts or stops polling.
    pub(crate) fn set_active(&self, active: bool) {
        self.orders.active.store(active, Ordering::Release);
        if let Some(thread) = self.thread.as_ref().filter(|_| active) {
            thread.thread().unpark();
        }
    }

    pub(crate) fn mapping(&self) -> &MappableParts {
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

/// Delivers written doorbells until `stop` is set. Idle polls become less frequent.
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
