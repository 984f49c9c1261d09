//! One connected endpoint. It carries packets, whose number is limited by credits, and one-sided
//! transfers.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use base::mem::ArenaBuf;
use bytes::Bytes;
use fabric::{Completion, GatherBytes, MemoryRegion, Operation, PostError};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::LinkEndpoint;
use super::endpoint::Posted;
use super::packet::{FIRST_GRANT, HEADER_BYTES, PACKET_BYTES, PacketCredits, PacketHeader};
use super::reads::RmaReads;

/// Number of credits that are reserved for packets without content. Such a packet only grants
/// credits to the peer, so the two sides never deadlock.
const RESERVE: u32 = 1;

/// Maximum window of a link. The window is the number of packets that a peer may send before it
/// gets further credits. It doubles while the peer uses it up, and halves while few packets arrive.
const WINDOW_MAX: u32 = 64;

/// Maximum number of packets with content between two calls of [`rest`](Link::rest) at which a link
/// still counts as idle, because these packets are heartbeats.
const LITTLE: u32 = 2;

/// One in this many operations requests a completion.
const QUIET_OPERATIONS: u32 = 8;

/// An operation also requests a completion if the operations since the last request hold at least
/// this many bytes in total.
const QUIET_BYTES: usize = 32 << 10;

/// Pause before another attempt when the provider's queue is full or no buffer is free.
const RETRY: Duration = Duration::from_millis(1);

/// Parts of a packet up to this length, in bytes, are copied into the packet's own buffer.
const COPY_MAX_BYTES: usize = 512;

/// One connected endpoint. The peer may send only as many packets as it has credits. A peer that
/// sends more packets loses the link.
pub struct Link {
    /// The token that packets to this side must carry.
    own_token: u64,
    /// Random number that identifies this transport within its connection. Both sides know the
    /// number.
    transport_number: u64,
    pub(in crate::transport) endpoint: LinkEndpoint,
    state: Mutex<State>,
    /// Wakes the task that sends packets when the peer has granted credits.
    credits: Notify,
    /// Wakes a task that waits for room in the provider's queue when an operation has completed.
    /// The task also tries again after [`RETRY`].
    room: Notify,
    /// Wakes the task that sends packets when an abandoned read has ended.
    pub(super) abandoned: Notify,
    /// Whether a packet or a completion arrived since the last [`take_heard`](Link::take_heard).
    heard: AtomicBool,
}

struct State {
    peer_token: u64,
    why_failed: Option<String>,
    inbox: VecDeque<Bytes>,
    reader: Option<Waker>,
    sending: PacketCredits,
    receiving: PacketCredits,
    /// Number of packets that the peer may send before it gets further credits.
    window: u32,
    /// Number of packets with content that arrived since the last [`rest`](Link::rest).
    busy: u32,
    /// Whether the last packet that arrived had content.
    was_content: bool,
    /// The total number of granted packets that this side has told the peer.
    told: u32,
    /// Whether the port will call [`grant`](Link::grant).
    is_due: bool,
    quiet_operations: u32,
    quiet_bytes: usize,
    /// Whether the next packet with content must free the memory of earlier operations.
    is_free_due: bool,
    reads: RmaReads,
}

impl State {
    /// Whether to send the peer its new credits in a packet without content. After a packet that
    /// only granted credits, this is true only if the peer cannot send content. Otherwise the two
    /// sides would exchange packets without content forever.
    fn owes_credits(&self) -> bool {
        const { assert!(FIRST_GRANT >= RESERVE + 2, "the first grant allows two packets with content") };
        let left = self.told.wrapping_sub(self.receiving.used);
        let few = if self.was_content { RESERVE.max(self.window / 2) } else { RESERVE };
        self.receiving.granted != self.told && left <= few
    }
}

/// A part of a packet's content.
#[derive(Debug, Clone)]
pub(crate) enum PacketContent<'a> {
    /// Bytes that are copied into the packet's buffer.
    Copied(&'a [u8]),
    /// Bytes that are sent from their own memory, if they are long enough and the device supports
    /// it.
    Shared(Bytes),
}

impl PacketContent<'_> {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            PacketContent::Copied(bytes) => bytes,
            PacketContent::Shared(bytes) => bytes,
        }
    }
}

