//! Functions for other people's kernels: what `include/onehop/device.h` declares, to be linked with code in any language
//! that calls C functions in PTX. A module of its own, without kernels. They only call `onehop_proto::kernel::DeviceQueue`.
#![no_std]
#![feature(asm_experimental_arch)]

use core::arch::asm;

use onehop_device::gpu::GpuThread;
use onehop_proto::GpuAddr;
use onehop_proto::kernel::{Answer, Command, DeviceQueue, DeviceOp};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel.
    unsafe { asm!("trap;", options(noreturn)) }
}

/// A queue's handle: only its address is used here.
#[repr(C)]
pub struct Queue([u32; 0]);

fn open(thread: &GpuThread, queue: *const Queue) -> Option<DeviceQueue<GpuThread>> {
    DeviceQueue::open(thread, GpuAddr(queue as u64))
}

/// Begins a command, and advances it. One copy, however many functions use it.
#[inline(never)]
fn start(
    thread: &GpuThread,
    queue: *const Queue,
    op: u32,
    lba: u64,
    blocks: u32,
    offset: u64,
    command: &mut Command,
    waits: bool,
) -> i32 {
    *command = Command::NONE;
    let begun = match (open(thread, queue), DeviceOp::from_code(op)) {
        (Some(queue), Some(op)) => queue.begin(thread, op, lba, blocks, offset, command),
        (Some(_), None) => Answer::NoOperation,
        (None, _) => Answer::NoHandle,
    };
    match begun {
        Answer::Pending => go_on(thread, queue, command, waits),
        refused => refused.code(),
    }
}

/// The only copy of the protocol.
#[inline(never)]
fn go_on(thread: &GpuThread, queue: *const Queue, command: &mut Command, waits: bool) -> i32 {
    match open(thread, queue) {
        Some(queue) => queue.go_on(thread, command, waits),
        None => Answer::NoHandle,
    }
    .code()
}

/// Reads blocks into the data memory, from byte `offset` on, and waits for them.
///
/// # Safety
/// `queue` is null or a handle that the host has exported and not revoked.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_read(queue: *const Queue, lba: u64, blocks: u32, offset: u64) -> i32 {
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    start(&thread, queue, DeviceOp::Read as u32, lba, blocks, offset, &mut { Command::NONE }, true)
}

/// Writes blocks from the data memory, from byte `offset` on, and waits for it.
///
/// # Safety
/// As for [`onehop_read`].
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_write(queue: *const Queue, lba: u64, blocks: u32, offset: u64) -> i32 {
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    start(&thread, queue, DeviceOp::Write as u32, lba, blocks, offset, &mut { Command::NONE }, true)
}

/// Begins to move blocks: `op` is 0 to read, 1 to write. -1 if the command is in flight; any other answer is its end.
///
/// # Safety
/// As for [`onehop_read`]; `command` is memory for a command; no other thread uses it meanwhile.
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
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    // SAFETY: the caller's promise; any bytes are a command, and `start` writes all of it before anything reads
    // it.
    start(&thread, queue, op, lba, blocks, offset, unsafe { &mut *command }, false)
}

/// Whether a command has ended, and how; -1 if not.
///
/// # Safety
/// As for [`onehop_submit`], which has written `command`; no other thread uses it meanwhile.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_test(queue: *const Queue, command: *mut Command) -> i32 {
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    // SAFETY: the caller's promise.
    go_on(&thread, queue, unsafe { &mut *command }, false)
}

/// Waits for a command's end.
///
/// # Safety
/// As for [`onehop_test`].
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_wait(queue: *const Queue, command: *mut Command) -> i32 {
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    // SAFETY: the caller's promise.
    go_on(&thread, queue, unsafe { &mut *command }, true)
}

macro_rules! query {
    ($(#[$doc:meta])* $name:ident: $t:ty = $method:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As for [`onehop_read`].
        // SAFETY: the name is this project's alone.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(queue: *const Queue) -> $t {
            // SAFETY: the caller's promise.
            let thread = unsafe { GpuThread::new() };
            open(&thread, queue).map_or(0, |queue| queue.$method(&thread))
        }
    };
}

query! {
    /// Blocks of the namespace; 0 if this is not a handle, as for those that follow.
    onehop_blocks: u64 = blocks
}

query! {
    /// Bytes that a block takes in memory.
    onehop_block_bytes: u32 = block_bytes
}

query! {
    /// The most blocks of one command.
    onehop_most_blocks: u32 = most_blocks
}

query! {
    /// Bytes of the data memory.
    onehop_data_bytes: u64 = data_bytes
}
