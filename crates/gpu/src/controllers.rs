//! Memory of resident controllers ([`ControllerHost::serve`]): descriptors of queue pairs, and a table of mappings.
//!
//! Both are full of addresses that controllers read and write, so neither gives out its memory. An address is stored
//! there only after a check that it is GPU memory, which is held until the controllers have ended.

pub(crate) mod emulated;
mod pairs;
mod table;

pub use pairs::{Begin, Common, Pairs};
pub use table::Table;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onehop_proto::GpuAddr;

use crate::{Region, Resident, Result};

/// Keeps memory from being freed.
pub type Hold = Arc<dyn Send + Sync>;

/// A GPU that runs resident controllers.
///
/// [`Self::serve`] trusts [`Self::hold`]: a GPU that wraps another one and forwards one of them forwards both.
pub trait ControllerHost {
    /// Loads the controllers, which takes a while the first time.
    ///
    /// # Errors
    /// When they cannot be loaded.
    fn load(&self) -> Result<()> {
        Ok(())
    }
    /// Holds memory whose address a controller is about to get: it is not freed as long as the result lives. On GPUs such
    /// as the emulated one, where wrong addresses are errors, there is nothing to hold.
    ///
    /// # Errors
    /// When the range is not memory that the GPU reaches.
    fn hold(&self, what: &'static str, at: GpuAddr, bytes: u64) -> Result<Hold>;
    /// Starts controllers: a warp for each pair. [`Pairs::start`] calls it.
    ///
    /// # Errors
    /// When they cannot be started.
    fn serve(&self, serving: Serving) -> Result<Box<dyn Resident>>;
}

/// What [`ControllerHost::serve`] starts; only [`Pairs::start`] makes one.
pub struct Serving {
    pub(crate) pairs: GpuAddr,
    pub(crate) count: u32,
    pub(crate) limit: Duration,
    /// Kept until all have ended.
    pub(crate) memory: Vec<Region>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes words from `at` on.
fn put(region: &Region, at: usize, words: &[u32]) -> Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    region.write(at, &bytes)
}

/// Reads `N` words from `at` on.
fn get<const N: usize>(region: &Region, at: usize) -> Result<[u32; N]> {
    let mut bytes = vec![0; N * 4];
    region.read(at, &mut bytes)?;
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    Ok(words)
}
