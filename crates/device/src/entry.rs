//! The kernels' entries. Hosts rely on their names and parameters.

use core::arch::{asm, nvptx};

use onehop_proto::GpuAddr;
use onehop_proto::kernel::{
    GROUP_WORDS, Job, KernelJob, KernelQueue, LOCAL_WORDS, SINGLE_WORDS, run_group, run_owner, run_single,
    scratch_init, share,
};
use onehop_proto::queue::{Address, Memory, Shared};

use crate::gpu::{Door, GpuThread, Lane};
use crate::params::LANES;

/// A warp that takes the times.
#[cfg(meter)]
type Warp = onehop_proto::kernel::Metered<Lane>;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel.
    unsafe { asm!("trap;", options(noreturn)) }
}

#[inline(always)]
fn job<M: Memory<Addr = GpuAddr>>(mem: &M, job: &KernelJob) -> Job<M> {
    job.until(mem.now().saturating_add(job.limit))
}

/// The index of the calling thread in its grid.
fn thread() -> u32 {
    // SAFETY: these read registers.
    unsafe { nvptx::_block_idx_x() as u32 * nvptx::_block_dim_x() as u32 + nvptx::_thread_idx_x() as u32 }
}

/// A kernel of owner mode, with this many words of local memory.
macro_rules! owner_kernel {
    ($(#[$doc:meta])* $name:ident, $run:ident, $words:ident) => {
        $(#[$doc])*
        // SAFETY: the name is this project's alone.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            queues: *const KernelQueue,
            exits: *mut [u32; 2],
            work: KernelJob,
            warps: u32,
        ) {
            // SAFETY: reads a register.
            let index = unsafe { nvptx::_block_idx_x() } as u32;
            if index >= warps {
                return;
            }
            // SAFETY: the caller's promise; there are `warps` queues. Volatile, or it would be read once and kept.
            let queue = || unsafe { queues.add(index as usize).read_volatile() };
            let doors = [queue().sq_door.0, queue().cq_door.0];
            // SAFETY: the caller's promise.
            let warp = unsafe { Lane::new(0, $words, doors) };
            #[cfg(meter)]
            let warp = Warp::begin(warp, work.outcomes, work.count);
            let (first, end) = share(work.count, index, warps);
            let exit = $run(&warp, || queue().owned(Door::Sq, Door::Cq), &job(&warp, &work), first, end);
            #[cfg(meter)]
            warp.report(index);
            warp.store_pair(GpuAddr(exits as u64).element(index, 8), exit);
        }
    };
}

owner_kernel! {
    /// Owner mode: block `i` executes its share of the job on queue `i` and stores its exit in `exits[i]`.
    ///
    /// # Safety
    /// As many blocks of 32 threads as there are queues, with dynamic shared memory for the largest window; all that
    /// queues and job describe is there.
    onehop_owner, run_owner, LOCAL_WORDS
}

owner_kernel! {
    /// Owner mode for queues that have one command in flight: as [`onehop_owner`], with less shared memory.
    ///
    /// # Safety
    /// As for [`onehop_owner`].
    onehop_single, run_single, SINGLE_WORDS
}

/// Prepares the control memory of queues in owner mode that were just created: a thread for each.
///
/// # Safety
/// All that the queues describe is there.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_owner_prepare(queues: *const KernelQueue, count: u32) {
    let index = thread();
    if index < count {
        // SAFETY: the caller's promise; there are `count` queues.
        let (thread, queue) = unsafe { (GpuThread::new(), queues.add(index as usize).read()) };
        scratch_init(&thread, queue.control);
    }
}

/// Shared mode: warp `i` of the grid executes its share of the job on queue `i % count`, which it shares with the other
/// warps that are assigned to it, and stores its exit in `exits[i]`.
///
/// # Safety
/// At least `warps` whole warps, with dynamic shared memory for each; all that queues and job describe is there.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_shared(
    queues: *const KernelQueue,
    exits: *mut [u32; 2],
    work: KernelJob,
    warps: u32,
    count: u32,
) {
    let index = thread() / LANES;
    if index >= warps {
        return;
    }
    // SAFETY: the caller's promise; there are `count` queues.
    let queue = unsafe { queues.add((index % count) as usize).read() };
    // SAFETY: reads a register.
    let in_block = unsafe { nvptx::_thread_idx_x() } as u32 / LANES;
    // SAFETY: the caller's promise.
    let warp = unsafe { Lane::new(in_block, GROUP_WORDS, [queue.sq_door.0, queue.cq_door.0]) };
    #[cfg(meter)]
    let warp = Warp::begin(warp, work.outcomes, work.count);
    if let Some(shared) = Shared::new(queue.rings(Door::Sq, Door::Cq), queue.control) {
        let (items, dealt) = (share(work.count, index, warps), (index / count, warps.div_ceil(count)));
        let exit = run_group(&warp, &shared, &job(&warp, &work), items, dealt);
        #[cfg(meter)]
        warp.report(index);
        warp.store_pair(GpuAddr(exits as u64).element(index, 8), exit);
    }
}

/// Prepares the control blocks of shared queues that were just created: a thread for each.
///
/// # Safety
/// All that the queues describe is there.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_shared_prepare(queues: *const KernelQueue, count: u32) {
    let index = thread();
    if index < count {
        // SAFETY: the caller's promise; there are `count` queues.
        let (thread, queue) = unsafe { (GpuThread::new(), queues.add(index as usize).read()) };
        if let Some(shared) = Shared::new(queue.rings(queue.sq_door, queue.cq_door), queue.control) {
            shared.initialise(&thread);
        }
    }
}
