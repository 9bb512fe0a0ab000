//! libhf3fs_api_shared.so: what `include/hf3fs_usrbio.h` and `include/hf3fs_usrbio_gdr.h` declare, over [`onehop_usrbio`].
//!
//! The API passes structures that the caller owns and pointers that the caller vouches for; each is looked at once, here, and
//! what is below has neither.

mod arguments;
mod gpu;
mod handle;
mod host;
mod rings;
mod state;
#[cfg(test)]
mod tests;
mod types;

pub use types::{Cqe, GPU_MARK, GpuHandle, Ior, Iov};
