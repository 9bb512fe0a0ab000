//! The kernels for NVIDIA GPUs: their PTX, and the parameters of a launch.
//!
//! All kernels take their queues as descriptors in memory that the GPU can access, and the job by value, as a kernel
//! parameter. Addresses are the GPU's. Rings and control memory are what [`KernelQueue`](onehop_proto::kernel::KernelQueue) says; control memory is zeroed
//! when it is allocated and never again, rings each time a queue is created.
//!
//! | entry | parameters | grid × block | dynamic shared memory |
//! |---|---|---|---|
//! | `onehop_owner_prepare` | `queues: *KernelQueue, count: u32` | ⌈count/32⌉ × 32 | 0 |
//! | `onehop_owner` | `queues: *KernelQueue, exits: *[u32; 2], job: KernelJob, warps: u32` | warps × 32 | [`params::OWNER_SHARED_BYTES`] |
//! | `onehop_single` | as `onehop_owner`, for queues whose window is 1 | warps × 32 | [`params::SINGLE_SHARED_BYTES`] |
//! | `onehop_shared_prepare` | `queues: *KernelQueue, count: u32` | ⌈count/32⌉ × 32 | 0 |
//! | `onehop_shared` | `queues: *KernelQueue, exits: *[u32; 2], job: KernelJob, warps: u32, count: u32` | any that holds `warps` warps, blocks of a multiple of 32, at most 768 | [`params::GROUP_SHARED_BYTES`] × warps of a block |
//!
//! In owner mode `warps` is the count of queues: block `i` executes its equal part of the job on queue `i`. In shared mode warp
//! `i` of the grid executes its equal part of the job on queue `i % count`; the rings' sizes are powers of two. Each warp
//! stores the words of an `onehop_proto::kernel::Exit` in `exits`, 8-byte aligned, zeroed before: if they stay zero, it did
//! not end. `prepare` runs after each creation of the queues, and ends before the next launch. The deadline is
//! the job's limit after the start of each warp.
#![no_std]
#![cfg_attr(not(target_arch = "nvptx64"), forbid(unsafe_code))]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_unadjusted, asm_experimental_arch, link_llvm_intrinsics, stdarch_nvptx)
)]
#![cfg_attr(all(target_arch = "nvptx64", not(rig)), feature(abi_ptx))]

pub mod params;

#[cfg(all(target_arch = "nvptx64", not(rig)))]
mod entry;
#[cfg(target_arch = "nvptx64")]
pub mod gpu;
#[cfg(not(target_arch = "nvptx64"))]
mod ptx;
#[cfg(not(target_arch = "nvptx64"))]
pub use ptx::Ptx;

#[cfg(not(target_arch = "nvptx64"))]
extern crate alloc;

/// The kernels as PTX for sm_80 and later; the driver compiles it for the GPU at hand.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: Ptx = Ptx(include_bytes!(concat!(env!("OUT_DIR"), "/onehop.ptx")));

/// The same kernels, which also record when each command began and ended, and what their warps spent their time on:
/// `onehop_proto::kernel::times` says where. They are slower; for benchmarks.
#[cfg(not(target_arch = "nvptx64"))]
pub const METER_PTX: Ptx = Ptx(include_bytes!(concat!(env!("OUT_DIR"), "/meter.ptx")));

/// Functions for other people's kernels, to be linked with theirs: what `include/onehop/device.h` declares.
#[cfg(not(target_arch = "nvptx64"))]
pub const LIBRARY_PTX: &str = include_str!("../ptx/library.ptx");

/// Kernels for tests and benchmarks, from `rig.rs`: controllers that serve queues in GPU memory, litmus experiments.
#[cfg(not(target_arch = "nvptx64"))]
pub const RIG_PTX: Ptx = Ptx(include_bytes!(concat!(env!("OUT_DIR"), "/rig.ptx")));

/// The PTX of the kernels that work on data, of `blocks.rs`.
#[cfg(not(target_arch = "nvptx64"))]
pub const BLOCKS_PTX: Ptx = Ptx(include_bytes!(concat!(env!("OUT_DIR"), "/blocks.ptx")));

/// The PTX of the kernel that reads registers, of `peek.rs`.
#[cfg(not(target_arch = "nvptx64"))]
pub const PEEK_PTX: &str = include_str!("../ptx/peek.ptx");

/// The PTX of the kernels that mark memory, of `marks.rs`.
#[cfg(not(target_arch = "nvptx64"))]
pub const MARKS_PTX: &str = include_str!("../ptx/marks.ptx");

/// The PTX of the kernel that copies for operations in streams, of `place.rs`.
#[cfg(not(target_arch = "nvptx64"))]
pub const PLACE_PTX: &str = include_str!("../ptx/place.ptx");

/// The PTX of the kernels of arrays, of `array.rs`.
#[cfg(not(target_arch = "nvptx64"))]
pub const ARRAY_PTX: Ptx = Ptx(include_bytes!(concat!(env!("OUT_DIR"), "/array.ptx")));

#[cfg(all(test, not(target_arch = "nvptx64")))]
mod tests {
    #[test]
    fn what_is_packed_is_what_is_checked_in() {
        for (packed, text) in [
            (super::PTX, include_str!("../ptx/onehop.ptx")),
            (super::METER_PTX, include_str!("../ptx/meter.ptx")),
            (super::RIG_PTX, include_str!("../ptx/rig.ptx")),
            (super::BLOCKS_PTX, include_str!("../ptx/blocks.ptx")),
            (super::ARRAY_PTX, include_str!("../ptx/array.ptx")),
        ] {
            assert!(packed.text() == text);
        }
    }

    #[test]
    fn every_entry_is_there() {
        for name in [
            "onehop_owner",
            "onehop_owner_prepare",
            "onehop_single",
            "onehop_shared",
            "onehop_shared_prepare",
        ] {
            for ptx in [super::PTX, super::METER_PTX] {
                assert!(ptx.text().contains(&std::format!(".visible .entry {name}(")), "{name}");
            }
        }
        for name in
            ["read", "write", "submit", "test", "wait", "blocks", "block_bytes", "most_blocks", "data_bytes"]
        {
            let function = std::format!(" onehop_{name}(");
            let mut lines = super::LIBRARY_PTX.lines().filter(|line| line.starts_with(".visible .func"));
            assert!(lines.any(|line| line.ends_with(&function)), "{name}");
        }
        assert!(super::PTX.text().contains(".param .align 8 .b8 onehop_owner_param_2[88]"), "the job's size");
        assert!(super::PEEK_PTX.contains(".visible .entry onehop_peek("));
        assert!(super::PLACE_PTX.contains(".visible .entry onehop_place("));
        for name in ["hits", "misses", "read", "write", "flush"] {
            assert!(
                super::ARRAY_PTX.text().contains(&std::format!(".visible .entry onehop_array_{name}(")),
                "{name}"
            );
        }
        assert!(super::ARRAY_PTX.text().contains("onehop_array_hits_param_1[56]"), "the job's size");
        for name in ["onehop_mark", "onehop_marks_left"] {
            assert!(super::MARKS_PTX.contains(&std::format!(".visible .entry {name}(")), "{name}");
        }
        for (name, bytes) in
            [("samples_convert", 48), ("samples_spectrum", 40), ("samples_check", 32), ("crc32c", 40)]
        {
            let parameter = std::format!(".param .align 8 .b8 onehop_{name}_param_0[{bytes}]");
            assert!(super::BLOCKS_PTX.text().contains(&parameter), "{parameter}");
        }
    }

    extern crate std;
}
