//! A simulated drive for its owner.

use std::sync::Arc;

use onehop_os::{ControllerBackend, FunctionReset, HostMem, Registers};
use onehop_proto::BusAddr;

use crate::config::{Config, Media};
use crate::core::{Core, CoreHandle, SimRegisters};
use crate::dma::{Segment, SimMapper};
use crate::engine::IoEngine;
use crate::faults::Fault;
use crate::mapped::MappedDoorbells;
use crate::media::NamespaceMedia;
use crate::stats::Stats;
use crate::violation::{Rule, Violation};
use crate::{Error, Result};

/// A simulated drive. Clones are the same drive; it ends with the last of them and of its [`ControllerBackend`]s.
#[derive(Clone)]
pub struct Sim {
    handle: Arc<CoreHandle>,
    mapper: Arc<SimMapper>,
    name: String,
}

/// Creates the drive of a specification after `sim:`.
///
/// # Errors
/// When the specification is invalid, or the image cannot be used.
pub fn open(spec: &str) -> Result<Sim> {
    let mut sim = Sim::new(Config::parse(spec)?)?;
    sim.name = format!("sim:{spec}");
    Ok(sim)
}

impl Sim {
    /// Creates a drive.
    ///
    /// # Errors
    /// When the configuration is contradictory, or the image cannot be used.
    pub fn new(config: Config) -> Result<Self> {
        Self::build(config, None)
    }

    /// Creates a drive whose I/O commands `engine` executes.
    ///
    /// # Errors
    /// As for [`Sim::new`].
    pub fn with_engine(config: Config, engine: Arc<dyn IoEngine>) -> Result<Self> {
        Self::build(config, Some(engine))
    }

    fn build(config: Config, engine: Option<Arc<dyn IoEngine>>) -> Result<Self> {
        let name = match &config.media {
            Media::Memory(bytes) => format!("sim:mem:{bytes}"),
            Media::Image { path, .. } => format!("sim:{}", path.display()),
        };
        let core = Core::new(config, engine)?;
        let page = 4096 << core.config.mpsmin;
        let mapper = Arc::new(SimMapper::new(core.space.clone(), core.config.scatter.then_some(page)));
        Ok(Self { handle: Arc::new(CoreHandle::new(core)?), mapper, name })
    }

    fn core(&self) -> &Core {
        &self.handle.core
    }

    /// Its controller, for a driver.
    #[must_use]
    pub fn port(&self) -> ControllerBackend {
        ControllerBackend {
            regs: self.registers(),
            mapper: self.mapper.clone(),
            reset: Some(Arc::new(SimReset(self.handle.clone()))),
            name: self.name.clone(),
            simulated: true,
        }
    }

    /// Its BAR0.
    #[must_use]
    pub fn registers(&self) -> Arc<dyn Registers> {
        Arc::new(SimRegisters(self.handle.clone()))
    }

    /// Its mapper.
    #[must_use]
    pub fn mapper(&self) -> Arc<SimMapper> {
        self.mapper.clone()
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.core().config
    }

    /// The driver's violations, in order: the first 4096, and the first of each rule.
    #[must_use]
    pub fn violations(&self) -> Vec<Violation> {
        self.core().with(|device| device.record_engine_breaches());
        self.core().book.all()
    }

    /// Number of violations, including those that are not kept.
    #[must_use]
    pub fn violation_count(&self) -> u64 {
        self.core().with(|device| device.record_engine_breaches());
        self.core().book.count()
    }

    /// Adds a fault; its clock starts now.
    pub fn inject(&self, fault: Fault) {
        self.core().with(|device| {
            let now = device.clock.now();
            device.faults.inject(fault, now);
        });
    }

    /// Simulates a power loss: unflushed writes are lost, and the controller is as after power-on.
    pub fn power_cycle(&self) {
        self.core().with(crate::device::ControllerState::power_loss);
    }

