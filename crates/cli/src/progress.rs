//! A progress bar on stderr, where that is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that goes away by itself.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// A bar for so many bytes.
    pub(crate) fn new(what: &'static str, bytes: u64) -> Self {
        if !crate::terminal::has_bars() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::new(bytes).with_message(what);
        let template = "{msg} [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self(bar)
    }

    /// What sets how many bytes are done.
    pub(crate) fn setter(&self) -> impl Fn(u64) + Send + use<> {
        let bar = self.0.clone();
        move |bytes| bar.set_position(bytes)
    }

    /// So many bytes more are done.
    pub(crate) fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
