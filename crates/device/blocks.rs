//! Kernels that work on data, such as samples: a module of its own, because they need floating point and shared memory of
//! blocks, and programs that drive a drive do not need them.
//!
//! | entry | parameter | block | dynamic shared memory |
//! |---|---|---|---|
//! | `onehop_samples_convert` | `Convert`, by value | `THREADS` | `LOCAL_WORDS` |
//! | `onehop_samples_spectrum` | `Spectrum`, by value | `THREADS` | `Spectrum::local_words` |
//! | `onehop_samples_check` | `Check`, by value | `THREADS` | `LOCAL_WORDS` |
//! | `onehop_crc32c` | `Sum`, by value | `THREADS` | `crc32c::LOCAL_WORDS` |
//! | `onehop_ranges` | `RangeList`, by value | `THREADS` | none |
#![no_std]
#![feature(abi_ptx, asm_experimental_arch, stdarch_nvptx)]

use core::arch::{asm, global_asm, nvptx};

use onehop_block::crc32c::{self, Sum};
use onehop_block::ranges::{self, RangeList};
use onehop_proto::GpuAddr;
use onehop_radio::kernel::{self, Block, Check, Convert, Spectrum, THREADS};

global_asm!(".extern .shared .align 16 .b8 onehop_block_local[];");

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel.
    unsafe { asm!("trap;", options(noreturn)) }
}

/// The calling thread's block.
struct Here;

impl Here {
    #[inline(always)]
    fn shared(index: u32) -> u32 {
        let base: u32;
        // SAFETY: the address of a symbol.
        unsafe { asm!("mov.u32 {0}, onehop_block_local;", out(reg32) base, options(pure, nomem, nostack)) };
        base + index * 4
    }
}

impl Block for Here {
    #[inline(always)]
    fn number(&self) -> u32 {
        // SAFETY: reads a register.
        unsafe { nvptx::_block_idx_x() as u32 }
    }

    #[inline(always)]
    fn count(&self) -> u32 {
        // SAFETY: reads a register.
        unsafe { nvptx::_grid_dim_x() as u32 }
    }

    #[inline(always)]
    fn threads(&self) -> u32 {
        THREADS
    }

    #[inline(always)]
    fn each(&self, mut f: impl FnMut(u32)) {
        // SAFETY: reads a register; all threads of the block come to the barrier, as `Block` says.
        unsafe {
            f(nvptx::_thread_idx_x() as u32);
            nvptx::_syncthreads();
        }
    }

    #[inline(always)]
    fn load(&self, at: GpuAddr) -> u32 {
        let value: u32;
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe { asm!("ld.global.u32 {0}, [{1}];", out(reg32) value, in(reg64) at.0, options(nostack)) };
        value
    }

    #[inline(always)]
    fn load_four(&self, at: GpuAddr) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe {
            asm!("ld.global.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) at.0, options(nostack));
        }
        [a, b, c, d]
    }

    #[inline(always)]
    fn store(&self, at: GpuAddr, value: u32) {
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe { asm!("st.global.u32 [{0}], {1};", in(reg64) at.0, in(reg32) value, options(nostack)) };
    }

    #[inline(always)]
    fn store_four(&self, at: GpuAddr, words: [u32; 4]) {
        let [a, b, c, d] = words;
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe {
            asm!("st.global.v4.u32 [{0}], {{{1}, {2}, {3}, {4}}};",
                in(reg64) at.0, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
        }
    }

    #[inline(always)]
    fn settle(&self) {
        // SAFETY: waits.
        unsafe { asm!("membar.sys;", options(nostack)) };
    }

    #[inline(always)]
    fn local(&self, index: u32) -> u32 {
        let value: u32;
        // SAFETY: within the shared memory that the launch asked for.
        unsafe {
            asm!("ld.shared.u32 {0}, [{1}];", out(reg32) value, in(reg32) Self::shared(index), options(nostack))
        };
        value
    }

    #[inline(always)]
    fn set_local(&self, index: u32, value: u32) {
        // SAFETY: within the shared memory that the launch asked for.
        unsafe {
            asm!("st.shared.u32 [{0}], {1};", in(reg32) Self::shared(index), in(reg32) value, options(nostack))
        };
    }
}

/// # Safety
/// Blocks of `THREADS` threads with `LOCAL_WORDS` words of shared memory; all that the job names is there.
// SAFETY: the name is this project's alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_samples_convert(job: Convert) {
    kernel::convert(&Here, &job);
}

/// # Safety
/// Blocks of `THREADS` threads with the words of shared memory that frames of this length need; all that the job names is
/// there.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_samples_spectrum(job: Spectrum) {
    kernel::spectrum(&Here, &job);
}

/// # Safety
/// Blocks of `THREADS` threads with `LOCAL_WORDS` words of shared memory; all that the job names is there.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_samples_check(job: Check) {
    kernel::check(&Here, &job);
}

/// # Safety
/// Blocks of `THREADS` threads with the sum's `LOCAL_WORDS` words of shared memory; all that the job names is there.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_crc32c(job: Sum) {
    crc32c::sum(&Here, &job);
}

/// # Safety
/// Blocks of `THREADS` threads; all that the list names is there.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn onehop_ranges(job: RangeList) {
    ranges::copy(&Here, &job);
}
