//! GPU memory: plain allocations, and exportable ones, which are made separately from their addresses.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use onehop_os::{DmaBuf, GpuRange, HostMem, Marks};
use onehop_proto::GpuAddr;

use super::capabilities::{Capabilities, allocation, owner};
use super::context::{Context, WorkProgress};
use super::dmabuf;
use super::driver::{DevicePtr, DriverCalls, Failure};
use super::reclaim::Freed;
use super::stream::{LONGEST, Stream};
use crate::region::DeviceBytes;
use crate::{Error, Result};

/// Plain allocations start and end on a GPU page, so that they do on host pages too.
const UNIT: usize = 64 << 10;
/// The driver cuts shorter allocations from larger ones, next to other allocations of this process.
const WHOLE: usize = 2 << 20;
/// Bytes of a barrier: the driver cuts small allocations from a larger one.
const BARRIER: usize = 256;
/// How long to wait for dropped memory if there is no room for more.
const ROOM: Duration = Duration::from_secs(5);
/// CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
const SYNC_MEMOPS: i32 = 6;
/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
const POSIX_FD: i32 = 1;

/// How GPU memory is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceKind {
    /// By `cuMemAlloc`: small, fast, shared with other processes by an IPC handle.
    Plain,
    /// By `cuMemCreate`, in steps of 2 MiB: capable of GPUDirect, shared by a file descriptor. For whole dma-bufs.
    Exportable,
}

#[derive(Clone, Copy)]
enum Origin {
    /// The allocation starts here.
    Plain { base: DevicePtr },
    /// The handle of the physical memory mapped at the address, and an allocation whose freeing waits until it is
    /// unused.
    Mapped { handle: u64, barrier: DevicePtr },
    /// Opened from another process's IPC handle.
    Opened,
    /// Allocated by other code in this process, which frees it.
    Borrowed,
}

/// Keeps borrowed memory allocated.
type MemoryOwner = Box<dyn Send + Sync>;

/// One allocation.
pub(super) struct DeviceMemory {
    // It may be the context's last reference, and the thread that drops it must not call the driver.
    context: ManuallyDrop<Arc<Context>>,
    stream: ManuallyDrop<Arc<Stream>>,
    pub(super) at: DevicePtr,
    /// Its size: at least the requested one.
    pub(super) bytes: usize,
    origin: Origin,
    owner: Option<MemoryOwner>,
}

impl DeviceMemory {
    fn on(
        context: &Arc<Context>,
        stream: &Arc<Stream>,
        (at, bytes): (DevicePtr, usize),
        origin: Origin,
    ) -> Self {
        let (context, stream) = (ManuallyDrop::new(context.clone()), ManuallyDrop::new(stream.clone()));
        Self { context, stream, at, bytes, origin, owner: None }
    }

    /// New memory with undefined content.
    pub(super) fn new(
        context: &Arc<Context>,
        stream: &Arc<Stream>,
        can: &Capabilities,
        kind: DeviceKind,
        bytes: usize,
    ) -> Result<Self> {
        match kind {
            DeviceKind::Plain => Self::plain(context, stream, bytes),
            DeviceKind::Exportable => Self::exportable(context, stream, can, bytes),
        }
    }

    /// Zeroes the parts of these ranges that lie in it.
    pub(super) fn zero(&self, ranges: &[Range<usize>]) -> Result<()> {
        let within = ranges.iter().map(|range| range.start.min(self.bytes)..range.end.min(self.bytes));
        // SAFETY: the ranges lie within the allocation.
        let zero =
            |range: Range<usize>| unsafe { self.stream.fill(self.at + range.start as u64, range.len(), 0) };
        within.filter(|range| !range.is_empty()).try_for_each(zero)
    }

