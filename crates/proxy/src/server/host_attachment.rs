//! The store's side of one attachment.

use std::future::poll_fn;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use base::fault::{Action, Faults, Site};
use base::mem::OutsideAccess;
use base::process::OwnUsage;
use bytes::Bytes;
use channel::ofi::{OfiGrant, OfiOffer};
use channel::ring::{self, MAX_ENTRY};
use channel::{
    Bell, Carrier, ChannelEntry, ChannelError, ControlSocket, Doorbell, EntryHeader, EntryKind, HEADER_LEN,
    HostDoorbells, HostMemory, MAX_FRAME, MemoryAccess, MemoryAnswer, REFUSE, Ringer,
};
use futures::stream::{FuturesUnordered, StreamExt};
use store::stripes::Engines;
use store::{StageId, StoreCalls, StoreError};

use super::calls::{Finished, FinishedCall, ReceivedCall, RunningCall, Via, make};
use super::offers::OfiHostSource;
use super::stages::OwnStages;
use super::transactions::{JointRequests, ReceivedTransaction};
use super::{Counts, ServedTarget, ServerOptions, stripes, transactions};
use crate::admission::Admission;
use crate::messages::{CallAnswer, CallOutcome, MAX_PARTS, NO_REPLY, StoreCall, encode, shorten};
use crate::poller::Poller;
use crate::store_channel::MAX_JOBS;

/// Maximum number of calls that an attachment takes on each path before it lets the other tasks of
/// the thread run, such as other attachments.
const CALLS_PER_SLICE: usize = 64;
/// Length of calls and their payload in host memory after which an attachment lets the other tasks
/// of the thread run, in bytes. The thread verifies the payload, so its time grows with this length.
const BYTES_PER_SLICE: usize = 4 << 20;
/// Maximum number of concurrent calls of one attachment, over ring and control socket together. Each
/// transaction of a request counts. A correct osd stays below this limit.
const MAX_CALLS: usize = MAX_PARTS * MAX_JOBS;
/// Maximum total length of calls that arrived before the transaction that they follow, in bytes. A
/// correct osd needs little of this, because it sends calls with payload in their order.
const MAX_HELD: usize = 256 << 20;

/// Maximum total length of replies that may wait for the osd to read them, in bytes. Above this
/// limit, the host takes no frames from the control socket.
const MAX_UNSENT: usize = 64 << 20;

/// How the osd's engine reaches host memory and the doorbells.
pub(super) enum Reached {
    /// Through file descriptors, for as long as the osd keeps the descriptors open.
    Descriptors { osd_doorbell: Ringer },
    /// Through an offer, with this libfabric provider. While `grant` is `None`, the engine has no
    /// access.
    Offer { offers: Arc<OfiHostSource>, provider: String, grant: Option<OfiGrant> },
}

/// Host memory that is ready for an osd: how the osd reaches the memory, the host's doorbell, the
/// answer for the welcome, and the access to memory to send with the welcome.
type OpenedMemory = ((Reached, Doorbell), MemoryAnswer, Option<MemoryAccess>);

/// The right to let the osd's engine access host memory.
#[allow(unsafe_code)]
fn outside_access(memory: &HostMemory) -> OutsideAccess {
    // SAFETY: only the osd's engine gets access. The osd assigns the ranges of the data region. By
    // the protocol, it makes no transfer to a range while a call of the host uses the range, and no
    // transfer from a range before the call has ended.
    unsafe { OutsideAccess::new(&memory.arena) }
}

impl Reached {
    /// Makes the memory available through the file descriptors that the control socket carries, for
    /// engines on the same machine.
    pub(super) fn by_descriptors(memory: &HostMemory, carrier: &Carrier) -> channel::Result<OpenedMemory> {
        let (HostDoorbells { host, osd }, theirs) = carrier.share(&outside_access(memory))?;
        let ours = (Reached::Descriptors { osd_doorbell: osd }, host);
        Ok((ours, MemoryAnswer::Descriptors, Some(theirs)))
    }

    /// Makes the memory available by an offer, for engines that use `provider`.
    pub(super) fn by_offer(
        offers: &Arc<OfiHostSource>,
        provider: &str,
        memory: &HostMemory,
    ) -> channel::Result<OpenedMemory> {
        let grant = offers.host(provider).map_err(ChannelError::Refused)?.grant(&outside_access(memory))?;
        let (host_doorbell, offer) = (Doorbell::new(grant.host_doorbell.try_clone()?)?, grant.offer.clone());
        let (offers, provider) = (Arc::clone(offers), provider.to_owned());
        let ours = (Reached::Offer { offers, provider, grant: Some(grant) }, host_doorbell);
        Ok((ours, MemoryAnswer::Offer(offer), None))
    }

