//! What a GPU offers for measurements and diagnosis.

use std::sync::Arc;
use std::time::Duration;

use crate::{Doorbells, Gpu, Result};

/// Kernels for measurements and diagnosis. No route needs them.
pub trait Instruments {
    /// The same GPU with kernels that take times: `onehop_proto::kernel::times` says where they store them, after the
    /// outcomes of a job. They are slower, and only whole warps take times.
    ///
    /// # Errors
    /// When they cannot be loaded.
    fn metered(&self) -> Result<Arc<dyn Gpu>>;

    /// Makes one GPU thread read `count` adjacent registers, at most 16, from the one at `first` on, of those that
    /// [`Gpu::map_registers`] mapped; returns their values. The first value of all ones is the last that is read,
    /// because nothing answered for it. No read starts after `limit`. Lost reads may take the device's link down, or
    /// the GPU with it.
    ///
    /// # Errors
    /// When there are no such registers, it cannot be started, the GPU fails, or a read neither ends nor fails: then no
    /// memory of this GPU is freed before it does.
    fn peek(&self, registers: &Doorbells, first: u32, count: u32, limit: Duration) -> Result<Vec<u32>>;
}