    fn plain(context: &Arc<Context>, stream: &Arc<Stream>, bytes: usize) -> Result<Self> {
        let bytes = round_up(bytes, UNIT)?;
        let what = format!("allocating {bytes} bytes of GPU memory");
        let mut base = 0;
        let all = if bytes < WHOLE { bytes + UNIT } else { bytes };
        // SAFETY: `base` lives across the call, and the context is current in it.
        with_room(context, &what, |driver| unsafe { driver.alloc(&mut base, all) })?;
        let at = base.next_multiple_of(UNIT as u64);
        let memory = Self::on(context, stream, (at, bytes), Origin::Plain { base });
        if at + bytes as u64 > base + all as u64 {
            return Err(Error::NotSupported {
                what,
                why: format!("the driver placed them at {base:#x}, which is not on a page of 64 KiB"),
            });
        }
        // Another device may write this memory: copies must not return before they are complete.
        let on: u32 = 1;
        // SAFETY: the attribute is a 32-bit number, and `at` was allocated above.
        context.call("asking for synchronous copies", |driver| unsafe {
            driver.pointer_set((&raw const on).cast(), SYNC_MEMOPS, at)
        })?;
        Ok(memory)
    }

    fn exportable(
        context: &Arc<Context>,
        stream: &Arc<Stream>,
        can: &Capabilities,
        bytes: usize,
    ) -> Result<Self> {
        let what = format!("allocating {bytes} exportable bytes of GPU memory");
        if !can.vmm {
            return Err(Error::NotSupported {
                what,
                why: "this GPU has no virtual memory management; use plain memory".into(),
            });
        }
        let properties = properties(context.device, can);
        let mut unit = 0;
        // SAFETY: both pointers live across the call; 0 asks for the smallest granularity.
        context.call(&what, |driver| unsafe { driver.granularity(&mut unit, &properties, 0) })?;
        let bytes = round_up(bytes, unit.max(UNIT))?;
        let mut handle = 0;
        // SAFETY: both pointers live across the call.
        with_room(context, &what, |driver| unsafe { driver.create(&mut handle, bytes, &properties, 0) })?;
        Self::map_handle(context, stream, handle, bytes, unit)
    }

    /// Memory that another process exported as a file descriptor.
    pub(super) fn import(
        context: &Arc<Context>,
        stream: &Arc<Stream>,
        fd: &OwnedFd,
        bytes: usize,
    ) -> Result<Self> {
        let mut handle = 0;
        let number = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: `handle` lives across the call; for this kind of handle the pointer is the descriptor's number.
        context.call("importing shared GPU memory", |driver| unsafe {
            driver.import_handle(&mut handle, number, POSIX_FD)
        })?;
        Self::map_handle(context, stream, handle, bytes, 0)
    }

    /// Memory that other code in this process has allocated: `bytes` from `at` on, in one allocation. The owner is
    /// dropped when nothing uses the memory any more, including the GPU.
    pub(super) fn borrowed(
        context: &Arc<Context>,
        stream: &Arc<Stream>,
        (at, bytes): (DevicePtr, usize),
        kept: MemoryOwner,
    ) -> Result<Self> {
        if owner(context, at)? != Some(context.device) {
            return Err(Error::NotSupported {
                what: format!("using the memory at {at:#x} as memory of GPU {}", context.device),
                why: "the memory is host memory, or of another GPU".into(),
            });
        }
        let (base, whole) = allocation(context, at)?;
        let offset = at.saturating_sub(base) as usize;
        if bytes == 0 || offset > whole || bytes > whole - offset {
            return Err(onehop_os::Error::OutOfRange { offset, bytes, len: whole }.into());
        }
        let mut memory = Self::on(context, stream, (at, bytes), Origin::Borrowed);
        memory.owner = Some(kept);
        Ok(memory)
    }

    /// Whether `cuMemAlloc` allocated it here: only such memory is open to peers.
    pub(super) fn is_plain(&self) -> bool {
        matches!(self.origin, Origin::Plain { .. })
    }

    /// All memory that copies of this context reach, by address.
    pub(super) fn everything(context: &Arc<Context>, stream: &Arc<Stream>) -> Self {
        Self::on(context, stream, (0, usize::MAX), Origin::Borrowed)
    }

