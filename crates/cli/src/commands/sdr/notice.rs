//! Shows the progress of a long self-test, and lets Ctrl-C cancel it.

use std::io::Write;
use std::time::{Duration, Instant};

use onehop_radio::{BUFFERS, Shape};
use onehop_sdr::Error;

use crate::commands::CommandContext;
use crate::error::CliError;
use crate::stop::StopFlag;
use crate::units;

/// Nothing is printed before this.
const SILENT_FOR: Duration = Duration::from_secs(1);

/// Prints the progress of a self-test on stderr: a redrawn line on a terminal, otherwise a line every ten seconds.
pub(super) struct SelfTestProgress<'a> {
    stop: &'a StopFlag,
    buffer: u32,
    start: Instant,
    reported: Option<Instant>,
    terminal: bool,
}

impl<'a> SelfTestProgress<'a> {
    pub(super) fn new(context: &'a CommandContext, shape: Shape) -> Self {
        let terminal = crate::terminal::has_bars();
        Self { stop: &context.stop, buffer: shape.bytes(), start: Instant::now(), reported: None, terminal }
    }

    /// Updates the number of filled buffers; returns whether to continue.
    pub(super) fn update(&mut self, filled: u32) -> bool {
        let interval = Duration::from_millis(if self.terminal { 250 } else { 10_000 });
        if self.start.elapsed() >= SILENT_FOR
            && self.reported.is_none_or(|reported| reported.elapsed() >= interval)
        {
            self.reported = Some(Instant::now());
            let mut words = format!("onehop: self-test, {} s", self.start.elapsed().as_secs());
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

impl Drop for SelfTestProgress<'_> {
    fn drop(&mut self) {
        if self.terminal && self.reported.is_some() {
            let _ = writeln!(std::io::stderr());
        }
    }
}

/// Converts an error of the self-test; a cancelled one was stopped by the user.
pub(super) fn self_test_error(error: Error) -> CliError {
    match error {
        Error::Cancelled => CliError::Interrupted,
        other => other.into(),
    }
}
