//! Descriptors for models with many shards.
//!
//! A model keeps a descriptor of each shard from its header on: only this ensures that all bytes are from one version
//! of the file. So the soft limit of the process is raised, but only when a call needs more, and only as far: a load of
//! few files keeps the limit that the program chose.

use onehop_load::{Error, engine};
use onehop_os::{descriptor_limit, open_descriptors, raise_descriptor_limit};

/// Opens a model. If there are too few descriptors, doubles their limit, up to the hard limit, and retries.
pub(crate) fn with_room<T>(open: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
    loop {
        match open() {
            Err(error) if error.is_out_of_descriptors() => {
                let Some(now) = descriptor_limit().now else { return Err(error) };
                if raise_descriptor_limit(now.saturating_mul(2)).now.is_some_and(|raised| raised <= now) {
                    return Err(error);
                }
            }
            other => return other,
        }
    }
}

/// Raises the limit for a load of this many open files. If that fails, the load reports it.
pub(crate) fn make_room(files: usize) {
    let open = open_descriptors().unwrap_or(files as u64);
    raise_descriptor_limit(open + engine::descriptors(files));
}
