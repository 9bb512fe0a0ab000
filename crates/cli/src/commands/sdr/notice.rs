//! The progress of a self-test that takes long, and how it is ended.

use std::io::Write;
use std::time::{Duration, Instant};

use onehop_radio::{BUFFERS, Shape};
use onehop_sdr::Error;

use crate::commands::CommandContext;
use crate::error::CliError;
use crate::stop::StopFlag;
use crate::units;

/// How long nothing is printed.
const SHORT: Duration = Duration::from_secs(1);

/// Reports on stderr how far a self-test is: on a terminal in one line, elsewhere in one every ten seconds.
pub(super) struct Notice<'a> {
    stop: &'a StopFlag,
    buffer: u32,
    begun: Instant,
    reported: Option<Instant>,
    terminal: bool,
}

impl<'a> Notice<'a> {
    pub(super) fn new(context: &'a CommandContext, shape: Shape) -> Self {
        let terminal = crate::terminal::has_bars();
        Self { stop: &context.stop, buffer: shape.bytes(), begun: Instant::now(), reported: None, terminal }
    }

    /// Takes how many buffers have been filled; returns whether to go on.
    pub(super) fn tell(&mut self, filled: u32) -> bool {
        let pause = Duration::from_millis(if self.terminal { 250 } else { 10_000 });
        if self.begun.elapsed() >= SHORT && self.reported.is_none_or(|reported| reported.elapsed() >= pause) {
            self.reported = Some(Instant::now());
            let mut words = format!("onehop: self-test, {} s", self.begun.elapsed().as_secs());
            if filled > 0 {
                let buffer = units::bytes(self.buffer.into());
                words += &format!(": {filled} of {BUFFERS} buffers of {buffer} are filled");
            }
            let line = if self.terminal { format!("\r{words:<72}") } else { words + "\n" };
            let _ = write!(std::io::stderr(), "{line}");
        }
        !self.stop.is_set()
    }
}

impl Drop for Notice<'_> {
    fn drop(&mut self) {
        if self.terminal && self.reported.is_some() {
            let _ = writeln!(std::io::stderr());
        }
    }
}

/// What went wrong with a board, or that the user stopped it.
pub(super) fn ended(error: Error) -> CliError {
    match error {
        Error::Cancelled => CliError::Interrupted,
        other => other.into(),
    }
}