/// The reason why a link can no longer be used.
#[derive(Debug, Clone)]
pub(crate) struct LinkFailed(pub(crate) String);

impl Link {
    pub(in crate::transport) fn new(
        endpoint: LinkEndpoint,
        (own_token, transport_number): (u64, u64),
    ) -> Arc<Link> {
        let state = State {
            peer_token: 0,
            why_failed: None,
            inbox: VecDeque::new(),
            reader: None,
            sending: PacketCredits::new(),
            receiving: PacketCredits { used: 0, granted: 0 },
            window: FIRST_GRANT,
            busy: 0,
            was_content: false,
            told: FIRST_GRANT,
            is_due: false,
            quiet_operations: 0,
            quiet_bytes: 0,
            is_free_due: false,
            reads: RmaReads::default(),
        };
        let link = Arc::new(Link {
            own_token,
            transport_number,
            endpoint,
            state: Mutex::new(state),
            credits: Notify::new(),
            room: Notify::new(),
            abandoned: Notify::new(),
            heard: AtomicBool::new(false),
        });
        link.endpoint.enter(own_token, &link);
        link
    }

    /// Posts the buffers for the packets that the peer may send before the first grant.
    pub(in crate::transport) fn post_first(self: &Arc<Self>) -> Result<(), String> {
        for _ in 0..FIRST_GRANT {
            let buf = self.endpoint.buffers().take_to_receive().ok_or("no receive buffers are left")?;
            self.endpoint.post_receive(buf)?;
            self.on_posted();
        }
        Ok(())
    }

    /// Sets the token that packets to the peer must carry. The peer states the token when the
    /// endpoints connect.
    pub(in crate::transport) fn set_peer_token(&self, token: u64) {
        self.state().peer_token = token;
    }