    /// Rings the osd's doorbell.
    fn ring_osd(&self, count: u64) -> std::io::Result<()> {
        match self {
            Reached::Descriptors { osd_doorbell } => osd_doorbell.ring(count),
            Reached::Offer { grant: Some(grant), .. } => Doorbell::ring(grant.osd_doorbell.as_fd(), count),
            Reached::Offer { grant: None, .. } => Ok(()),
        }
    }

    /// Revokes the offer, if there is one. After that, no transfer of the osd's engine reaches host
    /// memory.
    fn revoke(&mut self) -> channel::Result<()> {
        match self {
            Reached::Offer { grant, .. } => grant.take().map_or(Ok(()), OfiGrant::revoke),
            Reached::Descriptors { .. } => Ok(()),
        }
    }
}

/// Rings and doorbells of an attachment with host memory.
pub(super) struct Rings {
    pub(super) memory: HostMemory,
    reached: Reached,
    doorbell: Doorbell,
    max_outstanding: usize,
    outstanding: usize,
    /// Bytes that the doorbell announced and that the host has not taken from the inbound ring yet.
    announced: usize,
    /// Bytes taken from the inbound ring.
    taken: u64,
    /// Bytes put into the outbox.
    head: u64,
    /// Bytes put into the outbox since the osd's doorbell was last rung.
    unannounced: u64,
    /// `None` while the rings are in use. After a failure of DMA, the host does not use the rings,
    /// and this field is the sum of the doorbell's counts since then.
    closed: Option<u64>,
    /// Whether an invalid entry was found. The host takes no more entries until the rings are
    /// opened again.
    broken: bool,
    faults: Faults,
    /// Counts payload that is copied into and out of ring entries.
    copied: metrics::Counter,
}

impl Rings {
    pub(super) fn new(
        memory: HostMemory,
        (reached, doorbell): (Reached, Doorbell),
        max_outstanding: usize,
        faults: Faults,
    ) -> Rings {
        Rings {
            memory,
            reached,
            doorbell,
            max_outstanding,
            outstanding: 0,
            announced: 0,
            taken: 0,
            head: 0,
            unannounced: 0,
            closed: None,
            broken: false,
            faults,
            copied: metrics::counter!("outboard_proxy_entry_copy_bytes"),
        }
    }

    /// Adds the doorbell's count to the announced bytes. Returns `true` if the doorbell was rung.
    fn hear(&mut self, cx: &mut Context<'_>) -> channel::Result<bool> {
        let Poll::Ready(count) = self.doorbell.poll_wait(cx) else { return Ok(false) };
        if let Some(rung) = &mut self.closed {
            *rung = rung.saturating_add(count?);
            return Ok(true);
        }
        let limit = self.memory.layout.inbound().len;
        let count = usize::try_from(count?).unwrap_or(usize::MAX);
        let sum = self.announced.checked_add(count);
        self.announced = sum.filter(|s| *s <= limit && s.is_multiple_of(ring::CELL)).ok_or_else(|| {
            ChannelError::Protocol(format!(
                "the doorbell announced {count} bytes, which exceed the ring of {limit} bytes or end within a cell"
            ))
        })?;
        Ok(true)
    }

    /// Takes the next announced entry from the inbound ring.
    fn take(&mut self) -> channel::Result<RingRead> {
        if self.announced == 0 || self.is_closed() || self.broken {
            return Ok(RingRead::Nothing);
        }
        let read = self.memory.layout.inbound().read(&self.memory.arena, self.taken, self.announced);
        let frame = match read {
            Ok(frame) => frame,
            Err(e) => {
                self.broken = true;
                return Ok(RingRead::Damage(e));
            }
        };
        self.copied.increment(frame.data.len() as u64);
        let footprint = ring::footprint(frame.header.total_len());
        self.announced -= footprint;
        self.taken += footprint as u64;
        if self.outstanding >= self.max_outstanding {
            return Err(ChannelError::Protocol("it sent more requests at a time than agreed".into()));
        }
        if frame.header.reply_max as usize > MAX_ENTRY {
            return Err(ChannelError::Protocol(
                "a request asks for a longer reply than an entry can hold".into(),
            ));
        }
        self.outstanding += 1;
        Ok(RingRead::Entry(frame))
    }

