//! Checks that this process may have enough open files for a model of many shards.

use onehop_load::{Model, engine};
use serde::Serialize;

use crate::error::{CliError, Result};

/// The number of descriptors that a load needs, and the limit.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Descriptors {
    /// Approximate number needed, including those already open.
    pub needed: u64,
    /// The limit of this process, if there is one.
    pub limit: Option<u64>,
    pub fits: bool,
}

impl Descriptors {
    /// For an open model; `None` if it has no local files.
    pub(super) fn of(model: &Model) -> Option<Self> {
        let files = model.files.iter().filter(|file| file.local().is_some()).count();
        let open = onehop_os::open_descriptors().unwrap_or(files as u64);
        let (needed, limit) = (open + engine::descriptors(files), onehop_os::descriptor_limit().now);
        (files > 0).then(|| Self { needed, limit, fits: limit.is_none_or(|limit| needed <= limit) })
    }

    /// Formats the numbers.
    pub(super) fn text(&self) -> String {
        let Self { needed, limit, fits } = self;
        let limit = limit.map_or("no limit".into(), |limit| format!("{limit} allowed"));
        format!("{}about {needed} descriptors, {limit}", if *fits { "" } else { "TOO MANY: " })
    }
}

/// Refuses a model with more files than this process may have open.
pub(super) fn ensure_enough(model: &Model) -> Result<()> {
    match Descriptors::of(model).filter(|descriptors| !descriptors.fits) {
        Some(descriptors) => Err(too_few("the model", &format!("it needs {}", descriptors.text()))),
        None => Ok(()),
    }
}

/// The error for a hard limit that is too low. The soft limit has been raised to it.
pub(super) fn too_few(what: &str, why: &str) -> CliError {
    let fix = "Raise the hard limit, as root: ulimit -Hn 65536, or LimitNOFILE=65536 in a systemd unit";
    CliError::not_possible(format!("loading {what}"), why, fix)
}
