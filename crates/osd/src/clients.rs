//! [`Clients`]: the connections of a shard, and the sessions that are bound to them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use base::collections::HashMap;
use messenger::{Connection, PeerInfo};
use tokio::sync::Semaphore;
use wire::SessionId;

use crate::sessions::BindingNumber;
use crate::task::spawn;

/// Number that identifies a connection to this shard.
pub(crate) type ConnectionId = u64;

/// A session on a connection of the shard.
#[derive(Clone)]
pub(crate) struct SessionBinding {
    pub(crate) number: BindingNumber,
    pub(crate) connection: ConnectionId,
    /// Number of the session on the connection.
    pub(crate) strand: u32,
    /// One permit for each request of the session on this connection that may be in progress.
    pub(crate) room: Arc<Semaphore>,
}

/// The shard's connections, and the sessions on each.
#[derive(Default)]
pub(crate) struct Clients(RefCell<ClientTable>);

#[derive(Default)]
struct ClientTable {
    last: ConnectionId,
    open: BTreeMap<ConnectionId, OpenConnection>,
    bound: HashMap<SessionId, SessionBinding>,
}

struct OpenConnection {
    connection: Weak<dyn Connection>,
    /// Number of sessions that are bound to the connection.
    sessions: usize,
    /// Whether a session is being opened on the connection.
    is_opening: bool,
}

impl Clients {
    /// Adds an open connection. Returns its number.
    pub(crate) fn connected(&self, connection: &Arc<dyn Connection>) -> ConnectionId {
        let mut table = self.0.borrow_mut();
        table.last += 1;
        let id = table.last;
        table.open.insert(
            id,
            OpenConnection { connection: Arc::downgrade(connection), sessions: 0, is_opening: false },
        );
        id
    }

    /// Removes a connection that has ended. Only sessions that are being closed may still be bound
    /// to it.
    pub(crate) fn disconnected(&self, connection: ConnectionId) {
        self.0.borrow_mut().open.remove(&connection);
    }

    /// Ends a binding of a session. Returns whether it was the session's current one.
    pub(crate) fn unbind(&self, session: SessionId, number: BindingNumber) -> bool {
        let is_current = self.is_bound(session, number);
        if is_current {
            self.0.borrow_mut().remove(session);
        }
        is_current
    }

    /// Binds a session to a connection, which waits for this and therefore stays in the table. From
    /// then on, the shard refuses the session's requests on an earlier binding.
    pub(crate) fn bind(&self, session: SessionId, binding: SessionBinding) {
        let mut table = self.0.borrow_mut();
        let earlier = table.remove(session);
        let number = binding.number;
        assert!(earlier.is_none_or(|earlier| earlier.number < number), "bindings have growing numbers");
        let open = table.open.get_mut(&binding.connection).expect("the connection waits for its session");
        open.sessions += 1;
        table.bound.insert(session, binding);
    }

    /// Ends the session's binding on this shard, unless it is newer than `newest`. Returns it.
    pub(crate) fn end_session(&self, session: SessionId, newest: BindingNumber) -> Option<SessionBinding> {
        let mut table = self.0.borrow_mut();
        let is_meant = table.bound.get(&session).is_some_and(|now| now.number <= newest);
        is_meant.then(|| table.remove(session)).flatten()
    }

    /// Returns whether this is the session's current binding.
    pub(crate) fn is_bound(&self, session: SessionId, number: BindingNumber) -> bool {
        self.0.borrow().bound.get(&session).is_some_and(|now| now.number == number)
    }

    /// Notes that a session is being opened on a connection, or that this has ended.
    pub(crate) fn set_opening(&self, id: ConnectionId, is_opening: bool) {
        if let Some(open) = self.0.borrow_mut().open.get_mut(&id) {
            open.is_opening = is_opening;
        }
    }

    /// Closes the connections of a user.
    pub(crate) fn close_of(&self, user: u32) {
        let open: Vec<_> =
            self.0.borrow().open.values().filter_map(|open| open.connection.upgrade()).collect();
        let of_user = |peer: &PeerInfo| peer.user.as_ref().is_some_and(|known| known.id == user);
        for connection in open.into_iter().filter(|connection| of_user(connection.peer())) {
            spawn(async move { connection.close().await });
        }
    }

    /// Returns the number of sessions that are bound to a connection.
    pub(crate) fn sessions_on(&self, id: ConnectionId) -> usize {
        self.0.borrow().open.get(&id).map_or(0, |open| open.sessions)
    }

    /// Returns a connection, if it is open, and whether any session uses it.
    pub(crate) fn connection(&self, id: ConnectionId) -> Option<(Arc<dyn Connection>, bool)> {
        let table = self.0.borrow();
        let open = table.open.get(&id)?;
        Some((open.connection.upgrade()?, open.sessions > 0 || open.is_opening))
    }

    /// Returns the number of sessions that are bound to a connection.
    pub(crate) fn sessions(&self) -> u32 {
        self.0.borrow().bound.len() as u32
    }

    /// Returns the number of sessions whose connection uses one-sided transfers for bulk data now.
    pub(crate) fn one_sided(&self) -> u32 {
        let table = self.0.borrow();
        let is_one_sided =
            |open: &&OpenConnection| open.connection.upgrade().is_some_and(|open| open.limits().one_sided);
        table.open.values().filter(is_one_sided).map(|open| open.sessions as u32).sum()
    }
}

impl ClientTable {
    /// Removes the binding of a session.
    fn remove(&mut self, session: SessionId) -> Option<SessionBinding> {
        let removed = self.bound.remove(&session)?;
        // The connection may have ended while the session was being closed.
        if let Some(open) = self.open.get_mut(&removed.connection) {
            open.sessions -= 1;
        }
        Some(removed)
    }
}
