//! Functions for other people's kernels: what `include/onehop/device.h` declares, to be linked with code in any language
//! that calls C functions in PTX. A module of its own, without kernels. They only call `onehop_proto::kernel::DeviceQueue`
//! and `onehop_proto::array::PageCache`.
#![no_std]
#![feature(asm_experimental_arch)]

use core::arch::asm;

use onehop_device::gpu::GpuThread;
use onehop_proto::GpuAddr;
use onehop_proto::array::{ArrayError, Backing, PageCache};
use onehop_proto::kernel::{Answer, Command, DeviceOp, DeviceQueue};

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
) -> Answer {
    *command = Command::NONE;
    let begun = match (open(thread, queue), DeviceOp::from_code(op)) {
        (Some(queue), Some(op)) => queue.begin(thread, op, lba, blocks, offset, command),
        (Some(_), None) => Answer::NoOperation,
        (None, _) => Answer::NoHandle,
    };
    match begun {
        Answer::Pending => go_on(thread, queue, command, waits),
        refused => refused,
    }
}

/// The only copy of the protocol.
#[inline(never)]
fn go_on(thread: &GpuThread, queue: *const Queue, command: &mut Command, waits: bool) -> Answer {
    match open(thread, queue) {
        Some(queue) => queue.go_on(thread, command, waits),
        None => Answer::NoHandle,
    }
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
    start(&thread, queue, DeviceOp::Read as u32, lba, blocks, offset, &mut { Command::NONE }, true).code()
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
    start(&thread, queue, DeviceOp::Write as u32, lba, blocks, offset, &mut { Command::NONE }, true).code()
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
    start(&thread, queue, op, lba, blocks, offset, unsafe { &mut *command }, false).code()
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
    go_on(&thread, queue, unsafe { &mut *command }, false).code()
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
    go_on(&thread, queue, unsafe { &mut *command }, true).code()
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

/// An array's handle: only its address is used here.
#[repr(C)]
pub struct OpaqueArray([u32; 0]);

/// `onehop_pin`: a page that a thread has pinned.
#[repr(C)]
pub struct Pin {
    /// Where the byte lies that was asked for.
    at: u64,
    /// Bytes from there to the end of the page, or of the array.
    bytes: u32,
    slot: u32,
}

/// `ONEHOP_NOT_CACHED`.
const NOT_CACHED: i32 = -56;

/// The queue of an array. It calls the functions above: with [`DeviceQueue`] inlined, a pin takes 145 registers. A thread that
/// pins has one command at a time, so it may wait for room in the queue.
struct Called(DeviceQueue<GpuThread>, *const Queue);

impl Backing<GpuThread> for Called {
    fn open(thread: &GpuThread, queue: GpuAddr) -> Option<Self> {
        DeviceQueue::open(thread, queue).map(|opened| Self(opened, queue.0 as *const Queue))
    }

    fn begin(
        &self,
        thread: &GpuThread,
        op: DeviceOp,
        lba: u64,
        blocks: u32,
        offset: u64,
        command: &mut Command,
    ) -> Answer {
        start(thread, self.1, op as u32, lba, blocks, offset, command, false)
    }

    fn test(&self, thread: &GpuThread, command: &mut Command) -> Answer {
        go_on(thread, self.1, command, false)
    }

    fn life(&self, thread: &GpuThread) -> u32 {
        self.0.life(thread)
    }

    fn is_stopped(&self, thread: &GpuThread) -> bool {
        self.0.is_stopped(thread)
    }
}

type OpenArray = PageCache<GpuThread, Called>;

fn open_array(thread: &GpuThread, array: *const OpaqueArray) -> Result<OpenArray, ArrayError> {
    OpenArray::open_for_hits(thread, GpuAddr(array as u64))
}

/// Stores a pin for the caller.
#[inline(always)]
fn store_pin((slot, at, bytes): (u32, GpuAddr, u32), pin: *mut Pin) -> i32 {
    // SAFETY: the caller of the function has room there.
    unsafe { pin.write(Pin { at: at.0, bytes, slot }) };
    0
}

/// Pins a page that may have to be read.
#[inline(always)]
fn pin_page(array: *const OpaqueArray, byte: u64, pin: *mut Pin, writes: bool) -> i32 {
    // SAFETY: the caller of the function vouches for the array.
    let thread = unsafe { GpuThread::new() };
    let array = match open_array(&thread, array) {
        Ok(array) => array,
        Err(error) => return error.code(),
    };
    if writes && !array.is_writable(&thread) {
        return ArrayError::ReadOnly.code();
    }
    if let Some(located) = array.locate_cached(&thread, byte) {
        return store_pin(located, pin);
    }
    match array.fetch(&thread, byte) {
        Ok(slot) => store_pin(array.locate(&thread, byte, slot), pin),
        Err(error) => error.code(),
    }
}

/// Pins the page of a byte, to read it. It is read from the drive unless the cache has it.
///
/// # Safety
/// `array` is null or the handle of an array that is open, `pin` memory for a pin.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_array_pin(array: *const OpaqueArray, byte: u64, pin: *mut Pin) -> i32 {
    pin_page(array, byte, pin, false)
}

/// Pins the page of a byte, to write to it.
///
/// # Safety
/// As for [`onehop_array_pin`].
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_array_pin_mut(array: *const OpaqueArray, byte: u64, pin: *mut Pin) -> i32 {
    pin_page(array, byte, pin, true)
}

/// Pins the page of a byte if the cache has it, without waiting for anything.
///
/// # Safety
/// As for [`onehop_array_pin`].
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_array_pin_cached(array: *const OpaqueArray, byte: u64, pin: *mut Pin) -> i32 {
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    match open_array(&thread, array) {
        Ok(array) => array.locate_cached(&thread, byte).map_or(NOT_CACHED, |located| store_pin(located, pin)),
        Err(error) => error.code(),
    }
}

/// Releases a pin.
///
/// # Safety
/// `pin` was pinned on this array and not released yet; no thread uses the page by it any more.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_array_unpin(array: *const OpaqueArray, pin: *const Pin) -> i32 {
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    match open_array(&thread, array) {
        Ok(array) => {
            // SAFETY: the caller's promise.
            array.unpin(&thread, unsafe { (*pin).slot });
            0
        }
        Err(error) => error.code(),
    }
}

/// Releases a pin of [`onehop_array_pin_mut`]: the page is written back some time after.
///
/// # Safety
/// As for [`onehop_array_unpin`].
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_array_unpin_mut(array: *const OpaqueArray, pin: *const Pin) -> i32 {
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    match open_array(&thread, array) {
        Ok(array) => {
            // SAFETY: the caller's promise.
            array.unpin_written(&thread, unsafe { (*pin).slot });
            0
        }
        Err(error) => error.code(),
    }
}

/// Bytes of the array; 0 if this is not a handle of one.
///
/// # Safety
/// As for [`onehop_array_pin`].
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_array_bytes(array: *const OpaqueArray) -> u64 {
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    open_array(&thread, array).map_or(0, |array| array.bytes(&thread))
}
