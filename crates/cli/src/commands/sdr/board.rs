//! From what people write after `--device` to a board.

use std::sync::Arc;
use std::time::Duration;

use onehop_board::{Board, Config};
use onehop_sdr::{Card, Profile, Session};

use crate::error::{CliError, Result};
use crate::units;

/// Which board.
#[derive(Clone, clap::Args)]
pub(super) struct BoardArg {
    /// The board: sim:usdr with options, or a PCI address
    #[arg(
        long,
        value_name = "DEVICE",
        default_value = "sim:usdr",
        long_help = "The board: a PCI address, or sim:usdr, a simulated one, with options behind '?', parted by '&':\n\
                     rate=10M, signal=tone|noise|chirp|counter, freq=0.125 (of the rate), level=-6 (dBFS), dc=0, patient=1 \
                     (waits instead of losing samples), id=10ee:7045, max=1048576, mask=32, time=1, \
                     iommu=translated|off, bar=low|high, p2p=works|writes|dropped|refused, flr=1"
    )]
    device: String,
}

/// A board that was opened. The model, where it is one, outlives the session.
pub(super) struct Opened {
    pub session: Arc<Session>,
    pub board: Board,
}

impl Opened {
    /// How long a block of so many samples may take to come: its own time several times over, on a busy machine.
    pub(super) fn patience(&self, samples: u32) -> Duration {
        Duration::from_secs_f64(f64::from(samples) / self.board.config().rate * 4.0) + Duration::from_secs(5)
    }
}

/// The simulated board with these options.
pub(crate) fn simulated(options: &str) -> Result<Board> {
    let config = Config::parse(options).map_err(|error| CliError::Usage(error.to_string()))?;
    Board::new(config).map_err(|error| CliError::Failed(error.to_string()))
}

/// Opens it.
pub(super) fn open(arg: &BoardArg) -> Result<Opened> {
    let name = arg.device.as_str();
    if let Some(options) = name.strip_prefix("sim:") {
        let board = simulated(options)?;
        let profile =
            Profile { rx: board.limits(), tells_time: board.config().tells_time, ..Profile::SIMULATED };
        let mut port = board.port();
        name.clone_into(&mut port.name);
        let session = Session::open(Card::new(&port, board.interrupt(), profile))?;
        return Ok(Opened { session, board });
    }
    if units::is_pci_address(name) {
        return Err(CliError::not_possible(
            format!("using the board at {name}"),
            "its registers and its interrupt need a kernel module by which a program drives it, and this build has none",
            "Use the simulated board: --device sim:usdr",
        ));
    }
    Err(CliError::Usage(format!("'{}' is no board: it is sim:usdr or a PCI address", name.escape_debug())))
}
