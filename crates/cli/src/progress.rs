//! A progress bar on stderr, if that is a terminal.

use std::fmt::Write;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressState, ProgressStyle};

use crate::units;

/// No rate is shown before this: the first bytes of a load are counted late.
const WARM_UP: Duration = Duration::from_millis(500);

/// A bar that is cleared on drop.
pub(crate) struct TransientBar(ProgressBar);

impl TransientBar {
    /// A bar for this many bytes.
    pub(crate) fn of_bytes(what: &'static str, bytes: u64) -> Self {
        Self::with_template(what, bytes, "{msg} [{wide_bar}] {bytes}/{total_bytes} {rate}")
    }

    /// A bar for this many measurements.
    pub(crate) fn of_steps(what: &'static str, steps: u64) -> Self {
        Self::with_template(what, steps, "{msg} [{wide_bar}] {pos} of {len}")
    }

    fn with_template(what: &'static str, total: u64, template: &str) -> Self {
        if !crate::terminal::has_bars() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::new(total).with_message(what);
        if let Ok(style) = ProgressStyle::with_template(template) {
            let rate = move |state: &ProgressState, out: &mut dyn Write| {
                // A progress bar cannot report errors.
                let _ = out.write_str(&rate(state.pos(), total, state.elapsed()));
            };
            bar.set_style(style.with_key("rate", rate));
        }
        Self(bar)
    }

    /// A function that sets the position.
    pub(crate) fn setter(&self) -> impl Fn(u64) + Send + use<> {
        let bar = self.0.clone();
        move |done| bar.set_position(done)
    }

    /// Advances the position.
    pub(crate) fn add(&self, done: u64) {
        self.0.inc(done);
    }
}

impl Drop for TransientBar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// The average rate and the remaining time, or nothing while they are unknown.
fn rate(done: u64, total: u64, elapsed: Duration) -> String {
    if done == 0 || elapsed < WARM_UP {
        return String::new();
    }
    let rate = done as f64 / elapsed.as_secs_f64();
    let left = total.saturating_sub(done) as f64 / rate;
    format!("{}/s, {left:.0} s left", units::bytes(rate as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_rate_is_shown_before_it_is_known() {
        assert_eq!(rate(64 << 20, 1 << 30, Duration::from_micros(200)), "");
        assert_eq!(rate(0, 1 << 30, Duration::from_secs(9)), "");
        assert_eq!(rate(512 << 20, 1 << 30, Duration::from_secs(1)), "512 MiB/s, 1 s left");
        assert_eq!(rate(2 << 30, 1 << 30, Duration::from_secs(2)), "1 GiB/s, 0 s left");
    }
}
