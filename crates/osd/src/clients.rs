//! [`Clients`]: the connections of a shard, and the sessions that are attached to them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use base::collections::HashMap;
use messenger::Connection;
use tokio::sync::Semaphore;
use wire::SessionId;

use crate::sessions::AttachmentNumber;

/// Number that identifies a connection to this shard.
pub(crate) type ConnectionId = u64;

/// A session on a connection of the shard.
#[derive(Clone)]
pub(crate) struct SessionAttachment {
    pub(crate) number: AttachmentNumber,
    pub(crate) connection: ConnectionId,
    /// One permit for each request of the connection that may be in progress.
    pub(crate) room: Arc<Semaphore>,
}

/// The shard's connections, and the session of each.
#[derive(Default)]
pub(crate) struct Clients(RefCell<ClientTable>);

#[derive(Default)]
struct ClientTable {
    last: ConnectionId,
    open: BTreeMap<ConnectionId, Weak<dyn Connection>>,
    attached: HashMap<SessionId, SessionAttachment>,
}

impl Clients {
    /// Adds an open connection. Returns its number.
    pub(crate) fn connected(&self, connection: &Arc<dyn Connection>) -> ConnectionId {
        let mut table = self.0.borrow_mut();
        table.last += 1;
        let id = table.last;
        table.open.insert(id, Arc::downgrade(connection));
        id
    }

    /// Removes a connection that has ended, and the attachment of `session` to it. Returns the number
    /// of this attachment.
    pub(crate) fn disconnected(
        &self,
        connection: ConnectionId,
        session: Option<SessionId>,
    ) -> Option<AttachmentNumber> {
        self.0.borrow_mut().open.remove(&connection);
        session.and_then(|session| self.detach(session, connection))
    }

    /// Ends the attachment of a session to a connection. Returns its number, or `None` if the session
    /// is not attached to this connection.
    pub(crate) fn detach(&self, session: SessionId, connection: ConnectionId) -> Option<AttachmentNumber> {
        self.is_attached(session, connection)
            .then(|| self.0.borrow_mut().attached.remove(&session))
            .flatten()
            .map(|attachment| attachment.number)
    }

    /// Attaches a session to a connection, which waits for this and therefore stays in the table. From
    /// then on, the shard refuses the session's requests on an earlier connection.
    pub(crate) fn attach(&self, session: SessionId, attachment: SessionAttachment) {
        let mut table = self.0.borrow_mut();
        let number = attachment.number;
        let earlier = table.attached.insert(session, attachment);
        assert!(earlier.is_none_or(|earlier| earlier.number < number), "attachments have growing numbers");
    }

    /// Ends the session's attachment on this shard, unless it is newer than `newest`. Returns it.
    pub(crate) fn end_session(
        &self,
        session: SessionId,
        newest: AttachmentNumber,
    ) -> Option<SessionAttachment> {
        let mut table = self.0.borrow_mut();
        let is_meant = table.attached.get(&session).is_some_and(|now| now.number <= newest);
        is_meant.then(|| table.attached.remove(&session)).flatten()
    }

    /// Returns whether the session is attached to this connection.
    pub(crate) fn is_attached(&self, session: SessionId, connection: ConnectionId) -> bool {
        self.0.borrow().attached.get(&session).is_some_and(|now| now.connection == connection)
    }

    /// Returns a connection, if it is open.
    pub(crate) fn connection(&self, id: ConnectionId) -> Option<Arc<dyn Connection>> {
        self.0.borrow().open.get(&id).and_then(Weak::upgrade)
    }

    /// Returns the number of sessions that are attached to a connection.
    pub(crate) fn sessions(&self) -> u32 {
        self.0.borrow().attached.len() as u32
    }

    /// Returns the number of connections that use one-sided transfers for bulk data now.
    pub(crate) fn one_sided(&self) -> u32 {
        let table = self.0.borrow();
        table.open.values().filter_map(Weak::upgrade).filter(|c| c.limits().one_sided).count() as u32
    }
}