    fn put(&mut self, header: EntryHeader, control: &[u8], data: &[Bytes]) {
        let data_len: usize = data.iter().map(Bytes::len).sum();
        let header =
            EntryHeader { data_len: data_len as u32, position: self.head, consumed: self.taken, ..header };
        let data: Vec<&[u8]> = data.iter().map(|piece| &piece[..]).collect();
        let sealed = header.seal_whole(control, &data);
        let footprint = ring::footprint(sealed.len() + data_len) as u64;
        let parts: Vec<&[u8]> = std::iter::once(&sealed[..]).chain(data).collect();
        self.memory.layout.outbox().write(&self.memory.arena, self.head, &parts);
        self.copied.increment(data_len as u64);
        self.head += footprint;
        self.unannounced += footprint;
    }

    fn announce(&mut self) -> channel::Result<()> {
        let count = std::mem::take(&mut self.unannounced);
        if count > 0 { self.ring_osd(count) } else { Ok(()) }
    }

    pub(super) fn ring_osd(&self, count: u64) -> channel::Result<()> {
        if self.faults.hit(Site::StoreDoorbell) == Some(Action::Drop) {
            return Ok(());
        }
        Ok(self.reached.ring_osd(count)?)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.is_some()
    }

    /// Bytes taken from the inbound ring, and bytes put into the outbox.
    pub(super) fn positions(&self) -> (u64, u64) {
        (self.taken, self.head)
    }

    /// Closes the rings and returns their positions. After this call, each earlier transfer to
    /// offered memory either has arrived or will never arrive.
    pub(super) fn close(&mut self) -> channel::Result<(u64, u64)> {
        self.reached.revoke()?;
        self.closed = Some(0);
        self.announced = 0;
        self.unannounced = 0;
        Ok(self.positions())
    }

    /// Makes a new offer of host memory, with fresh doorbells and a working device. The rings must
    /// be closed.
    pub(super) fn offer(&mut self) -> Result<OfiOffer, StoreError> {
        if !self.is_closed() {
            return Err(StoreError::InvalidArgument("no offer is possible while the rings are open".into()));
        }
        let io = |e: ChannelError| StoreError::Io(e.to_string());
        self.reached.revoke().map_err(io)?;
        let Reached::Offer { offers, provider, grant } = &mut self.reached else {
            return Err(StoreError::InvalidArgument(
                "this attachment's memory was not offered through libfabric".into(),
            ));
        };
        let host = offers.host(provider).map_err(StoreError::Io)?;
        let fresh = host.grant(&outside_access(&self.memory)).map_err(io)?;
        let doorbell = fresh.host_doorbell.try_clone().and_then(Doorbell::new);
        self.doorbell = doorbell.map_err(|e| StoreError::Io(e.to_string()))?;
        self.closed = Some(0);
        Ok(grant.insert(fresh).offer.clone())
    }

    /// Bytes that the doorbell has announced since the rings were closed.
    pub(super) fn rung_while_closed(&mut self, cx: &mut Context<'_>) -> Result<u64, StoreError> {
        self.hear(cx).map_err(|e| StoreError::Io(e.to_string()))?;
        Ok(self.closed.unwrap_or(0))
    }

    /// The replies in the outbox from position `from`.
    pub(super) fn unfetched(&mut self, from: u64) -> channel::Result<Vec<ChannelEntry>> {
        let outbox = self.memory.layout.outbox();
        let left = self.head.checked_sub(from).filter(|left| *left <= outbox.len as u64);
        let mut left = left.ok_or_else(|| {
            ChannelError::Protocol(format!(
                "it reports {from} bytes as taken, but the store has put only {} into the outbox",
                self.head
            ))
        })? as usize;
        let (mut at, mut frames) = (from, Vec::new());
        while left > 0 {
            let frame = outbox.read(&self.memory.arena, at, left)?;
            let footprint = ring::footprint(frame.header.total_len());
            at += footprint as u64;
            left -= footprint;
            frames.push(frame);
        }
        Ok(frames)
    }

    /// Opens the rings again, both empty. Discards the doorbell's count, which belongs to the old
    /// rings. A late doorbell may still announce old bytes, and positions start from 0 again.
    /// Therefore this function also overwrites both rings with zeros, so that no old entry remains.
    pub(super) fn open(&mut self, cx: &mut Context<'_>) -> Result<(), StoreError> {
        if !self.is_closed() || self.outstanding > 0 {
            let what = format!(
                "the rings cannot be opened: they are open, or {} of their requests are unanswered",
                self.outstanding
            );
            return Err(StoreError::InvalidArgument(what));
        }
        self.rung_while_closed(cx)?;
        self.clear();
        (self.closed, self.broken) = (None, false);
        (self.taken, self.head) = (0, 0);
        Ok(())
    }

