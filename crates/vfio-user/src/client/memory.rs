//! Memory for a served controller: a memfd for each allocation, which the server maps.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use onehop_os::{Allocations, BusRange, DmaMemory, Error, HostMem, Mapped, Mapper};
use onehop_proto::BusAddr;

use super::connection::Connection;
use crate::error::ClientError;
use crate::memfd::sealed_file;
use crate::wire::command;

const PAGE: u64 = 4096;
/// First bus address. Addresses are never reused, and low ones are left out, because they look like mistakes.
const FIRST: u64 = 1 << 30;
/// Mappings start at multiples of this, and are at least a page apart.
const STEP: u64 = 2 << 20;
/// The device may read and write.
const READ_WRITE: u64 = 3;

/// Allocates memory and bus addresses.
pub(super) struct ClientMemory {
    connection: Arc<Connection>,
    next: AtomicU64,
    /// The file of each.
    files: Allocations<Arc<File>>,
}

impl ClientMemory {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self { connection, next: AtomicU64::new(FIRST), files: Allocations::default() }
    }

    fn cannot(&self, why: impl Into<String>) -> Error {
        Error::CannotMap { mapper: self.connection.name().to_owned(), why: why.into() }
    }
}

/// Unshares a mapping on drop. If that fails, the connection is gone, and the mapping with it.
struct SharedMapping {
    connection: Arc<Connection>,
    at: u64,
    bytes: u64,
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        let ask = [24, self.at, self.bytes].map(u64::to_le_bytes).concat();
        let _ = self.connection.request(command::DMA_UNMAP, &ask, None);
    }
}

impl Mapper for ClientMemory {
    fn name(&self) -> &str {
        self.connection.name()
    }

    fn alloc(&self, bytes: usize) -> onehop_os::Result<HostMem> {
        let none = || Error::NoMemory { mapper: self.connection.name().to_owned(), bytes };
        let len = bytes.max(1).checked_next_multiple_of(PAGE as usize).ok_or_else(none)?;
        let file = sealed_file("onehop-dma", len as u64).map_err(|_| none())?;
        let memory = HostMem::of_file(&file, len)?;
        Ok(self.files.add(memory, Arc::new(file)))
    }

    fn map(&self, memory: &dyn DmaMemory) -> onehop_os::Result<Mapped> {
        let host = memory.host().ok_or_else(|| {
            self.cannot("a vfio-user server reaches host memory only; use the emulated GPU or host buffers")
        })?;
        let found = self.files.find(host).filter(|_| !host.is_empty());
        let (start, file) =
            found.ok_or_else(|| self.cannot("only memory that this mapper allocated has a file to share"))?;
        let (start, len) = (start as u64, host.len() as u64);
        let (skew, offset) = (start % PAGE, start / PAGE * PAGE);
        let bytes = (skew + len).next_multiple_of(PAGE);
        let at = self.next.fetch_add((bytes + PAGE).next_multiple_of(STEP), Ordering::Relaxed);
        let ask = [32 | READ_WRITE << 32, offset, at, bytes].map(u64::to_le_bytes).concat();
        let shared = self.connection.request(command::DMA_MAP, &ask, Some(&file));
        shared.map_err(|error| match error {
            ClientError::Broken { .. } if self.connection.is_stopped() => {
                Error::Interrupted { device: self.connection.name().to_owned() }
            }
            // The controller is gone with its server. The memory is not the cause.
            ClientError::Broken { .. } => Error::Lost {
                device: self.connection.name().to_owned(),
                why: format!("mapping {bytes} bytes of host memory at bus address {at:#x}: {error}"),
            },
            refused => self.cannot(refused.to_string()),
        })?;
        let hold = SharedMapping { connection: self.connection.clone(), at, bytes };
        Ok(Mapped::new(vec![BusRange { addr: BusAddr(at + skew), len }], Box::new(hold)))
    }
}
