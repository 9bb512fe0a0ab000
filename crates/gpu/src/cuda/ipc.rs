//! GPU memory shared between processes, including its offset in the allocation.
//!
//! A CUDA handle identifies only an allocation: a process that exports a pointer into the middle makes the importer
//! read from the allocation's start. A [`Ticket`] also carries the offset, and what the importer needs to detect other
//! memory. A ticket is bytes. Memory of [`DeviceKind::Exportable`](super::DeviceKind) also has a file descriptor, to be
//! sent over a Unix socket (`SCM_RIGHTS`) or inherited.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::capabilities::{Capabilities, allocation, buffer_id, owner};
use super::context::Context;
use super::memory::DeviceMemory;
use super::stream::Stream;
use crate::{Error, Region, Result};

use onehop_os::DmaMemory;
use onehop_proto::GpuAddr;

const MAGIC: [u8; 8] = *b"onehopG1";

/// Identifies memory of another process's GPU allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// Whether a file descriptor goes with it.
    pub by_fd: bool,
    /// Which GPU.
    pub gpu: [u8; 16],
    /// Size of the allocation.
    pub allocation: u64,
    /// Offset of the memory in it.
    pub offset: u64,
    /// Size of the memory.
    pub bytes: u64,
    /// The exporting process's number for the allocation: never reused there, unlike the address.
    pub buffer: u64,
    /// CUDA's handle; zero if a file descriptor is used.
    pub handle: [u8; 64],
}

impl Ticket {
    /// Bytes of a ticket.
    pub const BYTES: usize = 128;

    /// The ticket as bytes, for a file, a pipe or a message.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let numbers = [self.by_fd.into(), self.allocation, self.offset, self.bytes, self.buffer];
        out[..8].copy_from_slice(&MAGIC);
        out[8..24].copy_from_slice(&self.gpu);
        for (to, number) in out[24..64].chunks_exact_mut(8).zip(numbers) {
            to.copy_from_slice(&number.to_le_bytes());
        }
        out[64..].copy_from_slice(&self.handle);
        out
    }

    /// Parses a ticket.
    ///
    /// # Errors
    /// When the bytes are not a ticket, or are inconsistent.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = |why: &str| Error::Foreign { why: why.into() };
        let bytes: &[u8; Self::BYTES] =
            bytes.try_into().map_err(|_| bad("a ticket has 128 bytes; this is not one"))?;
        if bytes[..8] != MAGIC {
            return Err(bad("the bytes do not start as a ticket of this version does"));
        }
        let number = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let (mut gpu, mut handle) = ([0; 16], [0; 64]);
        gpu.copy_from_slice(&bytes[8..24]);
        handle.copy_from_slice(&bytes[64..]);
        let [allocation, offset, len, buffer] = [32, 40, 48, 56].map(number);
        if number(24) > 1 || len == 0 || offset.checked_add(len).is_none_or(|end| end > allocation) {
            return Err(bad("the ticket's memory does not lie within its allocation"));
        }
        Ok(Self { by_fd: number(24) == 1, gpu, allocation, offset, bytes: len, buffer, handle })
    }
}

/// A ticket, and the descriptor that goes with it, if any.
#[derive(Debug)]
pub struct Exported {
    /// The ticket.
    pub ticket: Ticket,
    /// The descriptor, for memory of the exportable kind.
    pub fd: Option<OwnedFd>,
}

/// Makes a ticket for memory. The memory must outlive the other process's use.
pub(super) fn export(context: &Context, gpu: [u8; 16], region: &Region) -> Result<Exported> {
    let what = "sharing memory with another process";
    let Some(memory) = region.device() else {
        let why = "the region is host memory; share its memfd or file instead".into();
        return Err(Error::NotSupported { what: what.into(), why });
    };
    let at = region.addr().0;
    let (base, allocated) = allocation(context, at)?;
    let buffer = buffer_id(context, at)?;
    let fd = memory.share()?;
    let mut handle = [0; 64];
    if fd.is_none() {
        let mut raw = cudarc::driver::sys::CUipcMemHandle { reserved: [0; 64] };
        let named = context.attempt(|driver| {
            // SAFETY: `raw` lives across the call, and `base` is the start of an allocation that `region` keeps alive.
            unsafe { driver.ipc_get(&mut raw, base) }
        });
        named.map_err(|failure| context.driver.error_with(what, failure, NOT_FOR_IPC))?;
        handle = raw.reserved.map(|byte| byte as u8);
    }
    let ticket = Ticket {
        by_fd: fd.is_some(),
        gpu,
        allocation: allocated as u64,
        offset: at - base,
        bytes: region.len() as u64,
        buffer,
        handle,
    };
    Ok(Exported { ticket, fd })
}

