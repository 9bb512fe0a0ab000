//! The kernels of arrays: a module of its own, because few programs need it.
//!
//! | entry | parameters | grid × block | dynamic shared memory |
//! |---|---|---|---|
//! | `onehop_array_hits` | `array: u64, job: GatherJob, misses: u64, threads: u32` | any that holds `threads` threads, a multiple of 32, as blocks are | [`HITS_SHARED_BYTES`](onehop_device::params::HITS_SHARED_BYTES) × warps of a block |
//! | `onehop_array_misses` | the same | the same | [`MISSES_SHARED_BYTES`](onehop_device::params::MISSES_SHARED_BYTES) × warps of a block |
//! | `onehop_array_read`, `onehop_array_write` | `array: u64, job: GatherJob, threads: u32` | any that holds `threads` threads | 0 |
//! | `onehop_array_flush` | `array: u64, report: u64, limit: u64, threads: u32` | as above | 0 |
//!
//! `array` is an `onehop_proto::array::ArrayHandle`, `misses` a `MissList`, `report` a zeroed `FlushReport`. The kernel
//! of the misses begins when that of the hits has ended.
#![no_std]
#![feature(abi_ptx, asm_experimental_arch, stdarch_nvptx)]

use core::arch::{asm, nvptx};

use onehop_device::gpu::{GpuThread, Lane, seat};
use onehop_device::params::LANES;
use onehop_proto::GpuAddr;
use onehop_proto::array::{
    DriveArray, FlushReport, GatherJob, HIT_WORDS, MISS_WORDS, MissList, flush_slots, read_rows, run_hits, run_misses,
    write_rows,
};
use onehop_proto::kernel::share;
use onehop_proto::queue::Memory;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel.
    unsafe { asm!("trap;", options(noreturn)) }
}

fn index() -> u32 {
    let seat = seat();
    seat.block.0 * seat.thread.1 + seat.thread.0
}

fn open(thread: &GpuThread, array: u64) -> Option<DriveArray<GpuThread>> {
    DriveArray::open(thread, GpuAddr(array)).ok()
}

/// A warp, its number, and its local memory of this many words; none if it is one too many.
///
/// # Safety
/// As for [`Lane::new`].
unsafe fn warp(threads: u32, words: u32) -> Option<(Lane, u32)> {
    let index = index() / LANES;
    // SAFETY: reads a register.
    let in_block = unsafe { nvptx::_thread_idx_x() } as u32 / LANES;
    if index >= threads / LANES {
        return None;
    }
    // SAFETY: the caller's promise. It rings no doorbell of its own: the queue's functions do.
    Some((unsafe { Lane::new(in_block, words, [0; 2]) }, index))
}

/// Warp `i` copies what is in the cache of its equal part of the items, and lists the rest.
///
/// # Safety
/// The array and all that the job names are there, and room for the list; so are all threads of the grid, and the shared
/// memory that the table above names.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_array_hits(array: u64, job: GatherJob, misses: u64, threads: u32) {
    // SAFETY: the caller's promise.
    let (thread, warp) = unsafe { (GpuThread::new(), warp(threads, HIT_WORDS)) };
    if let Some((warp, index)) = warp
        && let Some(array) = open(&thread, array)
    {
        let share = share(job.count, index, threads / LANES);
        run_hits(&warp, &thread, &array, &job, MissList(GpuAddr(misses)), share);
    }
}

/// Warps read what is listed, and copy it.
///
/// # Safety
/// As for [`onehop_array_hits`], which has made the list.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_array_misses(array: u64, job: GatherJob, misses: u64, threads: u32) {
    // SAFETY: the caller's promise.
    let (thread, warp) = unsafe { (GpuThread::new(), warp(threads, MISS_WORDS)) };
    if let Some((warp, _)) = warp
        && let Some(array) = open(&thread, array)
    {
        run_misses(&warp, &thread, &array, &job, MissList(GpuAddr(misses)));
    }
}

/// Thread `i` reads the items `i`, `i + threads` …
///
/// # Safety
/// As for [`onehop_array_hits`].
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_array_read(array: u64, job: GatherJob, threads: u32) {
    let index = index();
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    if index < threads
        && let Some(array) = open(&thread, array)
    {
        read_rows(&thread, &array, &job, (index, threads));
    }
}

/// Thread `i` writes the items `i`, `i + threads` …
///
/// # Safety
/// As for [`onehop_array_hits`].
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_array_write(array: u64, job: GatherJob, threads: u32) {
    let index = index();
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    if index < threads
        && let Some(array) = open(&thread, array)
    {
        write_rows(&thread, &array, &job, (index, threads));
    }
}

/// Thread `i` writes back dirty pages in the slots `i`, `i + threads` …
///
/// # Safety
/// The array and the report are there.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_array_flush(array: u64, report: u64, limit: u64, threads: u32) {
    let index = index();
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    if index < threads
        && let Some(array) = open(&thread, array)
    {
        let deadline = thread.now().saturating_add(limit);
        let flushed = flush_slots(&thread, &array, (index, threads), deadline);
        FlushReport(GpuAddr(report)).add(&thread, &flushed);
    }
}
