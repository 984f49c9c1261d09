//! [`SessionSlots`]: the slots of the osd's sessions, which the first shard hands out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::budget::{Budget, PeerAddress};
use base::collections::HashMap;
use identity::{KeyHash, ProofKey};
use tokio::time::{Duration, Instant};
use wire::{Error, SessionId};

use crate::ended::EndedSessions;

/// Minimum time that a session must be disconnected or silent before it can lose its slot to a new
/// session whose address already has its fair share of slots.
const PATIENCE: Duration = Duration::from_secs(10);

/// Number of a binding: a session on one connection. Later bindings have greater numbers.
pub(crate) type BindingNumber = u64;

/// Table of the sessions that the osd knows now. Placement groups store the durable state of
/// sessions.
pub(crate) struct SessionSlots {
    known: HashMap<SessionId, KnownSession>,
    /// Divides the slots of the table between tenants and peer addresses. A session that loses its slot is
    /// removed from the table: the collector may then remove the parts of its unfinished uploads,
    /// and the osd may refuse retries of its requests. Its client may still present the session
    /// again.
    places: Budget<SessionId, (u32, PeerAddress)>,
    generation: u64,
    /// The key with which the osd makes and recognises session ids.
    dpu_key: ProofKey,
    /// Number of the newest session of this generation.
    last: u32,
    /// The sessions that were closed or removed last, in this order. They cannot be resumed. Unlike
    /// [`EndedSessions`], this list is not durable: only the clients of these sessions know their ids.
    closed: VecDeque<SessionId>,
    bindings: BindingNumber,
    shortages: Shortages,
}

/// A session that has a slot.
#[derive(Default)]
struct KnownSession {
    /// The newest binding on each shard.
    bindings: BTreeMap<u16, BindingNumber>,
    about: AboutSession,
}

/// The client to which a session belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionOwner {
    /// The key that the client has proved on the connection.
    pub key: KeyHash,
    /// Number of the user for whom the client acts, if another user has issued the capability.
    pub for_user: Option<u32>,
}

/// What operators see of a session.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AboutSession {
    /// Name of the user: `TENANT/USER`.
    pub(crate) user: String,
    /// Number of the user's tenant.
    pub(crate) tenant: u32,
    /// Number of the user who has proved the key of the connection: the user, or one to whom the user
    /// has given a capability.
    pub(crate) presenter: u32,
    /// Number of the user.
    pub(crate) user_id: u32,
    /// Address of the client.
    pub(crate) peer: String,
    /// Time at which the session got its slot, in milliseconds since 1970.
    pub(crate) opened_ms: u64,
}

/// Why a session that has ended is refused.
pub(crate) const ENDED: &str = "the session has ended: its client has closed it, another session has fenced it, or an operator has ended it";

/// Maximum number of closed sessions that the osd remembers.
const CLOSED_MAX: usize = 4096;

/// Counts of sessions that lost their slot or got no slot, since the osd started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Shortages {
    /// Connected sessions that lost their slot to another session.
    pub(crate) reclaimed: u64,
    /// Sessions that could not be opened because all slots were taken.
    pub(crate) refused: u64,
}

/// Result of opening a session.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OpenedSession {
    pub(crate) id: SessionId,
    pub(crate) binding: BindingNumber,
    /// The session that lost its slot to this one. The caller must close its connections.
    pub(crate) evicted: Option<SessionId>,
}

impl SessionSlots {
    /// Creates an empty table with `limit` slots. `generation` is the generation of new sessions.
    pub(crate) fn new(limit: usize, generation: u64, dpu_key: ProofKey) -> SessionSlots {
        SessionSlots {
            known: HashMap::default(),
            places: Budget::new(limit, PATIENCE),
            generation,
            dpu_key,
            last: 0,
            closed: VecDeque::new(),
            bindings: 0,
            shortages: Shortages::default(),
        }
    }

