//! The limits of a listener, and its counters of refused peers, and of handshakes and connections
//! that lost their slot to another peer.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::ConnectionConfig;

/// A limited resource of a listener that was exhausted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    /// Handshakes in progress.
    Handshakes,
    /// Connections.
    Connections,
    /// Slots for detached connections, which have no transport and wait for their clients.
    Detached,
    /// File descriptors.
    Descriptors,
}

impl Shortage {
    const ALL: [Shortage; 4] =
        [Shortage::Handshakes, Shortage::Connections, Shortage::Detached, Shortage::Descriptors];

    /// The name of the resource in metrics.
    fn name(self) -> &'static str {
        match self {
            Shortage::Handshakes => "handshakes",
            Shortage::Connections => "connections",
            Shortage::Detached => "detached",
            Shortage::Descriptors => "descriptors",
        }
    }
}

/// The limits of a listener, and its counters since it started: how often it refused a peer, and
/// how often it took the slot of a handshake or connection for another peer. Any thread may read the
/// counters.
#[derive(Debug)]
pub struct Admissions {
    max_handshakes: usize,
    max_connections: usize,
    reclaimed: [AtomicU64; Shortage::ALL.len()],
    refused: [AtomicU64; Shortage::ALL.len()],
}

impl Admissions {
    /// Creates the limits for a listener with `config`. Its handshakes and connections together may
    /// use `descriptors` file descriptors: at most a quarter for handshakes, the rest for
    /// connections.
    pub(crate) fn new(config: &ConnectionConfig, descriptors: usize) -> Admissions {
        let max_handshakes = config.max_handshakes.min(descriptors / 4).max(1);
        let max_connections = config.max_connections.min(descriptors.saturating_sub(max_handshakes)).max(1);
        if max_connections < config.max_connections {
            let (wanted, remedy) = (config.max_connections, "raise the limit (ulimit -n, LimitNOFILE)");
            tracing::warn!(
                wanted,
                max_connections,
                "the limit on open files allows fewer connections than configured; {remedy}"
            );
        }
        let admissions = Admissions {
            max_handshakes,
            max_connections,
            reclaimed: Default::default(),
            refused: Default::default(),
        };
        // Create each metric with the value 0 before the first event.
        for shortage in Shortage::ALL {
            admissions.add_reclaimed(shortage, 0);
            admissions.add_refused(shortage, 0);
        }
        admissions
    }

    /// Maximum number of handshakes at a time.
    #[must_use]
    pub fn max_handshakes(&self) -> usize {
        self.max_handshakes
    }

    /// Maximum number of connections at a time: the configured number, or fewer if the limit on
    /// file descriptors is low.
    #[must_use]
    pub fn max_connections(&self) -> usize {
        self.max_connections
    }

    /// Number of handshakes and connections that lost their slot to another peer, because of this
    /// shortage.
    #[must_use]
    pub fn reclaimed(&self, shortage: Shortage) -> u64 {
        self.reclaimed[shortage as usize].load(Ordering::Relaxed)
    }

    /// Number of peers that were refused because of this shortage. For
    /// [`Descriptors`](Shortage::Descriptors), the number of failed attempts to accept a peer.
    #[must_use]
    pub fn refused(&self, shortage: Shortage) -> u64 {
        self.refused[shortage as usize].load(Ordering::Relaxed)
    }

    pub(crate) fn add_reclaimed(&self, shortage: Shortage, count: u64) {
        self.reclaimed[shortage as usize].fetch_add(count, Ordering::Relaxed);
        metrics::counter!("outboard_messenger_connections_reclaimed_total", "reason" => shortage.name())
            .increment(count);
    }

    pub(crate) fn add_refused(&self, shortage: Shortage, count: u64) {
        self.refused[shortage as usize].fetch_add(count, Ordering::Relaxed);
        metrics::counter!("outboard_messenger_connections_refused_total", "reason" => shortage.name())
            .increment(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scarce_file_descriptors_are_divided_between_handshakes_and_connections() {
        let config = ConnectionConfig::default();
        let limits = |descriptors| {
            let admissions = Admissions::new(&config, descriptors);
            (admissions.max_handshakes(), admissions.max_connections())
        };
        assert_eq!(limits(usize::MAX), (256, 4096));
        assert_eq!(limits(896), (224, 672));
        assert_eq!(limits(16), (4, 12));
        assert_eq!(limits(0), (1, 1));
    }
}
