//! The kernels that mark GPU memory before a device writes it, and count the marks that are left: a small module of its own,
//! because it is loaded by programs that need no other kernel.
//!
//! | entry | parameters | grid × block | dynamic shared memory |
//! |---|---|---|---|
//! | `onehop_mark` | `first: u64, count: u64, word: u64` | any | 0 |
//! | `onehop_marks_left` | `first: u64, count: u64, word: u64, left: u64` | any | 0 |
//!
//! `count` neighbouring words of eight bytes from `first` on, a multiple of eight; `left` is a zeroed word of four bytes.
#![no_std]
#![feature(abi_ptx, asm_experimental_arch, stdarch_nvptx)]

use core::arch::{asm, nvptx};

use onehop_device::gpu::Gpu;
use onehop_proto::GpuAddr;
use onehop_proto::queue::Memory;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel.
    unsafe { asm!("trap;", options(noreturn)) }
}

/// Calls `f` with the address of each word that is this thread's.
#[inline(always)]
fn each(first: u64, count: u64, mut f: impl FnMut(GpuAddr)) {
    // SAFETY: these read registers.
    let (block, blocks, thread, threads) = unsafe {
        let (block, blocks) = (nvptx::_block_idx_x() as u64, nvptx::_grid_dim_x() as u64);
        (block, blocks, nvptx::_thread_idx_x() as u64, nvptx::_block_dim_x() as u64)
    };
    let mut index = block * threads + thread;
    while index < count {
        f(GpuAddr(first).plus(index * 8));
        index += blocks * threads;
    }
}

/// Writes the word to each place.
///
/// # Safety
/// The words are there, and nobody else writes them meanwhile.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_mark(first: u64, count: u64, word: u64) {
    each(first, count, |at| Gpu.store_pair(at, [word as u32, (word >> 32) as u32]));
}

/// Adds the number of places that hold the word to `left`.
///
/// # Safety
/// The words and `left` are there.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_marks_left(first: u64, count: u64, word: u64, left: u64) {
    let mut mine = 0;
    each(first, count, |at| {
        mine += u32::from(Gpu.load_pair(at) == [word as u32, (word >> 32) as u32]);
    });
    if mine > 0 {
        Gpu.fetch_add(GpuAddr(left), mine);
    }
}
