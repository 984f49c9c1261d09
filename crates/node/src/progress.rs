//! Progress of long work: a bar on a terminal, nothing in a pipe.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::io::{AsyncRead, AsyncWrite};

/// A bar on standard error; invisible unless that is a terminal.
pub struct ProgressMeter {
    bar: ProgressBar,
}

impl ProgressMeter {
    /// Progress over a known number of bytes.
    pub fn bytes(label: &str, total: u64) -> ProgressMeter {
        let style = "{prefix} {bar:32} {bytes}/{total_bytes} {bytes_per_sec} {msg} eta {eta}";
        ProgressMeter::with(
            label,
            ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(5)),
            style,
        )
    }

    /// Progress over an unknown number of bytes.
    pub fn stream(label: &str) -> ProgressMeter {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5));
        ProgressMeter::with(label, bar, "{prefix} {spinner} {bytes} {bytes_per_sec} {msg}")
    }

    /// Progress over a known number of things.
    pub fn count(what: &str, total: u64) -> ProgressMeter {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(5));
        ProgressMeter::with(what, bar, "{prefix} {bar:32} {pos}/{len} {msg} eta {eta}")
    }

    /// Progress over a known time, in seconds.
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

    /// A reader whose bytes are counted.
    pub fn reading<R: AsyncRead + Unpin>(&self, reader: R) -> impl AsyncRead + Unpin + use<R> {
        self.bar.wrap_async_read(reader)
    }

    /// A writer whose bytes are counted.
    pub fn writing<W: AsyncWrite + Unpin>(&self, writer: W) -> impl AsyncWrite + Unpin + use<W> {
        self.bar.wrap_async_write(writer)
    }

    /// So much is done of so much in all.
    pub fn set(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
    }

    /// Something was done.
    pub fn add(&self, amount: u64) {
        self.bar.inc(amount);
    }

    /// More is to be done than was known.
    pub fn grow(&self, amount: u64) {
        self.bar.inc_length(amount);
    }

    /// Prints something while the bar is out of the way.
    pub fn suspended(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }

    /// Says something beside the bar.
    pub fn message(&self, text: impl Into<String>) {
        self.bar.set_message(text.into());
    }
}

impl Drop for ProgressMeter {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
