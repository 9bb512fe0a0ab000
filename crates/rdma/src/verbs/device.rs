//! A device, its ports, its protection domain, and memory registered in it.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::caller::Caller;
use super::{Verbs, code, last, sys};
use crate::memory::{Access, MemoryRef, Register};
use crate::{Error, Result};

/// An open device.
pub(crate) struct VerbsDevice {
    verbs: Verbs,
    name: String,
    context: NonNull<sys::Context>,
    caller: Caller,
}

// SAFETY: the library's calls on a context may be made by any thread.
unsafe impl Send for VerbsDevice {}
// SAFETY: as above, by several at once.
unsafe impl Sync for VerbsDevice {}

impl Drop for VerbsDevice {
    fn drop(&mut self) {
        // SAFETY: what was made from the context is gone, or is a pair or registration that holds it
        // permanently; a queue or domain that the device did not destroy is not used any more, and closing the
        // context ends it.
        unsafe { self.call(|library| (library.close_device)(self.context())) };
    }
}

/// The present state of a port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Port {
    pub active: bool,
    /// Log2 of the largest packet, less 7.
    pub mtu: i32,
    pub gids: u32,
    pub lid: u16,
    pub ethernet: bool,
}

/// An address of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Gid {
    pub index: u8,
    pub bytes: [u8; 16],
    pub kind: GidKind,
}

/// The packet format of such an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GidKind {
    InfiniBand,
    RoceV1,
    RoceV2,
}

impl VerbsDevice {
    pub(super) fn new(verbs: Verbs, name: &str, context: NonNull<sys::Context>, caller: Caller) -> Self {
        Self { verbs, name: name.to_owned(), context, caller }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Calls the library, on a thread that the kernel accepts.
    ///
    /// # Safety
    /// The called function's contract; nothing else is done, and any thread may use what is used.
    pub(super) unsafe fn call<T>(&self, call: impl FnOnce(&sys::Functions) -> T) -> T {
        // SAFETY: the library's calls may be made by any thread, with its objects; the rest is the caller's promise.
        unsafe { self.caller.run(|| call(&self.verbs.0)) }
    }

    /// A call that returns an object, or null with the reason in errno.
    ///
    /// # Safety
    /// As for [`Self::call`].
    pub(super) unsafe fn make<T>(
        &self,
        name: &'static str,
        call: impl FnOnce(&sys::Functions) -> *mut T,
    ) -> Result<NonNull<T>> {
        // SAFETY: the caller's promise. errno is the thread's that made the call.
        unsafe { self.call(|library| NonNull::new(call(library)).ok_or_else(|| last(name, &self.name))) }
    }

    /// A call that returns the reason of its failure, or leaves it in errno.
    ///
    /// # Safety
    /// As for [`Self::call`].
    pub(super) unsafe fn ask(
        &self,
        name: &'static str,
        call: impl FnOnce(&sys::Functions) -> c_int,
    ) -> Result<()> {
        // SAFETY: as for `make`.
        unsafe { self.call(|library| code(name, &self.name, call(library))) }
    }

    pub(super) fn context(&self) -> *mut sys::Context {
        self.context.as_ptr()
    }

    pub fn status(&self, status: i32) -> String {
        self.verbs.status(status)
    }

    /// Maximum concurrent reads towards it, and its number of ports.
    pub fn limits(&self) -> Result<(u8, u8)> {
        // SAFETY: all zeroes is a valid value of this structure.
        let mut attr: sys::DeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and `attr` lives across the call and has the size that the library writes.
        unsafe { self.ask("ibv_query_device", |library| (library.query_device)(self.context(), &mut attr)) }?;
        let reads = attr.max_qp_rd_atom.min(attr.max_qp_init_rd_atom).clamp(1, 16);
        Ok((reads as u8, attr.ports()))
    }

    pub fn port(&self, number: u8) -> Result<Port> {
        let mut attr = sys::PortAttr::default();
        // SAFETY: the context is open, and `attr` lives across the call; the library writes no more than that.
        unsafe {
            self.ask("ibv_query_port", |library| (library.query_port)(self.context(), number, &mut attr))
        }?;
        Ok(Port {
            active: attr.state == sys::PORT_ACTIVE,
            mtu: attr.active_mtu,
            gids: u32::try_from(attr.gid_tbl_len).unwrap_or(0),
            lid: attr.lid,
            ethernet: attr.link_layer == sys::LINK_LAYER_ETHERNET,
        })
    }

    /// The port's addresses; its table has holes.
    pub fn gids(&self, port: u8, count: u32) -> Vec<Gid> {
        (0..count.min(256)).filter_map(|index| self.gid(port, index)).collect()
    }

    fn gid(&self, port: u8, index: u32) -> Option<Gid> {
        let mut entry = sys::GidEntry::default();
        let size = size_of::<sys::GidEntry>();
        // SAFETY: the context is open, and `entry` has the size that is passed.
        let result = unsafe {
            self.call(|library| {
                (library.query_gid_ex)(self.context(), port.into(), index, &mut entry, 0, size)
            })
        };
        if result != 0 || entry.gid == [0; 2] {
            return None;
        }
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&entry.gid[0].to_ne_bytes());
        bytes[8..].copy_from_slice(&entry.gid[1].to_ne_bytes());
        let kind = match entry.gid_type {
            sys::GID_TYPE_ROCE_V2 => GidKind::RoceV2,
            sys::GID_TYPE_ROCE_V1 => GidKind::RoceV1,
            _ => GidKind::InfiniBand,
        };
        Some(Gid { index: index as u8, bytes, kind })
    }
}

