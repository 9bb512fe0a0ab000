//! Capabilities of a GPU and its driver, and their consequences for bytes that another device wrote into GPU memory.
//!
//! # When written bytes may be read
//!
//! A drive or a network card writes data into GPU memory, then a completion that says so. PCIe keeps posted writes of
//! one device in order up to the GPU's port (unless the device marks them as relaxed). Beyond the port the GPU decides,
//! and reports in `GPU_DIRECT_RDMA_WRITES_ORDERING` how far its order extends:
//!
//! - **Owner**: code on this GPU that sees the completion sees the data. A kernel that polls the completion by an
//!   acquiring load of system scope needs nothing more: the load keeps its own later reads from moving up, and the GPU
//!   guarantees the order of arrival. Other GPUs that read over NVLink or PCIe have no such guarantee.
//! - **All devices**: the same for every CUDA device.
//! - **None**: data may become visible after the completion. The host must call `cuFlushGPUDirectRDMAWrites` between
//!   the completion and the use; a kernel that is already running cannot make the data visible itself.
//!
//! A kernel that is *launched* after the host saw the completion, on the GPU that owns the memory, needs no flush under
//! any of these: the launch is ordered after everything that reached the GPU before it. This is the rule of NVIDIA's
//! GPUDirect RDMA guide, and the reason why a host-driven load followed by launches is always right.
//!
//! The flush takes a scope. A scope that the GPU's own order covers is a no-op, and is left out.

use super::context::Context;
use super::driver::{DevicePtr, DriverCalls};
use crate::{Error, Result};

mod number {
    pub(super) const WARP_SIZE: i32 = 10;
    pub(super) const MULTIPROCESSORS: i32 = 16;
    pub(super) const INTEGRATED: i32 = 18;
    pub(super) const CAN_MAP_HOST_MEMORY: i32 = 19;
    pub(super) const UNIFIED_ADDRESSING: i32 = 41;
    pub(super) const MAJOR: i32 = 75;
    pub(super) const MINOR: i32 = 76;
    pub(super) const HOST_NATIVE_ATOMIC: i32 = 86;
    pub(super) const PAGEABLE: i32 = 88;
    pub(super) const HOST_POINTER_FOR_REGISTERED: i32 = 91;
    pub(super) const SHARED_PER_BLOCK: i32 = 97;
    pub(super) const CAN_FLUSH_REMOTE_WRITES: i32 = 98;
    pub(super) const HOST_REGISTER: i32 = 99;
    pub(super) const PAGEABLE_BY_HOST_TABLES: i32 = 100;
    pub(super) const VMM: i32 = 102;
    pub(super) const POSIX_FD: i32 = 103;
    pub(super) const GPUDIRECT_VMM: i32 = 110;
    pub(super) const READ_ONLY_HOST_REGISTER: i32 = 113;
    pub(super) const GPUDIRECT: i32 = 116;
    pub(super) const FLUSH_OPTIONS: i32 = 117;
    pub(super) const WRITES_ORDERING: i32 = 118;
    pub(super) const DMA_BUF: i32 = 124;
    pub(super) const HOST_ALLOC_DMA_BUF: i32 = 146;
    pub(super) const DMA_BUF_MMAP: i32 = 152;
}

/// Capabilities of one GPU under its driver. An attribute that the driver does not know counts as no.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capabilities {
    /// The CUDA version of the driver: 1000 × major + 10 × minor.
    pub driver: i32,
    /// Compute capability, such as (9, 0).
    pub compute: (i32, i32),
    /// Threads of a warp.
    pub warp: i32,
    /// Multiprocessors.
    pub multiprocessors: i32,
    /// Maximum dynamic shared memory of a block.
    pub shared_per_block: i32,
    /// Whether it uses the host's memory only.
    pub integrated: bool,
    /// Kernels can reach host memory that is registered.
    pub can_map_host_memory: bool,
    /// One address space for host and GPU.
    pub unified_addressing: bool,
    /// Atomics on host memory are atomic for the CPU as well.
    pub host_native_atomics: bool,
    /// Kernels can reach any host memory.
    pub pageable_access: bool,
    /// They do so through the host's page tables.
    pub pageable_by_host_tables: bool,
    /// Registered host memory has the same address on the GPU.
    pub host_pointer_for_registered: bool,
    /// Host memory can be registered.
    pub host_register: bool,
    /// So can host memory that is mapped read-only.
    pub read_only_host_register: bool,
    /// Memory can be allocated separately from its addresses.
    pub vmm: bool,
    /// Such memory can be shared by a file descriptor.
    pub posix_fd: bool,
    /// Other devices may access its memory.
    pub gpudirect: bool,
    /// Also memory allocated separately from its addresses.
    pub gpudirect_vmm: bool,
    /// As a dma-buf.
    pub dma_buf: bool,
    /// Host memory of the driver can be a dma-buf too (CUDA 13).
    pub host_alloc_dma_buf: bool,
    /// A dma-buf of GPU memory can be mapped by the CPU (CUDA 13).
    pub dma_buf_mmap: bool,
    /// How other devices' writes become visible.
    pub visibility: Visibility,
}

