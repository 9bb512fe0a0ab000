//! What a launch hands to a kernel: plain data, laid out alike on both sides.

use core::mem::{offset_of, size_of};

/// Threads of a warp, and of a block in owner mode.
pub const LANES: u32 = 32;

/// A queue pair, in an array in memory that the GPU reaches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Queue {
    /// The submission queue, on a multiple of 64.
    pub sq: u64,
    /// The completion queue, on a multiple of 16.
    pub cq: u64,
    /// The submission queue's doorbell.
    pub sq_door: u64,
    /// The completion queue's doorbell.
    pub cq_door: u64,
    /// Control memory, on a multiple of 16, zeroed when it was allocated.
    pub control: u64,
    /// Entries of the submission queue.
    pub sq_entries: u32,
    /// Entries of the completion queue.
    pub cq_entries: u32,
    /// How many commands may be in flight.
    pub window: u32,
    /// Zero.
    pub pad: u32,
}

const _: () =
    assert!(size_of::<Queue>() == 56 && offset_of!(Queue, control) == 32 && offset_of!(Queue, window) == 48);

/// A list of work, and its bounds; handed over by value, as a kernel parameter: there it costs no registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Job {
    /// The work items, on a multiple of 16. Nobody writes them during the launch.
    pub works: u64,
    /// The outcomes, on a multiple of 8.
    pub outcomes: u64,
    /// The word that ends the launch.
    pub poison: u64,
    /// How many items there are.
    pub count: u32,
    /// The namespace.
    pub nsid: u32,
    /// How often a command is tried again.
    pub retries: u32,
    /// Zero.
    pub pad: u32,
    /// Nanoseconds to wait before a retry, by CRD.
    pub retry_delay: [u64; 4],
    /// Nanoseconds without any completion after which the controller is taken to have stalled.
    pub stall: u64,
    /// Nanoseconds that the launch may take.
    pub limit: u64,
}

const _: () =
    assert!(size_of::<Job>() == 88 && offset_of!(Job, count) == 24 && offset_of!(Job, retry_delay) == 40);
const _: () = assert!(offset_of!(Job, stall) == 72 && offset_of!(Job, limit) == 80);

/// Words of shared memory for the addresses of a warp's two doorbells.
pub(crate) const DOOR_WORDS: u32 = 4;

/// Bytes of dynamic shared memory for each block in owner mode: the warp's tables, and the addresses of two doorbells.
pub const OWNER_SHARED_BYTES: u32 = (onehop_proto::kernel::LOCAL_WORDS + DOOR_WORDS) * 4;

/// The same for queues that have one command in flight.
pub const SINGLE_SHARED_BYTES: u32 = (onehop_proto::kernel::SINGLE_WORDS + DOOR_WORDS) * 4;

/// Bytes of dynamic shared memory in shared mode, for each warp of a block.
pub const GROUP_SHARED_BYTES: u32 = (onehop_proto::kernel::GROUP_WORDS + DOOR_WORDS) * 4;