    /// Its statistics.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let core = self.core();
        let mut stats = core.with(|device| Stats { faults: device.faults.fired(), ..device.counts.stats() });
        if let Some(engine) = &core.engine {
            stats.engine_commands = engine.commands();
            stats.completions += stats.engine_commands;
        }
        stats
    }

    /// Does the next due work, and advances the clock to it; false if there is none. For `workers=0`.
    pub fn step(&self) -> bool {
        self.core().step()
    }

    /// The controller memory buffer, as the BAR shows it.
    #[must_use]
    pub fn cmb(&self) -> Option<HostMem> {
        self.core().cmb.as_ref().map(|(mem, _)| mem.clone())
    }

    /// Calls `call` with the vector of every interrupt, on the thread that posted the completion; `call` may access
    /// registers.
    pub fn on_interrupt(&self, call: impl Fn(u16) + Send + Sync + 'static) {
        self.core().on_interrupt(Arc::new(call));
    }

    /// Lets the drive reach a range at a bus address, until the result is dropped: memory, or without it a range in
    /// which accesses fail. Dropping the result waits for the command being executed.
    ///
    /// # Errors
    /// When the address is in use.
    pub fn reach(&self, at: BusAddr, bytes: u64, memory: Option<HostMem>) -> onehop_os::Result<Reached> {
        let space = &self.core().space;
        let segment = usize::try_from(bytes).map(|bytes| Segment::at(at.0, bytes, memory));
        if !segment.is_ok_and(|segment| space.insert_free(segment)) {
            let why = format!("the {bytes} bytes at {at} are taken, or not an address range");
            return Err(onehop_os::Error::CannotMap { mapper: self.name.clone(), why });
        }
        Ok(Reached { handle: self.handle.clone(), at })
    }

    /// Bytes of BAR0 from its first doorbell to the end of its last doorbell's page.
    #[must_use]
    pub fn doorbell_bytes(&self) -> u32 {
        crate::cmb::doorbells_end(self.config()) - onehop_proto::regs::offset::DOORBELLS
    }

    /// Takes doorbells from `mem` as well from now on. It has [`Sim::doorbell_bytes`] bytes, and is zeroed. The caller
    /// must poll [`Sim::poll_doorbells`].
    ///
    /// # Errors
    /// When the memory is too short or read-only, or the doorbells are already mapped.
    pub fn map_doorbells(&self, mem: HostMem) -> onehop_os::Result<()> {
        let config = self.config();
        let mapped = MappedDoorbells::new(mem, config.queues, config.dstrd)?;
        self.core().mapped.set(mapped).map_err(|_| onehop_os::Error::CannotMap {
            mapper: self.name.clone(),
            why: "its doorbells are mapped already".into(),
        })
    }

    /// Delivers writes to mapped doorbells; returns whether there were any.
    pub fn poll_doorbells(&self) -> bool {
        self.core().poll_doorbells()
    }

    /// Sets Bus Master Enable, which is initially on.
    pub fn set_bus_master(&self, on: bool) {
        self.core().space.set_master(on);
    }

    /// Whether it has left the bus.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.core().is_gone()
    }

    /// Records a register access that the seam cannot express: one that is not whole dwords.
    pub fn note_irregular_access(&self, offset: u64, bytes: usize) {
        self.core().book.note(
            Rule::RegisterAccess,
            None,
            format!("an access of {bytes} bytes to {offset:#x}"),
        );
    }

    /// Sets the drive's temperature in kelvins.
    pub fn set_temperature(&self, kelvins: u16) {
        self.core().with(|device| device.set_temperature(kelvins));
    }

    /// Makes the drive report that a namespace's attributes changed.
    pub fn namespace_changed(&self, nsid: u32) {
        self.core().with(|device| device.note_changed(nsid));
    }

    /// Replaces a namespace with one of the same size and format, as another host would: it has other identifiers, and
    /// its blocks are zero.
    ///
    /// # Errors
    /// When there is no such namespace, or the medium fails.
    pub fn recreate(&self, nsid: u32) -> Result<()> {
        self.with_namespace(nsid, |ns| Ok(ns.recreate()?))?;
        self.namespace_changed(nsid);
        Ok(())
    }

    /// Makes blocks unreadable until they are written again.
    ///
    /// # Errors
    /// When there is no such namespace, or no such blocks.
    pub fn spoil(&self, nsid: u32, lba: u64, blocks: u64) -> Result<()> {
        self.with_namespace(nsid, |ns| {
            let (offset, bytes) =
                (lba.saturating_mul(u64::from(ns.lba)), blocks.saturating_mul(u64::from(ns.lba)));
            check(ns, nsid, offset, bytes)?;
            ns.spoil(lba, blocks);
            Ok(())
        })
    }

    /// Writes data bytes directly to the medium: durable, and bypassing the controller.
    ///
    /// # Errors
    /// When the bytes are outside the namespace, or the medium fails.
    pub fn write_media(&self, nsid: u32, offset: u64, data: &[u8]) -> Result<()> {
        self.with_namespace(nsid, |ns| {
            check(ns, nsid, offset, data.len() as u64)?;
            Ok(ns.write_bytes(offset, data)?)
        })
    }

    /// Reads data bytes directly from the medium, including unflushed writes.
    ///
    /// # Errors
    /// When the bytes are outside the namespace, or the medium fails.
    pub fn read_media(&self, nsid: u32, offset: u64, out: &mut [u8]) -> Result<()> {
        self.with_namespace(nsid, |ns| {
            check(ns, nsid, offset, out.len() as u64)?;
            Ok(ns.read_bytes(offset, out)?)
        })
    }

    fn with_namespace<T>(&self, nsid: u32, work: impl FnOnce(&mut NamespaceMedia) -> Result<T>) -> Result<T> {
        let last = self.core().config.namespaces;
        self.core().with(|device| work(device.namespace(nsid).ok_or(Error::NoNamespace { nsid, last })?))
    }
}

impl std::fmt::Debug for Sim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sim").field("name", &self.name).finish_non_exhaustive()
    }
}

fn check(ns: &NamespaceMedia, nsid: u32, offset: u64, bytes: u64) -> Result<()> {
    let size = ns.bytes();
    if offset.checked_add(bytes).is_some_and(|end| end <= size) {
        Ok(())
    } else {
        Err(Error::OutOfRange { nsid, offset, bytes, size })
    }
}

/// A bus range that a drive reaches, until this is dropped.
pub struct Reached {
    handle: Arc<CoreHandle>,
    at: BusAddr,
}

impl Drop for Reached {
    fn drop(&mut self) {
        // Commands are executed under the same lock.
        let core = &self.handle.core;
        core.with(|_| core.space.remove(&[self.at.0]));
    }
}

/// Resets the function from outside.
struct SimReset(Arc<CoreHandle>);

impl FunctionReset for SimReset {
    fn function_reset(&self) -> onehop_os::Result<()> {
        self.0.core.with(|device| {
            if device.gone {
                return Err(onehop_os::Error::System {
                    call: "function reset of the simulated drive".into(),
                    source: std::io::Error::other("the device has left the bus"),
                    hint: "; only a power cycle brings it back",
                });
            }
            device.full_reset();
            Ok(())
        })
    }
}
