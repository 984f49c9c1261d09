//! The task of a connection: it runs one transport after another until the connection is closed or
//! lost.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use identity::ProofKey;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::connection_end::CloseReason;
use super::on_wake::OnWake;
use super::packets::PacketReader;
use super::reader::{FrameReader, ReadFailure};
use super::slot::ConnectionSlot;
use super::{ConnectionState, Shared};
use crate::dialer::Dialer;
use crate::frame::{Body, Challenge, Reject, RejectCode, Resume};
use crate::handshake::{self, HandshakeError};
use crate::transport::packets::Link;
use crate::transport::{ConnectTicket, Road, Wire};
use crate::{ConnectionEvent, MessengerError};

/// Time that a closing connection has to send its queued frames.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// Time that a closing connection has to send its queued frames if another connection needs its
/// slot. The time suffices to tell the peer the reason.
const RECLAIM_TIME: Duration = Duration::from_millis(100);

/// How long an acknowledgement waits for another frame that can carry it.
const ACK_DELAY: Duration = Duration::from_millis(20);

/// A transport that ended within this time and delivered no new frame counts as a failed attempt,
/// which lengthens the backoff.
const SHORT_LIFE: Duration = Duration::from_secs(1);

/// Minimum and maximum pause between attempts to connect.
pub(crate) const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// A transport with which a client resumes its connection.
pub(crate) struct Resumption {
    pub(crate) wire: Wire,
    /// The client's request, whose proof the server has verified.
    pub(crate) request: Resume,
    pub(crate) challenge: Challenge,
}

/// The source of new transports, which differs between client and server.
pub(crate) enum TransportSupply {
    /// The client dials new transports.
    Client(Box<Dialer>),
    /// The server waits until the client resumes the connection.
    Server { resumptions: mpsc::Receiver<Box<Resumption>>, registration: Arc<dyn ConnectionSlot> },
}

/// The reason why a transport is no longer used.
pub(super) enum TransportEnd {
    Broken(String),
    /// The peer was silent for too long.
    Silent(String),
    Damaged(String),
    Replaced(Box<Resumption>),
    /// This side found a better transport.
    Upgraded(Wire, ConnectTicket),
    Fatal(MessengerError),
    Closed,
}

/// Runs the connection, first on `wire`, until it ends.
pub(crate) async fn run(shared: Arc<Shared>, mut role: TransportSupply, wire: Wire) {
    let end = EndGuard(Arc::clone(&shared));
    let why = live(&shared, &mut role, wire).await;
    tracing::debug!(connection = %format_args!("{:032x}", shared.connection_id()), %why, "connection ended");
    shared.lose(why);
    drop(role);
    drop(end);
}

/// Announces that the connection's task has ended, even if the task was dropped together with its
/// runtime.
struct EndGuard(Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.lose(MessengerError::ConnectionLost("the connection's runtime has ended".into()));
        self.0.end.finish();
    }
}

async fn live(shared: &Arc<Shared>, role: &mut TransportSupply, mut wire: Wire) -> MessengerError {
    let mut damaged = 0;
    loop {
        let before = shared.progress();
        let began = Instant::now();
        let is_path = matches!(wire.road, Road::Packets(_));
        let end = shared.use_transport(role, wire).await;
        let useful = shared.progress() != before;
        if useful {
            damaged = 0;
        }
        let (mut better, mut is_silent) = (None, shared.is_missing_peer());
        let (reason, resumption) = match end {
            TransportEnd::Upgraded(wire, ticket) => {
                better = Some((wire, ticket));
                ("a better transport is available".to_owned(), None)
            }
            TransportEnd::Closed => return MessengerError::ConnectionLost(shared.end.reason().text().into()),
            TransportEnd::Fatal(why) => return why,
            TransportEnd::Replaced(resumption) => {
                ("the client resumed on a new transport".to_owned(), Some(resumption))
            }
            TransportEnd::Broken(reason) => (reason, None),
            TransportEnd::Silent(reason) => {
                is_silent = true;
                (reason, None)
            }
            TransportEnd::Damaged(reason) => {
                damaged += 1;
                if damaged > shared.config.max_damaged_transports {
                    let why = format!("{reason}; {damaged} transports in a row delivered damaged frames");
                    return MessengerError::Protocol(why);
                }
                (reason, None)
            }
        };
        tracing::debug!(connection = %format_args!("{:032x}", shared.connection_id()), reason, "transport ended");
        shared.interrupt();
        let lived = useful || began.elapsed() > SHORT_LIFE;
        if let (TransportSupply::Client(dialer), true) = (&*role, is_path && (is_silent || !lived)) {
            dialer.path_was_useless(&reason);
        }
        let next = tokio::select! {
            biased;
            next = Box::pin(role.next_wire(shared, resumption, better, lived)) => next,
            () = shared.end.close_requested() => {
                let why = format!("{}, while the peer was not reachable", shared.end.reason().text());
                return MessengerError::ConnectionLost(why);
            }
        };
        wire = match next {
            Ok(next) => next,
            Err(why) => return why,
        };
        shared.metrics.resumes.increment(1);
    }
}

