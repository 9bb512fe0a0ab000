//! libhf3fs_api_shared.so: implements `include/hf3fs_usrbio.h` and `include/hf3fs_usrbio_gdr.h` with [`onehop_usrbio`].
//!
//! The API passes structures and pointers whose validity the caller guarantees. Each is read once, in this crate; the
//! code below it sees neither.

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
