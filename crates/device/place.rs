//! The kernel that copies between host memory and GPU memory for operations in streams: a small module of its own, because it
//! is loaded by programs that need no other kernel.
//!
//! | entry | parameters | grid × block | dynamic shared memory |
//! |---|---|---|---|
//! | `onehop_place` | `order: u64` | any | 0 |
//!
//! `order` is the address of an `onehop_proto::kernel::PlaceOrder`, on a multiple of eight.
#![no_std]
#![feature(abi_ptx, asm_experimental_arch)]

use core::arch::asm;

use onehop_device::gpu::{GpuThread, seat};
use onehop_proto::GpuAddr;
use onehop_proto::kernel::{Copies, PlaceOrder, run_place};
use onehop_proto::queue::Memory;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel.
    unsafe { asm!("trap;", options(noreturn)) }
}

/// Loads see what the host wrote after the launch. The end of the kernel makes stores visible.
struct WordCopies;

#[inline(always)]
fn load_16(at: u64) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the host vouches for the addresses of an order.
    unsafe {
        asm!("ld.relaxed.sys.global.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) at, options(nostack));
    }
    [a, b, c, d]
}

#[inline(always)]
fn store_16(at: u64, [a, b, c, d]: [u32; 4]) {
    // SAFETY: as above.
    unsafe {
        asm!("st.global.v4.u32 [{0}], {{{1}, {2}, {3}, {4}}};",
            in(reg64) at, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
    }
}

#[inline(always)]
fn load_4(at: u64) -> u32 {
    // SAFETY: as above.
    unsafe { GpuThread::new() }.load(GpuAddr(at))
}

#[inline(always)]
fn store_4(at: u64, value: u32) {
    // SAFETY: as above.
    unsafe { asm!("st.global.u32 [{0}], {1};", in(reg64) at, in(reg32) value, options(nostack)) };
}

#[inline(always)]
fn load_1(at: u64) -> u32 {
    let value;
    // SAFETY: as above.
    unsafe { asm!("ld.relaxed.sys.global.u8 {0}, [{1}];", out(reg32) value, in(reg64) at, options(nostack)) };
    value
}

#[inline(always)]
fn store_1(at: u64, value: u32) {
    // SAFETY: as above.
    unsafe { asm!("st.global.u8 [{0}], {1};", in(reg64) at, in(reg32) value, options(nostack)) };
}

/// Four loads in flight hide most of the bus's latency.
#[inline(always)]
fn copy<T: Copy>(
    load: impl Fn(u64) -> T,
    store: impl Fn(u64, T),
    [source, destination, step]: [u64; 3],
    count: u32,
) {
    if count == 4 {
        let words = [load(source), load(source + step), load(source + 2 * step), load(source + 3 * step)];
        store(destination, words[0]);
        store(destination + step, words[1]);
        store(destination + 2 * step, words[2]);
        store(destination + 3 * step, words[3]);
        return;
    }
    let mut word = 0;
    while word < count as u64 {
        store(destination + word * step, load(source + word * step));
        word += 1;
    }
}

impl Copies for WordCopies {
    #[inline(always)]
    fn copy<const W: u64>(&self, source: u64, destination: u64, step: u64, count: u32) {
        let range = [source, destination, step];
        match W {
            16 => copy(load_16, store_16, range, count),
            4 => copy(load_4, store_4, range, count),
            _ => copy(load_1, store_1, range, count),
        }
    }
}

/// Executes an order.
///
/// # Safety
/// The order is there, and both of its ranges are.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_place(order: u64) {
    // SAFETY: the caller's promise.
    let thread = unsafe { GpuThread::new() };
    let word = |at| {
        let [low, high] = thread.load_pair(GpuAddr(order + at));
        low as u64 | (high as u64) << 32
    };
    let order = [PlaceOrder::SOURCE, PlaceOrder::DESTINATION, PlaceOrder::LENGTH].map(word);
    run_place(&WordCopies, order, seat());
}
