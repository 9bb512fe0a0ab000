//! A PCI function: a device model behind a configuration space and interrupts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::config::{self, ConfigSpace, MSIX_BAR};
use crate::error::Refusal;
use crate::irq::Interrupts;
use crate::model::{DeviceModel, Vectors};
use crate::wire::RegionAccess;

/// Number of regions: six BARs, the ROM, the configuration space, VGA.
pub(crate) const REGIONS: u32 = 9;
const CONFIG_REGION: u32 = 7;

/// A simulated PCI function.
pub struct Function {
    pub(crate) model: Box<dyn DeviceModel>,
    pub(crate) interrupts: Arc<Interrupts>,
    config: Mutex<ConfigSpace>,
    /// The MSI-X table. As with VFIO, clients keep their own; this one only stores what they write.
    table: Mutex<Vec<u8>>,
    vectors: Vectors,
    flr: bool,
    /// BARs respond even if Memory Space Enable is off.
    forgiving: bool,
    /// Bytes of each region.
    sizes: [u64; REGIONS as usize],
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Function {
    /// Wraps a device model.
    #[must_use]
    pub fn new(model: Box<dyn DeviceModel>) -> Self {
        let identity = model.identity();
        let vectors = identity.vectors;
        let interrupts = Arc::new(Interrupts::new(vectors.count()));
        model.connect(interrupts.clone());
        model.set_bus_master(false);
        let mut sizes = [0; REGIONS as usize];
        for bar in &identity.bars {
            sizes[usize::from(bar.index)] = bar.bytes;
        }
        let mut table = Vec::new();
        if let Vectors::MsiX(count) = vectors {
            sizes[usize::from(MSIX_BAR)] = config::msix_bar_bytes(count);
            table.resize(usize::from(count) * 16, 0);
        }
        sizes[CONFIG_REGION as usize] = config::BYTES as u64;
        Self {
            interrupts,
            config: Mutex::new(ConfigSpace::new(&identity)),
            table: Mutex::new(table),
            vectors,
            flr: identity.flr,
            forgiving: false,
            sizes,
            model,
        }
    }

    /// Lets BARs respond to clients that never set Memory Space Enable. Power states still apply.
    #[must_use]
    pub fn forgiving_memory_space(self) -> Self {
        Self { forgiving: true, ..self }
    }

    /// Bytes of a region; 0 if it does not exist.
    pub(crate) fn region_bytes(&self, region: u32) -> Result<u64, Refusal> {
        let size = self.sizes.get(region as usize).copied();
        size.ok_or_else(|| Refusal::invalid(format!("region {region}; there are 0 to {}", REGIONS - 1)))
    }

    /// Its kind of interrupts.
    pub(crate) fn vectors(&self) -> Vectors {
        self.vectors
    }

    /// Whether it can be reset.
    pub(crate) fn has_reset(&self) -> bool {
        self.flr
    }

    fn check(&self, access: &RegionAccess) -> Result<(), Refusal> {
        let size = self.region_bytes(access.region)?;
        match access.offset.checked_add(access.bytes.into()) {
            Some(end) if end <= size => Ok(()),
            _ => {
                let RegionAccess { region, offset, bytes } = access;
                let why = format!("{bytes} bytes at {offset:#x} of region {region}, which has {size:#x}");
                Err(Refusal::invalid(why))
            }
        }
    }

    /// Whether the BARs respond.
    fn answers(&self) -> bool {
        let config = locked(&self.config);
        config.memory_enabled() || self.forgiving && config.is_awake()
    }

    /// Reads from a region; `out` has the length of the access.
    pub(crate) fn read(&self, access: &RegionAccess, out: &mut [u8]) -> Result<(), Refusal> {
        self.check(access)?;
        if self.model.is_gone() {
            out.fill(0xff);
            return Ok(());
        }
        if access.region == CONFIG_REGION {
            locked(&self.config).read(access.offset as usize, out);
        } else if !self.answers() {
            out.fill(0xff);
        } else if access.region == u32::from(MSIX_BAR) {
            self.read_msix(access.offset, out);
        } else {
            self.model.read(access.region as u8, access.offset, out);
        }
        Ok(())
    }

    /// Writes to a region.
    pub(crate) fn write(&self, access: &RegionAccess, data: &[u8]) -> Result<(), Refusal> {
        self.check(access)?;
        if self.model.is_gone() {
            return Ok(());
        }
        if access.region == CONFIG_REGION {
            self.write_config(access.offset as usize, data);
        } else if !self.answers() {
            // Nothing responds now; the write is lost, as on a bus.
        } else if access.region == u32::from(MSIX_BAR) {
            for (at, byte) in (access.offset as usize..).zip(data) {
                if let Some(kept) = locked(&self.table).get_mut(at) {
                    *kept = *byte;
                }
            }
        } else {
            self.model.write(access.region as u8, access.offset, data);
        }
        Ok(())
    }

    fn read_msix(&self, offset: u64, out: &mut [u8]) {
        let (table, pending) = (locked(&self.table), self.interrupts.pending());
        let bits = config::msix_table_bytes((table.len() / 16) as u16);
        for (at, byte) in (offset..).zip(out) {
            let bit = at.checked_sub(bits).and_then(|at| pending.get(at as usize));
            *byte = *table.get(at as usize).or(bit).unwrap_or(&0);
        }
    }

    fn write_config(&self, offset: usize, data: &[u8]) {
        let mut config = locked(&self.config);
        let resets = config.write(offset, data);
        let (master, (enabled, all_masked)) = (config.bus_master(), config.interrupts());
        drop(config);
        if resets {
            return self.reset();
        }
        self.model.set_bus_master(master);
        self.interrupts.control(enabled, all_masked);
    }

    /// Function level reset. As with VFIO, event fds stay connected to the client's vectors.
    pub fn reset(&self) {
        self.model.set_bus_master(false);
        self.model.reset();
        locked(&self.config).reset();
        locked(&self.table).fill(0);
        self.interrupts.control(false, false);
    }
}