impl Capabilities {
    /// Queries the driver.
    pub(super) fn read(calls: &DriverCalls, version: i32, device: i32) -> Self {
        let value = |attribute: i32| {
            let mut value = 0;
            // SAFETY: `value` lives across the call; a driver that does not know the attribute returns an error.
            unsafe { calls.device_attribute(&mut value, attribute, device) }.map_or(0, |()| value)
        };
        let yes = |attribute: i32| value(attribute) != 0;
        Self {
            driver: version,
            compute: (value(number::MAJOR), value(number::MINOR)),
            warp: value(number::WARP_SIZE),
            multiprocessors: value(number::MULTIPROCESSORS),
            shared_per_block: value(number::SHARED_PER_BLOCK),
            integrated: yes(number::INTEGRATED),
            can_map_host_memory: yes(number::CAN_MAP_HOST_MEMORY),
            unified_addressing: yes(number::UNIFIED_ADDRESSING),
            host_native_atomics: yes(number::HOST_NATIVE_ATOMIC),
            pageable_access: yes(number::PAGEABLE),
            pageable_by_host_tables: yes(number::PAGEABLE_BY_HOST_TABLES),
            host_pointer_for_registered: yes(number::HOST_POINTER_FOR_REGISTERED),
            host_register: yes(number::HOST_REGISTER),
            read_only_host_register: yes(number::READ_ONLY_HOST_REGISTER),
            vmm: yes(number::VMM),
            posix_fd: yes(number::POSIX_FD),
            gpudirect: yes(number::GPUDIRECT),
            gpudirect_vmm: yes(number::GPUDIRECT_VMM),
            dma_buf: yes(number::DMA_BUF),
            host_alloc_dma_buf: yes(number::HOST_ALLOC_DMA_BUF),
            dma_buf_mmap: yes(number::DMA_BUF_MMAP),
            visibility: Visibility {
                ordering: WritesOrdering::from_value(value(number::WRITES_ORDERING)),
                host_flush: value(number::FLUSH_OPTIONS) & 1 != 0,
                stream_flush: value(number::FLUSH_OPTIONS) & 2 != 0 || yes(number::CAN_FLUSH_REMOTE_WRITES),
            },
        }
    }
}

/// How far the GPU orders other devices' writes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum WritesOrdering {
    /// Nowhere.
    None,
    /// For code that runs on this GPU.
    Owner,
    /// For every CUDA device.
    AllDevices,
}

impl WritesOrdering {
    /// The meaning of the attribute's value; a value between two known ones guarantees what the lower one does.
    fn from_value(value: i32) -> Self {
        match value {
            ..100 => Self::None,
            100..200 => Self::Owner,
            200.. => Self::AllDevices,
        }
    }
}

/// How writes of other devices into GPU memory become visible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Visibility {
    /// How far they are ordered without a flush.
    pub ordering: WritesOrdering,
    /// Whether the host can wait until they are visible (`cuFlushGPUDirectRDMAWrites`).
    pub host_flush: bool,
    /// Whether an operation in a stream can.
    pub stream_flush: bool,
}

/// The user of bytes that another device wrote.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Consumer {
    /// A kernel of the GPU that owns the memory, launched after the host saw the completion.
    LaterLaunch,
    /// A kernel of that GPU which was already running, and saw the completion itself.
    RunningKernel,
    /// Another CUDA device.
    OtherDevice,
}

/// What must happen between the completion and the use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// Nothing.
    Nothing,
    /// The kernel must have read the completion by an acquiring load of system scope, or have put a system fence after
    /// it.
    AcquireOrFence,
    /// [`CudaGpu::flush_remote_writes`](super::CudaGpu::flush_remote_writes), for this GPU.
    FlushToOwner,
    /// The same, for all devices.
    FlushToAllDevices,
    /// Not possible: end the kernel and launch another, or have the device write elsewhere.
    Impossible,
}

