//! Sessions: who is connected.

use std::collections::HashMap;

use proto::{Error, SessionId};
use tokio::time::{Duration, Instant};

use crate::gone::Living;

/// Numbers the connections of an OSD.
pub(crate) type ConnectionId = u64;

/// How long sessions of the OSD before this one are given to come back.
const RETURN: Duration = Duration::from_secs(3600);

/// The sessions known now. Their durable part is in the placement groups.
pub(crate) struct Sessions {
    known: HashMap<SessionId, Attachment>,
    limit: usize,
    generation: u64,
    /// Number of the session made last.
    last: u32,
    started: Instant,
}

#[derive(Debug, Clone, Copy)]
enum Attachment {
    Connected(ConnectionId),
    GoneSince(Instant),
}

impl Sessions {
    /// No sessions yet; new ones are of this generation.
    pub(crate) fn new(limit: usize, generation: u64) -> Sessions {
        Sessions { known: HashMap::new(), limit, generation, last: 0, started: Instant::now() }
    }

    /// Attaches a session to a connection: the one that the client presents, or a new one. Another connection that the
    /// session had is no longer listened to.
    pub(crate) fn open(
        &mut self,
        presented: Option<SessionId>,
        connection: ConnectionId,
    ) -> proto::Result<SessionId> {
        // A session that was never made would be noted as forgotten one day, and with it all that come before it.
        if let Some(session) =
            presented.filter(|id| (id.generation(), id.number()) > (self.generation, self.last))
        {
            let why = "this node has not made it, or has lost its last state".to_owned();
            return Err(Error::SessionRefused { session, why });
        }
        if presented.is_none_or(|id| !self.known.contains_key(&id)) && self.known.len() >= self.limit {
            self.forget_one()?;
        }
        let id = presented.unwrap_or_else(|| self.make());
        self.known.insert(id, Attachment::Connected(connection));
        Ok(id)
    }

    fn make(&mut self) -> SessionId {
        // After more sessions than there are numbers, the last number is used again: ids differ in their random bits.
        self.last = self.last.saturating_add(1);
        SessionId::new(self.generation, self.last, rand::random())
    }

    /// Forgets a session that its client has closed.
    pub(crate) fn close(&mut self, session: SessionId) {
        self.known.remove(&session);
    }

    /// Whether a session's requests come from this connection.
    pub(crate) fn is_attached(&self, session: SessionId, connection: ConnectionId) -> bool {
        matches!(self.known.get(&session), Some(Attachment::Connected(now)) if *now == connection)
    }

    /// Says that a connection has ended.
    pub(crate) fn detach(&mut self, session: SessionId, connection: ConnectionId) {
        if self.is_attached(session, connection) {
            self.known.insert(session, Attachment::GoneSince(Instant::now()));
        }
    }

    /// Whether the session is connected, or was less than `grace` ago. Sessions of earlier generations count as
    /// connected until this OSD started.
    pub(crate) fn is_alive(&self, session: SessionId, grace: Duration) -> bool {
        match self.known.get(&session) {
            Some(attachment) => attachment.is_alive(grace),
            None => session.generation() < self.generation && self.started.elapsed() < grace.min(RETURN),
        }
    }

    /// All sessions that are connected or were less than `grace` ago.
    pub(crate) fn living(&self, grace: Duration) -> Living {
        let alive = self.known.iter().filter(|(_, attachment)| attachment.is_alive(grace));
        Living {
            known: alive.map(|(id, _)| *id).collect(),
            unseen_below: (self.started.elapsed() < grace).then_some(self.generation),
        }
    }

    /// Number of sessions that are connected.
    pub(crate) fn connected(&self) -> u32 {
        self.known.values().filter(|a| matches!(a, Attachment::Connected(_))).count() as u32
    }

    /// Makes room by forgetting the session that has been away longest.
    fn forget_one(&mut self) -> proto::Result<()> {
        let gone = self.known.iter().filter_map(|(id, attachment)| match attachment {
            Attachment::GoneSince(when) => Some((*when, *id)),
            Attachment::Connected(_) => None,
        });
        let limit = self.limit as u64;
        let advice = "close clients that are not needed".to_owned();
        let (_, oldest) = gone.min().ok_or(Error::Busy { what: "sessions".into(), limit, advice })?;
        self.known.remove(&oldest);
        Ok(())
    }
}

impl Attachment {
    fn is_alive(&self, grace: Duration) -> bool {
        match self {
            Attachment::Connected(_) => true,
            Attachment::GoneSince(when) => when.elapsed() < grace,
        }
    }
}