    /// Random number that identifies this transport within its connection. Both sides know the
    /// number.
    pub(crate) fn transport_number(&self) -> u64 {
        self.transport_number
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the mutex.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn reads<T>(&self, with: impl FnOnce(&mut RmaReads) -> T) -> T {
        with(&mut self.state().reads)
    }

    /// Name of the provider.
    pub(in crate::transport) fn provider(&self) -> &str {
        self.endpoint.provider()
    }

    /// Whether a packet or a completion arrived since the last call.
    pub(crate) fn take_heard(&self) -> bool {
        self.heard.swap(false, Ordering::Relaxed)
    }

    /// The reason of the failure, if the link has failed.
    pub(crate) fn failure(&self) -> Option<LinkFailed> {
        self.state().why_failed.clone().map(LinkFailed)
    }

    fn broken(&self) -> LinkFailed {
        self.failure().unwrap_or_else(|| LinkFailed("the connection is closed".into()))
    }

    /// Closes the endpoint, so that all operations in progress fail. When this returns, the
    /// endpoint no longer accesses memory of this side.
    pub(crate) fn fail(&self, why: &str) {
        self.state().why_failed.get_or_insert_with(|| why.to_owned());
        if !self.endpoint.close() {
            return;
        }
        // The memory may be released only after the endpoint is closed.
        let mut state = self.state();
        let reads = std::mem::take(&mut state.reads);
        let inbox = std::mem::take(&mut state.inbox);
        let waker = state.reader.take();
        let outstanding = state.receiving.left();
        drop(state);
        drop((reads, inbox));
        self.endpoint.leave(self.own_token, outstanding);
        self.room.notify_waiters();
        self.credits.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits for the next packet. Returns its content in the buffer in which it arrived.
    pub(crate) async fn receive(&self) -> Result<Bytes, LinkFailed> {
        poll_fn(|cx| {
            let mut state = self.state();
            if let Some(why) = &state.why_failed {
                return Poll::Ready(Err(LinkFailed(why.clone())));
            }
            match state.inbox.pop_front() {
                Some(packet) => Poll::Ready(Ok(packet)),
                None => {
                    state.reader = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Handles a packet of `len` bytes from the peer in the buffer in which it arrived, and posts
    /// another buffer. If no buffer is free, the packet is copied, and its buffer is posted again. So
    /// a user that keeps received packets does not block the senders.
    pub(in crate::transport) fn take_packet(
        self: &Arc<Self>,
        header: PacketHeader,
        buf: ArenaBuf,
        len: usize,
    ) {
        let buffers = self.endpoint.buffers();
        let (content, next) = match buffers.take_to_receive() {
            Some(next) => (buf.freeze().slice(HEADER_BYTES..len), next),
            None => {
                metrics::counter!("outboard_messenger_copied_packets").increment(1);
                metrics::counter!("outboard_messenger_copied_bytes").increment((len - HEADER_BYTES) as u64);
                (Bytes::copy_from_slice(&buf[HEADER_BYTES..len]), buf)
            }
        };
        let wanted = self.on_packet(header, content);
        // If the link may not have more posted buffers, post only one, in place of the packet's own
        // buffer.
        let wanted = if wanted > 1 && !self.endpoint.may_grow(wanted) { 1 } else { wanted };
        let more = std::iter::from_fn(|| buffers.take_to_receive());
        for buf in std::iter::once(next).chain(more).take(wanted as usize) {
            if let Err(why) = self.endpoint.post_receive(buf) {
                self.fail(&why);
                return;
            }
            self.on_posted();
        }
    }

    /// Whether `token` is the token that packets to this side must carry.
    pub(in crate::transport) fn is_own_token(&self, token: u64) -> bool {
        token == self.own_token
    }

    /// Handles a packet from the peer. Returns the number of receive buffers to post.
    fn on_packet(self: &Arc<Self>, header: PacketHeader, content: Bytes) -> u32 {
        self.heard.store(true, Ordering::Relaxed);
        let mut state = self.state();
        let used_up = state.receiving.left() <= RESERVE + 1;
        if !state.receiving.take() || !state.sending.on_granted(header.granted) {
            drop(state);
            self.fail("the peer sent a packet without credit, or granted invalid credits");
            return 0;
        }
        state.was_content = !content.is_empty();
        state.busy = state.busy.saturating_add(u32::from(state.was_content));
        if used_up && state.busy > LITTLE && state.window < WINDOW_MAX && self.endpoint.buffers().are_plenty()
        {
            state.window = (state.window * 2).min(WINDOW_MAX);
        }
        let wanted = state.window - state.receiving.left().min(state.window);
        let waker = (!content.is_empty()).then(|| {
            state.inbox.push_back(content);
            state.reader.take()
        });
        drop(state);
        self.credits.notify_one();
        if let Some(waker) = waker.flatten() {
            waker.wake();
        }
        wanted
    }

    /// Halves the window of a link that counts as idle, so that the link needs fewer buffers. Lets
    /// the next packet free the memory of earlier operations. Must be called periodically. The peer
    /// may still use the credits that it has.
    pub(crate) fn rest(&self) {
        let mut state = self.state();
        if std::mem::take(&mut state.busy) <= LITTLE {
            state.window = (state.window / 2).max(FIRST_GRANT);
        }
        state.is_free_due = state.quiet_operations > 0;
    }

    /// Records that a buffer was posted for the peer's packets.
    fn on_posted(self: &Arc<Self>) {
        let mut state = self.state();
        state.receiving.granted = state.receiving.granted.wrapping_add(1);
        let becomes_due = state.owes_credits() && !std::mem::replace(&mut state.is_due, true);
        drop(state);
        if becomes_due {
            self.endpoint.is_due(self);
        }
    }

    /// Handles the completion of an operation of the endpoint.
    pub(in crate::transport) fn on_completion(&self, completion: Completion) {
        self.heard.store(true, Ordering::Relaxed);
        if completion.operation == Operation::Read {
            let read = self.state().reads.take(completion.token);
            match (read, &completion.result) {
                (Some(read), Ok(())) => {
                    if read.is_abandoned() {
                        self.abandoned.notify_one();
                    }
                    read.finish();
                }
                // Keep the failed read: the end of the link reports the failure, after the last
                // write to the read's memory.
                (Some(read), Err(_)) => self.state().reads.put_back(completion.token, read),
                (None, _) => {}
            }
        }
        match completion.result {
            Ok(()) => self.room.notify_one(),
            Err(e) => self.fail(&e.to_string()),
        }
    }

    /// Sends the peer its new credits in a packet without content, unless another packet has
    /// already done so.
    pub(in crate::transport) fn grant(self: &Arc<Self>) {
        let mut state = self.state();
        state.is_due = false;
        let told = state.told;
        if !state.owes_credits() || !state.sending.take() {
            return;
        }
        let header = Self::header(&mut state);
        drop(state);
        let parts = if self.can_inject(HEADER_BYTES) { Ok(Vec::new()) } else { self.alone(header) };
        let notify = parts.as_ref().is_ok_and(|parts| self.wants_completion(parts, false));
        let result = match parts {
            Ok(parts) if parts.is_empty() => self.endpoint.inject(&header.encode()),
            Ok(mut parts) => self.endpoint.send_parts(&mut parts, notify),
            // No buffer is free now: handle this like a full queue.
            Err(()) => Some(Err(PostError::Full)),
        };
        match result {
            None | Some(Ok(())) => {}
            Some(Err(PostError::Full)) => {
                // The next packet or the next attempt grants these credits.
                let mut state = self.state();
                state.sending.used = state.sending.used.wrapping_sub(1);
                state.told = told;
                state.is_due = true;
                drop(state);
                self.endpoint.is_due(self);
            }
            Some(Err(e)) => self.fail(&e.to_string()),
        }
    }

    /// Whether a packet of `len` bytes can be sent without a buffer of the pool. Some devices
    /// support no such packets.
    fn can_inject(&self, len: usize) -> bool {
        len <= self.endpoint.inject_max().min(COPY_MAX_BYTES)
    }

    /// Assembles a packet without content.
    fn alone(&self, header: PacketHeader) -> Result<Vec<GatherBytes>, ()> {
        let mut buf = self.endpoint.buffers().take().ok_or(())?;
        buf.truncate(HEADER_BYTES);
        buf.copy_from_slice(&header.encode());
        let region = self.own_region(&buf).map_err(|_| ())?;
        Ok(vec![GatherBytes { bytes: buf.freeze(), region }])
    }

    /// The registration of a buffer of the pool, if the provider needs one.
    fn own_region(&self, buf: &ArenaBuf) -> Result<Option<MemoryRegion>, LinkFailed> {
        self.endpoint.packet_region(buf.arena()).map_err(LinkFailed)
    }

    fn header(state: &mut State) -> PacketHeader {
        state.told = state.receiving.granted;
        PacketHeader { token: state.peer_token, granted: state.receiving.granted }
    }

    /// Maximum number of memory areas from which a packet can be sent. The first area is the
    /// packet's own buffer.
    pub(crate) fn parts_max(&self) -> usize {
        self.endpoint.parts_max()
    }

    /// Sends one packet with a content of at most [`ROOM_BYTES`](super::packet::ROOM_BYTES). Waits
    /// until the peer has a buffer for it. With `frees`, the memory of this packet and of all
    /// earlier ones is freed as soon as they are sent. Otherwise, a later packet may have to free
    /// it.
    pub(crate) async fn send(&self, pieces: &[PacketContent<'_>], frees: bool) -> Result<(), LinkFailed> {
        let (header, is_due) = self.credit().await?;
        let frees = frees || is_due;
        let len: usize = pieces.iter().map(|piece| piece.bytes().len()).sum();
        debug_assert!(len + HEADER_BYTES <= PACKET_BYTES, "a packet must fit into a buffer");
        if self.can_inject(len + HEADER_BYTES) && !frees {
            let mut packet = Vec::with_capacity(len + HEADER_BYTES);
            packet.extend_from_slice(&header.encode());
            pieces.iter().for_each(|piece| packet.extend_from_slice(piece.bytes()));
            return self.post(|endpoint| endpoint.inject(&packet)).await;
        }
        let mut parts = self.assemble(header, pieces).await?;
        let notify = self.wants_completion(&parts, frees);
        self.post(|endpoint| endpoint.send_parts(&mut parts, notify)).await
    }

    /// Waits until a packet with content may be sent. Returns its header, and whether it must free
    /// the memory of earlier operations.
    async fn credit(&self) -> Result<(PacketHeader, bool), LinkFailed> {
        loop {
            {
                let mut state = self.state();
                if state.why_failed.is_some() {
                    drop(state);
                    return Err(self.broken());
                }
                if state.sending.left() > RESERVE {
                    state.sending.take();
                    return Ok((Self::header(&mut state), state.is_free_due));
                }
            }
            self.credits.notified().await;
        }
    }

    /// Assembles a packet. Copied parts are in a buffer of the pool, and the other parts stay in
    /// their own memory.
    async fn assemble(
        &self,
        header: PacketHeader,
        pieces: &[PacketContent<'_>],
    ) -> Result<Vec<GatherBytes>, LinkFailed> {
        let mut buf = self.send_buffer().await?;
        buf[..HEADER_BYTES].copy_from_slice(&header.encode());
        let most = self.parts_max();
        let mut filled = HEADER_BYTES;
        let mut plan: Vec<Planned> = vec![Planned::Here(0, HEADER_BYTES)];
        for (at, piece) in pieces.iter().enumerate() {
            let follow = usize::from(at + 1 < pieces.len());
            if let PacketContent::Shared(bytes) = piece
                && bytes.len() > COPY_MAX_BYTES
                && plan.len() + 1 + follow <= most
                && let Ok(region) = self.endpoint.region_of(bytes)
            {
                plan.push(Planned::There(GatherBytes { bytes: bytes.clone(), region }));
                continue;
            }
            let bytes = piece.bytes();
            if let PacketContent::Shared(_) = piece {
                metrics::counter!("outboard_messenger_copied_bytes").increment(bytes.len() as u64);
            }
            buf[filled..filled + bytes.len()].copy_from_slice(bytes);
            filled += bytes.len();
            match plan.last_mut() {
                Some(Planned::Here(_, end)) => *end = filled,
                _ => plan.push(Planned::Here(filled - bytes.len(), filled)),
            }
        }
        let region = self.own_region(&buf)?;
        let buf = buf.freeze();
        let part = |planned| match planned {
            Planned::Here(start, end) => GatherBytes { bytes: buf.slice(start..end), region: region.clone() },
            Planned::There(part) => part,
        };
        Ok(plan.into_iter().map(part).collect())
    }

    async fn send_buffer(&self) -> Result<ArenaBuf, LinkFailed> {
        loop {
            if let Some(buf) = self.endpoint.buffers().take() {
                return Ok(buf);
            }
            // The release of a buffer is not signalled, so try again after a pause.
            tokio::time::sleep(RETRY).await;
            if self.failure().is_some() {
                return Err(self.broken());
            }
        }
    }

    /// Whether the next operation must request a completion. Operations without a completion keep
    /// their memory until the next completion, so this function limits the amount of this memory.
    /// With `frees`, the memory must not wait for the next completion. This is necessary if the
    /// parts belong to a larger buffer.
    pub(super) fn wants_completion(&self, parts: &[GatherBytes], frees: bool) -> bool {
        let mut state = self.state();
        state.quiet_operations += 1;
        state.quiet_bytes += parts.iter().map(|part| part.bytes.len()).sum::<usize>();
        let wants = frees || state.quiet_operations >= QUIET_OPERATIONS || state.quiet_bytes >= QUIET_BYTES;
        if wants {
            (state.quiet_operations, state.quiet_bytes, state.is_free_due) = (0, 0, false);
        }
        wants
    }

    /// Posts an operation. Retries while the provider's queue is full.
    pub(super) async fn post(
        &self,
        mut operation: impl FnMut(&LinkEndpoint) -> Posted,
    ) -> Result<(), LinkFailed> {
        loop {
            match operation(&self.endpoint) {
                None => return Err(self.broken()),
                Some(Ok(())) => return Ok(()),
                Some(Err(PostError::Full)) => {
                    // Try again after a completion, or after the pause.
                    let _ = timeout(RETRY, self.room.notified()).await;
                }
                Some(Err(e)) => {
                    self.fail(&e.to_string());
                    return Err(self.broken());
                }
            }
        }
    }
}

/// A part of a packet that is being assembled.
enum Planned {
    /// Start and end of the part in the packet's own buffer.
    Here(usize, usize),
    /// A part in memory of its own.
    There(GatherBytes),
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("id", &self.endpoint.id()).finish_non_exhaustive()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.fail("the link is no longer used");
    }
}
