//! The kernels.
#![no_std]
#![cfg_attr(not(target_arch = "nvptx64"), forbid(unsafe_code))]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, abi_unadjusted, asm_experimental_arch, link_llvm_intrinsics, stdarch_nvptx)
)]

pub mod params;

#[cfg(target_arch = "nvptx64")]
mod entry;
#[cfg(target_arch = "nvptx64")]
mod gpu;

/// The kernels as PTX for sm_80 and later; the driver compiles it for the GPU at hand.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../ptx/onehop.ptx");
