//! Whether the rings and DMA are in use. Module [`recover`](super::recover) changes this state.

use std::time::Instant;

/// Whether the rings and DMA are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DmaState {
    Open,
    Closing { since: Instant },
    Closed,
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
    /// The host has not heard the doorbell yet, so the link must ask again.
    Unheard,
    /// The transfer back is in progress.
    Back,
    /// The bytes are right, and the link waits for the host's doorbell.
    Bell,
    /// The host opens its rings.
    Opening,
}
