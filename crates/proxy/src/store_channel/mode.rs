//! Whether the rings and DMA are in use. Module [`recover`](super::recover) changes this state.

use base::clock::Instant;

/// Whether the rings and DMA are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DmaState {
    /// The rings and DMA are in use.
    Open,
    /// DMA has failed, and the host has not yet reported which requests it has taken.
    Closing { since: Instant },
    /// The control socket carries everything.
    Closed,
    /// A probe tests whether DMA works again.
    Probing { since: Instant, step: ProbeStep },
}

/// The steps of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProbeStep {
    /// The host makes a new offer of its memory, if the engine needs one.
    Offering,
    /// The engine connects. The engine itself limits how long this takes.
    Attaching,
    /// The transfer to the host is in progress.
    There,
    /// The host copies the probe and rings the doorbell.
    Echo,
    /// The host has not received the doorbell yet, so the store channel must repeat its request for
    /// the echo.
    Unheard,
    /// The transfer back is in progress.
    Back,
    /// The bytes that came back are correct, and the store channel waits for the doorbell that the
    /// host rings.
    Bell,
    /// The host opens its rings.
    Opening,
}
