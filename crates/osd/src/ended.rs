//! [`EndedSessions`]: the sessions that may not change anything any more.
//!
//! The set is part of the node's map, so a session stays ended across restarts of the osd. It takes
//! bounded space: it lists the ended sessions from a *floor* on. All sessions before the floor have
//! ended, except the listed sessions that were open when the floor passed them.
//!
//! ```text
//!                         floor
//!   sessions, by age ──▶    │
//!      ended  OPEN  ended   │  open  ENDED  open  ENDED  open
//!               │           │          │            │
//!            `spared`       │          └─ `listed` ─┘
//! ```

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use wire::SessionId;

/// Maximum number of listed sessions. If there are more, the floor rises over the older half of
/// them.
const LISTED_MAX: usize = 4096;

/// Maximum number of listed sessions while clients may return after a start of the osd. Their sessions
/// have no slot yet, so a floor that rises would end them.
const LISTED_MAX_AT_START: usize = 4 * LISTED_MAX;

/// What is known of the sessions that are open.
#[derive(Debug, Default)]
pub(crate) struct OpenSessions {
    /// The sessions that have a slot.
    pub(crate) slots: BTreeSet<SessionId>,
    /// Whether clients may still resume sessions from before the start of the osd, which have no slot yet.
    pub(crate) may_return: bool,
}

/// The sessions that have ended because another session has fenced them, or an operator has ended
/// them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct EndedSessions {
    /// Generation and number of the oldest session that has not ended by its age alone.
    floor: (u64, u32),
    /// Sessions before the floor that have not ended.
    spared: BTreeSet<SessionId>,
    /// Sessions from the floor on that have ended.
    listed: BTreeSet<SessionId>,
}

impl EndedSessions {
    /// Returns whether the session has ended.
    pub(crate) fn has(&self, session: SessionId) -> bool {
        if age(session) < self.floor {
            !self.spared.contains(&session)
        } else {
            self.listed.contains(&session)
        }
    }

    /// Adds a session. If the set lists too many sessions then, all older sessions end too, except
    /// those in `open`.
    pub(crate) fn add(&mut self, session: SessionId, open: &OpenSessions) {
        if age(session) < self.floor {
            self.spared.remove(&session);
            return;
        }
        self.listed.insert(session);
        let max = if open.may_return { LISTED_MAX_AT_START } else { LISTED_MAX };
        if self.listed.len() > max {
            let middle = *self.listed.iter().nth(self.listed.len() - max / 2).expect("the list is longer");
            let floor = age(middle);
            self.spared =
                open.slots.iter().copied().filter(|id| age(*id) < floor && !self.has(*id)).collect();
            self.listed.retain(|id| age(*id) >= floor);
            self.floor = floor;
        }
        assert!(self.has(session), "an added session has ended");
    }

    /// Adds all sessions that exist. A node does so when it has lost its newest map, which may have
    /// contained more ended sessions.
    pub(crate) fn add_all(&mut self) {
        *self = EndedSessions { floor: (u64::MAX, 0), ..EndedSessions::default() };
    }

    /// Limits the effect of [`add_all`](Self::add_all) to the sessions of generations before
    /// `generation`, the osd's current one.
    pub(crate) fn begin(&mut self, generation: u64) {
        self.floor = self.floor.min((generation, 0));
    }
}

/// Returns the place of a session in the order in which the node has created its sessions.
fn age(session: SessionId) -> (u64, u32) {
    (session.generation(), session.number())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(generation: u64, number: u32) -> SessionId {
        SessionId::new(SessionId::FIRST_GENERATION + generation, number, 7)
    }

    #[test]
    fn the_set_takes_bounded_space_and_spares_open_sessions() {
        let mut ended = EndedSessions::default();
        let slots: BTreeSet<SessionId> = (0..20).map(|n| id(1, n * 1000 + 1)).collect();
        let open = OpenSessions { slots, may_return: false };
        let fenced = (0..3 * LISTED_MAX as u32).map(|n| id(1, 2 * n + 2));
        fenced.clone().for_each(|session| ended.add(session, &open));
        assert!(fenced.clone().all(|session| ended.has(session)));
        assert!(open.slots.iter().all(|session| !ended.has(*session)), "open sessions are spared");
        assert!(ended.has(id(0, 5)) && ended.has(id(1, 3)), "other old sessions have ended");
        assert!(ended.listed.len() <= LISTED_MAX && ended.spared.len() <= open.slots.len());
        let closed = *open.slots.first().unwrap();
        ended.add(closed, &open);
        assert!(ended.has(closed), "a spared session can end, too");
    }

    #[test]
    fn sessions_whose_clients_may_return_after_a_start_do_not_end() {
        let mut ended = EndedSessions::default();
        let mut open = OpenSessions { slots: BTreeSet::new(), may_return: true };
        let fence = |ended: &mut EndedSessions, open: &OpenSessions, numbers: std::ops::Range<usize>| {
            numbers.for_each(|n| ended.add(id(1, 2 * n as u32 + 2), open));
        };
        fence(&mut ended, &open, 0..LISTED_MAX_AT_START);
        assert!(!ended.has(id(1, 3)), "its client may return");
        fence(&mut ended, &open, LISTED_MAX_AT_START..LISTED_MAX_AT_START + 1);
        assert!(ended.has(id(1, 3)) && ended.listed.len() <= LISTED_MAX_AT_START, "the space is bounded");
        open.may_return = false;
        fence(&mut ended, &open, LISTED_MAX_AT_START + 1..LISTED_MAX_AT_START + 2);
        assert!(ended.listed.len() <= LISTED_MAX, "one more fence restores the usual bound");
    }

    #[test]
    fn a_lost_map_ends_the_sessions_of_earlier_starts_only() {
        let mut ended = EndedSessions::default();
        ended.add_all();
        assert!(ended.has(id(4, 1)));
        ended.begin(id(4, 1).generation());
        assert!(ended.has(id(3, u32::MAX)) && !ended.has(id(4, 1)));
        let floor = ended.clone();
        ended.begin(id(5, 1).generation());
        assert_eq!(ended, floor, "a later start ends no session");
    }

    proptest! {
        #[test]
        fn an_ended_session_stays_ended(
            sessions in proptest::collection::vec((0u64..3, 1u32..20_000), 1..40),
            more in proptest::collection::vec((0u64..6, 1u32..20_000), 0..10_000),
        ) {
            let mut ended = EndedSessions::default();
            let none = OpenSessions::default();
            let first: Vec<SessionId> = sessions.iter().map(|(g, n)| id(*g, *n)).collect();
            first.iter().for_each(|session| ended.add(*session, &none));
            let slots: BTreeSet<SessionId> = (1..20_000).map(|n| id(1, n)).collect();
            let all = OpenSessions { slots, may_return: false };
            for (generation, number) in more {
                ended.add(id(generation, number), &all);
            }
            prop_assert!(first.iter().all(|session| ended.has(*session)));
        }
    }
}