/// A protection domain: memory and queues that belong together.
pub(crate) struct Domain {
    pub device: Arc<VerbsDevice>,
    pd: NonNull<std::ffi::c_void>,
    /// Whether a queue pair by which the other side may reach exposed memory could not be destroyed.
    exposed_lost: AtomicBool,
}

// SAFETY: as for `VerbsDevice`.
unsafe impl Send for Domain {}
// SAFETY: as for `VerbsDevice`.
unsafe impl Sync for Domain {}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: registrations and queue pairs hold the domain and are gone; those that could not be destroyed hold it
        // permanently.
        unsafe { self.device.call(|library| (library.dealloc_pd)(self.pd())) };
    }
}

impl Domain {
    pub fn new(device: Arc<VerbsDevice>) -> Result<Self> {
        // SAFETY: the context is open.
        let pd = unsafe { device.make("ibv_alloc_pd", |library| (library.alloc_pd)(device.context())) }?;
        Ok(Self { device, pd, exposed_lost: AtomicBool::new(false) })
    }

    /// Leaks all exposed memory to the device: a queue pair that may have admitted the other side is not destroyed, and
    /// its keys may be used at any time.
    pub fn lose_exposed(&self) {
        self.exposed_lost.store(true, Ordering::Release);
    }

    pub fn has_lost_exposed(&self) -> bool {
        self.exposed_lost.load(Ordering::Acquire)
    }

    pub(super) fn pd(&self) -> *mut std::ffi::c_void {
        self.pd.as_ptr()
    }

    fn by_address(
        self: &Arc<Self>,
        memory: &MemoryRef,
        at: u64,
        bytes: usize,
        access: Access,
    ) -> Result<Registration> {
        // SAFETY: the range comes from the memory itself, which the registration keeps: from `HostMem`, a mapping, or from
        // `GpuRange`, which is a GPU's memory as long as the value that gave it.
        let mr = unsafe {
            self.device.make("ibv_reg_mr", |library| {
                (library.reg_mr)(self.pd(), at as *mut _, bytes, at, flags(access))
            })
        }?;
        Ok(self.made(memory, mr, access))
    }

