//! Arrays on a drive that GPU threads read and write as memory.
//!
//! An [`Array`] is a range of blocks and a cache of its pages in memory that the GPU reaches. Kernels get its
//! [handle](Array::handle) and use `onehop_proto::array::PageCache`; [`Array::gather`] and [`Array::scatter`] are kernels of our
//! own that move rows. What is written reaches the drive by [`Array::flush`], or when its page has to make room.
#![forbid(unsafe_code)]

mod array;
mod error;
mod options;
mod stats;

pub use array::{Array, Flushed, MovedRows};
pub use error::{Error, Result};
pub use onehop_gpu::ArrayRows;
pub use onehop_proto::array::ArrayError;
pub use options::ArrayOptions;
pub use stats::ArrayStats;
