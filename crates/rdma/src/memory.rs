//! Memory that an RDMA device reaches, and by which route.
//!
//! Host memory is pinned by its address. A GPU's memory is registered by a dma-buf if kernel, card and GPU driver
//! support that, otherwise by its address through the module nvidia-peermem. If neither works, the caller has to move
//! bytes through host memory, and to report it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use onehop_os::DmaMemory;

use crate::verbs::reason;
use crate::{Error, Result};

/// Memory to register; a registration keeps it alive.
pub type MemoryRef = Arc<dyn DmaMemory + Send + Sync>;

/// How memory is registered, the best route first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum MemoryRoute {
    /// Host memory, by its address.
    Host,
    /// A GPU's memory, by a dma-buf.
    DmaBuf,
    /// A GPU's memory, by its address (nvidia-peermem).
    Peermem,
    /// Not registered: bytes go through registered host memory.
    Bounce,
}

impl MemoryRoute {
    /// The route's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "rdma/host",
            Self::DmaBuf => "rdma/dma-buf",
            Self::Peermem => "rdma/peermem",
            Self::Bounce => "rdma/bounce",
        }
    }
}

/// A refused route.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RefusedRoute {
    /// The route.
    pub way: MemoryRoute,
    /// Why not.
    pub why: String,
}

/// A device's access to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Messages are received into it and sent from it, in order.
    Messages,
    /// This side puts from it and gets into it. The device may write it out of order, which is faster with some host
    /// bridges. So it must not be read before the completion.
    Own,
    /// The same, and admitted other sides may read and write it.
    Exposed,
}

/// A memory range of this side as the other side addresses it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteMemory {
    /// The address of its first byte.
    pub addr: u64,
    /// How long it is.
    pub len: u64,
    /// The key for access.
    pub rkey: u32,
}

impl RemoteMemory {
    /// A part of it.
    ///
    /// # Errors
    /// When the range does not lie within it.
    pub fn part(&self, offset: u64, bytes: u64) -> Result<Self> {
        if offset > self.len || bytes > self.len - offset {
            return Err(Error::OutOfRange { offset, bytes, len: self.len });
        }
        let addr = self.addr.checked_add(offset);
        let addr = addr.ok_or(Error::OutOfRange { offset, bytes, len: self.len })?;
        Ok(Self { addr, len: bytes, rkey: self.rkey })
    }
}

/// Registers memory: a protection domain, or a substitute in tests.
pub(crate) trait Register {
    /// A registration, which ends when it is dropped.
    type Region;

