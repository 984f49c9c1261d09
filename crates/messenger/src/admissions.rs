//! The limits of a listener, and the counters of refused peers and reclaimed places.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::SessionConfig;

/// What there was not enough of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shortage {
    Handshakes,
    Sessions,
    /// Places of sessions without a transport.
    Detached,
    Descriptors,
}

impl Shortage {
    const ALL: [Shortage; 4] =
        [Shortage::Handshakes, Shortage::Sessions, Shortage::Detached, Shortage::Descriptors];

    /// As metrics and status name it.
    fn name(self) -> &'static str {
        match self {
            Shortage::Handshakes => "handshakes",
            Shortage::Sessions => "sessions",
            Shortage::Detached => "detached",
            Shortage::Descriptors => "descriptors",
        }
    }
}

/// The limits of a listener, and how often it had to refuse a peer or reclaim a place since it started, by what was short:
/// `handshakes`, `sessions`, `detached` (sessions that wait for their peers) or `descriptors`. Any thread may read it.
#[derive(Debug)]
pub struct Admissions {
    max_handshakes: usize,
    max_sessions: usize,
    reclaimed: [AtomicU64; Shortage::ALL.len()],
    refused: [AtomicU64; Shortage::ALL.len()],
}

impl Admissions {
    /// For a listener of that configuration, whose connections may take `descriptors` in all: at most a quarter of them for
    /// handshakes, the rest for sessions.
    pub(crate) fn new(config: &SessionConfig, descriptors: usize) -> Admissions {
        let max_handshakes = config.max_handshakes.min(descriptors / 4).max(1);
        let max_sessions = config.max_sessions.min(descriptors.saturating_sub(max_handshakes)).max(1);
        if max_sessions < config.max_sessions {
            let (wanted, remedy) = (config.max_sessions, "raise the limit (ulimit -n, LimitNOFILE)");
            tracing::warn!(wanted, max_sessions, "the limit on open files allows fewer sessions; {remedy}");
        }
        let admissions = Admissions {
            max_handshakes,
            max_sessions,
            reclaimed: Default::default(),
            refused: Default::default(),
        };
        // Series that begin at 0 are there before the first event.
        for shortage in Shortage::ALL {
            admissions.add_reclaimed(shortage, 0);
            admissions.add_refused(shortage, 0);
        }
        admissions
    }

    /// Most handshakes at a time.
    #[must_use]
    pub fn max_handshakes(&self) -> usize {
        self.max_handshakes
    }

    /// Most sessions at a time: as configured, or fewer if the limit on descriptors is low.
    #[must_use]
    pub fn max_sessions(&self) -> usize {
        self.max_sessions
    }

    /// Handshakes and sessions that lost their place to another peer, by shortage.
    pub fn reclaimed(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Shortage::ALL.into_iter().map(|s| (s.name(), self.reclaimed[s as usize].load(Ordering::Relaxed)))
    }

    /// Peers that got no place, by shortage; of `descriptors`, failed attempts to accept one.
    pub fn refused(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Shortage::ALL.into_iter().map(|s| (s.name(), self.refused[s as usize].load(Ordering::Relaxed)))
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
    fn few_descriptors_are_divided_between_handshakes_and_sessions() {
        let config = SessionConfig::default();
        let limits = |descriptors| {
            let admissions = Admissions::new(&config, descriptors);
            (admissions.max_handshakes(), admissions.max_sessions())
        };
        assert_eq!(limits(usize::MAX), (256, 4096));
        assert_eq!(limits(896), (224, 672));
        assert_eq!(limits(16), (4, 12));
        assert_eq!(limits(0), (1, 1));
    }
}
