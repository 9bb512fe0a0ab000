//! The kernels' entries. Their names and parameters are what hosts rely on.

use core::arch::{asm, nvptx};

use onehop_proto::GpuAddr;
use onehop_proto::kernel::{self, OwnerQueue, run_owner, run_shared, scratch_init, share};
use onehop_proto::queue::{Address, Memory, Rings, Shared};

use crate::gpu::{Door, Gpu, Lane};
use crate::params::{Job, Queue};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel.
    unsafe { asm!("trap;", options(noreturn)) }
}

#[inline(always)]
fn rings<M: Memory<Addr = GpuAddr>>(queue: &Queue, sq_door: M::Door, cq_door: M::Door) -> Rings<M> {
    Rings {
        sq: GpuAddr(queue.sq),
        cq: GpuAddr(queue.cq),
        sq_door,
        cq_door,
        sq_entries: queue.sq_entries,
        cq_entries: queue.cq_entries,
    }
}

#[inline(always)]
fn owner(queue: &Queue) -> OwnerQueue<Lane> {
    OwnerQueue {
        rings: rings(queue, Door::Sq, Door::Cq),
        scratch: GpuAddr(queue.control),
        window: queue.window,
    }
}

#[inline(always)]
fn job<M: Memory<Addr = GpuAddr>>(mem: &M, job: &Job) -> kernel::Job<M> {
    kernel::Job {
        works: GpuAddr(job.works),
        outcomes: GpuAddr(job.outcomes),
        count: job.count,
        nsid: job.nsid,
        retries: job.retries,
        retry_delay: job.retry_delay,
        stall: job.stall,
        deadline: mem.now().saturating_add(job.limit),
        poison: GpuAddr(job.poison),
    }
}

/// The index of the calling thread in its grid.
fn thread() -> u32 {
    // SAFETY: these read registers.
    unsafe { nvptx::_block_idx_x() as u32 * nvptx::_block_dim_x() as u32 + nvptx::_thread_idx_x() as u32 }
}

/// Owner mode: block `i` carries out its share of the job on queue `i` and leaves its exit in `exits[i]`.
///
/// # Safety
/// As many blocks of 32 threads as there are queues, with dynamic shared memory for the largest window; all that queues
/// and job describe is there.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_owner(
    queues: *const Queue,
    exits: *mut [u32; 2],
    work: Job,
    warps: u32,
) {
    // SAFETY: reads a register.
    let index = unsafe { nvptx::_block_idx_x() } as u32;
    if index >= warps {
        return;
    }
    // SAFETY: the caller's promise; there are `warps` queues. Volatile, or it would be read once and kept.
    let queue = || unsafe { queues.add(index as usize).read_volatile() };
    let warp = Lane::new(queue().sq_door, queue().cq_door);
    let (first, end) = share(work.count, index, warps);
    let exit = run_owner(&warp, || owner(&queue()), &job(&warp, &work), first, end);
    warp.store_pair(GpuAddr(exits as u64).element(index, 8), exit);
}

/// Prepares the control memory of queues in owner mode that were just created: a thread for each.
///
/// # Safety
/// All that the queues describe is there.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_owner_prepare(queues: *const Queue, count: u32) {
    let index = thread();
    if index < count {
        // SAFETY: the caller's promise; there are `count` queues.
        let queue = unsafe { queues.add(index as usize).read() };
        scratch_init(&Gpu, GpuAddr(queue.control));
    }
}

fn shared(queue: &Queue) -> Option<Shared<Gpu>> {
    Shared::new(rings(queue, GpuAddr(queue.sq_door), GpuAddr(queue.cq_door)), GpuAddr(queue.control))
}

/// Shared mode: thread `i` of the grid carries out the items `i`, `i + threads` … and leaves its exit in `exits[i]`.
///
/// # Safety
/// At least `threads` threads; all that queue and job describe is there.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_shared(
    queue: *const Queue,
    threads: u32,
    work: Job,
    exits: *mut [u32; 2],
) {
    let index = thread();
    // SAFETY: the caller's promise.
    let queue = shared(unsafe { &*queue });
    if let Some(queue) = queue
        && index < threads
    {
        let exit = run_shared(&Gpu, &queue, &job(&Gpu, &work), index, threads);
        Gpu.store_pair(GpuAddr(exits as u64).element(index, 8), exit.words());
    }
}

/// Prepares the control block of a shared queue that was just created: one thread.
///
/// # Safety
/// All that the queue describes is there.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_shared_prepare(queue: *const Queue) {
    // SAFETY: the caller's promise.
    let queue = shared(unsafe { &*queue });
    if let Some(queue) = queue
        && thread() == 0
    {
        queue.initialise(&Gpu);
    }
}
