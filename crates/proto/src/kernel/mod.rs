//! What GPU threads run: ordinary generic functions over [`Memory`] and [`Warp`]. The emulated GPU calls them on CPU
//! threads, the device crate wraps them into kernel entries.

mod job;
mod owner;
mod shared;

pub use job::{Exit, Job, Outcome, Work};
pub use owner::{OwnerQueue, run_owner, scratch_bytes, scratch_init};
pub use shared::run_shared;

use crate::queue::Memory;

/// Threads that run in step and act on one queue pair together.
///
/// Code between two calls is run by every lane with the same values; only the closures see single lanes.
pub trait Warp: Memory {
    /// How many lanes there are.
    fn lanes(&self) -> u32;
    /// Runs `f` on every lane; when it returns, what each lane stored is seen by all of them.
    fn each(&self, f: impl FnMut(u32));
    /// Runs `f` on one lane; when it returns, what it stored is seen by all of them.
    fn once(&self, f: impl FnMut());
    /// How many lanes answer yes, counted from lane 0 up to the first no.
    fn prefix(&self, f: impl FnMut(u32) -> bool) -> u32;
}
