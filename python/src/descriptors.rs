//! Room for the files of a model with many shards.
//!
//! A model keeps a descriptor of each shard from its header on, because that alone makes sure that all bytes are of one
//! version of the file; to open shards late would give that up. So the soft limit of the process is raised, but only when a
//! call needs more than there is, and only as far: a load of few files keeps the limit that the program chose.

use onehop_load::{Error, engine};
use onehop_os::{descriptor_limit, open_descriptors, raise_descriptor_limit};

/// Opens a model; again with twice the descriptors, as often as the hard limit allows, if there are too few.
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

/// Makes room for a load of so many files that are open already. Where there is none to be had, the load says so.
pub(crate) fn make_room(files: usize) {
    let open = open_descriptors().unwrap_or(files as u64);
    raise_descriptor_limit(open + engine::descriptors(files));
}
