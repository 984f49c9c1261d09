//! [`Links`]: the session's shard links. A shard link is the client's way to one shard of the osd:
//! one connection after the other.

use std::ops::Range;
use std::sync::Arc;

use messenger::Limits;
use tokio::sync::Notify;

use super::strand::Strand;

/// A connection of a shard link.
struct ShardConnection {
    strand: Strand,
    number: u64,
    /// Whether callers may send on the connection. They wait until the link's task has sent all
    /// requests that were waiting for the connection.
    is_ready: bool,
    /// Whether the node has no session on the connection any more. The link waits for the answers to
    /// the requests in flight, and then gives the connection up.
    is_draining: bool,
}

#[derive(Default)]
struct ShardLink {
    /// `None` while the link has no connection.
    connection: Option<ShardConnection>,
    /// Whether the link's task must connect, even if no request needs the link.
    is_asked: bool,
    /// Wakes the link's task.
    wake: Arc<Notify>,
}

/// A connection on which a request can be sent.
pub(crate) struct ReadyConnection {
    pub(crate) strand: Strand,
    /// Number of the connection, unique among all connections of the session and at least 1.
    pub(crate) number: u64,
}

/// The shard links of a session. The number of links never shrinks: if a restarted osd has fewer
/// shards, the links of the other shards wait until the osd has these shards again.
pub(crate) struct Links {
    links: Vec<ShardLink>,
    /// Number of connections so far.
    connections: u64,
    /// Limits of the newest connection.
    limits: Limits,
}

impl Links {
    /// Creates a table without links. `limits` are the limits of the session's first connection.
    pub(crate) fn new(limits: Limits) -> Links {
        Links { links: Vec::new(), connections: 0, limits }
    }

    /// Adds the missing links to `shards` shards, and returns their shards.
    pub(crate) fn add_missing(&mut self, shards: u16) -> Range<u16> {
        let before = self.links.len() as u16;
        if shards > before {
            self.links.resize_with(usize::from(shards), ShardLink::default);
        }
        before..shards.max(before)
    }

    /// Gives a link its next connection. Returns the connection's number. Callers may use the
    /// connection once it is [ready](Links::set_ready).
    pub(crate) fn attach(&mut self, shard: u16, strand: Strand) -> u64 {
        self.connections += 1;
        self.limits = strand.limits();
        let link = self.link_mut(shard);
        assert!(link.connection.is_none(), "a link has one connection at a time");
        link.is_asked = false;
        let number = self.connections;
        self.link_mut(shard).connection =
            Some(ShardConnection { strand, number, is_ready: false, is_draining: false });
        number
    }

    /// Sends nothing more on a link's connection with this number.
    pub(crate) fn drain(&mut self, shard: u16, number: u64) {
        let connection = self.link_mut(shard).connection.as_mut();
        if let Some(attached) = connection.filter(|attached| attached.number == number) {
            (attached.is_ready, attached.is_draining) = (false, true);
        }
    }

    /// Wakes the tasks of the links that only wait for answers.
    pub(crate) fn wake_draining(&self) {
        let is_draining =
            |link: &&ShardLink| link.connection.as_ref().is_some_and(|attached| attached.is_draining);
        self.links.iter().filter(is_draining).for_each(|link| link.wake.notify_one());
    }

    /// Returns whether the link only waits for answers on its connection with this number.
    pub(crate) fn is_draining(&self, shard: u16, number: u64) -> bool {
        let connection = self.link(shard).connection.as_ref();
        connection.is_some_and(|attached| attached.number == number && attached.is_draining)
    }

    /// Removes a link's connection with this number. Returns `false` if the link has it no longer.
    pub(crate) fn detach(&mut self, shard: u16, number: u64) -> bool {
        let is_attached = self.is_attached(shard, number);
        if is_attached {
            self.link_mut(shard).connection = None;
        }
        is_attached
    }

    /// Removes a link's connection, and returns it.
    pub(crate) fn take(&mut self, shard: u16) -> Option<Strand> {
        self.link_mut(shard).connection.take().map(|attached| attached.strand)
    }

    /// Removes all connections, and asks the links to connect again.
    pub(crate) fn detach_all(&mut self) {
        for link in &mut self.links {
            link.connection = None;
            link.is_asked = true;
            link.wake.notify_one();
        }
    }

    /// Returns whether this is the link's current connection.
    pub(crate) fn is_attached(&self, shard: u16, number: u64) -> bool {
        self.link(shard).connection.as_ref().is_some_and(|attached| attached.number == number)
    }

    /// Lets callers send on a link's connection.
    pub(crate) fn set_ready(&mut self, shard: u16) {
        if let Some(attached) = &mut self.link_mut(shard).connection {
            attached.is_ready = true;
        }
    }

    /// Returns the ready connection to a shard; with `None`, to the first shard that has one.
    pub(crate) fn ready(&self, shard: Option<u16>) -> Option<ReadyConnection> {
        let ready = |link: &ShardLink| {
            let attached = link.connection.as_ref().filter(|attached| attached.is_ready)?;
            Some(ReadyConnection { strand: attached.strand.clone(), number: attached.number })
        };
        match shard {
            Some(shard) => ready(self.link(shard)),
            None => self.links.iter().find_map(ready),
        }
    }

    /// Returns the limits of the connection to a shard. Without this connection, returns the limits
    /// of the newest connection. All shards have the same limits, except that only some connections
    /// may have one-sided transfers.
    pub(crate) fn limits(&self, shard: Option<u16>) -> Limits {
        let attached = shard.and_then(|shard| self.link(shard).connection.as_ref());
        attached.map_or(self.limits, |attached| attached.strand.limits())
    }

    /// Wakes the task of the link to a shard; with `None`, the tasks of all links.
    pub(crate) fn wake(&self, shard: Option<u16>) {
        match shard {
            Some(shard) => self.link(shard).wake.notify_one(),
            None => self.links.iter().for_each(|link| link.wake.notify_one()),
        }
    }

    /// Returns the signal that wakes a link's task.
    pub(crate) fn signal(&self, shard: u16) -> Arc<Notify> {
        Arc::clone(&self.link(shard).wake)
    }

    /// Returns the strands of all links.
    pub(crate) fn strands(&self) -> Vec<Strand> {
        let attached = self.links.iter().filter_map(|link| link.connection.as_ref());
        attached.map(|attached| attached.strand.clone()).collect()
    }

    /// Asks all links without connection to connect.
    pub(crate) fn ask_all(&mut self) {
        for link in self.links.iter_mut().filter(|link| link.connection.is_none()) {
            link.is_asked = true;
            link.wake.notify_one();
        }
    }

    /// Returns whether any link has a connection.
    pub(crate) fn is_any_connected(&self) -> bool {
        self.links.iter().any(|link| link.connection.is_some())
    }

    /// Withdraws the wish that a link connects.
    pub(crate) fn stop_asking(&mut self, shard: u16) {
        self.link_mut(shard).is_asked = false;
    }

    /// Returns whether a link was asked to connect.
    pub(crate) fn is_asked(&self, shard: u16) -> bool {
        self.link(shard).is_asked
    }

    fn link(&self, shard: u16) -> &ShardLink {
        &self.links[usize::from(shard)]
    }

    fn link_mut(&mut self, shard: u16) -> &mut ShardLink {
        &mut self.links[usize::from(shard)]
    }
}
