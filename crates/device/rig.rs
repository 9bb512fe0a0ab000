//! Kernels for tests and benchmarks: controllers that serve queues in GPU memory, and the litmus experiments. A module of
//! its own, so that the module that users load has none of it.
#![no_std]
#![feature(abi_ptx, abi_unadjusted, asm_experimental_arch, link_llvm_intrinsics, stdarch_nvptx)]

use core::arch::{asm, global_asm, nvptx};

use onehop_proto::kernel::Lanes;
use onehop_controller::{Exit, NULL_FAR_LOCAL_WORDS, Scoped, Wide, check, litmus, null, null_far, serve};
use onehop_device::gpu::GpuThread;
use onehop_proto::GpuAddr;
use onehop_proto::queue::Memory;

global_asm!(".extern .shared .align 16 .b8 onehop_rig_local[];");

// SAFETY: LLVM's own declaration of it.
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn bar_warp_sync(mask: u32);
}

const LANES: u32 = 32;

// The warps' words follow each other.
const _: () = assert!(NULL_FAR_LOCAL_WORDS.is_multiple_of(4), "`null_far` uses four words at once");

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel.
    unsafe { asm!("trap;", options(noreturn)) }
}

/// One lane of a warp, and where its warp's local words lie.
#[derive(Clone, Copy)]
struct RigThread(u32, u32);

impl RigThread {
    fn new(local: u32) -> Self {
        let (lane, base): (u32, u32);
        // SAFETY: these read a register and take the address of a symbol.
        unsafe {
            asm!("mov.u32 {0}, %laneid;", out(reg32) lane, options(pure, nomem, nostack));
            asm!("mov.u32 {0}, onehop_rig_local;", out(reg32) base, options(pure, nomem, nostack));
        }
        Self(lane, base + local * 4)
    }

    #[inline(always)]
    fn barrier() {
        // SAFETY: all lanes of the warp come here together, as `Lanes` says.
        unsafe { bar_warp_sync(u32::MAX) }
    }

    #[inline(always)]
    fn shared(&self, index: u32) -> u32 {
        self.1 + index * 4
    }
}

/// What a lane does like any thread.
macro_rules! as_a_thread {
    ($($name:ident($($arg:ident: $t:ty),*) $(-> $r:ty)?;)*) => {
        $(#[inline(always)]
        fn $name(&self, $($arg: $t),*) $(-> $r)? {
            // SAFETY: only this module's kernels make lanes; their callers promise it.
            unsafe { GpuThread::new() }.$name($($arg),*)
        })*
    };
}

impl Memory for RigThread {
    type Addr = GpuAddr;
    type Door = GpuAddr;
    as_a_thread! {
        load(at: GpuAddr) -> u32;
        load_acquire(at: GpuAddr) -> u32;
        store(at: GpuAddr, value: u32);
        store_release(at: GpuAddr, value: u32);
        store_entry(at: GpuAddr, entry: &[u32; 16]);
        load_pair(at: GpuAddr) -> [u32; 2];
        store_pair(at: GpuAddr, words: [u32; 2]);
        load_constant(at: GpuAddr) -> [u32; 4];
        fetch_add(at: GpuAddr, value: u32) -> u32;
        fetch_or(at: GpuAddr, bits: u32) -> u32;
        fetch_and(at: GpuAddr, mask: u32) -> u32;
        compare_exchange(at: GpuAddr, old: u32, new: u32) -> u32;
        fence();
        ring(door: GpuAddr, value: u32);
        pause();
        now() -> u64;
    }
}

impl Lanes for RigThread {
    #[inline(always)]
    fn lanes(&self) -> u32 {
        LANES
    }

    #[inline(always)]
    fn each(&self, mut f: impl FnMut(u32)) {
        f(self.0);
        Self::barrier();
    }

    #[inline(always)]
    fn once(&self, mut f: impl FnMut()) {
        if self.0 == 0 {
            f();
        }
        Self::barrier();
    }

    #[inline(always)]
    fn local(&self, at: u32) -> u32 {
        let value: u32;
        // SAFETY: within the shared memory that the launch asked for.
        unsafe {
            asm!("ld.shared.u32 {0}, [{1}];", out(reg32) value, in(reg32) self.shared(at), options(nostack))
        };
        value
    }

