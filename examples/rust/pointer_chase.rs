//! The kernels of examples/cuda/pointer_chase.cu in Rust: the same names, parameters and structures, so that the same hosts
//! run them. A program for the GPU alone, without std; `crates/device/gen-ptx` compiles it as one would compile one's own, and
//! docs/gpu-kernels.md says how.
#![no_std]
#![feature(abi_ptx, asm_experimental_arch, stdarch_nvptx)]

use core::arch::{asm, nvptx};

/// A queue that the host has exported.
#[repr(C)]
pub struct Queue([u8; 0]);

// SAFETY: declared as include/onehop/device.h declares them.
unsafe extern "C" {
    fn onehop_read(queue: *const Queue, lba: u64, blocks: u32, offset: u64) -> i32;
    fn onehop_write(queue: *const Queue, lba: u64, blocks: u32, offset: u64) -> i32;
    fn onehop_block_bytes(queue: *const Queue) -> u32;
}

/// What a call answers when all is well.
const OK: i32 = 0;
/// A block is not the one that was asked for.
const WRONG_BLOCK: i32 = -1000;

/// The beginning of each block of the chain.
#[derive(Clone, Copy)]
#[repr(C)]
struct Node {
    own: u64,
    next: u64,
    value: u64,
}

/// How a thread's chase ended.
#[repr(C)]
pub struct End {
    sum: u64,
    lba: u64,
    hops: u32,
    answer: i32,
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel.
    unsafe { asm!("trap;", options(noreturn)) }
}

/// The calling thread's number in the grid, and how many threads there are.
fn thread() -> (u64, u64) {
    // SAFETY: these read registers.
    let (block, blocks, threads, thread) = unsafe {
        (nvptx::_block_idx_x(), nvptx::_grid_dim_x(), nvptx::_block_dim_x(), nvptx::_thread_idx_x())
    };
    let of_block = threads as u64;
    (block as u64 * of_block + thread as u64, blocks as u64 * of_block)
}

/// Lays the chain through the first `length` blocks of the drive.
///
/// # Safety
/// `queue` is exported for writing, `data` is its data memory with a block for each thread, `answers` has a place for each.
// SAFETY: no other kernel here has the name.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn lay(queue: *const Queue, data: *mut u8, length: u64, answers: *mut i32) {
    let (thread, threads) = thread();
    // SAFETY: the caller's promise.
    let offset = thread * u64::from(unsafe { onehop_block_bytes(queue) });
    let (mut lba, mut answer) = (thread, OK);
    while lba < length && answer == OK {
        let node = Node { own: lba, next: (lba * 5 + 7) & (length - 1), value: lba.wrapping_mul(lba) };
        // SAFETY: the caller's promise: this part of the data memory is the thread's own.
        answer = unsafe {
            data.add(offset as usize).cast::<Node>().write_volatile(node);
            onehop_write(queue, lba, 1, offset)
        };
        lba += threads;
    }
    // SAFETY: the caller's promise.
    unsafe { answers.add(thread as usize).write(answer) };
}

/// Each thread follows the chain for `hops` blocks, from the block of its own number on.
///
/// # Safety
/// As for [`lay`]; `ends` has a place for each thread.
// SAFETY: no other kernel here has the name.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn chase(queue: *const Queue, data: *const u8, hops: u32, ends: *mut End) {
    let (thread, _) = thread();
    // SAFETY: the caller's promise.
    let offset = thread * u64::from(unsafe { onehop_block_bytes(queue) });
    let mut end = End { sum: 0, lba: thread, hops: 0, answer: OK };
    while end.hops < hops {
        // SAFETY: the caller's promise.
        end.answer = unsafe { onehop_read(queue, end.lba, 1, offset) };
        if end.answer != OK {
            break;
        }
        // SAFETY: as above; volatile, because the drive has written it.
        let node = unsafe { data.add(offset as usize).cast::<Node>().read_volatile() };
        if node.own != end.lba {
            end.answer = WRONG_BLOCK;
            break;
        }
        end.sum = end.sum.wrapping_add(node.value);
        end.lba = node.next;
        end.hops += 1;
    }
    // SAFETY: the caller's promise.
    unsafe { ends.add(thread as usize).write(end) };
}
