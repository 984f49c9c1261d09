//! [`LinkTask`]: the background task of one shard link.
//!
//! The task connects to the shard, and opens or resumes the session on the connection. Then it
//! sends the requests that wait for the link, and receives answers. When the connection is lost,
//! the task connects again, and sends the link's unanswered requests again, in order and marked as
//! retries.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use base::thread::ThreadClass;
use messenger::MessengerError;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::opening::{OpenedStrand, dial};
use super::session::{Ending, NextSend, Shared, at_host};
use super::strand::{Strand, StrandEvent, StrandIncoming};
use crate::Error;
use crate::error::refuses_client;

/// First pause between two attempts to connect. The pause doubles with each attempt, up to
/// [`RECONNECT_PAUSE_MAX`].
pub(super) const RECONNECT_PAUSE: Duration = Duration::from_millis(10);
/// Maximum pause between two attempts to reconnect.
pub(super) const RECONNECT_PAUSE_MAX: Duration = Duration::from_millis(500);

/// Pause before a lost connection is opened again while no request needs it. A node that has
/// reached its limit of connections drops idle connections to serve other clients. If the clients
/// of the dropped connections reconnected at once, the node would have to drop further connections.
/// The pause is shorter than the time for which nodes keep the uploads of disconnected clients.
const IDLE_RECONNECT_PAUSE: Duration = Duration::from_secs(60);

/// Time after which a link that cannot connect asks the other links for help.
const HELP_DELAY: Duration = Duration::from_millis(250);

/// Why a link has no longer its connection.
enum LinkLoss {
    /// The connection was lost.
    Lost,
    /// The session has removed the connection, because it has another id or other shards now. Or the
    /// node has no session on the connection.
    Detached,
}

/// A connection of a link, with its number.
pub(super) struct LinkEnds {
    pub(super) strand: Strand,
    pub(super) incoming: StrandIncoming,
    pub(super) number: u64,
}

/// The background task of the link to one shard. It runs until the session is closed.
pub(super) struct LinkTask {
    ending: Arc<Ending>,
    shard: u16,
    wake: Arc<Notify>,
    /// Pause before the next attempt to connect.
    pause: Duration,
}

impl LinkTask {
    /// Starts the task of the link to `shard`. `first` is the link's first connection; with `None`,
    /// the task connects.
    pub(super) fn start(ending: &Arc<Ending>, shard: u16, wake: Arc<Notify>, first: Option<LinkEnds>) {
        let task = LinkTask { ending: Arc::clone(ending), shard, wake, pause: Duration::ZERO };
        base::task::spawn(ThreadClass::Client, task.run(first));
    }

    async fn run(mut self, first: Option<LinkEnds>) {
        let ending = Arc::clone(&self.ending);
        let shard = self.shard;
        tokio::select! {
            biased;
            () = ending.shared().close_wanted() => {}
            never = self.serve(first) => match never {},
        }
        ending.shared().end_link(shard).await;
    }

    fn shared(&self) -> &Arc<Shared> {
        self.ending.shared()
    }

    async fn serve(&mut self, mut first: Option<LinkEnds>) -> Infallible {
        loop {
            let ends = match first.take() {
                Some(ends) => ends,
                None => self.reconnect().await,
            };
            let (begun, number) = (Instant::now(), ends.number);
            let loss = self.use_connection(ends).await;
            self.shared().lost(self.shard, number);
            // If a node contradicts itself, the session may remove a new connection at once, again
            // and again. Then the pauses grow.
            if matches!(loss, LinkLoss::Lost) || begun.elapsed() > RECONNECT_PAUSE_MAX {
                self.pause = Duration::ZERO;
            }
            self.wait_for_need().await;
        }
    }

    /// Sends requests and receives answers until the link loses the connection.
    async fn use_connection(&self, mut ends: LinkEnds) -> LinkLoss {
        let LinkEnds { strand, incoming, number } = &mut ends;
        // Answers are received while requests are sent. Otherwise client and node could wait for
        // each other (deadlock).
        tokio::select! {
            biased;
            () = self.send_unsent(strand, *number) => LinkLoss::Detached,
            loss = self.receive(incoming, *number) => loss,
        }
    }

    /// Sends all requests that wait for the link, now and later. Returns when the session has
    /// removed the connection.
    async fn send_unsent(&self, strand: &Strand, number: u64) {
        loop {
            match self.shared().next_unsent(self.shard, number, strand) {
                NextSend::Message(seq, message) => match strand.send(message).await {
                    Ok(()) => {}
                    Err(MessengerError::ConnectionLost(_)) => std::future::pending().await,
                    Err(e) => self.shared().fail_sending(seq, e.into()),
                },
                NextSend::Nothing => self.wake.notified().await,
                // `receive` learns of the loss too, and passes on the answers that arrived before.
                NextSend::Lost => std::future::pending().await,
                NextSend::Detached => return,
            }
        }
    }

