//! Resolves the value of `-d` to a drive.

use onehop_drive::{Drive, Options};
use onehop_pci::{Root, Usage};
use onehop_transfer::controllers::{self, FoundController};

use crate::error::{CliError, Result};
use crate::report;
use crate::stop::StopFlag;

pub(crate) use onehop_transfer::controllers::{address, block_device, present};

/// The option `-d` for any drive.
#[derive(clap::Args)]
pub(crate) struct DriveArg {
    /// The drive: 0000:0b:00.0 (a PCI address), sim:mem:64M, sim:IMAGE?lba=4096&mdts=5, qtest:SOCKET,MEMORY-FILE,
    /// vfio-user:SOCKET, nvme-tcp://HOST:PORT/NQN (over the network)
    #[arg(short = 'd', long = "drive", value_name = "DRIVE")]
    pub drive: String,
}

/// The option `-d` for real drives.
#[derive(clap::Args)]
pub(crate) struct RealDriveArg {
    /// The drive, by its PCI address: 0000:0b:00.0
    #[arg(short = 'd', long = "drive", value_name = "DRIVE")]
    pub drive: String,
}

/// Finds the controller that `-d` names, and prints warnings about it.
pub(crate) fn find(spec: &str, stop: &StopFlag) -> Result<FoundController> {
    // After Ctrl-C, any error is a consequence of it.
    let or_stopped = |error| stop.check().err().unwrap_or_else(|| CliError::from(error));
    let found = controllers::find(spec, &stop.signal()).map_err(or_stopped)?;
    for warning in &found.warnings {
        report::note(warning);
    }
    Ok(found)
}

/// Initializes a controller.
pub(crate) fn bring_up(found: FoundController, options: Options, stop: &StopFlag) -> Result<Drive> {
    let drive = Drive::open(found.backend, Options { stop: stop.signal(), ..options })?;
    stop.check()?;
    Ok(drive)
}

/// Finds and initializes a controller, for reads only.
pub(crate) fn open(spec: &str, stop: &StopFlag) -> Result<Drive> {
    bring_up(find(spec, stop)?, Options::default(), stop)
}

/// Fails unless the serial number is this drive's, and no other controller with the same drive is in use.
pub(crate) fn allow_writes(drive: &Drive, spec: &str, serial: &str) -> Result<()> {
    let identity = drive.identity();
    let own = identity.serial();
    if own.is_empty() || serial != own {
        return Err(CliError::Usage(format!(
            "'{}' is not the serial number of {}; `onehop drive identify -d '{spec}'` shows it",
            serial.escape_debug(),
            drive.name(),
        )));
    }
    // Only a drive on this machine's bus can be reachable through another of its controllers.
    let Ok(name) = address(spec) else { return Ok(()) };
    let all = Usage::all(&Root::here())?;
    Usage::other_path(&all, name.address, &own, &identity.model()).map_or(Ok(()), |other| {
        Err(onehop_pci::Error::Refused {
            what: format!("writing to {spec}"),
            why: format!("{} has the same model and serial number, and is or may be in use", other.address),
            fix: format!(
                "If it is the same drive, stop its users, or detach it from the kernel: `onehop drive bind -d {}`",
                other.address
            ),
        }
        .into())
    })
}