impl TransportSupply {
    /// Waits for the transport on which the connection continues.
    async fn next_wire(
        &mut self,
        shared: &Arc<Shared>,
        resumption: Option<Box<Resumption>>,
        better: Option<(Wire, ConnectTicket)>,
        was_useful: bool,
    ) -> Result<Wire, MessengerError> {
        match self {
            TransportSupply::Client(dialer) => match better {
                Some(better) => dialer.redial_over(shared, better).await,
                None => dialer.redial(shared, was_useful).await,
            },
            TransportSupply::Server { resumptions, registration } => {
                let deadline = Instant::now() + shared.config.hold;
                registration.hold()?;
                let mut resumption = resumption;
                loop {
                    let next = match resumption.take() {
                        Some(next) => next,
                        None => match timeout_at(deadline, resumptions.recv()).await {
                            Ok(Some(next)) => next,
                            _ => {
                                let why = "the client did not resume the connection in time";
                                return Err(MessengerError::ConnectionLost(why.into()));
                            }
                        },
                    };
                    if let Some(wire) = shared.accept_resumption(next).await? {
                        registration.release();
                        return Ok(wire);
                    }
                }
            }
        }
    }

    /// The connection's slot in its listener's registry.
    fn registration(&self) -> Option<Arc<dyn ConnectionSlot>> {
        match self {
            TransportSupply::Client(_) => None,
            TransportSupply::Server { registration, .. } => Some(Arc::clone(registration)),
        }
    }

    /// Waits for a replacement of the current transport. On a server, the client may resume before
    /// the server notices that the transport broke. On a client, a better transport may be found
    /// while the connection uses the base transport.
    async fn replaced(&mut self, shared: &Shared, is_base: bool) -> TransportEnd {
        match self {
            TransportSupply::Client(dialer) => {
                let (wire, ticket) = dialer.upgrade(shared, is_base).await;
                TransportEnd::Upgraded(wire, ticket)
            }
            TransportSupply::Server { resumptions, .. } => match resumptions.recv().await {
                Some(resumption) => TransportEnd::Replaced(resumption),
                None => std::future::pending().await,
            },
        }
    }
}

impl Shared {
    /// Reads from and writes to one transport until it ends.
    async fn use_transport(self: &Arc<Self>, role: &mut TransportSupply, wire: Wire) -> TransportEnd {
        self.watch.begin_transport();
        let road = self.config.records.protect(wire.road, self.proof_key());
        let end = match road {
            Road::Stream(mut reader, mut writer) => {
                let reading = Box::pin(FrameReader::new(self, &mut *reader).run());
                let writing =
                    Box::pin(async { self.write_loop(&mut *writer).await.map_err(|e| e.to_string()) });
                self.until_end(role, reading, writing, None).await
            }
            Road::Packets(link) => {
                self.lock().link = Some(Arc::clone(&link));
                let reading = Box::pin(PacketReader::new(self, &link).run());
                let writing = Box::pin(async { self.send_packets(&link).await.map_err(|e| e.0) });
                let end = self.until_end(role, reading, writing, Some(&link)).await;
                // From here on the peer cannot reach memory of this side over the link.
                link.fail("the connection no longer uses this transport");
                end
            }
        };
        let closing = self.lock().status == ConnectionState::Closing;
        match end {
            TransportEnd::Broken(_)
            | TransportEnd::Silent(_)
            | TransportEnd::Fatal(MessengerError::ConnectionLost(_))
                if closing =>
            {
                TransportEnd::Closed
            }
            other => other,
        }
    }

    /// Runs the transport until one of its tasks reports an end.
    ///
    /// The futures are boxed, because each `async` function that passes a future on would hold it
    /// twice. With thousands of idle connections, this would use much memory.
    async fn until_end(
        self: &Arc<Self>,
        role: &mut TransportSupply,
        reading: Pin<Box<impl Future<Output = ReadFailure>>>,
        writing: Pin<Box<impl Future<Output = Result<(), String>>>>,
        link: Option<&Link>,
    ) -> TransportEnd {
        let registration = role.registration();
        let writing = async {
            match writing.await {
                // Everything was sent. Wait for the peer to close the transport.
                Ok(()) => std::future::pending().await,
                Err(reason) => reason,
            }
        };
        // Almost all wake-ups concern the reader or the writer.
        let rare = OnWake::new(async {
            tokio::select! {
                biased;
                end = self.watch_peer(link, registration.as_deref()) => end,
                never = self.acknowledge_in_time() => match never {},
                end = role.replaced(self, link.is_none()) => end,
                () = self.close_deadline() => TransportEnd::Closed,
            }
        });
        tokio::select! {
            biased;
            fault = reading => fault.into(),
            reason = writing => TransportEnd::Broken(reason),
            end = rare => end,
        }
    }