    /// Memory that another process exported as an IPC handle, from the allocation's start on.
    pub(super) fn open(
        context: &Arc<Context>,
        stream: &Arc<Stream>,
        handle: [u8; 64],
    ) -> std::result::Result<Self, Failure> {
        const LAZY_PEER_ACCESS: u32 = 1;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        let (mut at, mut base, mut bytes) = (0, 0, 0);
        context.attempt(|driver| {
            // SAFETY: `at` lives across the call, and the handle is 64 bytes. NVIDIA does not document forged handles;
            // tests/cuda/sharing.rs shows that they are refused. Which programs may use handles is the caller's
            // decision, since a guessed one opens another program's memory.
            unsafe { driver.ipc_open(&mut at, handle, LAZY_PEER_ACCESS) }
        })?;
        let mut memory = Self::on(context, stream, (at, 0), Origin::Opened);
        // SAFETY: both results live across the call.
        context.attempt(|driver| unsafe { driver.address_range(&mut base, &mut bytes, at) })?;
        memory.bytes = bytes;
        Ok(memory)
    }

    fn map_handle(
        context: &Arc<Context>,
        stream: &Arc<Stream>,
        handle: u64,
        bytes: usize,
        unit: usize,
    ) -> Result<Self> {
        let what = format!("mapping {bytes} bytes of GPU memory");
        let mut barrier = 0;
        // SAFETY: `barrier` lives across the call.
        let allocated = context.attempt(|driver| unsafe { driver.alloc(&mut barrier, BARRIER) });
        if let Err(failure) = allocated {
            // SAFETY: the caller handed the handle over, and nothing maps it.
            let _ = context.attempt(|driver| unsafe { driver.release(handle) });
            return Err(context.driver.error(what, failure));
        }
        let at = context.attempt(|driver| map(driver, context.device, handle, bytes, unit)).map_err(
            |failure| {
                // Freeing it waits for every kernel of the GPU, other libraries' too.
                let owned = context.clone();
                context.driver.reclaimer.enqueue(move || {
                    // SAFETY: it was allocated above, and nothing uses it.
                    let answer = owned.attempt(|driver| unsafe { driver.free(barrier) });
                    owned.freed(answer, "freeing GPU memory")
                });
                context.driver.error(what, failure)
            },
        )?;
        Ok(Self::on(context, stream, (at, bytes), Origin::Mapped { handle, barrier }))
    }
}

/// Allocates; if there is no room, tries once more when dropped memory has been freed.
fn with_room(
    context: &Context,
    what: &str,
    mut allocate: impl FnMut(&DriverCalls) -> std::result::Result<(), Failure>,
) -> Result<()> {
    /// CUDA_ERROR_OUT_OF_MEMORY.
    const NO_ROOM: i32 = 2;
    match context.attempt(&mut allocate) {
        Err(failure) if failure.code() == Some(NO_ROOM) => {
            context.driver.reclaimer.settle(ROOM);
            context.call(what, allocate)
        }
        other => other.map_err(|failure| context.driver.error(what, failure)),
    }
}

/// Maps physical memory at an address; releases the handle on failure.
fn map(
    driver: &DriverCalls,
    device: i32,
    handle: u64,
    bytes: usize,
    unit: usize,
) -> std::result::Result<DevicePtr, Failure> {
    let mut at = 0;
    // SAFETY: `at` lives across the call; the driver chooses the address.
    let reserved = unsafe { driver.reserve(&mut at, bytes, unit, 0, 0) };
    let mapped = reserved.and_then(|()| {
        // SAFETY: the range was reserved above; the driver refuses a length that the handle's memory does not have.
        let mapped = unsafe { driver.map(at, bytes, 0, handle, 0) }.and_then(|()| {
            let access = sys::CUmemAccessDesc {
                location: location(device),
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            };
            // SAFETY: `access` lives across the call, and the range is mapped.
            unsafe { driver.set_access(at, bytes, &access, 1) }.inspect_err(|_| {
                // SAFETY: the range was mapped above, and nobody has its address.
                let _ = unsafe { driver.unmap(at, bytes) };
            })
        });
        mapped.inspect_err(|_| {
            // SAFETY: the range was reserved above, and nothing is mapped there any more.
            let _ = unsafe { driver.unreserve(at, bytes) };
        })
    });
    match mapped {
        Ok(()) => Ok(at),
        Err(failure) => {
            // SAFETY: the caller handed the handle over, and nothing maps it.
            let _ = unsafe { driver.release(handle) };
            Err(failure)
        }
    }
}

