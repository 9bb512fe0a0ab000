//! The drive: the simulator's controller, with a mapper that also reaches VRAM.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use onehop_controller::BusMapping;
use onehop_gpu::controllers::{Common, Pairs, Table};
use onehop_gpu::{Gpu, Place, Region};
use onehop_os::{ControllerBackend, DmaMemory, HostMem, Mapped, Mapper};
use onehop_proto::GpuAddr;
use onehop_sim::{Config, Media, Sim, SimMapper};

use crate::engine::{DriveEngine, locked};
use crate::error::not_served;
use crate::memory::NamespaceBlocks;
use crate::{Result, faults};

/// Mappings that can come and go while queues are served.
const MAPPINGS: usize = 1024;
/// Warps end after this, even if their host does not stop them.
const LIMIT: Duration = Duration::from_secs(900);
/// Maximum queue pairs: each has a warp.
const QUEUES: u16 = 64;

/// A simulated drive whose I/O commands a GPU executes.
pub struct ResidentDrive {
    sim: Sim,
    mapper: Arc<ResidentMapper>,
}

/// Makes a drive from the specification after `sim:`, with its queues, its namespace and its data within this GPU's
/// reach.
///
/// # Errors
/// When the specification is invalid or not supported on a GPU, or the GPU is out of memory.
pub fn open(spec: &str, gpu: Arc<dyn Gpu>) -> Result<ResidentDrive> {
    let config = Config::parse(spec)?;
    let bytes = check(&config)?;
    let faults = faults::translate(&config.faults)?;
    // Now, because creating a queue is limited to an admin command's time.
    gpu.controllers()?.load()?;
    let table = Arc::new(Mutex::new(Table::new(&gpu, MAPPINGS)?));
    let namespace = gpu.alloc(Place::Vram, bytes as usize)?;
    let page_bytes = 4096 << config.mpsmin;
    let common = Common {
        namespace: namespace.clone(),
        blocks: bytes / u64::from(config.lba),
        lba_shift: config.lba.ilog2(),
        max_bytes: page_bytes << config.mdts,
        limit: LIMIT,
        flags: 0,
    };
    let pairs = Pairs::new(&gpu, common, &table, config.queues, page_bytes)?;
    let namespace = Arc::new(NamespaceBlocks(namespace));
    let engine = DriveEngine::new(gpu.clone(), table.clone(), pairs, namespace, faults);
    let sim = Sim::with_engine(config, Arc::new(engine))?;
    let mapper = ResidentMapper { sim: sim.mapper(), gpu, table };
    Ok(ResidentDrive { sim, mapper: Arc::new(mapper) })
}

/// Checks that a GPU can serve such a drive; returns the bytes of its namespace.
fn check(config: &Config) -> Result<u64> {
    let Media::Memory(bytes) = config.media else {
        return not_served("an image file", "write its bytes to a drive in memory (mem:)");
    };
    if config.ms != 0 || config.namespaces != 1 {
        return not_served("metadata, or several namespaces", "ms=0 and ns=1");
    }
    if config.sgl || config.dbbuf || config.scatter {
        return not_served("SGLs, shadow doorbells, or scattered mappings", "sgl=0, dbbuf=0, scatter=0");
    }
    if config.mdts == 0 || config.mdts > 10 {
        return not_served(format!("mdts={}", config.mdts), "mdts=1 to 10");
    }
    if config.queues > QUEUES {
        return not_served(format!("{} queues", config.queues), &format!("{QUEUES} at most"));
    }
    if config.null.is_some() || config.bandwidth != 0 || !(config.latency + config.jitter).is_zero() {
        return not_served("null, latency, jitter and bandwidth", "leave them away");
    }
    Ok(bytes - bytes % u64::from(config.lba))
}

impl ResidentDrive {
    /// The controller for a driver.
    #[must_use]
    pub fn port(&self) -> ControllerBackend {
        let port = self.sim.port();
        ControllerBackend {
            name: format!("{} on {}", port.name, self.mapper.gpu.name()),
            mapper: self.mapper.clone(),
            ..port
        }
    }

    /// The simulator behind it, with its violations, media and faults.
    #[must_use]
    pub fn sim(&self) -> &Sim {
        &self.sim
    }
}

/// Provides bus addresses of host memory and of the GPU's own.
struct ResidentMapper {
    sim: Arc<SimMapper>,
    gpu: Arc<dyn Gpu>,
    table: Arc<Mutex<Table>>,
}

/// A mapping. The warps lose it first.
struct WarpMapping {
    table: Arc<Mutex<Table>>,
    bus: u64,
    _mapped: Mapped,
    _region: Option<Region>,
}

impl Drop for WarpMapping {
    fn drop(&mut self) {
        // A failed GPU accesses nothing any more.
        let _ = locked(&self.table).remove(self.bus);
    }
}

impl ResidentMapper {
    fn cannot(&self, why: impl ToString) -> onehop_os::Error {
        onehop_os::Error::CannotMap { mapper: self.name().into(), why: why.to_string() }
    }

    /// The memory's address for the warps, and what keeps it valid.
    fn target(&self, memory: &dyn DmaMemory) -> onehop_os::Result<(GpuAddr, Option<Region>)> {
        match (memory.host(), memory.gpu_addr()) {
            (Some(host), _) => {
                let adopted = self.gpu.adopt(Place::PinnedHost, host.clone());
                let region = adopted.map_err(|error| self.cannot(error))?;
                Ok((region.addr(), Some(region)))
            }
            (None, Some(at)) => Ok((at, None)),
            (None, None) => Err(self.cannot("it is neither host memory nor a GPU's")),
        }
    }
}

impl Mapper for ResidentMapper {
    fn name(&self) -> &str {
        "a controller on the GPU"
    }

    fn alloc(&self, bytes: usize) -> onehop_os::Result<HostMem> {
        self.sim.alloc(bytes)
    }

    fn map(&self, memory: &dyn DmaMemory) -> onehop_os::Result<Mapped> {
        let (target, region) = self.target(memory)?;
        // Locked until the entry is added: the table's addresses only grow.
        let mut table = locked(&self.table);
        let mapped = match memory.host() {
            Some(_) => self.sim.map(memory)?,
            None => self.sim.map_foreign(memory.bytes(), target.0),
        };
        let bus = mapped.contiguous()?.0;
        if !bus.is_multiple_of(16) || !target.0.is_multiple_of(16) {
            return Err(self.cannot("it does not start at a multiple of 16 bytes"));
        }
        table.add(BusMapping { bus, bytes: mapped.bytes(), target }).map_err(|error| self.cannot(error))?;
        let runs = mapped.runs().to_vec();
        let hold = WarpMapping { table: self.table.clone(), bus, _mapped: mapped, _region: region };
        Ok(Mapped::new(runs, Box::new(hold)))
    }
}