const NOT_FOR_IPC: &str = "this system has no CUDA IPC for such memory (containers need a common IPC and PID \
                           namespace); use DeviceKind::Exportable, which is shared by a file descriptor";

/// Whether a ticket still refers to the memory of a region of this process.
pub(super) fn is_current(context: &Context, ticket: &Ticket, region: &Region) -> Result<bool> {
    Ok(region.host().is_none() && buffer_id(context, region.addr().0)? == ticket.buffer)
}

/// Opens the memory of another process's ticket.
pub(super) fn import(
    (context, stream): (&Arc<Context>, &Arc<Stream>),
    (gpu, can): ([u8; 16], &Capabilities),
    ticket: &Ticket,
    fd: Option<&OwnedFd>,
) -> Result<Region> {
    if ticket.gpu != gpu {
        return Err(foreign("it is on another GPU than the one it is opened on; open that one".into()));
    }
    let memory = open(context, stream, can, ticket, fd)?;
    if owner(context, memory.at)? != Some(context.device) {
        return Err(foreign("it is on another GPU than its ticket says".into()));
    }
    region(context, ticket, memory)
}

/// Opens the memory of another process's ticket, on this GPU or on another one. Kernels do not get its address.
pub(super) fn import_of_any(
    (context, stream): (&Arc<Context>, &Arc<Stream>),
    (gpu, can): ([u8; 16], &Capabilities),
    ticket: &Ticket,
    fd: Option<&OwnedFd>,
) -> Result<Region> {
    if ticket.gpu == gpu {
        return import((context, stream), (gpu, can), ticket, fd);
    }
    // The driver does not say of every kind of memory whose it is.
    region(context, ticket, open(context, stream, can, ticket, fd)?)
}

fn foreign(why: String) -> Error {
    Error::Foreign { why }
}

fn open(
    context: &Arc<Context>,
    stream: &Arc<Stream>,
    can: &Capabilities,
    ticket: &Ticket,
    fd: Option<&OwnedFd>,
) -> Result<DeviceMemory> {
    check_range(ticket)?;
    match (ticket.by_fd, fd) {
        (false, _) => DeviceMemory::open(context, stream, ticket.handle).map_err(|failure| {
            let hint =
                "the exporting process must still run and hold the memory, and be another process than this";
            context.driver.error_with("opening another process's memory", failure, hint)
        }),
        (true, None) => Err(foreign("its file descriptor is missing; send it along with the ticket".into())),
        (true, Some(fd)) if can.vmm => {
            let bytes = usize::try_from(ticket.allocation)
                .map_err(|_| foreign("it is longer than this machine addresses".into()))?;
            DeviceMemory::import(context, stream, fd, bytes)
        }
        (true, Some(_)) => {
            let what = "opening another process's memory".into();
            let why = "this GPU has no virtual memory management".into();
            Err(Error::NotSupported { what, why })
        }
    }
}

/// The end of a ticket's memory in its allocation.
fn check_range(ticket: &Ticket) -> Result<u64> {
    let end = ticket.offset.checked_add(ticket.bytes).filter(|end| *end <= ticket.allocation);
    end.ok_or_else(|| foreign("the ticket's memory does not lie within its allocation".into()))
}

/// The part of an opened allocation that a ticket is for.
fn region(context: &Context, ticket: &Ticket, memory: DeviceMemory) -> Result<Region> {
    let end = check_range(ticket)?;
    let (_, allocated) = allocation(context, memory.at)?;
    if allocated as u64 != ticket.allocation {
        return Err(foreign(format!(
            "the allocation has {allocated} bytes, and the ticket is for one of {}: it was freed, and another made in \
             its place",
            ticket.allocation
        )));
    }
    let whole = context.region(GpuAddr(memory.at), memory);
    whole.slice(ticket.offset as usize..end as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_come_back_as_they_were_and_nonsense_does_not() {
        let ticket = Ticket {
            by_fd: true,
            gpu: *b"a GPU's 16 bytes",
            allocation: 1 << 21,
            offset: 70_000,
            bytes: (1 << 21) - 70_000,
            buffer: 0x1234_5678_9abc,
            handle: std::array::from_fn(|i| i as u8),
        };
        let bytes = ticket.to_bytes();
        assert_eq!(Ticket::from_bytes(&bytes).unwrap(), ticket);
        assert!(Ticket::from_bytes(&bytes[1..]).is_err());
        for (at, value) in [(0, 0), (24, 2), (31, 1), (48, 0x91), (55, 0xff), (34, 0)] {
            let mut broken = bytes;
            broken[at] = value;
            assert!(matches!(Ticket::from_bytes(&broken), Err(Error::Foreign { .. })), "byte {at}");
        }
    }
}