fn location(device: i32) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

fn properties(device: i32, can: &Capabilities) -> sys::CUmemAllocationProp {
    let kind = if can.posix_fd {
        sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    } else {
        sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
    };
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: kind,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: u8::from(can.gpudirect_vmm),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn round_up(bytes: usize, unit: usize) -> Result<usize> {
    let refused = || onehop_os::Error::OutOfRange { offset: 0, bytes, len: 0 };
    Ok(bytes.max(1).checked_next_multiple_of(unit).ok_or_else(refused)?)
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: neither is used after this, in which self goes.
        let (context, stream) =
            unsafe { (ManuallyDrop::take(&mut self.context), ManuallyDrop::take(&mut self.stream)) };
        let (at, bytes, mut origin, owner) = (self.at, self.bytes, self.origin, self.owner.take());
        let reclaimer = context.driver.reclaimer.clone();
        // There is nothing to free here, and the owner may be dropped at once: its kernels and copies have ended.
        if matches!(origin, Origin::Borrowed) && !reclaimer.has_unfinished_work() {
            return;
        }
        reclaimer.enqueue(move || {
            let _ = (&stream, &owner);
            free(&context, at, bytes, &mut origin)
        });
    }
}

/// Frees an allocation whose regions were all dropped.
fn free(context: &Context, at: DevicePtr, bytes: usize, origin: &mut Origin) -> Freed {
    const WHAT: &str = "freeing GPU memory";
    let mut rest = Ok(());
    let answer = context.attempt(|driver| match origin {
        // SAFETY: it came from cuMemAlloc, and nobody holds a region of it any more.
        Origin::Plain { base } => unsafe { driver.free(*base) },
        // SAFETY: it came from cuIpcOpenMemHandle, and nobody holds a region of it any more.
        Origin::Opened => unsafe { driver.ipc_close(at) },
        Origin::Borrowed => Ok(()),
        Origin::Mapped { handle, barrier } => {
            // A tensor's consumers may have left kernels running that still use it. cuMemFree waits for all work of the
            // GPU; cuMemUnmap does not, and cuCtxSynchronize would invalidate captures.
            if *barrier != 0 {
                // SAFETY: it came from cuMemAlloc, and nobody uses it.
                unsafe { driver.free(*barrier) }?;
                *barrier = 0;
            }
            rest = unmap(driver, at, bytes, *handle)?;
            Ok(())
        }
    });
    match (context.freed(answer.and(rest), WHAT), rest) {
        // Another try would begin with unmapping what another allocation may have mapped there by then.
        (Freed::NotNow, Err(failure)) => Freed::Refused(context.driver.error(WHAT, failure).to_string()),
        (freed, _) => freed,
    }
}

/// Waits for all GPU work that this process has started, in every stream.
pub(super) fn wait_for_all(context: &Arc<Context>) -> Result<()> {
    const WHAT: &str = "waiting for the GPU";
    let mut barrier = 0;
    // SAFETY: `barrier` lives across the call.
    context.call(WHAT, |driver| unsafe { driver.alloc(&mut barrier, BARRIER) })?;
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    let owned = context.clone();
    context.driver.reclaimer.enqueue(move || {
        // SAFETY: it came from cuMemAlloc, and nobody uses it. The call waits for the work in all streams. This is not
        // documented; tests/cuda/capture.rs shows it with driver 580.159 on an H200.
        let answer = owned.attempt(|driver| unsafe { driver.free(barrier) });
        let freed = owned.freed(answer, WHAT);
        if !matches!(freed, Freed::NotNow) {
            let _ = sender.try_send(answer);
        }
        freed
    });
    match receiver.recv_timeout(LONGEST) {
        Ok(answer) => answer.map_err(|failure| context.driver.error(WHAT, failure)),
        Err(_) => Err(Error::Silent { what: WHAT.into(), seconds: LONGEST.as_secs() }),
    }
}