impl Visibility {
    /// What a consumer needs. The module's documentation has the reasons.
    #[must_use]
    pub fn needed(&self, consumer: Consumer) -> Need {
        let by_flush = |need| if self.host_flush { need } else { Need::Impossible };
        match consumer {
            Consumer::LaterLaunch => Need::Nothing,
            Consumer::RunningKernel if self.ordering >= WritesOrdering::Owner => Need::AcquireOrFence,
            // The host can flush only after it saw the completion itself, and must then notify the kernel.
            Consumer::RunningKernel => by_flush(Need::FlushToOwner),
            Consumer::OtherDevice if self.ordering == WritesOrdering::AllDevices => Need::AcquireOrFence,
            Consumer::OtherDevice => by_flush(Need::FlushToAllDevices),
        }
    }

    /// Does the host's part of a need.
    pub(super) fn satisfy(&self, context: &Context, need: Need) -> Result<()> {
        /// CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
        const CURRENT_CONTEXT: i32 = 0;
        let scope = match need {
            Need::Nothing | Need::AcquireOrFence => return Ok(()),
            Need::FlushToOwner => 100,
            Need::FlushToAllDevices => 200,
            Need::Impossible => {
                return Err(Error::NotSupported {
                    what: "making another device's writes visible".into(),
                    why: "this GPU neither orders them nor flushes them; have the device write host memory"
                        .into(),
                });
            }
        };
        // SAFETY: the call takes no pointers; the context is current in it.
        context.call("flushing other devices' writes", |driver| unsafe {
            driver.flush_writes(CURRENT_CONTEXT, scope)
        })
    }
}

/// The identity of the allocation at an address: unlike the address, it is never reused in this process.
pub(super) fn buffer_id(context: &Context, at: DevicePtr) -> Result<u64> {
    const BUFFER_ID: i32 = 7;
    let mut id = 0u64;
    // SAFETY: the attribute is a 64-bit number, and `id` lives across the call.
    context.call("identifying GPU memory", |driver| unsafe {
        driver.pointer_get((&raw mut id).cast(), BUFFER_ID, at)
    })?;
    Ok(id)
}

/// The GPU whose memory is at an address; none for host memory that the GPUs reach.
pub(super) fn owner(context: &Context, at: DevicePtr) -> Result<Option<i32>> {
    const MEMORY_TYPE: i32 = 2;
    const DEVICE_ORDINAL: i32 = 9;
    /// CU_MEMORYTYPE_DEVICE
    const DEVICE: u32 = 2;
    let (mut kind, mut device) = (0u32, 0i32);
    // SAFETY: both attributes are 32-bit numbers, and live across the calls.
    context.call("asking whose the memory is", |driver| unsafe {
        driver.pointer_get((&raw mut kind).cast(), MEMORY_TYPE, at)?;
        driver.pointer_get((&raw mut device).cast(), DEVICE_ORDINAL, at)
    })?;
    Ok((kind == DEVICE).then_some(device))
}

/// The start and length of the allocation that contains an address.
pub(super) fn allocation(context: &Context, at: DevicePtr) -> Result<(DevicePtr, usize)> {
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: both results live across the call.
    context.call("finding the allocation of a GPU address", |driver| unsafe {
        driver.address_range(&mut base, &mut bytes, at)
    })?;
    Ok((base, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(ordering: i32, host_flush: bool) -> [Need; 3] {
        let ordering = WritesOrdering::from_value(ordering);
        let visibility = Visibility { ordering, host_flush, stream_flush: false };
        [Consumer::LaterLaunch, Consumer::RunningKernel, Consumer::OtherDevice].map(|c| visibility.needed(c))
    }

    #[test]
    fn the_order_decides_what_a_consumer_needs() {
        use Need::{AcquireOrFence, FlushToAllDevices, FlushToOwner, Impossible, Nothing};
        assert_eq!(need(0, true), [Nothing, FlushToOwner, FlushToAllDevices]);
        assert_eq!(need(0, false), [Nothing, Impossible, Impossible]);
        assert_eq!(need(100, true), [Nothing, AcquireOrFence, FlushToAllDevices]);
        assert_eq!(need(100, false), [Nothing, AcquireOrFence, Impossible]);
        assert_eq!(need(200, true), [Nothing, AcquireOrFence, AcquireOrFence]);
        assert_eq!(need(150, true), need(100, true));
    }
}
