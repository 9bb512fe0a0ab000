//! Resolves the value of `--device` to a board.

use std::sync::Arc;
use std::time::Duration;

use onehop_board::{Board, BoardConfig, BoardStats};
use onehop_pci::Root;
use onehop_sdr::{BoardName, Card, Profile, Session};

use crate::error::{CliError, Result};

/// The option `--device`.
#[derive(Clone, clap::Args)]
pub(super) struct BoardArg {
    /// The board: sim:usdr with options, or a PCI address
    #[arg(
        short = 'd',
        long,
        value_name = "DEVICE",
        default_value = "sim:usdr",
        long_help = "The board: a PCI address, or sim:usdr, a simulated one, with options after '?', joined by '&':\n\
                     rate=10M, signal=tone|noise|chirp|counter, freq=0.125 (of the rate), level=-6 (dBFS), dc=0, patient=1 \
                     (waits instead of losing samples), id=10ee:7045, max=1048576, mask=32, time=1 (events carry the board's clock), \
                     missing=0+3-5@n=7 (these bursts of every seventh block), untold=1 (losses are not reported), \
                     iommu=translated|off, bar=low|high, p2p=works|writes|dropped|refused, flr=1.\n\
                     A PCI address takes rate=10M (its configured rate) and signal=counter (if it sends a counter)"
    )]
    device: String,
}

/// An open board. A simulated board outlives its session.
pub(super) struct OpenedBoard {
    pub session: Arc<Session>,
    pub simulation: Option<Board>,
    /// Samples per second, if known.
    pub rate: Option<f64>,
    /// Whether it sends a counter, so that every sample can be checked.
    pub counter: bool,
}

impl OpenedBoard {
    /// Time limit for a block of this many samples to arrive or be played: several times its duration, for busy
    /// machines.
    pub(super) fn timeout(&self, samples: u32) -> Duration {
        timeout(self.rate, samples)
    }

    /// Statistics of a simulated board.
    pub(super) fn stats(&self) -> Option<BoardStats> {
        self.simulation.as_ref().map(Board::stats)
    }

    /// Rules of the board that the driver violated: name and detail. Only a simulated board detects them.
    pub(super) fn violations(&self) -> Vec<(&'static str, String)> {
        let list = self.simulation.as_ref().map(Board::violations).unwrap_or_default();
        list.into_iter().map(|violation| (violation.rule.name(), violation.detail)).collect()
    }

    /// The first violation as an error.
    pub(super) fn violation_error(&self) -> Option<CliError> {
        let (rule, detail) = self.violations().into_iter().next()?;
        Some(CliError::Failed(format!("the driver violated a rule of the board: {rule}: {detail}")))
    }
}

fn timeout(rate: Option<f64>, samples: u32) -> Duration {
    // Assumed for an unknown rate; boards are faster.
    let min_rate = 1e5;
    Duration::from_secs_f64(f64::from(samples) / rate.unwrap_or(min_rate) * 4.0) + Duration::from_secs(5)
}

/// Creates a simulated board with these options.
pub(crate) fn simulated(options: &str) -> Result<Board> {
    let config = BoardConfig::parse(options).map_err(|error| CliError::Usage(error.to_string()))?;
    Board::new(config).map_err(|error| CliError::Failed(error.to_string()))
}

/// Opens a board.
pub(super) fn open(arg: &BoardArg) -> Result<OpenedBoard> {
    let name = arg.device.as_str();
    if let Some(options) = name.strip_prefix("sim:") {
        let board = simulated(options)?;
        let profile = Profile {
            rx: board.limits(),
            tx: board.tx_limits(),
            reports_time: board.config().reports_time,
            ..Profile::SIMULATED
        };
        let mut port = board.port();
        name.clone_into(&mut port.name);
        let session = Session::open(Card::new(&port, board.interrupt(), profile))?;
        let (rate, counter) = (board.config().rate, board.config().signal.is_counter());
        return Ok(OpenedBoard { session, simulation: Some(board), rate: Some(rate), counter });
    }
    let name: BoardName = name.parse().map_err(|error| {
        let name = name.escape_debug();
        CliError::Usage(format!("'{name}' is not a board; use sim:usdr or a PCI address: {error}"))
    })?;
    let card = onehop_sdr::open(&Root::here(), name.address)?;
    let session = Session::open(card)?;
    Ok(OpenedBoard { session, simulation: None, rate: name.rate, counter: name.counter })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn violations_fail_a_command() {
        let opened = open(&BoardArg { device: "sim:usdr".into() }).unwrap();
        assert!(opened.violation_error().is_none());
        opened.simulation.as_ref().unwrap().note_irregular_access(2, 1);
        assert!(opened.violation_error().unwrap().to_string().contains("access: 1 bytes"));
    }
}
