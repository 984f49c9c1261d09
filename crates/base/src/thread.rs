//! Threads named by class, so that CPU time can be booked per class.

use std::thread::{Builder, JoinHandle};

/// What a thread is for. The class is the part of the thread's name before the dash, e.g. `store-0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ThreadClass {
    /// Network connections that are not served by a shard's own loop.
    Messenger,
    /// An OSD shard: request handling, and the connections pinned to it.
    Osd,
    /// The host–DPU channel's software: rings, doorbells, control socket.
    Channel,
    /// Emulated DMA hardware. Its CPU time stands for work that a device would do.
    Dma,
    /// A target: drive I/O, log, index.
    Store,
    /// The client library and what drives it.
    Client,
    /// Supervision, metrics and other housekeeping.
    Admin,
}

impl ThreadClass {
    /// The name's prefix.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            ThreadClass::Messenger => "msgr",
            ThreadClass::Osd => "osd",
            ThreadClass::Channel => "chan",
            ThreadClass::Dma => "dma",
            ThreadClass::Store => "store",
            ThreadClass::Client => "client",
            ThreadClass::Admin => "admin",
        }
    }
}

/// Starts a thread called `<class>-<suffix>`. Linux keeps the first 15 bytes of a thread's name.
///
/// # Errors
/// If the system has no room for another thread.
pub fn spawn<T: Send + 'static>(
    class: ThreadClass,
    suffix: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<JoinHandle<T>> {
    Builder::new().name(format!("{}-{suffix}", class.prefix())).spawn(body)
}
