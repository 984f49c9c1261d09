//! Sessions: who is connected.

use std::collections::HashMap;

use proto::{Error, SessionId};
use tokio::time::{Duration, Instant};

use crate::clock::now_ms;

/// Numbers the connections of an OSD.
pub(crate) type ConnectionId = u64;

/// The sessions known now. Their durable part is in the placement groups.
pub(crate) struct Sessions {
    known: HashMap<SessionId, Attachment>,
    limit: usize,
}

#[derive(Debug, Clone, Copy)]
enum Attachment {
    Connected(ConnectionId),
    GoneSince(Instant),
}

impl Sessions {
    pub(crate) fn new(limit: usize) -> Sessions {
        Sessions { known: HashMap::new(), limit }
    }

    /// Attaches a session to a connection: the one that the client presents, or a new one. Another connection that the
    /// session had is no longer listened to.
    pub(crate) fn open(
        &mut self,
        presented: Option<SessionId>,
        connection: ConnectionId,
    ) -> proto::Result<SessionId> {
        if let Some(early) = presented.filter(|id| id.made_ms() > now_ms().saturating_add(CLOCK_SLACK_MS)) {
            let advice = "connect again without a session".to_owned();
            return Err(Error::BadRequest(format!("session {early} is of the future; {advice}")));
        }
        let id = presented.unwrap_or_else(|| SessionId::new(now_ms(), rand::random()));
        if !self.known.contains_key(&id) && self.known.len() >= self.limit {
            self.forget_one()?;
        }
        self.known.insert(id, Attachment::Connected(connection));
        Ok(id)
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

    /// Whether the session is connected, or was less than `grace` ago.
    pub(crate) fn is_alive(&self, session: SessionId, grace: Duration) -> bool {
        match self.known.get(&session) {
            Some(Attachment::Connected(_)) => true,
            Some(Attachment::GoneSince(when)) => when.elapsed() < grace,
            None => false,
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

/// How far a clock may have gone back since a session was made.
const CLOCK_SLACK_MS: u64 = 24 * 3600 * 1000;
