//! The life of a session: transports come and go, until the session is closed or lost.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::packets::PacketReader;
use super::reader::{FrameReader, ReadFailure};
use super::{ConnectionState, Shared};
use crate::handshake::{self, Dialer, HandshakeError};
use crate::stack::RegistryPlace;
use crate::transport::ofi::Link;
use crate::transport::{ConnectClaim, Road, Wire};
use crate::{ConnectionEvent, MessengerError};

/// How long a session that is being closed may take to send what is queued.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// The same, for a session whose place is needed: long enough to say why.
const RECLAIM_TIME: Duration = Duration::from_millis(100);

/// How long an acknowledgement waits for a frame to travel with.
const ACK_DELAY: Duration = Duration::from_millis(20);

/// A transport that lasted less than this, and brought nothing, counts as a failed attempt when the next one is made.
const SHORT_LIFE: Duration = Duration::from_secs(1);

/// Shortest and longest pause between attempts to connect.
pub(crate) const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// A transport that a client brings to go on with its session.
pub(crate) struct Resumption {
    pub(crate) wire: Wire,
    pub(crate) nonce: [u8; 16],
    /// Number of the last sequenced frame that the client has.
    pub(crate) received: u64,
    /// Credits that the client granted since the session began.
    pub(crate) granted: u64,
}

/// Which side of the session this is.
pub(crate) enum TransportSupply {
    /// Makes new transports.
    Client(Box<Dialer>),
    /// Waits for them.
    Server { resumptions: mpsc::Receiver<Box<Resumption>>, registration: Arc<RegistryPlace> },
}

/// Why a transport is used no longer.
pub(super) enum TransportEnd {
    Broken(String),
    /// The peer was not heard of for too long.
    Silent(String),
    Damaged(String),
    Replaced(Box<Resumption>),
    /// There is a better one.
    Upgraded(Wire, ConnectClaim),
    Fatal(MessengerError),
    Closed,
}

/// Runs the session, first on `wire`, until it ends.
pub(crate) async fn run(shared: Arc<Shared>, mut role: TransportSupply, wire: Wire) {
    let end = EndGuard(Arc::clone(&shared));
    let why = live(&shared, &mut role, wire).await;
    tracing::debug!(session = %format_args!("{:032x}", shared.session_id()), %why, "session ended");
    shared.lose(why);
    drop(role);
    drop(end);
}

