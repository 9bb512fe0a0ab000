//! The mapper of the module: chooses the call for each kind of memory.

use onehop_os::{DmaMemory, HostMem, Mapped, Mapper};

use super::mapping::Access;
use super::session::Session;
use crate::pages::PageSpan;
use crate::places::ProcessMaps;

/// How a mapper maps.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MapperRules {
    /// Chunks of this size must be contiguous on the bus, for engines without scatter lists.
    pub chunk: Option<u64>,
    /// Exporters may move the memory, which stops the device. Some exporters can only pin memory by moving it out of
    /// the GPU first.
    pub movable: bool,
}

/// Maps memory for a session's device.
pub(super) struct ModuleMapper {
    name: String,
    session: Session,
    access: Access,
}

impl ModuleMapper {
    pub(super) fn new(session: Session, rules: MapperRules) -> Self {
        let name = format!("the kernel module, for {}", session.address());
        let access = Access { chunk: rules.chunk, movable: rules.movable, ..Access::BOTH };
        Self { name, session, access }
    }

    fn cannot(&self, why: impl ToString) -> onehop_os::Error {
        onehop_os::Error::CannotMap { mapper: self.name.clone(), why: why.to_string() }
    }

    /// Maps memory of this process, or another device's BAR mapped through sysfs.
    fn host(&self, host: &HostMem) -> onehop_os::Result<Mapped> {
        if host.is_empty() {
            return Err(self.cannot("it has no bytes"));
        }
        let span = PageSpan::of(host);
        let Some(place) = ProcessMaps::read()?.device_memory(self.session.root(), span.start, span.len)
        else {
            let mapping = self.session.map_host(host, self.access).map_err(|e| self.cannot(e))?;
            return Ok(mapping.into_mapped());
        };
        let place = place.map_err(|why| self.cannot(why))?;
        let (device, bar) = (place.device, place.bar);
        let mapping = self.session.map_peer(device, bar, place.offset, span.len as u64, self.access);
        Ok(mapping.map_err(|e| self.cannot(e))?.part(span.skip as u64, host.len() as u64))
    }
}

impl Mapper for ModuleMapper {
    fn name(&self) -> &str {
        &self.name
    }

    fn alloc(&self, bytes: usize) -> onehop_os::Result<HostMem> {
        HostMem::touched(bytes)
    }

    fn map(&self, memory: &dyn DmaMemory) -> onehop_os::Result<Mapped> {
        match (memory.dma_buf(), memory.host()) {
            (Some(Ok(buffer)), _) => {
                let mapping = self.session.map_dma_buf(&buffer, self.access).map_err(|e| self.cannot(e))?;
                Ok(mapping.into_mapped())
            }
            (_, Some(host)) => self.host(host),
            (Some(Err(error)), None) => Err(self.cannot(error)),
            (None, None) => Err(self.cannot(
                "it is memory of a GPU whose driver exports no dma-buf of it. Use a route with data in host memory",
            )),
        }
    }
}