    #[inline(always)]
    fn set_local(&self, at: u32, value: u32) {
        // SAFETY: within the shared memory that the launch asked for.
        unsafe {
            asm!("st.shared.u32 [{0}], {1};", in(reg32) self.shared(at), in(reg32) value, options(nostack))
        };
    }

    #[inline(always)]
    fn local_four(&self, at: u32) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: within the shared memory that the launch asked for, and aligned: the index is a multiple of
        // four, as `Lanes` says, and the base is a multiple of four words in the kernel that uses this.
        unsafe {
            asm!("ld.shared.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) self.shared(at), options(nostack));
        }
        [a, b, c, d]
    }

    #[inline(always)]
    fn set_local_four(&self, at: u32, words: [u32; 4]) {
        let [a, b, c, d] = words;
        // SAFETY: as for `local_four`.
        unsafe {
            asm!("st.shared.v4.u32 [{0}], {{{1}, {2}, {3}, {4}}};",
                in(reg32) self.shared(at), in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
        }
    }

    #[inline(always)]
    fn add_local(&self, at: u32, value: u32) -> u32 {
        let old: u32;
        // SAFETY: within the shared memory that the launch asked for.
        unsafe {
            asm!("atom.relaxed.cta.shared.add.u32 {0}, [{1}], {2};",
                out(reg32) old, in(reg32) self.shared(at), in(reg32) value, options(nostack));
        }
        old
    }
}

impl Wide for RigThread {
    #[inline(always)]
    fn load4(&self, at: GpuAddr) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe {
            asm!("ld.relaxed.sys.global.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) at.0, options(nostack));
        }
        [a, b, c, d]
    }

    #[inline(always)]
    fn store4(&self, at: GpuAddr, words: [u32; 4]) {
        let [a, b, c, d] = words;
        // SAFETY: the host vouches for the addresses that it describes to a kernel.
        unsafe {
            asm!("st.relaxed.sys.global.v4.u32 [{0}], {{{1}, {2}, {3}, {4}}};",
                in(reg64) at.0, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
        }
    }
}

impl Scoped for RigThread {
    #[inline(always)]
    fn fence_gpu(&self) {
        // SAFETY: touches no memory.
        unsafe { asm!("fence.acq_rel.gpu;", options(nostack)) };
    }
}

/// The calling warp's number in its block, and in the grid.
fn warp() -> (u32, u32) {
    // SAFETY: these read registers.
    let (thread, threads, block) = unsafe {
        (nvptx::_thread_idx_x() as u32, nvptx::_block_dim_x() as u32, nvptx::_block_idx_x() as u32)
    };
    (thread / LANES, block * (threads / LANES) + thread / LANES)
}

/// A kernel of one warp for each descriptor; each stores how it ended where its descriptor says.
macro_rules! kernel {
    ($name:ident, $run:path, $bytes:expr) => {
        /// # Safety
        /// Whole warps, at least `count`, with `words` words of shared memory for each, as many as the function behind
        /// it needs; `count` descriptors, and all that they name is there.
        // SAFETY: the name is this project's alone.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(list: u64, count: u32, words: u32) {
            let (in_block, index) = warp();
            if index < count {
                let mine = GpuAddr(list).plus(u64::from(index) * u64::from($bytes));
                let _: Exit = $run(&RigThread::new(in_block * words), mine);
            }
        }
    };
}

kernel!(onehop_serve, serve, onehop_controller::Pair::BYTES);
kernel!(onehop_null, null, onehop_controller::Pair::BYTES);
kernel!(onehop_null_far, null_far, onehop_controller::Pair::BYTES);
kernel!(onehop_check, check, onehop_controller::layout::DataCheck::BYTES);
kernel!(onehop_litmus_submit, litmus::submit, onehop_controller::layout::Litmus::BYTES);
kernel!(onehop_litmus_fetch, litmus::fetch, onehop_controller::layout::Litmus::BYTES);
kernel!(onehop_litmus_complete, litmus::complete, onehop_controller::layout::Litmus::BYTES);
kernel!(onehop_litmus_consume, litmus::consume, onehop_controller::layout::Litmus::BYTES);