    fn clear(&self) {
        let zeros = [0; 64 << 10];
        for ring in [self.memory.layout.inbound(), self.memory.layout.outbox()] {
            for at in (0..ring.len).step_by(zeros.len()) {
                let len = zeros.len().min(ring.len - at);
                let inside = self.memory.arena.copy_in(ring.offset + at, &zeros[..len]);
                debug_assert!(inside, "rings are inside their memory");
            }
        }
    }
}

/// The result of reading the inbound ring.
enum RingRead {
    Entry(ChannelEntry),
    Nothing,
    /// Bytes that are not a valid entry, because of a fault of DMA or of the osd.
    Damage(ChannelError),
}

/// A call or a transaction that has its place in the order of a target.
enum Admitted {
    Call(ReceivedCall),
    Transaction(ReceivedTransaction),
}

impl Admitted {
    /// Whether the call has a number in the order of the target.
    fn is_numbered(&self) -> bool {
        match self {
            Admitted::Call(request) => {
                matches!(&request.call, Ok((call, ..)) if call.is_object_query())
            }
            Admitted::Transaction(_) => true,
        }
    }

    /// Records that the call begins to wait for its turn. Returns the number of bytes that are held
    /// back because of that.
    fn hold(&self) -> usize {
        match self {
            Admitted::Call(request) => request.size,
            Admitted::Transaction(transaction) => transaction.hold(),
        }
    }

    /// Records that the turn of the call has come. Returns the number of bytes that are no longer held
    /// back.
    fn let_go(&self) -> usize {
        match self {
            Admitted::Call(request) => request.size,
            Admitted::Transaction(transaction) => transaction.let_go(),
        }
    }
}

/// The calls that an attachment may still take on one path before it lets other tasks run.
#[derive(Clone, Copy)]
struct Allowance {
    calls: usize,
    bytes: usize,
}

impl Default for Allowance {
    fn default() -> Allowance {
        Allowance { calls: CALLS_PER_SLICE, bytes: BYTES_PER_SLICE }
    }
}

impl Allowance {
    /// Counts a call with a total length of `bytes`. The length may exceed what is left.
    fn spend(&mut self, bytes: usize) {
        assert!(!self.is_spent(), "the attachment takes no call without an allowance");
        self.calls -= 1;
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    fn is_spent(&self) -> bool {
        self.calls == 0 || self.bytes == 0
    }
}

/// The allowances of the ring and of the control socket. They are separate, so that neither path
/// delays the other.
#[derive(Clone, Copy, Default)]
struct Allowances {
    ring: Allowance,
    socket: Allowance,
}

/// Why an attachment has stopped working for now.
#[derive(Debug, PartialEq, Eq)]
enum SliceEnd {
    /// Nothing is left to do.
    Idle {
        /// Whether the attachment has done anything.
        progress: bool,
    },
    /// An allowance is spent, so more work may be left.
    Spent,
}

/// The store's side of one attachment. It executes the osd's calls on each target in the order that
/// [`Admission`] determines.
pub(super) struct HostAttachment {
    targets: Arc<[ServedTarget]>,
    engines: Arc<Engines>,
    pub(super) rings: Option<Rings>,
    pub(super) control: ControlSocket,
    admissions: Vec<Admission<Admitted>>,
    /// Total length of the calls in `admissions` that are held back, in bytes.
    held_bytes: usize,
    /// What the attachment may still take in this slice of the thread's time.
    allowances: Allowances,
    running: FuturesUnordered<RunningCall>,
    joint: JointRequests,
    stages: OwnStages,
    counts: Arc<Counts>,
    faults: Faults,
    poll: Duration,
    poller: Poller,
}

impl HostAttachment {
    pub(super) fn new(
        targets: Arc<[ServedTarget]>,
        engines: Arc<Engines>,
        rings: Option<Rings>,
        control: ControlSocket,
        counts: Arc<Counts>,
        options: &ServerOptions,
    ) -> HostAttachment {
        let admissions = targets.iter().map(|_| Admission::default()).collect();
        HostAttachment {
            targets,
            engines,
            rings,
            control,
            admissions,
            held_bytes: 0,
            allowances: Allowances::default(),
            running: FuturesUnordered::new(),
            joint: JointRequests::default(),
            stages: OwnStages::new(Arc::clone(&counts)),
            counts,
            faults: options.faults.clone(),
            poll: options.poll,
            poller: Poller::default(),
        }
    }

    /// Serves until the osd disconnects, breaks the protocol, or `stop` is ready. Then it frees the
    /// attachment's stages and calls `on_end`, after which the next attachment of the seat may begin.
    /// Finally it waits for running calls of the stores, because they may still use host memory.
    /// `name` names the attachment in the log.
    pub(super) async fn run(mut self, name: &str, stop: impl Future<Output = ()>, on_end: impl FnOnce()) {
        match self.serve(stop).await {
            Some(ChannelError::Socket(e)) => tracing::info!("{name}: the osd has disconnected: {e}"),
            Some(e) => {
                self.counts.violations.fetch_add(1, Ordering::Relaxed);
                tracing::error!("{name} was ended: {e}");
            }
            None => {}
        }
        self.wind_up(name, on_end).await;
    }

