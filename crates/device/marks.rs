//! The kernels that mark GPU memory before a device writes it, and count the marks that are left: a small module of its own,
//! because it is loaded by programs that need no other kernel.
//!
//! | entry | parameters | grid × block | dynamic shared memory |
//! |---|---|---|---|
//! | `onehop_mark` | `first: u64, word: u64, permit: u64, count: u32, launch: u32` | at most `Permit::MOST_BLOCKS` × any | 0 |
//! | `onehop_marks_left` | `first: u64, word: u64, left: u64, count: u32` | any | 0 |
//!
//! `count` neighbouring words of eight bytes from `first` on, a multiple of eight; `permit` and `launch` are those of
//! `onehop_proto::kernel::Marking`; `left` is a zeroed word of four bytes.
#![no_std]
#![feature(abi_ptx, asm_experimental_arch, stdarch_nvptx)]

use core::arch::{asm, nvptx};

use onehop_device::gpu::{GpuThread, seat};
use onehop_proto::GpuAddr;
use onehop_proto::kernel::{Marking, count_marks, run_mark};
use onehop_proto::queue::Memory;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel.
    unsafe { asm!("trap;", options(noreturn)) }
}

/// Writes the word to each place, unless the host has revoked the permit before.
///
/// # Safety
/// The permit is there; so are the words, which nothing else writes, as long as the host permits the launch.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_mark(first: u64, word: u64, permit: u64, count: u32, launch: u32) {
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    let marking = Marking { first: GpuAddr(first), count, word, permit: GpuAddr(permit), launch };
    // SAFETY: every thread of the block comes to each of its barriers.
    run_mark(&thread, &marking, seat(), || unsafe { nvptx::_syncthreads() });
}

/// Adds the number of places that hold the word to `left`.
///
/// # Safety
/// The words and `left` are there.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_marks_left(first: u64, word: u64, left: u64, count: u32) {
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    let mine = count_marks(&thread, (GpuAddr(first), count), word, seat());
    if mine > 0 {
        thread.fetch_add(GpuAddr(left), mine);
    }
}
