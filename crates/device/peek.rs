//! The kernel that reads a device's registers, for `drive check-p2p`: a module of its own, so that the module that users
//! load has no such instruction.
//!
//! | entry | parameters | grid × block | dynamic shared memory |
//! |---|---|---|---|
//! | `onehop_peek` | `first: u64, count: u32, notes: u64, limit: u64` | 1 × 1 | 0 |
//!
//! `notes` is `onehop_proto::kernel::PeekNotes`, zeroed.
#![no_std]
#![feature(abi_ptx, asm_experimental_arch)]

use core::arch::asm;

use onehop_device::gpu::GpuThread;
use onehop_proto::GpuAddr;
use onehop_proto::kernel::{PeekNotes, run_peek};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel.
    unsafe { asm!("trap;", options(noreturn)) }
}

/// Reads up to `count` registers from `first` on; see [`run_peek`].
///
/// # Safety
/// One thread; `first` is the address of that many registers, `notes` of zeroed notes.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_peek(first: u64, count: u32, notes: u64, limit: u64) {
    let read = |at: GpuAddr| {
        let value: u32;
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe {
            asm!("ld.relaxed.mmio.sys.global.u32 {0}, [{1}];", out(reg32) value, in(reg64) at.0, options(nostack))
        };
        value
    };
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    run_peek(&thread, read, (GpuAddr(first), count), PeekNotes(GpuAddr(notes)), limit);
}