    /// Receives answers. Returns when the connection is lost, or has no session any more.
    async fn receive(&self, incoming: &mut StrandIncoming, number: u64) -> LinkLoss {
        loop {
            match incoming.next().await {
                // The strand has no session if the session has lost its slot, if an operator has ended
                // it, or if the node has attached it to an earlier, abandoned connection. The last case
                // happens if the node received the request to open the session on the abandoned
                // connection last.
                StrandEvent::Reply(reply, payload) => {
                    if !self.shared().take_answer(self.shard, number, reply, payload) {
                        return LinkLoss::Detached;
                    }
                }
                StrandEvent::Lost(e) => {
                    tracing::info!(shard = self.shard, error = %e, "connection lost");
                    return LinkLoss::Lost;
                }
            }
        }
    }

    /// Waits until the link needs a connection, or for [`IDLE_RECONNECT_PAUSE`].
    async fn wait_for_need(&self) {
        let needed = async {
            while !self.shared().is_needed(self.shard) {
                self.wake.notified().await;
            }
        };
        // Connect in both cases: after the timeout, and when the connection is needed.
        let _ = tokio::time::timeout(IDLE_RECONNECT_PAUSE, needed).await;
    }

    async fn reconnect(&mut self) -> LinkEnds {
        loop {
            if !self.pause.is_zero() {
                tokio::time::sleep(self.pause).await;
            }
            self.pause = (self.pause * 2).clamp(RECONNECT_PAUSE, RECONNECT_PAUSE_MAX);
            let endpoint = self.endpoint().await;
            let attempt = tokio::select! {
                biased;
                () = self.endpoint_changed(&endpoint) => None,
                attempt = self.connect(&endpoint) => Some(attempt),
                never = self.ask_for_help() => match never {},
            };
            match attempt {
                Some(Ok(Some(ends))) => return ends,
                Some(Ok(None)) => {}
                None => self.pause = RECONNECT_PAUSE,
                Some(Err(Error::Network(e))) if refuses_client(&e) => {
                    self.shared().refused_client(self.shard, &e);
                }
                Some(Err(e)) => {
                    tracing::debug!(endpoint, shard = self.shard, error = %e, "cannot reconnect yet");
                    self.shared().cannot_connect(&e);
                    self.shared().ask_other_links(self.shard);
                    // If this shard alone is unreachable, do not try forever unless a request needs it.
                    if self.pause >= RECONNECT_PAUSE_MAX && self.shared().may_rest(self.shard) {
                        self.wait_for_need().await;
                    }
                }
            }
        }
    }

    /// Returns the endpoint of the shard. Waits while the osd does not have the shard.
    async fn endpoint(&self) -> String {
        loop {
            match self.shared().endpoint(self.shard) {
                Some(endpoint) => return endpoint,
                None => self.wake.notified().await,
            }
        }
    }

    /// Waits until another link has learned that the shard has another endpoint.
    async fn endpoint_changed(&self, endpoint: &str) {
        while self.shared().endpoint(self.shard).as_deref() == Some(endpoint) {
            self.wake.notified().await;
        }
    }

    /// Asks the other links to connect too if requests wait for this link and it takes long to
    /// connect. The osd may have been restarted with other ports, and each shard knows all ports.
    async fn ask_for_help(&self) -> Infallible {
        loop {
            tokio::time::sleep(HELP_DELAY).await;
            self.shared().ask_other_links(self.shard);
        }
    }

    /// Connects, and opens or resumes the session on the connection. Returns `None` if the session
    /// cannot use the connection.
    async fn connect(&self, endpoint: &str) -> Result<Option<LinkEnds>, Error> {
        let shared = self.shared();
        let mut dialed = dial(shared.dialer(), endpoint, shared.options()).await?;
        let (_opening, session) = shared.session_to_present().await;
        let capability = shared.capabilities().current();
        match dialed.open(session, capability.clone()).await {
            Ok(opened) => {
                let OpenedStrand { strand, incoming, opened } = dialed.with(opened);
                let number = shared.attach(&self.ending, self.shard, endpoint, session, &opened, &strand)?;
                Ok(number.map(|number| LinkEnds { strand, incoming, number }))
            }
            Err(Error::Node(wire::Error::CapabilityRefused { why, control }))
                if !shared.capabilities().is_given() =>
            {
                let control = control.map(|control| at_host(&control, endpoint));
                match shared.capabilities().replace(&capability, control.as_deref()).await {
                    Err(e) if !e.is_transient() => {
                        let why = format!("{why}, and the node issues no other: {e}");
                        shared.refused(self.shard, session, &wire::Error::CapabilityRefused { why, control });
                        Ok(None)
                    }
                    Err(e) => Err(Error::NoCapability { why, error: Box::new(e) }),
                    Ok(()) => Ok(None),
                }
            }
            Err(Error::Node(e)) => {
                shared.refused(self.shard, session, &e);
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }
}
