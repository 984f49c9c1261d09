//! [`SimEndpoint`]: a simulated endpoint below a link, and the task that handles its completions.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use base::mem::{Arena, ArenaBuf};
use bytes::{Bytes, BytesMut};
use fabric::{
    Completion, ExposedMemory, GatherBytes, MemoryRegion, Operation, PeerBuffer, PostError, RemoteRegion,
};
use tokio::sync::Notify;

use super::SimHost;
use super::link::{LinkOperation, SimCompletion};
use super::state::{EndIndex, State, TransportId};
use crate::transport::packets::packet::PacketHeader;
use crate::transport::packets::{
    Buffers, LandingBuffer, Landings, Link, NotRegistered, Registration, RemoteRange,
};

/// Maximum length of a packet that is sent from a copy, in bytes. Links with odd numbers use a
/// device that supports no such packets.
const INJECT_MAX: usize = 64;

/// Maximum number of memory areas of a packet.
const PARTS_MAX: usize = 4;

/// Maximum amount of memory for the packets of a process, in bytes.
const PACKET_MEMORY_BYTES: usize = 64 << 20;

/// Pause before another attempt to send credits when the queue is full.
const RETRY: Duration = Duration::from_millis(1);

/// Memory that the links of a process share.
pub(super) struct LinkMemory {
    buffers: Buffers,
    landings: Landings,
}

impl Default for LinkMemory {
    fn default() -> Self {
        LinkMemory { buffers: Buffers::new(PACKET_MEMORY_BYTES), landings: Landings::default() }
    }
}

/// One end of a simulated link.
pub(crate) struct SimEndpoint {
    host: SimHost,
    id: TransportId,
    end: EndIndex,
    memory: Arc<LinkMemory>,
    /// Whether only memory in arenas can be sent without a copy.
    needs_arena: bool,
    /// Wakes the task when the link owes its peer credits.
    due: Arc<Notify>,
    is_closed: AtomicBool,
}

impl SimEndpoint {
    pub(super) fn new(
        host: SimHost,
        id: TransportId,
        end: EndIndex,
        memory: Arc<LinkMemory>,
        needs_arena: bool,
    ) -> SimEndpoint {
        let (due, is_closed) = (Arc::default(), AtomicBool::new(false));
        SimEndpoint { host, id, end, memory, needs_arena, due, is_closed }
    }

    fn with<T>(&self, call: impl FnOnce(&mut State, TransportId, EndIndex) -> T) -> T {
        self.host.with(|state| call(state, self.id, self.end))
    }

    // The operations of a `LinkEndpoint`, which documents them.

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    #[expect(clippy::unused_self, reason = "each kind of endpoint has this function")]
    pub(crate) fn provider(&self) -> &str {
        "sim"
    }

    pub(crate) fn buffers(&self) -> &Buffers {
        &self.memory.buffers
    }

    pub(crate) fn landings(&self) -> &Landings {
        &self.memory.landings
    }

    pub(crate) fn inject_max(&self) -> usize {
        if self.id.is_multiple_of(2) { INJECT_MAX } else { 0 }
    }

    #[expect(clippy::unused_self, reason = "each kind of endpoint has this function")]
    pub(crate) fn parts_max(&self) -> usize {
        PARTS_MAX
    }

    /// Starts the task that handles the completions of the link, in the current role.
    pub(crate) fn enter(&self, _own_token: u64, link: &Arc<Link>) {
        let (host, due) = (self.host.clone(), Arc::clone(&self.due));
        crate::spawn(drive(Arc::downgrade(link), host, (self.id, self.end), due));
    }

    #[expect(clippy::unused_self, reason = "each kind of endpoint has this function")]
    pub(crate) fn leave(&self, _own_token: u64, _outstanding: u32) {}

    pub(crate) fn close(&self) -> bool {
        let is_first = !self.is_closed.swap(true, Ordering::Relaxed);
        if is_first {
            self.with(|state, id, end| state.close(id, end, true));
        }
        is_first
    }

    #[expect(clippy::unused_self, reason = "each kind of endpoint has this function")]
    pub(crate) fn may_grow(&self, _more: u32) -> bool {
        true
    }

    pub(crate) fn is_due(&self, _link: &Arc<Link>) {
        self.due.notify_one();
    }

    pub(crate) fn post_receive(&self, buf: ArenaBuf) -> Result<(), String> {
        self.with(|state, id, end| state.post_receive(id, end, buf));
        Ok(())
    }

    pub(crate) fn inject(&self, packet: &[u8]) -> Option<Result<(), PostError>> {
        let packet = LinkOperation::Packet { data: Bytes::copy_from_slice(packet), notify: false };
        self.with(|state, id, end| state.post(id, end, vec![packet], None))
    }

    pub(crate) fn send_parts(
        &self,
        parts: &mut Vec<GatherBytes>,
        notify: bool,
    ) -> Option<Result<(), PostError>> {
        let data = gather(parts);
        let operation = notify.then_some(Operation::Send);
        let packet = LinkOperation::Packet { data, notify };
        let posted = self.with(|state, id, end| state.post(id, end, vec![packet], operation));
        take_if_posted(parts, posted)
    }