    /// Binds a session to a connection of a shard: the session that the client presents, or a new
    /// one. The client belongs to a tenant, and has an address. If all slots are taken, another session
    /// may lose its slot by the rules of [`Budget`].
    ///
    /// # Errors
    /// [`Error::SessionRefused`] if the presented session is in `ended`, was closed, or does not belong
    /// to the client. [`Error::Busy`] if no slot is free.
    pub(crate) fn open(
        &mut self,
        presented: Option<SessionId>,
        shard: u16,
        (peer, owner): ((u32, PeerAddress), &SessionOwner),
        ended: &EndedSessions,
    ) -> wire::Result<OpenedSession> {
        // The osd must refuse a session id that it never issued. Otherwise a placement group could
        // later mark the id as forgotten, together with all lower numbers. The answer does not tell
        // whether the session exists and belongs to another client.
        if let Some(session) = presented.filter(|id| !self.is_made(*id, owner)) {
            let why = "this node did not create the session for this client, or has lost its latest state";
            return Err(Error::SessionRefused { session, why: why.to_owned() });
        }
        if let Some(session) = presented.filter(|id| ended.has(*id) || self.closed.contains(id)) {
            return Err(Error::SessionRefused { session, why: ENDED.to_owned() });
        }
        let id = presented.map_or_else(|| self.make(owner, ended), Ok)?;
        let evicted = self.places.admit(id, peer, Instant::now()).map_err(|full| {
            self.shortages.refused += 1;
            Error::Busy {
                what: "sessions".into(),
                limit: full.limit as u64,
                advice: "close clients that are not needed".to_owned(),
            }
        })?;
        if let Some(session) = evicted.and_then(|evicted| self.known.remove(&evicted))
            && !session.bindings.is_empty()
        {
            self.shortages.reclaimed += 1;
        }
        self.bindings += 1;
        self.known.entry(id).or_default().bindings.insert(shard, self.bindings);
        assert_eq!(
            self.known.len(),
            self.places.taken(),
            "the table contains exactly the sessions with a slot"
        );
        Ok(OpenedSession { id, binding: self.bindings, evicted })
    }

    /// Notes what operators see of a session that has a slot.
    pub(crate) fn describe(&mut self, id: SessionId, about: AboutSession) {
        if let Some(known) = self.known.get_mut(&id).filter(|known| known.about.user.is_empty()) {
            known.about = about;
        }
    }

    /// Returns the sessions, ordered by id, with the number of their connections.
    pub(crate) fn list(&self) -> Vec<(SessionId, &AboutSession, usize)> {
        let mut all: Vec<_> =
            self.known.iter().map(|(id, known)| (*id, &known.about, known.bindings.len())).collect();
        all.sort_by_key(|(id, ..)| *id);
        all
    }

    /// Returns the sessions that have a slot.
    pub(crate) fn open_sessions(&self) -> BTreeSet<SessionId> {
        self.known.keys().copied().collect()
    }

    /// Returns whether a session belongs to the client `owner`.
    pub(crate) fn belongs_to(&self, id: SessionId, owner: &SessionOwner) -> bool {
        self.is_made(id, owner)
    }

    /// Removes a session, which cannot be resumed any more. Returns whether it had a slot.
    pub(crate) fn remove(&mut self, id: SessionId) -> bool {
        if self.closed.len() == CLOSED_MAX {
            self.closed.pop_front();
        }
        self.closed.push_back(id);
        self.places.remove(id);
        self.known.remove(&id).is_some()
    }

    /// Records that the session is active, so that silent sessions lose their slots first.
    pub(crate) fn heard(&mut self, session: SessionId) {
        self.places.heard(session, Instant::now());
    }

    /// Returns the id of a new session.
    ///
    /// # Errors
    /// [`Error::Busy`] if all numbers of this generation are used up.
    fn make(&mut self, owner: &SessionOwner, ended: &EndedSessions) -> wire::Result<SessionId> {
        let used_up = || Error::Busy {
            what: "sessions since the start of the osd".into(),
            limit: u32::MAX.into(),
            advice: "restart the osd".into(),
        };
        loop {
            self.last = self.last.checked_add(1).ok_or_else(used_up)?;
            let id = session_id(&self.dpu_key, (self.generation, self.last), owner);
            // An earlier start that could not store its generation may have used it, too.
            if !ended.has(id) {
                return Ok(id);
            }
        }
    }

    /// Returns whether the osd has made the session for the client `owner`, now or in an earlier start.
    fn is_made(&self, id: SessionId, owner: &SessionOwner) -> bool {
        let place = (id.generation(), id.number());
        place <= (self.generation, self.last) && id == session_id(&self.dpu_key, place, owner)
    }

    /// Returns the number of the newest binding of all sessions.
    pub(crate) fn newest_binding(&self) -> BindingNumber {
        self.bindings
    }

