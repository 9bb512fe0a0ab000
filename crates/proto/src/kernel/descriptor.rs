//! The parameters of a launch, as the host writes and the kernel reads them: plain data without padding.

use core::mem::{offset_of, size_of};
use core::time::Duration;

use super::{Job, OwnerQueue};
use crate::GpuAddr;
use crate::queue::{Memory, Rings};

/// A queue pair: where its rings lie, and the memory in which kernels keep their own state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct KernelQueue {
    /// The submission queue, on a multiple of 64.
    pub sq: GpuAddr,
    /// The completion queue, on a multiple of 16.
    pub cq: GpuAddr,
    /// The submission queue's doorbell.
    pub sq_door: GpuAddr,
    /// The completion queue's doorbell.
    pub cq_door: GpuAddr,
    /// Owner mode: scratch memory. Shared mode: the control block. On a multiple of 16, prepared before the first launch.
    pub control: GpuAddr,
    /// Entries of the submission queue.
    pub sq_entries: u32,
    /// Entries of the completion queue.
    pub cq_entries: u32,
    /// How many commands may be in flight.
    pub window: u32,
    /// Zero.
    pub zero: u32,
}

const _: () = assert!(
    size_of::<KernelQueue>() == 56
        && offset_of!(KernelQueue, control) == 32
        && offset_of!(KernelQueue, window) == 48
        && offset_of!(KernelQueue, zero) == 52
);

impl KernelQueue {
    /// The rings, with their doorbells as `M` names them.
    #[inline(always)]
    #[must_use]
    pub fn rings<M: Memory<Addr = GpuAddr>>(&self, sq_door: M::Door, cq_door: M::Door) -> Rings<M> {
        Rings {
            sq: self.sq,
            cq: self.cq,
            sq_door,
            cq_door,
            sq_entries: self.sq_entries,
            cq_entries: self.cq_entries,
        }
    }

    /// The queue as a warp in owner mode takes it.
    #[inline(always)]
    #[must_use]
    pub fn owned<M: Memory<Addr = GpuAddr>>(&self, sq_door: M::Door, cq_door: M::Door) -> OwnerQueue<M> {
        OwnerQueue { rings: self.rings(sq_door, cq_door), scratch: self.control, window: self.window }
    }
}

/// A list of work, and its bounds. A kernel gets it by value, as a parameter: there it costs no registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct KernelJob {
    /// The work items, on a multiple of 16. They do not change during the launch.
    pub works: GpuAddr,
    /// The outcomes, on a multiple of 8.
    pub outcomes: GpuAddr,
    /// The word that ends the launch.
    pub poison: GpuAddr,
    /// How many items there are.
    pub count: u32,
    /// The namespace.
    pub nsid: u32,
    /// How often a command is retried.
    pub retries: u32,
    /// Zero.
    pub zero: u32,
    /// Nanoseconds to wait before a retry, by CRD.
    pub retry_delay: [u64; 4],
    /// Nanoseconds without any completion after which the controller counts as stalled.
    pub stall: u64,
    /// Nanoseconds that the launch may take, by the GPU's clock from the kernel's start.
    pub limit: u64,
}

const _: () = assert!(
    size_of::<KernelJob>() == 88
        && offset_of!(KernelJob, count) == 24
        && offset_of!(KernelJob, zero) == 36
        && offset_of!(KernelJob, retry_delay) == 40
        && offset_of!(KernelJob, stall) == 72
        && offset_of!(KernelJob, limit) == 80
);

impl KernelJob {
    /// The job of a launch that ends by `deadline`.
    #[inline(always)]
    #[must_use]
    pub fn until<M: Memory<Addr = GpuAddr>>(&self, deadline: u64) -> Job<M> {
        Job {
            works: self.works,
            outcomes: self.outcomes,
            count: self.count,
            nsid: self.nsid,
            retries: self.retries,
            retry_delay: self.retry_delay,
            stall: self.stall,
            deadline,
            poison: self.poison,
        }
    }

    /// A time as a job counts it.
    #[must_use]
    pub fn nanos(time: Duration) -> u64 {
        u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
    }
}