    /// Serves until the attachment ends. Returns the error that ended it, or `None` if `stop` is
    /// ready.
    async fn serve(&mut self, stop: impl Future<Output = ()>) -> Option<ChannelError> {
        let mut stop = std::pin::pin!(stop);
        let mut worked = false;
        loop {
            let end = poll_fn(|cx| {
                if stop.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Err(None));
                }
                match self.slice(cx) {
                    Ok(SliceEnd::Idle { progress }) => {
                        self.poller.after_turn(progress || worked, self.poll, cx);
                        worked = false;
                        Poll::Pending
                    }
                    Ok(SliceEnd::Spent) => Poll::Ready(Ok(())),
                    Err(e) => Poll::Ready(Err(Some(e))),
                }
            });
            match end.await {
                // Unlike a wake-up of this task, a yield also lets the thread look for new events
                // of other attachments.
                Ok(()) => tokio::task::yield_now().await,
                Err(why) => return why,
            }
            worked = true;
        }
    }

    async fn wind_up(mut self, name: &str, on_end: impl FnOnce()) {
        if let Some(rings) = &mut self.rings
            && let Err(e) = rings.reached.revoke()
        {
            tracing::error!("{name}: the osd's connections to host memory may still be open: {e}");
        }
        for (target, stage) in self.stages.take_all() {
            self.targets[usize::from(target)].store.stage_release(stage);
        }
        self.counts.leftover_calls.fetch_add(self.running.len(), Ordering::Relaxed);
        on_end();
        // Drop the socket now, so that the osd can open the next attachment without waiting for the
        // stores.
        drop(self.control);
        while let Some(done) = self.running.next().await {
            self.counts.leftover_calls.fetch_sub(1, Ordering::Relaxed);
            if let Finished::Call(FinishedCall { header, outcome: Ok(CallAnswer::Stage(id)), .. }) = done {
                self.targets[usize::from(header.target)].store.stage_release(StageId(id));
            }
        }
    }

    /// Runs turns until nothing is left to do, or until an allowance is spent.
    fn slice(&mut self, cx: &mut Context<'_>) -> channel::Result<SliceEnd> {
        self.allowances = Allowances::default();
        let mut progress = false;
        loop {
            while self.turn(cx)? {
                progress = true;
            }
            if let Some(rings) = &mut self.rings {
                rings.announce()?;
            }
            let was_behind = self.is_behind();
            if let Poll::Ready(result) = self.control.poll_flush(cx) {
                result?;
            }
            if self.allowances.ring.is_spent() || self.allowances.socket.is_spent() {
                return Ok(SliceEnd::Spent);
            }
            // No event will announce frames that are still in the socket, so continue with them.
            if !was_behind || self.is_behind() {
                return Ok(SliceEnd::Idle { progress });
            }
        }
    }

    /// Handles ready entries, frames and finished calls once.
    fn turn(&mut self, cx: &mut Context<'_>) -> channel::Result<bool> {
        let mut progress = self.take_entries(cx)?;
        progress |= self.take_frames(cx)?;
        while let Poll::Ready(Some(done)) = self.running.poll_next_unpin(cx) {
            match done {
                Finished::Call(done) => self.reply(done),
                Finished::Transaction(done) => {
                    if let Some(answer) = self.joint.finish(done, &self.running) {
                        self.reply(answer);
                    }
                }
            }
            progress = true;
        }
        for answer in self.joint.slow(cx) {
            self.reply(answer);
            progress = true;
        }
        Ok(progress)
    }

    /// Whether so many replies wait for the osd that it must read some before the host takes new
    /// calls.
    fn is_behind(&self) -> bool {
        self.control.unsent() > MAX_UNSENT
    }

    fn take_entries(&mut self, cx: &mut Context<'_>) -> channel::Result<bool> {
        let Some(rings) = &mut self.rings else { return Ok(false) };
        let mut progress = rings.hear(cx)?;
        while !self.allowances.ring.is_spent() {
            match self.rings.as_mut().map_or(Ok(RingRead::Nothing), Rings::take)? {
                RingRead::Entry(frame) => {
                    self.admit(cx, frame, Via::Ring)?;
                    progress = true;
                }
                RingRead::Nothing => break,
                RingRead::Damage(e) => {
                    tracing::warn!("an entry in the inbound ring is invalid, and the osd is informed: {e}");
                    let notice = encode(&CallOutcome::Ok(CallAnswer::Damaged));
                    self.control.push(EntryHeader::new(EntryKind::Reply, 0, NO_REPLY), &notice, []);
                }
            }
        }
        Ok(progress)
    }

    fn take_frames(&mut self, cx: &mut Context<'_>) -> channel::Result<bool> {
        let mut progress = false;
        while !self.allowances.socket.is_spent() && !self.is_behind() {
            let Poll::Ready(frame) = self.control.poll_frame(cx) else { break };
            self.admit(cx, frame?, Via::Socket)?;
            progress = true;
        }
        Ok(progress)
    }

    /// Number of calls that the attachment has taken and not answered.
    fn calls(&self) -> usize {
        self.running.len() + self.admissions.iter().map(Admission::held).sum::<usize>()
    }

    fn admit(&mut self, cx: &mut Context<'_>, frame: ChannelEntry, via: Via) -> channel::Result<()> {
        let ChannelEntry { header, control, data } = frame;
        let target = usize::from(header.target);
        if header.kind != EntryKind::Request || target >= self.targets.len() {
            return Err(ChannelError::Protocol(format!(
                "it sent an entry of kind {:?} for target {target}",
                header.kind
            )));
        }
        if self.calls() >= MAX_CALLS {
            return Err(ChannelError::Protocol(format!("it sent more than {MAX_CALLS} calls at a time")));
        }
        // Injects a fault. The only possible fault here kills the process, so there is no result to
        // handle.
        let _ = self.faults.hit(Site::StoreCall);
        let mut request = ReceivedCall::decode(header, via, &control, data);
        match via {
            Via::Ring => self.allowances.ring.spend(request.cost()),
            Via::Socket => self.allowances.socket.spend(request.cost()),
        }
        if let Ok((StoreCall::Channel(call), _, payload)) = &request.call {
            return self.channel_call(cx, header, *call, payload);
        }
        let is_joint = match &request.call {
            Ok((StoreCall::Transactions { transactions, .. }, ..)) => {
                transactions::check(self.targets.len(), transactions)?;
                true
            }
            _ => false,
        };
        let lease = self.rings.as_ref().map(Rings::lease);
        let mut refused = None;
        if request.is_damaged(lease) {
            if header.flags & REFUSE == 0 {
                self.reply(request.done(Ok(CallAnswer::Damaged)));
                return Ok(());
            }
            // The request takes its place in the order of the transactions, and then fails.
            let what = "it did not match its checksums when the osd sent it";
            refused = Some(StoreError::BadPayload(what.to_owned()));
        }
        if is_joint {
            let lease = self.rings.as_ref().map(Rings::lease);
            for one in transactions::receive(lease, request, refused) {
                self.order(one.target, one.after, Admitted::Transaction(one))?;
            }
            return Ok(());
        }
        if let Some(e) = refused {
            request.call = Err(e);
        }
        self.order(header.target, header.after, Admitted::Call(request))
    }

    /// Gives a call its place in the order of a target, and starts every call whose turn has come.
    fn order(&mut self, target: u16, after: u64, call: Admitted) -> channel::Result<()> {
        self.held_bytes += call.hold();
        match self.admissions[usize::from(target)].offer(after, call.is_numbered(), call) {
            Ok(turn) => turn.into_iter().for_each(|call| {
                self.held_bytes -= call.let_go();
                match call {
                    Admitted::Call(request) => self.make(request),
                    Admitted::Transaction(transaction) => {
                        let store = &self.targets[usize::from(target)].store;
                        self.running.push(transaction.start(store, &self.stages));
                    }
                }
            }),
            Err(_) => {
                let what = format!("it sent the transaction or query after number {after} twice");
                return Err(ChannelError::Protocol(what));
            }
        }
        if self.held_bytes > MAX_HELD {
            let what = "more than 256 MiB of calls wait for transactions that have not arrived";
            return Err(ChannelError::Protocol(what.to_owned()));
        }
        Ok(())
    }

    fn make(&mut self, request: ReceivedCall) {
        let target = request.header.target;
        let lease = self.rings.as_ref().map(|rings| &rings.memory.data);
        match &request.call {
            Ok((StoreCall::StageRelease { stage }, ..)) if !self.stages.remove(target, StageId(*stage)) => {
                // The release of a stage that the attachment does not have changes nothing.
                let done = Finished::Call(request.done(Ok(CallAnswer::Done)));
                self.running.push(Box::pin(std::future::ready(done)));
            }
            Ok((StoreCall::StageStripes { .. }, ..)) => {
                let calls = stripes::make(&self.targets, &self.stages, &self.engines, lease, request);
                self.running.extend(calls);
            }
            Ok((StoreCall::HostReading { with_store }, ..)) => {
                let outcome = self.engines.host_reading(*with_store).map(CallAnswer::HostReading);
                let done = Finished::Call(request.done(outcome));
                self.running.push(Box::pin(std::future::ready(done)));
            }
            Ok((StoreCall::Usage, ..)) => {
                let outcome = OwnUsage::read().map(CallAnswer::Usage).map_err(StoreError::from);
                let done = Finished::Call(request.done(outcome));
                self.running.push(Box::pin(std::future::ready(done)));
            }
            _ => {
                let store = &self.targets[usize::from(target)].store;
                self.running.push(make(store, &self.stages, lease, request));
            }
        }
    }

    fn reply(&mut self, done: FinishedCall) {
        let FinishedCall { header: request, came, via, outcome, mut data, is_first } = done;
        if let Ok(CallAnswer::Stage(id)) = &outcome {
            self.stages.insert(request.target, StageId(*id));
        }
        if request.id == NO_REPLY {
            return;
        }
        let elapsed_us = u32::try_from(came.elapsed().as_micros()).unwrap_or(u32::MAX);
        let header =
            EntryHeader { elapsed_us, ..EntryHeader::new(EntryKind::Reply, request.target, request.id) };
        let most = match via {
            Via::Ring => request.reply_max as usize,
            Via::Socket => MAX_FRAME,
        };
        let mut control = encode(&outcome.map_err(shorten));
        let size = HEADER_LEN + control.len() + data.iter().map(Bytes::len).sum::<usize>();
        if size > most {
            let (what, size, limit) = ("reply".to_owned(), size as u64, most as u64);
            control = encode(&Err::<CallAnswer, _>(StoreError::TooLarge { what, size, limit }));
            data.clear();
        }
        match (via, &mut self.rings) {
            (Via::Ring, Some(rings)) if rings.is_closed() => {
                rings.outstanding -= usize::from(!is_first);
                self.control.push(header, &control, data);
            }
            (Via::Ring, Some(rings)) => {
                rings.put(header, &control, &data);
                rings.outstanding -= usize::from(!is_first);
            }
            _ => self.control.push(header, &control, data),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::PayloadPlace;
    use channel::{ChannelHello, ChannelWelcome, MemoryFds, MemoryLayout, SeatClaim, Socket};
    use std::future::poll_fn;

    /// Host memory with descriptors, and the descriptors for the osd's engine.
    fn shared(memory: &HostMemory) -> ((Reached, Doorbell), MemoryFds) {
        let (socket, _) = tokio::net::UnixStream::pair().unwrap();
        let opened = Reached::by_descriptors(memory, &Socket::Unix(socket).carrier()).unwrap();
        let (ours, _, Some(MemoryAccess::Descriptors(theirs))) = opened else {
            panic!("a UNIX socket carries descriptors")
        };
        (ours, theirs)
    }

    /// The ends of a control socket: the store's end and the osd's end.
    async fn control_socket() -> (ControlSocket, ControlSocket) {
        let (near, far) = tokio::net::UnixStream::pair().unwrap();
        let (version, seat) = (channel::VERSION, SeatClaim::sole());
        let hello = ChannelHello {
            version_min: version,
            version_max: version,
            nonce: 1,
            memory: None,
            outstanding: 1,
            seat,
        };
        let store = channel::accept(Socket::Unix(near), |hello, _| {
            let (nonce, memory, targets) = (hello.nonce, MemoryAnswer::None(None), Vec::new());
            Ok((ChannelWelcome { version, nonce, attachment: 1, memory, targets }, None, ()))
        });
        let (near, far) = tokio::join!(store, channel::join(Socket::Unix(far), &hello));
        (near.ok().unwrap().2, far.ok().unwrap().2)
    }

    /// An attachment with 1 MiB of data region, whose osd may send many requests at a time. Also
    /// returns the descriptors for the osd's engine, and the osd's end of the control socket.
    async fn attachment() -> (HostAttachment, MemoryFds, ControlSocket) {
        let memory = HostMemory::new(MemoryLayout { ring_len: 64 << 10, data_len: 1 << 20 }).unwrap();
        let (ours, theirs) = shared(&memory);
        let rings = Rings::new(memory, ours, usize::MAX, Faults::default());
        let (near, far) = control_socket().await;
        let store = Arc::new(store::MemStore::new());
        let targets = Arc::from([ServedTarget { uuid: uuid::Uuid::from_u128(1), store }]);
        let engines = Arc::new(Engines::start(Default::default(), None).unwrap());
        let options = ServerOptions::default();
        let counts = Arc::<Counts>::default();
        (HostAttachment::new(targets, engines, Some(rings), near, counts, &options), theirs, far)
    }

    /// Puts entries with this call into the inbound ring, and rings the host's doorbell.
    fn send(attachment: &HostAttachment, osd: &MemoryFds, header: EntryHeader, call: &[u8], count: usize) {
        let memory = &attachment.rings.as_ref().unwrap().memory;
        let mut head = 0;
        for _ in 0..count {
            let sealed = EntryHeader { position: head, ..header }.seal(call);
            memory.layout.inbound().write(&memory.arena, head, &[&sealed]);
            head += ring::footprint(sealed.len()) as u64;
        }
        Doorbell::ring(osd.host_doorbell.as_fd(), head).unwrap();
    }

    /// Runs slices until the attachment is idle. Returns how many calls each slice has taken.
    async fn slices(attachment: &mut HostAttachment) -> Vec<usize> {
        let mut taken = Vec::new();
        loop {
            let before = attachment.calls();
            let end = poll_fn(|cx| match attachment.slice(cx).unwrap() {
                SliceEnd::Idle { progress: false } => Poll::Pending,
                end => Poll::Ready(end),
            });
            let end = end.await;
            taken.push(attachment.calls() - before);
            if end != SliceEnd::Spent {
                return taken;
            }
        }
    }

    #[tokio::test]
    async fn an_attachment_with_many_calls_lets_other_tasks_run() {
        let (mut attachment, osd, mut control) = attachment().await;
        // These calls wait for a transaction that never arrives.
        let header = EntryHeader { after: 5, reply_max: 64, ..EntryHeader::new(EntryKind::Request, 0, 1) };
        send(&attachment, &osd, header, &encode(&StoreCall::Space), 150);
        assert_eq!(slices(&mut attachment).await, [64, 64, 22]);
        for _ in 0..100 {
            control.push(header, &encode(&StoreCall::Space), []);
        }
        poll_fn(|cx| control.poll_flush(cx)).await.unwrap();
        assert_eq!(slices(&mut attachment).await, [64, 36]);
    }

    #[tokio::test]
    async fn an_attachment_with_long_calls_lets_other_tasks_run() {
        let (mut attachment, osd, _control) = attachment().await;
        let header = EntryHeader { after: 5, reply_max: 64, ..EntryHeader::new(EntryKind::Request, 0, 1) };
        let place = PayloadPlace::Range { offset: 128 << 10, len: 1 << 20 };
        let (checksums, stage) = (Bytes::new(), 1);
        let write = StoreCall::StageWrite { stage, offset: 0, block_offset: 0, checksums, place };
        send(&attachment, &osd, header, &encode(&write), 10);
        assert_eq!(slices(&mut attachment).await, [4, 4, 2]);
    }

    #[tokio::test]
    async fn a_new_offer_needs_closed_rings_and_an_earlier_offer() {
        let memory = HostMemory::new(MemoryLayout { ring_len: 64 << 10, data_len: 1 << 20 }).unwrap();
        let (ours, _) = shared(&memory);
        let mut rings = Rings::new(memory, ours, 8, Faults::default());
        let open = rings.offer().unwrap_err().to_string();
        assert!(open.contains("rings are open"), "{open}");
        rings.close().unwrap();
        let descriptors = rings.offer().unwrap_err().to_string();
        assert!(descriptors.contains("was not offered"), "{descriptors}");
    }

    /// Regression test: a late doorbell once made the host execute an entry of an earlier use of
    /// the rings.
    #[tokio::test]
    async fn reopened_rings_contain_no_earlier_entries() {
        let memory = HostMemory::new(MemoryLayout { ring_len: 64 << 10, data_len: 1 << 20 }).unwrap();
        let (ours, theirs) = shared(&memory);
        let mut rings = Rings::new(memory, ours, 8, Faults::default());
        let entry = EntryHeader::new(EntryKind::Request, 0, 7).seal(b"call");
        let (inbound, outbox) = (rings.memory.layout.inbound(), rings.memory.layout.outbox());
        inbound.write(&rings.memory.arena, 0, &[&entry]);
        outbox.write(&rings.memory.arena, 0, &[&entry]);
        rings.close().unwrap();
        poll_fn(|cx| Poll::Ready(rings.open(cx))).await.unwrap();
        Doorbell::ring(theirs.host_doorbell.as_fd(), ring::CELL as u64).unwrap();
        poll_fn(|cx| match rings.hear(cx).unwrap() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
        assert!(matches!(rings.take().unwrap(), RingRead::Damage(_)));
        assert!(outbox.read(&rings.memory.arena, 0, ring::CELL).is_err());
    }
}
