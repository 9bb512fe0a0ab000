//! From the value of `--device` to a board.

use std::sync::Arc;
use std::time::Duration;

use onehop_board::{Board, BoardConfig, BoardStats};
use onehop_pci::Root;
use onehop_sdr::{BoardName, Card, Profile, Session};

use crate::error::{CliError, Result};

/// Which board.
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
                     A PCI address takes rate=10M (what the board was set to) and signal=counter (what it is known to send)"
    )]
    device: String,
}

/// A board that was opened. The model, where it is one of this process, outlives the session.
pub(super) struct OpenedBoard {
    pub session: Arc<Session>,
    pub model: Option<Board>,
    /// Samples a second, where that is known.
    pub rate: Option<f64>,
    /// Whether it sends a counter, so that every sample can be checked.
    pub counter: bool,
}

impl OpenedBoard {
    /// How long a block of this many samples may take to arrive or to be played: several times its own duration, for
    /// busy machines.
    pub(super) fn patience(&self, samples: u32) -> Duration {
        patience(self.rate, samples)
    }

    /// What the model has done, where there is one to ask.
    pub(super) fn stats(&self) -> Option<BoardStats> {
        self.model.as_ref().map(Board::stats)
    }

    /// Rules of the board that the driver broke, as far as they are known: by name, and how.
    pub(super) fn breaches(&self) -> Vec<(&'static str, String)> {
        let list = self.model.as_ref().map(Board::violations).unwrap_or_default();
        list.into_iter().map(|violation| (violation.rule.name(), violation.detail)).collect()
    }

    /// The first of them, as what went wrong.
    pub(super) fn broken_rule(&self) -> Option<CliError> {
        let (rule, detail) = self.breaches().into_iter().next()?;
        Some(CliError::Failed(format!("the driver broke a rule of the board: {rule}: {detail}")))
    }
}

fn patience(rate: Option<f64>, samples: u32) -> Duration {
    // Every board that moves samples faster than that.
    let slowest = 1e5;
    Duration::from_secs_f64(f64::from(samples) / rate.unwrap_or(slowest) * 4.0) + Duration::from_secs(5)
}

/// The simulated board with these options.
pub(crate) fn simulated(options: &str) -> Result<Board> {
    let config = BoardConfig::parse(options).map_err(|error| CliError::Usage(error.to_string()))?;
    Board::new(config).map_err(|error| CliError::Failed(error.to_string()))
}

/// Opens it.
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
        return Ok(OpenedBoard { session, model: Some(board), rate: Some(rate), counter });
    }
    let name: BoardName = name.parse().map_err(|error| {
        let name = name.escape_debug();
        CliError::Usage(format!("'{name}' is not a board; use sim:usdr or a PCI address: {error}"))
    })?;
    let card = onehop_sdr::open(&Root::here(), name.address)?;
    let session = Session::open(card)?;
    Ok(OpenedBoard { session, model: None, rate: name.rate, counter: name.counter })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_rules_fail_a_command() {
        let opened = open(&BoardArg { device: "sim:usdr".into() }).unwrap();
        assert!(opened.broken_rule().is_none());
        opened.model.as_ref().unwrap().note_irregular_access(2, 1);
        assert!(opened.broken_rule().unwrap().to_string().contains("access: 1 bytes"));
    }
}
