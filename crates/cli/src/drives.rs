//! From what people write after `-d` to a controller.

use onehop_drive::{Drive, Options};
use onehop_transfer::controllers::{self, FoundController};

use crate::error::Result;
use crate::report;

pub(crate) use onehop_transfer::controllers::{address, block_device, present};

/// Which drive.
#[derive(clap::Args)]
pub(crate) struct DriveArg {
    /// The drive: 0000:0b:00.0 (a PCI address), sim:mem:64M, sim:IMAGE?lba=4096&mdts=5, qtest:SOCKET,MEMORY-FILE,
    /// vfio-user:SOCKET, nvme-tcp://HOST:PORT/NQN (across the network)
    #[arg(short = 'd', long = "drive", value_name = "DRIVE")]
    pub drive: String,
}

/// Finds the controller that a description names; says what its user has to know of it.
pub(crate) fn find(spec: &str) -> Result<FoundController> {
    let found = controllers::find(spec)?;
    for warning in &found.warnings {
        report::note(warning);
    }
    Ok(found)
}

/// Finds a controller and brings it up, for reading only.
pub(crate) fn open(spec: &str) -> Result<Drive> {
    Ok(Drive::open(find(spec)?.backend, Options::default())?)
}
