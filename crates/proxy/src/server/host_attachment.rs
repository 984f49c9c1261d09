//! The store's side of one attachment.

use std::future::poll_fn;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use base::collections::HashSet;
use base::fault::{Action, Faults, Site};
use base::mem::OutsideAccess;
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
use super::transactions::{JointRequests, ReceivedTransaction};
use super::{Counts, ServedTarget, stripes, transactions};
use crate::admission::Admission;
use crate::messages::{CallAnswer, CallOutcome, MAX_PARTS, NO_REPLY, StoreCall, encode, shorten};
use crate::poller::Poller;
use crate::store_channel::MAX_JOBS;

/// Maximum number of control-socket frames that one turn takes.
const FRAMES_PER_TURN: usize = 64;
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
    Offer { offers: Rc<OfiHostSource>, provider: String, grant: Option<OfiGrant> },
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
        offers: &Rc<OfiHostSource>,
        provider: &str,
        memory: &HostMemory,
    ) -> channel::Result<OpenedMemory> {
        let grant = offers.host(provider).map_err(ChannelError::Refused)?.grant(&outside_access(memory))?;
        let (host_doorbell, offer) = (Doorbell::new(grant.host_doorbell.try_clone()?)?, grant.offer.clone());
        let (offers, provider) = (Rc::clone(offers), provider.to_owned());
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
    running: FuturesUnordered<RunningCall>,
    joint: JointRequests,
    stages: HashSet<(u16, StageId)>,
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
        faults: Faults,
        poll: Duration,
    ) -> HostAttachment {
        let admissions = targets.iter().map(|_| Admission::default()).collect();
        let (running, stages) = (FuturesUnordered::new(), HashSet::default());
        HostAttachment {
            targets,
            engines,
            rings,
            control,
            admissions,
            held_bytes: 0,
            running,
            joint: JointRequests::default(),
            stages,
            counts,
            faults,
            poll,
            poller: Poller::default(),
        }
    }

    /// Serves until the osd disconnects, breaks the protocol, or `stop` is ready. Then it frees the
    /// attachment's stages and calls `on_end`, after which the next attachment may begin. Finally
    /// it waits for running calls of the stores, because they may still use host memory.
    pub(super) async fn run(mut self, stop: impl Future<Output = ()>, on_end: impl FnOnce()) {
        let mut stop = std::pin::pin!(stop);
        let why = poll_fn(|cx| {
            if stop.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            match self.turns(cx) {
                Ok(progress) => {
                    self.poller.after_turn(progress, self.poll, cx);
                    Poll::Pending
                }
                Err(e) => Poll::Ready(Some(e)),
            }
        })
        .await;
        match why {
            Some(ChannelError::Socket(e)) => tracing::info!("the osd has disconnected: {e}"),
            Some(e) => {
                self.counts.violations.fetch_add(1, Ordering::Relaxed);
                tracing::error!("the attachment was ended: {e}");
            }
            None => {}
        }
        self.wind_up(on_end).await;
    }

    async fn wind_up(mut self, on_end: impl FnOnce()) {
        if let Some(rings) = &mut self.rings
            && let Err(e) = rings.reached.revoke()
        {
            tracing::error!("the osd's connections to host memory may still be open: {e}");
        }
        for (target, stage) in self.stages.drain() {
            self.targets[usize::from(target)].store.stage_release(stage);
        }
        self.counts.stages.store(0, Ordering::Relaxed);
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

    /// Runs turns until nothing is left to do. Returns whether anything was done.
    fn turns(&mut self, cx: &mut Context<'_>) -> channel::Result<bool> {
        let mut any = false;
        loop {
            while self.turn(cx)? {
                any = true;
            }
            if let Some(rings) = &mut self.rings {
                rings.announce()?;
            }
            let was_behind = self.is_behind();
            if let Poll::Ready(result) = self.control.poll_flush(cx) {
                result?;
            }
            // No event will announce frames that are still in the socket, so continue with them.
            if !was_behind || self.is_behind() {
                return Ok(any);
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
        let progress = rings.hear(cx)?;
        loop {
            match self.rings.as_mut().map_or(Ok(RingRead::Nothing), Rings::take)? {
                RingRead::Entry(frame) => self.admit(cx, frame, Via::Ring)?,
                RingRead::Nothing => return Ok(progress),
                RingRead::Damage(e) => {
                    tracing::warn!("an entry in the inbound ring is invalid, and the osd is informed: {e}");
                    let notice = encode(&CallOutcome::Ok(CallAnswer::Damaged));
                    self.control.push(EntryHeader::new(EntryKind::Reply, 0, NO_REPLY), &notice, []);
                }
            }
        }
    }

    fn take_frames(&mut self, cx: &mut Context<'_>) -> channel::Result<bool> {
        let mut progress = false;
        for _ in 0..FRAMES_PER_TURN {
            if self.is_behind() {
                break;
            }
            let Poll::Ready(frame) = self.control.poll_frame(cx) else { break };
            self.admit(cx, frame?, Via::Socket)?;
            progress = true;
        }
        Ok(progress)
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
        let held: usize = self.admissions.iter().map(Admission::held).sum();
        if self.running.len() + held >= MAX_CALLS {
            return Err(ChannelError::Protocol(format!("it sent more than {MAX_CALLS} calls at a time")));
        }
        // Injects a fault. The only possible fault here kills the process, so there is no result to
        // handle.
        let _ = self.faults.hit(Site::StoreCall);
        let mut request = ReceivedCall::decode(header, via, &control, data);
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
                        self.running.push(transaction.start(&self.targets[usize::from(target)].store));
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
        if let Ok((StoreCall::StageRelease { stage }, ..)) = &request.call {
            self.stages.remove(&(target, StageId(*stage)));
            self.counts.stages.store(self.stages.len(), Ordering::Relaxed);
        }
        let lease = self.rings.as_ref().map(|rings| &rings.memory.data);
        match &request.call {
            Ok((StoreCall::StageStripes { .. }, ..)) => {
                self.running.extend(stripes::make(&self.targets, &self.engines, lease, request));
            }
            Ok((StoreCall::HostReading, ..)) => {
                let outcome = self.engines.host_reading().map(CallAnswer::HostReading);
                let done = Finished::Call(request.done(outcome));
                self.running.push(Box::pin(std::future::ready(done)));
            }
            _ => self.running.push(make(&self.targets[usize::from(target)].store, lease, request)),
        }
    }

    fn reply(&mut self, done: FinishedCall) {
        let FinishedCall { header: request, came, via, outcome, mut data, is_first } = done;
        if request.id == NO_REPLY {
            return;
        }
        if let Ok(CallAnswer::Stage(id)) = &outcome {
            self.stages.insert((request.target, StageId(*id)));
            self.counts.stages.store(self.stages.len(), Ordering::Relaxed);
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
    use channel::{MemoryFds, MemoryLayout, Socket};
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