    /// Host memory by its address.
    fn host(&self, memory: &MemoryRef, access: Access) -> Result<Self::Region>;
    /// A GPU's memory by its GPU address.
    fn peer(&self, memory: &MemoryRef, access: Access) -> Result<Self::Region>;
    /// A GPU's memory by its dma-buf and the offset there; `name` becomes the address of its first byte.
    fn dma_buf(
        &self,
        memory: &MemoryRef,
        at: (BorrowedFd<'_>, u64),
        name: u64,
        access: Access,
    ) -> Result<Self::Region>;
}

/// A registration, the address of its first byte, and its route.
#[derive(Debug)]
pub(crate) struct NewRegistration<R> {
    pub region: R,
    pub addr: u64,
    pub way: MemoryRoute,
    pub refusals: Vec<RefusedRoute>,
}

/// Registers memory by the best route that works.
pub(crate) fn register<D: Register>(
    domain: &D,
    device: &str,
    memory: &MemoryRef,
    access: Access,
) -> Result<NewRegistration<D::Region>> {
    if let Some(mem) = memory.host() {
        let (region, addr) = (domain.host(memory, access)?, mem.host_ptr() as u64);
        return Ok(NewRegistration { region, addr, way: MemoryRoute::Host, refusals: Vec::new() });
    }
    let mut refusals = Vec::new();
    let mut refused = |way, why| refusals.push(RefusedRoute { way, why });
    let on_gpu = memory.gpu_addr().map_or(0, |at| at.0);
    match memory.dma_buf() {
        None => refused(MemoryRoute::DmaBuf, "its driver exports no dma-bufs of it".into()),
        Some(Err(error)) => refused(MemoryRoute::DmaBuf, error.to_string()),
        Some(Ok(buf)) => match domain.dma_buf(memory, (buf.fd.as_fd(), buf.offset), on_gpu, access) {
            // The registration holds the dma-buf; the descriptor is no longer needed.
            Ok(region) => {
                return Ok(NewRegistration { region, addr: on_gpu, way: MemoryRoute::DmaBuf, refusals });
            }
            Err(error) => refused(MemoryRoute::DmaBuf, because(&error, DMA_BUF_HINT)),
        },
    }
    if memory.gpu_addr().is_none() {
        refused(MemoryRoute::Peermem, "it has no address on a GPU".into());
    } else {
        match domain.peer(memory, access) {
            Ok(region) => {
                return Ok(NewRegistration { region, addr: on_gpu, way: MemoryRoute::Peermem, refusals });
            }
            Err(error) => refused(MemoryRoute::Peermem, because(&error, PEERMEM_HINT)),
        }
    }
    Err(Error::NotRegistered { device: device.to_owned(), refusals })
}

/// The requirement if dma-bufs are refused as not supported.
const DMA_BUF_HINT: (i32, &str) = (
    95,
    "; the card's driver does not accept dma-bufs: mlx5, bnxt_re, irdma and efa do from kernel 5.12 on, soft-RoCE never does",
);
/// The requirement if a GPU address is refused as a bad one.
const PEERMEM_HINT: (i32, &str) =
    (14, "; no module provides GPU memory there: load nvidia-peermem (modprobe nvidia-peermem)");

fn because(error: &Error, (errno, hint): (i32, &str)) -> String {
    match error {
        Error::Call { source, .. } if source.raw_os_error() == Some(errno) => {
            format!("{}{hint}", reason(error))
        }
        _ => reason(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io;

    use onehop_os::{DmaBuf, HostMem};
    use onehop_proto::GpuAddr;

    use super::*;

    /// Accepts dma-bufs and addresses, or refuses each with an error number.
    struct FakeRegistrar {
        dma_buf: Option<i32>,
        peer: Option<i32>,
    }

    fn answer(call: &'static str, errno: Option<i32>) -> Result<&'static str> {
        match errno {
            None => Ok(call),
            Some(errno) => Err(Error::Call {
                call,
                device: "fake".into(),
                source: io::Error::from_raw_os_error(errno),
                hint: "",
            }),
        }
    }

    impl Register for FakeRegistrar {
        type Region = &'static str;
        fn host(&self, _: &MemoryRef, _: Access) -> Result<&'static str> {
            answer("host", None)
        }
        fn peer(&self, _: &MemoryRef, _: Access) -> Result<&'static str> {
            answer("peer", self.peer)
        }
        fn dma_buf(
            &self,
            _: &MemoryRef,
            (_, offset): (BorrowedFd<'_>, u64),
            name: u64,
            _: Access,
        ) -> Result<&'static str> {
            assert_eq!((offset, name), (4096, 1 << 40));
            answer("dma_buf", self.dma_buf)
        }
    }

    struct FakeGpuMemory {
        exports: bool,
    }

    impl DmaMemory for FakeGpuMemory {
        fn bytes(&self) -> usize {
            8192
        }
        fn host(&self) -> Option<&HostMem> {
            None
        }
        fn gpu_addr(&self) -> Option<GpuAddr> {
            Some(GpuAddr(1 << 40))
        }
        fn dma_buf(&self) -> Option<onehop_os::Result<DmaBuf>> {
            self.exports.then(|| {
                let fd = File::open("/dev/null").unwrap().into();
                Ok(DmaBuf { fd, offset: 4096, bytes: 8192 })
            })
        }
    }

    #[test]
    fn each_route_is_tried_and_refusals_are_reported() {
        let memory: MemoryRef = Arc::new(FakeGpuMemory { exports: true });
        let made =
            register(&FakeRegistrar { dma_buf: None, peer: None }, "fake", &memory, Access::Exposed).unwrap();
        assert_eq!((made.region, made.way, made.addr), ("dma_buf", MemoryRoute::DmaBuf, 1 << 40));
        assert!(made.refusals.is_empty());

        let made =
            register(&FakeRegistrar { dma_buf: Some(95), peer: None }, "fake", &memory, Access::Exposed)
                .unwrap();
        assert_eq!((made.region, made.way), ("peer", MemoryRoute::Peermem));
        assert!(made.refusals[0].way == MemoryRoute::DmaBuf && made.refusals[0].why.contains("soft-RoCE"));

        let none = FakeRegistrar { dma_buf: Some(95), peer: Some(14) };
        let error = register(&none, "fake", &memory, Access::Exposed).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::NotRegistered { refusals, .. } if refusals.len() == 2));
        assert!(text.contains("rdma/dma-buf") && text.contains("modprobe nvidia-peermem"), "{text}");

        let memory: MemoryRef = Arc::new(FakeGpuMemory { exports: false });
        let made =
            register(&FakeRegistrar { dma_buf: None, peer: None }, "fake", &memory, Access::Exposed).unwrap();
        assert_eq!((made.way, made.refusals.len()), (MemoryRoute::Peermem, 1));

        let memory: MemoryRef = Arc::new(HostMem::anonymous(4096).unwrap());
        let made = register(&none, "fake", &memory, Access::Exposed).unwrap();
        assert_eq!((made.region, made.way), ("host", MemoryRoute::Host));
        assert_eq!(made.addr, memory.host().unwrap().host_ptr() as u64);
    }

    #[test]
    fn parts_stay_within() {
        let whole = RemoteMemory { addr: 1000, len: 100, rkey: 7 };
        assert_eq!(whole.part(10, 90).unwrap(), RemoteMemory { addr: 1010, len: 90, rkey: 7 });
        assert!(
            whole.part(10, 91).is_err() && whole.part(101, 0).is_err() && whole.part(u64::MAX, 2).is_err()
        );
        assert!(RemoteMemory { addr: u64::MAX, len: 100, rkey: 7 }.part(10, 1).is_err());
    }
}