    /// Sends acknowledgements that no other frame carried in time.
    async fn acknowledge_in_time(&self) -> Infallible {
        loop {
            self.ack_wanted.notified().await;
            sleep(ACK_DELAY).await;
            let mut state = self.lock();
            if state.inbound.owes_ack() {
                state.outbound.want_window();
                self.wake_writer.notify_one();
            }
        }
    }

    async fn close_deadline(&self) {
        self.end.close_requested().await;
        sleep(match self.end.reason() {
            CloseReason::User => CLOSE_TIME,
            CloseReason::Reclaimed => RECLAIM_TIME,
        })
        .await;
    }

    /// Number of the last sequenced frame that this side received, of the last sequenced frame that
    /// the peer acknowledged, and of the bytes that this side has pulled.
    pub(super) fn progress(&self) -> (u64, u64, u64) {
        let state = self.lock();
        (state.inbound.received(), state.outbound.acked(), state.pulls.pulled_bytes())
    }

    /// Stops everything that depends on the transport that has ended.
    fn interrupt(&self) {
        let mut state = self.lock();
        state.link = None;
        let exposed = state.offers.hide();
        state.offers.stop_serving();
        let dropped = state.outbound.rewind();
        if base::mutant!(DeliverTwice) {
            state.inbound.forget_last_message();
        }
        state.inbound.push_info(ConnectionEvent::Interrupted);
        let waker = state.inbound.take_waker();
        drop(state);
        self.send_limits.free_bulk_slots(dropped.len());
        drop((dropped, exposed));
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Number of the last sequenced frame that this side received, and the total credit that this
    /// side has granted, in bytes.
    pub(crate) fn resume_point(&self) -> (u64, u64) {
        let state = self.lock();
        (state.inbound.received(), state.inbound.granted())
    }

    /// The key by which each side proves that the connection is its own.
    pub(crate) fn proof_key(&self) -> &ProofKey {
        &self.proof_key
    }

    /// Continues from the peer's state: the peer has all frames up to `received` and has granted
    /// `granted` bytes of credit.
    pub(crate) fn resume(&self, received: u64, granted: u64) -> Result<(), MessengerError> {
        self.on_ack(received, &mut Vec::new())?;
        self.on_granted(granted)?;
        let mut state = self.lock();
        let dropped = state.outbound.rewind();
        for request in state.pulls.requests() {
            state.outbound.push_control(crate::frame::Body::PullRequest(request))?;
        }
        state.inbound.push_info(ConnectionEvent::Resumed);
        let waker = state.inbound.take_waker();
        drop(state);
        self.send_limits.free_bulk_slots(dropped.len());
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }

    /// Answers a client that resumes its connection. Returns `None` if the answer could not be
    /// written to the new transport in time.
    async fn accept_resumption(&self, next: Box<Resumption>) -> Result<Option<Wire>, MessengerError> {
        let Resumption { mut wire, request, challenge } = *next;
        let resumed = handshake::resumed(&self.proof_key, &request, &challenge, self.resume_point());
        let frames = [Body::Resumed(resumed)];
        let answer = handshake::write(&mut wire, &frames);
        match timeout(self.config.handshake_timeout, answer).await {
            Ok(Ok(())) => {
                self.resume(request.received, request.granted)?;
                Ok(Some(wire))
            }
            _ => Ok(None),
        }
    }
}

impl From<ReadFailure> for TransportEnd {
    fn from(fault: ReadFailure) -> TransportEnd {
        match fault {
            ReadFailure::Broken(reason) => TransportEnd::Broken(reason),
            ReadFailure::Damaged(error) => TransportEnd::Damaged(error.to_string()),
            ReadFailure::Fatal(why) => TransportEnd::Fatal(why),
            ReadFailure::Closed(reason) => {
                let why = format!("the peer closed the connection: {reason}");
                TransportEnd::Fatal(MessengerError::ConnectionLost(why))
            }
        }
    }
}

impl From<HandshakeError> for MessengerError {
    fn from(e: HandshakeError) -> MessengerError {
        match e {
            HandshakeError::Rejected(Reject { code: RejectCode::UnknownKey, reason }) => {
                MessengerError::KeyRefused(reason)
            }
            HandshakeError::Rejected(reject) => MessengerError::Refused(reject.reason),
            HandshakeError::Identity(e) => MessengerError::Identity(e),
            HandshakeError::Transport { endpoint, reason } => {
                MessengerError::Unreachable { endpoint, reason }
            }
            HandshakeError::Protocol(reason) => MessengerError::Protocol(reason),
        }
    }
}
