//! Progress of long operations: a bar on a terminal, no output to a pipe.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::io::{AsyncRead, AsyncWrite};

/// A progress bar on standard error; invisible if standard error is not a terminal.
pub struct ProgressMeter {
    bar: ProgressBar,
}

impl ProgressMeter {
    /// Creates a bar for a known number of bytes.
    pub fn bytes(label: &str, total: u64) -> ProgressMeter {
        let style = "{prefix} {bar:32} {bytes}/{total_bytes} {bytes_per_sec} {msg} eta {eta}";
        ProgressMeter::with(
            label,
            ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(5)),
            style,
        )
    }

    /// Creates a bar for an unknown number of bytes.
    pub fn stream(label: &str) -> ProgressMeter {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5));
        ProgressMeter::with(label, bar, "{prefix} {spinner} {bytes} {bytes_per_sec} {msg}")
    }

    /// Creates a bar for a known number of items.
    pub fn count(what: &str, total: u64) -> ProgressMeter {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(5));
        ProgressMeter::with(what, bar, "{prefix} {bar:32} {pos}/{len} {msg} eta {eta}")
    }

    /// Creates a bar for a known time, in seconds.
    pub fn seconds(label: &str, total: u64) -> ProgressMeter {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(5));
        ProgressMeter::with(label, bar, "{prefix} {bar:32} {pos}/{len} s {msg}")
    }

    fn with(label: &str, bar: ProgressBar, template: &str) -> ProgressMeter {
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = bar.with_style(style).with_prefix(label.to_owned());
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        ProgressMeter { bar }
    }

    /// Returns a reader whose bytes advance the bar.
    pub fn reading<R: AsyncRead + Unpin>(&self, reader: R) -> impl AsyncRead + Unpin + use<R> {
        self.bar.wrap_async_read(reader)
    }

    /// Returns a writer whose bytes advance the bar.
    pub fn writing<W: AsyncWrite + Unpin>(&self, writer: W) -> impl AsyncWrite + Unpin + use<W> {
        self.bar.wrap_async_write(writer)
    }

    /// Sets the completed amount and the total amount.
    pub fn set(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
    }

    /// Adds to the completed amount.
    pub fn add(&self, amount: u64) {
        self.bar.inc(amount);
    }

    /// Adds to the total amount.
    pub fn grow(&self, amount: u64) {
        self.bar.inc_length(amount);
    }

    /// Hides the bar while `print` runs.
    pub fn suspended(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }

    /// Shows a message beside the bar.
    pub fn message(&self, text: impl Into<String>) {
        self.bar.set_message(text.into());
    }
}

impl Drop for ProgressMeter {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