    /// Forgets a session that its client has closed. Returns false, and keeps the session, if its
    /// client has opened it again: if it has a binding newer than `newest`.
    pub(crate) fn close(&mut self, session: SessionId, newest: BindingNumber) -> bool {
        let known = self.known.get(&session);
        if known.is_some_and(|known| known.bindings.values().any(|number| *number > newest)) {
            return false;
        }
        self.remove(session);
        true
    }

    /// Records that a binding has ended. Returns whether the session has no other binding.
    pub(crate) fn left(&mut self, session: SessionId, shard: u16, binding: BindingNumber) -> bool {
        let Some(known) = self.known.get_mut(&session) else { return false };
        let connections = &mut known.bindings;
        if connections.get(&shard) != Some(&binding) {
            return false;
        }
        connections.remove(&shard);
        if connections.is_empty() {
            self.places.left(session, Instant::now());
        }
        connections.is_empty()
    }

    /// Returns the counts of sessions that lost their slot or got no slot.
    pub(crate) fn shortages(&self) -> Shortages {
        self.shortages
    }
}

/// Returns the id of the session with this generation and number, which belongs to the client `owner`.
/// The lowest 48 bits of the id are a proof of the other bits and of the owner, so the osd
/// recognises its sessions after a restart without storing them.
#[must_use]
pub fn session_id(dpu_key: &ProofKey, (generation, number): (u64, u32), owner: &SessionOwner) -> SessionId {
    let (generation_bytes, number_bytes) = (generation.to_le_bytes(), number.to_le_bytes());
    let for_user = owner.for_user.map(u32::to_le_bytes);
    let mut parts = vec![&generation_bytes[..], &number_bytes, owner.key.as_bytes()];
    parts.extend(for_user.as_ref().map(|user| &user[..]));
    let proof = dpu_key.prove("outboard session", &parts);
    let bits = u64::from_le_bytes(*proof.first_chunk().expect("a proof has 32 bytes"));
    SessionId::new(generation, number, bits)
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;
    use crate::ended::OpenSessions;

    static NONE: LazyLock<EndedSessions> = LazyLock::new(EndedSessions::default);

    /// The owner of most sessions, who acts for itself.
    fn first() -> SessionOwner {
        SessionOwner { key: [1; 32].into(), for_user: None }
    }

    fn slots() -> SessionSlots {
        SessionSlots::new(3, SessionId::FIRST_GENERATION, ProofKey::default())
    }

    #[tokio::test]
    async fn no_two_sessions_of_a_client_share_an_id_when_all_numbers_are_used_up() {
        let owner = first();
        let mut sessions = slots();
        sessions.last = u32::MAX - 1;
        let newest = sessions.open(None, 0, (A, &owner), &NONE).unwrap().id;
        assert!(matches!(sessions.open(None, 0, (A, &owner), &NONE), Err(Error::Busy { .. })));
        assert_eq!(sessions.open(Some(newest), 0, (A, &owner), &NONE).unwrap().id, newest);
    }

    #[tokio::test]
    async fn an_ended_session_is_refused_and_its_id_is_not_used_again() {
        let owner = first();
        let mut ended = EndedSessions::default();
        let mut sessions = slots();
        let fenced = sessions.open(None, 0, (A, &owner), &ended).unwrap().id;
        ended.add(fenced, &OpenSessions::default());
        let refused = sessions.open(Some(fenced), 0, (A, &owner), &ended);
        assert!(matches!(refused, Err(Error::SessionRefused { .. })), "{refused:?}");
        // The osd has started again, and could not store that it had.
        let again = slots().open(None, 0, (A, &owner), &ended).unwrap().id;
        assert_ne!(again, fenced);
        let newest = sessions.newest_binding();
        let closed = sessions.open(Some(again), 0, (A, &owner), &ended);
        assert!(closed.is_err(), "this table has not made the session");
        let closed = sessions.open(None, 0, (A, &owner), &ended).unwrap();
        assert!(!sessions.close(closed.id, newest) && sessions.close(closed.id, closed.binding));
        assert!(sessions.open(Some(closed.id), 0, (A, &owner), &ended).is_err());
    }

    #[tokio::test]
    async fn a_session_belongs_to_the_client_that_opened_it_and_to_the_node_that_made_it() {
        let (owner, other) = (first(), SessionOwner { key: [2; 32].into(), for_user: None });
        let mut sessions = slots();
        let opened = sessions.open(None, 0, (A, &owner), &NONE).unwrap().id;
        let refused = |result: wire::Result<OpenedSession>| match result {
            Err(Error::SessionRefused { why, .. }) => why,
            other => panic!("{other:?}"),
        };
        let stolen = refused(sessions.open(Some(opened), 0, (A, &other), &NONE));
        let guessed = refused(sessions.open(Some(SessionId(opened.0 ^ 1)), 0, (A, &owner), &NONE));
        let future = session_id(&ProofKey::default(), (opened.generation(), opened.number() + 1), &owner);
        let never_made = refused(sessions.open(Some(future), 0, (A, &owner), &NONE));
        assert_eq!([&stolen, &guessed], [&never_made; 2], "the answer does not tell which sessions exist");
        let mut of_other_node =
            SessionSlots::new(3, SessionId::FIRST_GENERATION + 1, ProofKey::new(&[9; 32]));
        refused(of_other_node.open(Some(opened), 0, (A, &owner), &NONE));
        let mut after_restart = SessionSlots::new(3, SessionId::FIRST_GENERATION + 1, ProofKey::default());
        assert_eq!(after_restart.open(Some(opened), 0, (A, &owner), &NONE).unwrap().id, opened);
        refused(after_restart.open(Some(opened), 0, (A, &other), &NONE));
        assert_eq!(sessions.open(Some(opened), 1, (A, &owner), &NONE).unwrap().id, opened);
    }

    const A: (u32, PeerAddress) = (0, PeerAddress::V4([192, 0, 2, 1]));
    const B: (u32, PeerAddress) = (0, PeerAddress::V4([192, 0, 2, 2]));
    /// Another tenant at the first address.
    const TENANT: (u32, PeerAddress) = (1, A.1);

    #[tokio::test(start_paused = true)]
    async fn an_address_with_too_many_sessions_loses_a_slot_to_a_new_address() {
        let mut sessions = slots();
        let mut crowd = Vec::new();
        for _ in 0..3 {
            crowd.push(sessions.open(None, 0, (A, &first()), &NONE).unwrap());
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert!(matches!(sessions.open(None, 0, (A, &first()), &NONE), Err(Error::Busy { limit: 3, .. })));
        sessions.heard(crowd[0].id);
        let other = sessions.open(None, 0, (B, &first()), &NONE).unwrap();
        assert_eq!(
            other.evicted,
            Some(crowd[1].id),
            "the session that was silent for the longest time loses its slot"
        );
        // A disconnected session loses its slot first. The session that lost its slot earlier can
        // be opened again.
        assert!(sessions.left(crowd[0].id, 0, crowd[0].binding));
        let back = sessions.open(Some(crowd[1].id), 0, (A, &first()), &NONE).unwrap();
        assert_eq!((back.id, back.evicted), (crowd[1].id, Some(crowd[0].id)));
        assert_eq!(sessions.shortages(), Shortages { reclaimed: 1, refused: 1 });
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenant_with_too_many_sessions_loses_a_slot_to_another_tenant_at_the_same_address() {
        let mut sessions = slots();
        let crowd: Vec<_> =
            (0..3).map(|_| sessions.open(None, 0, (A, &first()), &NONE).unwrap().id).collect();
        assert!(matches!(sessions.open(None, 0, (A, &first()), &NONE), Err(Error::Busy { .. })));
        let other = sessions.open(None, 0, (TENANT, &first()), &NONE).unwrap();
        assert!(crowd.contains(&other.evicted.unwrap()));
    }

    #[tokio::test]
    async fn a_session_leaves_when_its_newest_bindings_on_all_shards_have_ended() {
        let mut sessions = slots();
        let opened = sessions.open(None, 0, (A, &first()), &NONE).unwrap();
        let second = sessions.open(Some(opened.id), 1, (A, &first()), &NONE).unwrap();
        let again = sessions.open(Some(opened.id), 1, (A, &first()), &NONE).unwrap();
        assert!(!sessions.left(opened.id, 1, second.binding), "a newer binding took its place");
        assert!(!sessions.left(opened.id, 0, opened.binding), "shard 1 has a binding");
        assert!(sessions.left(opened.id, 1, again.binding));
        assert!(!sessions.left(opened.id, 1, again.binding), "a binding ends once");
        let newest = sessions.newest_binding();
        sessions.open(Some(opened.id), 1, (A, &first()), &NONE).unwrap();
        assert!(!sessions.close(opened.id, newest), "the session was opened again");
        assert!(sessions.close(opened.id, sessions.newest_binding()));
    }
}