/// Unmaps memory. If that succeeds, the result is that of the rest, and the caller does not call it again.
fn unmap(
    driver: &DriverCalls,
    at: DevicePtr,
    bytes: usize,
    handle: u64,
) -> std::result::Result<std::result::Result<(), Failure>, Failure> {
    // SAFETY: the range is mapped, nobody holds a region of it any more, and all work that used it has ended.
    unsafe { driver.unmap(at, bytes) }?;
    // SAFETY: the range was reserved with this length, and nothing is mapped there any more.
    let unreserved = unsafe { driver.unreserve(at, bytes) };
    // SAFETY: the handle is ours, and its mapping is gone.
    let released = unsafe { driver.release(handle) };
    Ok(unreserved.and(released))
}

impl DeviceBytes for DeviceMemory {
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        // SAFETY: `DeviceBytes` is called with ranges that were checked to lie within the allocation. It is freed, or
        // its owner dropped, only when all work is known to have ended.
        unsafe { self.stream.copy_out(self.at + offset as u64, out) }
    }

    fn read_to(&self, offset: usize, to: &HostMem, at: usize, bytes: usize) -> Result<()> {
        let to = to.slice(at..at + bytes)?;
        to.check_writable_range(0, to.len())?;
        // SAFETY: as for `read`; the host memory has just been checked.
        unsafe { self.stream.copy_out_to(self.at + offset as u64, &to) }
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        // SAFETY: as for `read`.
        unsafe { self.stream.copy_in(self.at + offset as u64, data) }
    }

    fn fill(&self, offset: usize, bytes: usize, value: u8) -> Result<()> {
        // SAFETY: as for `read`.
        unsafe { self.stream.fill(self.at + offset as u64, bytes, value) }
    }

    fn mark(&self, marks: &Marks, limit: Duration) -> Result<()> {
        // SAFETY: as for `read`. A kernel that comes late writes nothing.
        unsafe { self.stream.marker()?.mark(self.at, marks, limit) }
    }

    fn marks_left(&self, marks: &Marks, limit: Duration) -> Result<u64> {
        // SAFETY: as for `mark`.
        unsafe { self.stream.marker()?.left(self.at, marks, limit) }
    }

    fn is_settled(&self) -> Result<bool> {
        match self.stream.progress() {
            // Work lost with the context has ended.
            WorkProgress::Over | WorkProgress::Lost(_) => Ok(true),
            WorkProgress::Pending => Ok(false),
            WorkProgress::Unknown(failure) => {
                Err(self.context.driver.error("asking for the end of copies", failure).of_begun_work())
            }
        }
    }

    fn gpu_range(&self, offset: usize, bytes: usize) -> Option<GpuRange<'_>> {
        // SAFETY: the memory is the GPU's as long as self, and the range lies in it.
        Some(unsafe { GpuRange::new(GpuAddr(self.at + offset as u64), bytes) })
    }

    fn dma_buf(&self, offset: usize, bytes: usize) -> Result<DmaBuf> {
        dmabuf::export(&self.context, self.at + offset as u64, bytes, dmabuf::Span::Allocation)
            .map(Into::into)
    }

    fn share(&self) -> Result<Option<OwnedFd>> {
        let Origin::Mapped { handle, .. } = self.origin else { return Ok(None) };
        let mut fd = -1;
        // SAFETY: `fd` lives across the call, and the handle as long as self.
        self.context.call("sharing GPU memory", |driver| unsafe {
            driver.export_handle(&mut fd, handle, POSIX_FD, 0)
        })?;
        // SAFETY: the driver has just made this descriptor for us, and nobody else knows it.
        Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
    }
}
