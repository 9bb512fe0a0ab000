//! The structures of the statistics, as C lays them out.

use std::mem::offset_of;

/// `CUfileOpCounter_t`
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct OpCounter {
    pub ok: u64,
    pub err: u64,
}

/// `CUfileStatsLevel1_t`, as of 1.17.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Level1 {
    pub read: OpCounter,
    pub write: OpCounter,
    pub handle_register: OpCounter,
    pub handle_deregister: OpCounter,
    pub buffer_register: OpCounter,
    pub buffer_deregister: OpCounter,
    pub read_bytes: u64,
    pub write_bytes: u64,
    pub read_rate: u64,
    pub write_rate: u64,
    pub read_latency_us: u64,
    pub write_latency_us: u64,
    pub reads_per_second: u64,
    pub writes_per_second: u64,
    pub read_latency_sum_us: u64,
    pub write_latency_sum_us: u64,
    pub batch_submit: OpCounter,
    pub batch_complete: OpCounter,
    pub batch_setup: OpCounter,
    pub batch_cancel: OpCounter,
    pub batch_destroy: OpCounter,
    pub batch_enqueued: OpCounter,
    pub batch_posix_enqueued: OpCounter,
    pub batch_processed: OpCounter,
    pub batch_posix_processed: OpCounter,
    /// Of nvidia-fs, P2P, AIO, io_uring and mixed submissions: always zero.
    pub batch_other: [OpCounter; 5],
    pub batch_total_submit: OpCounter,
    pub batch_read_bytes: u64,
    pub batch_write_bytes: u64,
    /// Rates, latencies and the last batch: not measured.
    pub batch_rest: [u64; 10],
}

/// `CUfileStatsLevel2_t`
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Level2 {
    pub basic: Level1,
    /// Reads by their size in KiB: each bucket is for twice the size of the one before.
    pub reads_by_size: [u64; 32],
    pub writes_by_size: [u64; 32],
}

/// `CUfilePerGpuStats_t`
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct PerGpu {
    pub uuid: [u8; 16],
    pub read_bytes: u64,
    pub read_rate: u64,
    pub read_utilization: u64,
    pub read_us: u64,
    pub reads: u64,
    pub p2p_reads: u64,
    pub nvfs_reads: u64,
    pub posix_reads: u64,
    /// Unaligned, dynamically routed, sparse, inline: not distinguished.
    pub other_reads: [u64; 4],
    pub read_errors: u64,
    pub write_bytes: u64,
    pub write_rate: u64,
    pub write_utilization: u64,
    pub write_us: u64,
    pub writes: u64,
    pub p2p_writes: u64,
    pub nvfs_writes: u64,
    pub posix_writes: u64,
    pub other_writes: [u64; 2],
    pub write_errors: u64,
    pub mappings: [u64; 4],
    pub registered_bytes: u64,
}

/// Maximum number of GPUs in the statistics.
pub const MOST_GPUS: usize = 16;

/// `CUfileStatsLevel3_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Level3 {
    pub detailed: Level2,
    pub gpus: u32,
    pub by_gpu: [PerGpu; MOST_GPUS],
}

const _: () = {
    assert!(size_of::<Level1>() == 512 && offset_of!(Level1, read_bytes) == 96);
    assert!(offset_of!(Level1, batch_submit) == 176 && offset_of!(Level1, batch_read_bytes) == 416);
    assert!(size_of::<Level2>() == 1024 && size_of::<PerGpu>() == 248);
    assert!(size_of::<Level3>() == 5000 && offset_of!(Level3, gpus) == 1024);
    assert!(offset_of!(Level3, by_gpu) == 1032);
};
