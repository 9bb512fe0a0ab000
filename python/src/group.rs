//! Messages to a group before a load has begun.

use onehop_load::group::Group;
use pyo3::prelude::*;

use crate::error::Result;

/// Notifies the other processes of a group that this one does not load.
#[pyfunction]
pub(crate) fn decline_group(name: &str, rank: usize, size: usize, why: &str) -> Result<()> {
    Group::new(name, rank, size)?.decline(why);
    Ok(())
}