    fn made(self: &Arc<Self>, memory: &MemoryRef, mr: NonNull<sys::Mr>, access: Access) -> Registration {
        // SAFETY: the library has just created it, and no longer changes these fields.
        let (lkey, rkey) = unsafe { (mr.as_ref().lkey, mr.as_ref().rkey) };
        let (lost, memory) = (AtomicBool::new(false), memory.clone());
        let exposed = access == Access::Exposed;
        Registration { domain: self.clone(), mr, lkey, rkey, exposed, lost, memory }
    }
}

impl Register for Arc<Domain> {
    type Region = Registration;

    fn host(&self, memory: &MemoryRef, access: Access) -> Result<Registration> {
        let mem = memory.host().ok_or(onehop_os::Error::NotReachable)?;
        self.by_address(memory, mem.host_ptr() as u64, mem.len(), access)
    }

    fn peer(&self, memory: &MemoryRef, access: Access) -> Result<Registration> {
        let range =
            memory.gpu_range().ok_or_else(|| Error::none("its address is not known to be a GPU's"))?;
        self.by_address(memory, range.addr().0, range.bytes(), access)
    }

    fn dma_buf(
        &self,
        memory: &MemoryRef,
        (fd, offset): (BorrowedFd<'_>, u64),
        name: u64,
        access: Access,
    ) -> Result<Registration> {
        let Some(register) = self.device.verbs.0.reg_dmabuf_mr else {
            return Err(Error::none("libibverbs has no ibv_reg_dmabuf_mr: it is older than rdma-core 34"));
        };
        let (bytes, rights) = (memory.bytes(), flags(access) as i32);
        // SAFETY: the descriptor is open across the call, and the kernel checks what it is, and the range in it.
        let mr = unsafe {
            self.device.make("ibv_reg_dmabuf_mr", |_| {
                register(self.pd(), offset, bytes, name, fd.as_raw_fd(), rights)
            })
        }?;
        Ok(self.made(memory, mr, access))
    }
}

fn flags(access: Access) -> u32 {
    // Providers that do not know relaxed ordering ignore it.
    match access {
        Access::Messages => sys::ACCESS_LOCAL_WRITE,
        Access::Own => sys::ACCESS_LOCAL_WRITE | sys::ACCESS_RELAXED_ORDERING,
        Access::Exposed => sys::ACCESS_LOCAL_WRITE | sys::ACCESS_RELAXED_ORDERING | REMOTE,
    }
}

/// Rights of the other side of a connection.
pub(super) const REMOTE: u32 = sys::ACCESS_REMOTE_READ | sys::ACCESS_REMOTE_WRITE;

/// Memory that a device may reach until this is dropped.
pub(crate) struct Registration {
    domain: Arc<Domain>,
    mr: NonNull<sys::Mr>,
    pub lkey: u32,
    pub rkey: u32,
    /// Whether the other side of any connection of the domain can access it.
    exposed: bool,
    /// Whether a queue pair that uses it could not be destroyed.
    lost: AtomicBool,
    memory: MemoryRef,
}

impl Registration {
    /// Leaks the memory to the device: a queue pair that uses it is not destroyed.
    pub fn lose(&self) {
        self.lost.store(true, Ordering::Release);
    }

    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire) || self.exposed && self.domain.has_lost_exposed()
    }
}

// SAFETY: as for `VerbsDevice`.
unsafe impl Send for Registration {}
// SAFETY: as for `VerbsDevice`.
unsafe impl Sync for Registration {}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: the library created it, and this is its only owner; the memory is dropped after it. Work that still
        // refers to it fails.
        let end = || unsafe {
            self.domain.device.ask("ibv_dereg_mr", |library| (library.dereg_mr)(self.mr.as_ptr()))
        };
        if self.is_lost() || end().is_err() {
            // The device may still reach it, and the domain is not empty.
            std::mem::forget((self.memory.clone(), self.domain.clone()));
        }
    }
}