    pub(crate) fn write_parts(
        &self,
        parts: &mut Vec<GatherBytes>,
        to: RemoteRange,
        notify: bool,
    ) -> Option<Result<(), PostError>> {
        let chunks = State::chunks(to, &gather(parts), notify);
        let operation = notify.then_some(Operation::Write);
        let posted = self.with(|state, id, end| state.post(id, end, chunks, operation));
        take_if_posted(parts, posted)
    }

    pub(crate) fn read(
        &self,
        landing: &LandingBuffer,
        at: usize,
        from: RemoteRange,
        token: u64,
    ) -> Option<Result<(), PostError>> {
        let buffer = landing.buffer()?.clone();
        self.with(|state, id, end| state.post_read(id, end, (buffer, at), from, token))
    }

    #[expect(clippy::unused_self, reason = "each kind of endpoint has this function")]
    pub(crate) fn packet_region(&self, _arena: &Arc<Arena>) -> Result<Option<MemoryRegion>, String> {
        Ok(None)
    }

    pub(crate) fn region_of(&self, bytes: &Bytes) -> Result<Option<MemoryRegion>, NotRegistered> {
        if self.needs_arena && Arena::containing(bytes).is_none() { Err(NotRegistered) } else { Ok(None) }
    }

    #[expect(clippy::unused_self, reason = "each kind of endpoint has this function")]
    pub(crate) fn land(&self, _buf: &PeerBuffer, _arena: &Arc<Arena>) -> Result<Registration, String> {
        Ok(Registration::Unneeded)
    }

    pub(crate) fn expose(&self, memory: ExposedMemory) -> Result<Registration, String> {
        let len = match &memory {
            ExposedMemory::Bytes(bytes) => bytes.len(),
            ExposedMemory::Buffer(buffer) => buffer.len(),
        };
        let host = self.host.clone();
        let key = host.with(|state| {
            let refuses = state.one_in(state.faults.refuse_memory_one_in, |counts| &counts.refused_memory);
            (!refuses).then(|| state.expose(host.process, memory))
        });
        let key = key.ok_or("the simulated device refuses to register memory")?;
        let inner = ExposureGuard { host, key, len: len as u64, is_settled: AtomicBool::new(false) };
        Ok(Registration::Sim(SimRegion(Arc::new(inner))))
    }

    pub(crate) fn quarantined_bytes(&self) -> usize {
        self.host.with(|state| state.kept_bytes(self.host.process))
    }
}

impl Drop for SimEndpoint {
    fn drop(&mut self) {
        self.close();
    }
}

/// The data of a message or a write.
fn gather(parts: &[GatherBytes]) -> Bytes {
    match parts {
        [one] => one.bytes.clone(),
        many => {
            let mut data = BytesMut::new();
            many.iter().for_each(|part| data.extend_from_slice(&part.bytes));
            data.freeze()
        }
    }
}

fn take_if_posted(
    parts: &mut Vec<GatherBytes>,
    posted: Option<Result<(), PostError>>,
) -> Option<Result<(), PostError>> {
    if matches!(posted, Some(Ok(()))) {
        parts.clear();
    }
    posted
}

/// Memory that a process exposes to its peers on the simulated network.
#[derive(Debug, Clone)]
pub(crate) struct SimRegion(Arc<ExposureGuard>);

#[derive(Debug)]
struct ExposureGuard {
    host: SimHost,
    key: u64,
    len: u64,
    is_settled: AtomicBool,
}

impl SimRegion {
    pub(crate) fn remote(&self) -> RemoteRegion {
        RemoteRegion { key: self.0.key, base: 0, len: self.0.len }
    }

    pub(crate) fn settle(&self) {
        self.0.is_settled.store(true, Ordering::Relaxed);
    }
}

impl Drop for ExposureGuard {
    fn drop(&mut self) {
        let is_settled = self.is_settled.load(Ordering::Relaxed);
        self.host.with(|state| state.withdraw(self.key, is_settled));
    }
}

/// Handles the completions of a link until the link ends.
async fn drive(link: Weak<Link>, host: SimHost, (id, end): (TransportId, EndIndex), due: Arc<Notify>) {
    let mut has_granted = false;
    loop {
        let completion = poll_fn(|cx| host.with(|state| state.take_completion(id, end, cx.waker())));
        // Completions come first: their handling may send the credits that are due.
        let next = tokio::select! {
            biased;
            completion = completion => completion.map(Some),
            () = due.notified() => Some(None),
        };
        let Some(next) = next else { return };
        match next {
            None => {
                // Another packet may carry the credits meanwhile.
                if has_granted {
                    tokio::time::sleep(RETRY).await;
                } else {
                    tokio::task::yield_now().await;
                }
                has_granted = true;
                let Some(link) = link.upgrade() else { return };
                link.grant();
            }
            Some(completion) => {
                has_granted = false;
                let Some(link) = link.upgrade() else { return };
                handle(&link, completion);
            }
        }
    }
}

fn handle(link: &Arc<Link>, completion: SimCompletion) {
    match completion {
        SimCompletion::Received(buf, len) => {
            match PacketHeader::decode(&buf[..len]).filter(|header| link.is_own_token(header.token)) {
                Some(header) => link.take_packet(header, buf, len),
                None => link.fail("the peer sent a packet without the token of this connection"),
            }
        }
        SimCompletion::Done(operation, token) => {
            let endpoint = link.endpoint.id();
            link.on_completion(Completion { endpoint, token, operation, len: 0, result: Ok(()) });
        }
        SimCompletion::Failed(why) => link.fail(&why),
    }
}
