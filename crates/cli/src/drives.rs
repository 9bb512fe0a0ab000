//! From what people write after `-d` to a controller.

use std::path::PathBuf;

use onehop_drive::{Drive, Options};
use onehop_os::Port;
use onehop_sim::Media;

use crate::error::{CliError, Result};
use crate::units;

const WANTED: &str = "a drive is sim:mem:64M or sim:IMAGE (a simulated one), qtest:SOCKET,MEMORY-FILE (QEMU's), or a \
                      PCI address such as 0000:0b:00.0";

/// Which drive.
#[derive(clap::Args)]
pub(crate) struct DriveArg {
    /// The drive: sim:mem:64M, sim:IMAGE?lba=4096&mdts=5, qtest:SOCKET,MEMORY-FILE
    #[arg(short = 'd', long = "drive", value_name = "DRIVE")]
    pub drive: String,
}

/// A controller that was found, not yet brought up.
pub(crate) struct Found {
    pub port: Port,
    /// The file that holds its blocks, where that is a file of this machine.
    pub image: Option<PathBuf>,
}

/// Finds the controller that a description names.
pub(crate) fn find(spec: &str) -> Result<Found> {
    if let Some(rest) = spec.strip_prefix("sim:") {
        let sim = onehop_sim::open(rest)?;
        let image = match &sim.config().media {
            Media::Image { path, .. } => Some(path.clone()),
            Media::Memory(_) => None,
        };
        return Ok(Found { port: sim.port(), image });
    }
    if let Some(rest) = spec.strip_prefix("qtest:") {
        return Ok(Found { port: onehop_qtest::open(rest)?, image: None });
    }
    if units::is_pci_address(spec) {
        return Err(CliError::not_possible(
            format!("driving the PCI device {spec}"),
            "this build has no driver for real PCI devices yet; it comes with the pci room",
            "Use a simulated drive (-d sim:mem:64M) or QEMU's (-d qtest:SOCKET,MEMORY-FILE, see bed/qtest.sh)",
        ));
    }
    Err(CliError::Usage(format!("'{}' is no drive: {WANTED}", spec.escape_debug())))
}

/// Finds a controller and brings it up, for reading only.
pub(crate) fn open(spec: &str) -> Result<Drive> {
    Ok(Drive::open(find(spec)?.port, Options::default())?)
}