/// Tells everybody that the session's task has ended, also when that was because its runtime ended.
struct EndGuard(Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.lose(MessengerError::SessionLost("the runtime that served it has ended".into()));
        self.0.ended.send_replace(true);
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
            TransportEnd::Upgraded(wire, claim) => {
                better = Some((wire, claim));
                ("there is a better one".to_owned(), None)
            }
            TransportEnd::Closed => return MessengerError::SessionLost(shared.close_reason().into()),
            TransportEnd::Fatal(why) => return why,
            TransportEnd::Replaced(resumption) => ("replaced by the peer".to_owned(), Some(resumption)),
            TransportEnd::Broken(reason) => (reason, None),
            TransportEnd::Silent(reason) => {
                is_silent = true;
                (reason, None)
            }
            TransportEnd::Damaged(reason) => {
                damaged += 1;
                if damaged > shared.config.max_damaged_transports {
                    let why = format!("{reason}; {damaged} transports in a row were damaged");
                    return MessengerError::Protocol(why);
                }
                (reason, None)
            }
        };
        tracing::debug!(session = %format_args!("{:032x}", shared.session_id()), reason, "transport ended");
        shared.interrupt();
        let lived = useful || began.elapsed() > SHORT_LIFE;
        if let (TransportSupply::Client(dialer), true) = (&*role, is_path && (is_silent || !lived)) {
            dialer.path_was_useless(&reason);
        }
        let next = tokio::select! {
            biased;
            next = Box::pin(role.next_wire(shared, resumption, better, lived)) => next,
            () = shared.close_requested() => {
                let why = format!("{}, while the peer was not reachable", shared.close_reason());
                return MessengerError::SessionLost(why);
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
    /// The transport that the session goes on with.
    async fn next_wire(
        &mut self,
        shared: &Arc<Shared>,
        resumption: Option<Box<Resumption>>,
        better: Option<(Wire, ConnectClaim)>,
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
                                return Err(MessengerError::SessionLost("the peer did not come back".into()));
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

    /// The session's place in its listener's registry.
    fn registration(&self) -> Option<Arc<RegistryPlace>> {
        match self {
            TransportSupply::Client(_) => None,
            TransportSupply::Server { registration, .. } => Some(Arc::clone(registration)),
        }
    }

    /// A client comes back before this side noticed that its transport broke; or this side is a client and has found a better
    /// transport than the base, if it uses that.
    async fn replaced(&mut self, is_base: bool) -> TransportEnd {
        match self {
            TransportSupply::Client(dialer) => {
                let (wire, claim) = dialer.upgrade(is_base).await;
                TransportEnd::Upgraded(wire, claim)
            }
            TransportSupply::Server { resumptions, .. } => match resumptions.recv().await {
                Some(resumption) => TransportEnd::Replaced(resumption),
                None => std::future::pending().await,
            },
        }
    }
}

impl Shared {
    /// Reads and writes one transport for as long as it lasts.
    async fn use_transport(self: &Arc<Self>, role: &mut TransportSupply, wire: Wire) -> TransportEnd {
        self.heard.store(true, Ordering::Relaxed);
        let end = match wire.road {
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
                // From here on nobody reaches memory of this side by it.
                link.fail("the session has ended it");
                end
            }
        };
        let closing = self.lock().status == ConnectionState::Closing;
        match end {
            TransportEnd::Broken(_)
            | TransportEnd::Silent(_)
            | TransportEnd::Fatal(MessengerError::SessionLost(_))
                if closing =>
            {
                TransportEnd::Closed
            }
            other => other,
        }
    }

    /// The futures are boxed because each `async` that they go through would hold them twice: thousands of sessions are idle.
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
                // Everything was said; what is left is to see the peer go.
                Ok(()) => std::future::pending().await,
                Err(reason) => reason,
            }
        };
        tokio::select! {
            biased;
            fault = reading => fault.into(),
            reason = writing => TransportEnd::Broken(reason),
            end = self.watch_peer(link, registration.as_deref()) => end,
            never = self.acknowledge_in_time() => match never {},
            end = role.replaced(link.is_none()) => end,
            () = self.close_deadline() => TransportEnd::Closed,
        }
    }

    /// Sends acknowledgements that found no frame to travel with.
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

    async fn close_requested(&self) {
        // The sender lives as long as `self` does.
        let _ = self.close_wanted.subscribe().wait_for(|wanted| *wanted).await;
    }

    async fn close_deadline(&self) {
        self.close_requested().await;
        sleep(if self.is_reclaimed() { RECLAIM_TIME } else { CLOSE_TIME }).await;
    }

    /// Numbers of the last sequenced frames that got through, in and out.
    pub(super) fn progress(&self) -> (u64, u64) {
        let state = self.lock();
        (state.inbound.received(), state.outbound.acked())
    }

    /// The transport is gone: nothing that belonged to it may go on.
    fn interrupt(&self) {
        let mut state = self.lock();
        state.link = None;
        let exposed = state.offers.hide();
        state.offers.stop_serving();
        let dropped = state.outbound.rewind();
        state.inbound.push_info(ConnectionEvent::Interrupted);
        let waker = state.inbound.take_waker();
        drop(state);
        self.bulk_slots.add_permits(dropped.len());
        drop((dropped, exposed));
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// What this side has received, and the credits it has granted.
    pub(crate) fn resume_point(&self) -> (u64, u64) {
        let state = self.lock();
        (state.inbound.received(), state.inbound.granted())
    }

    /// The secret that proves that a client may go on with the session.
    pub(crate) fn secret(&self) -> [u8; 16] {
        self.secret
    }

    /// What the session was configured with.
    pub(crate) fn config(&self) -> &crate::SessionConfig {
        &self.config
    }

    /// Goes on where the peer is: it has everything up to `received`, and has granted `granted` bytes of credit.
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
        self.bulk_slots.add_permits(dropped.len());
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }

    /// Answers a client that came back. `None` if its transport broke meanwhile.
    async fn accept_resumption(&self, next: Box<Resumption>) -> Result<Option<Wire>, MessengerError> {
        let Resumption { mut wire, nonce, received, granted } = *next;
        let welcome = handshake::welcome_back(self, nonce);
        let answer = handshake::write(&mut wire, &welcome);
        match timeout(self.config.handshake_timeout, answer).await {
            Ok(Ok(())) => {
                self.resume(received, granted)?;
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
                TransportEnd::Fatal(MessengerError::SessionLost(format!("the peer ended it: {reason}")))
            }
        }
    }
}

impl From<HandshakeError> for MessengerError {
    fn from(e: HandshakeError) -> MessengerError {
        match e {
            HandshakeError::Rejected(reject) => MessengerError::Refused(reject.reason),
            HandshakeError::Transport { endpoint, reason } => {
                MessengerError::Unreachable { endpoint, reason }
            }
            HandshakeError::Protocol(reason) => MessengerError::Protocol(reason),
        }
    }
}
