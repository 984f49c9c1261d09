//! The set of sessions whose results a placement group has forgotten. With this set, the group
//! never mistakes a retry for a new request.
//!
//! The set contains every session that the group has forgotten, and possibly more. Each generation
//! has a *bound*: the set contains all sessions with numbers up to the bound, except *spared*
//! sessions. A session is spared if it was alive when the bound passed its number. A forgotten
//! session is never spared again. The set also contains all sessions of the generations below a
//! *floor*.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use wire::SessionId;

const FORMAT: u8 = 1;
/// Maximum number of generations with their own bound. If there are more, the floor rises above the
/// oldest of them.
const GENERATIONS: usize = 64;
/// Maximum number of spared sessions that are stored. If there are more, only the newest are
/// stored.
const SPARED_STORED: usize = 256;

/// The set of sessions whose results a placement group has forgotten.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gone {
    floor: u64,
    /// The bound of each generation.
    bounds: BTreeMap<u64, u32>,
    spared: BTreeSet<SessionId>,
}

/// Stored form of the set.
#[derive(Serialize, Deserialize)]
struct StoredGone {
    floor: u64,
    bounds: BTreeMap<u64, u32>,
    spared: Vec<SessionId>,
}

/// Sessions that may still send retries.
#[derive(Debug, Clone, Default)]
pub(crate) struct Living {
    pub(crate) known: BTreeSet<SessionId>,
    /// Clients may resume sessions of generations below this value, even if `known` does not
    /// contain these sessions.
    pub(crate) unseen_below: Option<u64>,
}

impl Living {
    fn has(&self, session: SessionId) -> bool {
        self.known.contains(&session) || self.unseen_below.is_some_and(|g| session.generation() < g)
    }
}

impl Default for Gone {
    /// The set of a new placement group. It contains no session that this version of the node
    /// creates. It contains all session ids of older versions, because the clients of older
    /// versions do not speak today's protocol.
    fn default() -> Gone {
        let floor = SessionId::FIRST_GENERATION;
        Gone { floor, bounds: BTreeMap::new(), spared: BTreeSet::new() }
    }
}

impl Gone {
    /// Returns whether the session's results may have been forgotten.
    pub(crate) fn has(&self, session: SessionId) -> bool {
        let bound = self.bounds.get(&session.generation());
        session.generation() < self.floor
            || bound.is_some_and(|bound| session.number() <= *bound && !self.spared.contains(&session))
    }

    /// Adds a session whose results are about to be forgotten. Spares the sessions in `living`.
    pub(crate) fn add(&mut self, session: SessionId, living: &Living) {
        let generation = session.generation();
        if generation < self.floor {
            return;
        }
        let bound = self.bounds.entry(generation).or_insert(0);
        if session.number() > *bound {
            let first = SessionId::new(generation, bound.saturating_add(1), 0);
            let last = SessionId::new(generation, session.number(), u64::MAX);
            self.spared.extend(living.known.range(first..=last));
            *bound = session.number();
        }
        self.spared.retain(|id| living.has(*id));
        self.spared.remove(&session);
        while self.bounds.len() > GENERATIONS {
            let Some((oldest, _)) = self.bounds.pop_first() else { break };
            self.floor = oldest + 1;
        }
        let floor = self.floor;
        self.spared.retain(|id| id.generation() >= floor);
        debug_assert!(self.has(session));
    }

    /// Encodes the set: a format byte, then postcard.
    pub(crate) fn encode(&self) -> Bytes {
        let spared = self.spared.iter().rev().take(SPARED_STORED).copied().collect();
        let stored = StoredGone { floor: self.floor, bounds: self.bounds.clone(), spared };
        // Encoding plain data into a growing vector cannot fail.
        postcard::to_extend(&stored, vec![FORMAT]).expect("plain data can be encoded").into()
    }

    /// Decodes bytes from [`Gone::encode`]; `None` for other bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Gone> {
        let (&FORMAT, rest) = bytes.split_first()? else { return None };
        let StoredGone { floor, bounds, spared } = postcard::from_bytes(rest).ok()?;
        Some(Gone { floor, bounds, spared: spared.into_iter().collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(generation: u64, number: u32) -> SessionId {
        SessionId::new(SessionId::FIRST_GENERATION + generation, number, 7)
    }

    proptest! {
        /// Adds random sessions to the set, and at random times encodes and decodes the set.
        #[test]
        fn forgotten_sessions_stay_forgotten_and_living_sessions_are_spared(
            steps in proptest::collection::vec((0u64..4, 1u32..40, any::<bool>(), any::<bool>()), 1..80),
            living in proptest::collection::btree_set((0u64..4, 1u32..40), 0..60),
        ) {
            let mut living: BTreeSet<SessionId> = living.into_iter().map(|(g, n)| id(g, n)).collect();
            let mut gone = Gone::default();
            let mut forgotten = BTreeSet::new();
            for (generation, number, lives, stored) in steps {
                let session = id(generation, number);
                let known = Living { known: living.clone(), unseen_below: None };
                gone.add(session, &known);
                forgotten.insert(session);
                if !lives {
                    living.remove(&session);
                }
                if stored {
                    gone = Gone::decode(&gone.encode()).unwrap();
                }
                prop_assert!(forgotten.iter().all(|id| gone.has(*id)));
                let mut untouched = living.difference(&forgotten);
                prop_assert!(untouched.all(|id| !gone.has(*id)));
            }
        }

        #[test]
        fn decoding_arbitrary_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Gone::decode(&bytes);
        }
    }

    #[test]
    fn the_encoded_set_of_forgotten_sessions_stays_small_with_many_sessions_and_generations() {
        let mut gone = Gone::default();
        let known = (0..1000).map(|n| id(2000, n)).collect();
        let living = Living { known, unseen_below: None };
        for generation in 0..2000 {
            gone.add(id(generation, 5), &living);
        }
        gone.add(id(2000, 5000), &living);
        assert!(
            gone.has(id(0, 9))
                && gone.has(id(1999, 5))
                && !gone.has(id(1999, 6))
                && !gone.has(id(2000, 5001))
        );
        let stored = gone.encode();
        assert!(stored.len() < 8192, "{} bytes", stored.len());
        let back = Gone::decode(&stored).unwrap();
        assert!(
            !back.has(id(2000, 999)) && back.has(id(2000, 1)),
            "only the newest sessions are stored as spared"
        );
    }

    #[test]
    fn the_initial_set_contains_the_session_ids_of_older_versions() {
        assert!(Gone::default().has(SessionId(1_700_000_000_000 << 80 | 5)));
        assert!(!Gone::default().has(id(0, 1)));
    }
}
