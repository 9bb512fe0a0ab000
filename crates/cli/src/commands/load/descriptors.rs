//! Whether this process may have as many files open as a model of many shards takes.

use onehop_load::{Model, engine};
use serde::Serialize;

use crate::error::{CliError, Result};

/// The descriptors that a load needs, and how many it may have.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Descriptors {
    /// About how many are needed, including those that are open already.
    pub needed: u64,
    /// How many this process may have; none where there is no limit.
    pub limit: Option<u64>,
    pub fits: bool,
}

impl Descriptors {
    /// For a model that is open; none if none of its files is on this machine.
    pub(super) fn of(model: &Model) -> Option<Self> {
        let files = model.files.iter().filter(|file| file.local().is_some()).count();
        let open = onehop_os::open_descriptors().unwrap_or(files as u64);
        let (needed, limit) = (open + engine::descriptors(files), onehop_os::descriptor_limit().now);
        (files > 0).then(|| Self { needed, limit, fits: limit.is_none_or(|limit| needed <= limit) })
    }

    /// The same in words.
    pub(super) fn words(&self) -> String {
        let Self { needed, limit, fits } = self;
        let limit = limit.map_or("no limit".into(), |limit| format!("{limit} allowed"));
        format!("{}about {needed} descriptors, {limit}", if *fits { "" } else { "TOO MANY: " })
    }
}

/// Refuses a model of more files than this process may have open.
pub(super) fn must_suffice(model: &Model) -> Result<()> {
    match Descriptors::of(model).filter(|descriptors| !descriptors.fits) {
        Some(descriptors) => Err(too_few("the model", &format!("it takes {}", descriptors.words()))),
        None => Ok(()),
    }
}

/// The error where the hard limit is too low: the soft one has been raised to it.
pub(super) fn too_few(what: &str, why: &str) -> CliError {
    let fix = "Raise the hard limit, as root: ulimit -Hn 65536, or LimitNOFILE=65536 in a systemd unit";
    CliError::not_possible(format!("loading {what}"), why, fix)
}
