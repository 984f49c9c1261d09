//! Whether the rings and DMA are used; how this changes is in [`recover`](super::recover).

use std::time::Instant;

/// Whether the rings and DMA are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DmaState {
    Open,
    Closing { since: Instant },
    Closed,
    Probing { since: Instant, step: ProbeStep },
}

/// How far a probe has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProbeStep {
    /// The host offers its memory anew, if that is needed.
    Offering,
    /// The engine connects. That takes no longer than the engine lets it.
    Attaching,
    /// The transfer to the host.
    There,
    /// The host copies and rings.
    Echo,
    /// The host has not heard the doorbell: it is to be asked again.
    Unheard,
    /// The transfer back.
    Back,
    /// The bytes are right; the doorbell is waited for.
    Bell,
    /// The host opens its rings.
    Opening,
}
