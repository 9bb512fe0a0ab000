//! The commands, one module each: its arguments, and a `run` that returns a report.

pub(crate) mod bar0;
pub(crate) mod bench;
pub(crate) mod bind;
pub(crate) mod check_p2p;
pub(crate) mod completions;
pub(crate) mod cufile;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod errors;
pub(crate) mod identify;
pub(crate) mod list;
pub(crate) mod load;
pub(crate) mod man;
pub(crate) mod map;
pub(crate) mod mount;
pub(crate) mod read;
pub(crate) mod recover;
pub(crate) mod report;
pub(crate) mod reset;
pub(crate) mod schema;
pub(crate) mod sdr;
pub(crate) mod serve;
pub(crate) mod smart;
pub(crate) mod target;
pub(crate) mod topo;
pub(crate) mod write;

#[cfg(test)]
mod rebinding;

use crate::stop::StopFlag;

/// The field `simulated` of a command that uses only a drive.
pub(crate) fn simulated_drive(is_simulated: bool) -> Vec<&'static str> {
    is_simulated.then_some("drive").into_iter().collect()
}

/// Common input of all commands.
pub(crate) struct CommandContext {
    pub stop: StopFlag,
    /// Whether the report is printed as JSON, which has all details.
    pub json: bool,
}
