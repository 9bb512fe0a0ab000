//! Functions for other people's kernels: what `include/onehop/device.h` declares, to be linked with code in any language
//! that calls C functions in PTX. A module of its own, without kernels. All that they do is `onehop_proto::kernel::Lent`.
#![no_std]
#![feature(asm_experimental_arch)]

use core::arch::asm;

use onehop_device::gpu::Gpu;
use onehop_proto::GpuAddr;
use onehop_proto::kernel::{Answer, Command, Lent, LentOp};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel.
    unsafe { asm!("trap;", options(noreturn)) }
}

/// A queue's handle: only its address is used here.
#[repr(C)]
pub struct Queue([u32; 0]);

/// What `f` makes of the queue of this handle.
#[inline(always)]
fn with<R>(queue: *const Queue, none: R, f: impl FnOnce(&Lent<Gpu>) -> R) -> R {
    match Lent::open(&Gpu, GpuAddr(queue as u64)) {
        Some(lent) => f(&lent),
        None => none,
    }
}

macro_rules! run {
    ($(#[$doc:meta])* $name:ident, $op:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// `queue` is null or a handle that the host has lent and not taken back.
        // SAFETY: the name is this project's alone.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(queue: *const Queue, lba: u64, blocks: u32, offset: u64) -> i32 {
            with(queue, Answer::NoHandle, |lent| lent.run(&Gpu, LentOp::$op, lba, blocks, offset)).code()
        }
    };
}

run! {
    /// Reads blocks into the data memory, from byte `offset` on, and waits for them.
    onehop_read, Read
}

run! {
    /// Writes blocks from the data memory, from byte `offset` on, and waits for it.
    onehop_write, Write
}

/// Begins to move blocks: `op` is 0 to read, 1 to write. -1 if it is under way; any other answer is its end.
///
/// # Safety
/// As for [`onehop_read`]; `command` is memory for a command.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_submit(
    queue: *const Queue,
    op: u32,
    lba: u64,
    blocks: u32,
    offset: u64,
    command: *mut Command,
) -> i32 {
    let mut new = Command::NONE;
    let op = if op == LentOp::Read as u32 { LentOp::Read } else { LentOp::Write };
    let answer = with(queue, Answer::NoHandle, |lent| lent.submit(&Gpu, op, lba, blocks, offset, &mut new));
    // SAFETY: the caller's promise.
    unsafe { command.write(new) };
    answer.code()
}

macro_rules! go_on {
    ($(#[$doc:meta])* $name:ident, $method:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As for [`onehop_submit`], which has written `command`; no other thread uses it meanwhile.
        // SAFETY: the name is this project's alone.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(queue: *const Queue, command: *mut Command) -> i32 {
            // SAFETY: the caller's promise.
            let mut now = unsafe { command.read() };
            let answer = with(queue, Answer::NoHandle, |lent| lent.$method(&Gpu, &mut now));
            // SAFETY: the caller's promise.
            unsafe { command.write(now) };
            answer.code()
        }
    };
}

go_on! {
    /// Whether a command has ended, and how; -1 if not.
    onehop_test, test
}

go_on! {
    /// Waits for a command's end.
    onehop_wait, wait
}

macro_rules! tell {
    ($(#[$doc:meta])* $name:ident: $t:ty = $field:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As for [`onehop_read`].
        // SAFETY: the name is this project's alone.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(queue: *const Queue) -> $t {
            with(queue, 0, |lent| lent.handle().$field)
        }
    };
}

tell! {
    /// Blocks of the namespace; 0 if this is no handle, as for those that follow.
    onehop_blocks: u64 = blocks
}

tell! {
    /// Bytes that a block takes in memory.
    onehop_block_bytes: u32 = block_bytes
}

tell! {
    /// The most blocks of one command.
    onehop_most_blocks: u32 = most_blocks
}

tell! {
    /// Bytes of the data memory.
    onehop_data_bytes: u64 = bytes
}
