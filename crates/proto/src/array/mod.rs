//! Arrays that are larger than the GPU's memory: a range of a namespace, cached in pages that GPU threads pin.
//!
//! All state is words in memory, and any thread may do any step. docs/architecture.md, *Arrays in device memory*,
//! explains the states, the orders and the failures.

mod backing;
mod cache;
mod claim;
mod error;
mod flush;
mod guard;
mod hits;
mod items;
mod layout;
mod misses;
mod request;
mod rows;

pub use backing::Backing;
pub use cache::{DriveArray, PageCache};
pub use error::ArrayError;
pub use flush::{FlushReport, Flushed, flush_slots};
pub use guard::{Pin, PinMut};
pub use hits::{HIT_WORDS, run_hits};
pub use items::{GatherItem, GatherJob, MissList};
pub use layout::{
    ArrayHandle, MAX_PAGE_BYTES, MIN_PAGE_BYTES, WAYS, broken_pages, counter, directory_bytes,
    directory_words, is_in_use,
};
pub use misses::{MISS_WORDS, run_misses};
pub use request::{PageRequest, PageStep};
pub use rows::{read_rows, write_rows};
