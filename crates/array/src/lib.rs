//! Arrays on a drive that GPU threads access like memory, through a cache of pages that the GPU reaches.
//!
//! 1. [`Array::open`] takes a range of blocks of a drive, and makes the cache and a queue that kernels drive.
//! 2. [`Array::handle`] is for kernels, which use it with `onehop_proto::array::PageCache`.
//! 3. [`Array::gather`] and [`Array::scatter`] move rows by kernels of our own.
//! 4. [`Array::flush`] makes writes durable. Until then a page is written only to make room.
//! 5. [`Array::close`] flushes and deletes the queue.
#![forbid(unsafe_code)]

mod array;
mod error;
mod options;
mod stats;

pub use array::{Array, Flushed, MovedRows};
pub use error::{Error, Result};
pub use onehop_gpu::ArrayRows;
pub use onehop_proto::array::{ArrayError, GatherItem};
pub use options::ArrayOptions;
pub use stats::ArrayStats;
