//! Connected endpoints.

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::abi::{
    COMPLETION, CONTROL_ENABLE, FENCE, FiMsg, FiMsgRma, FiRmaIov, FidEp, INJECT, RECV, SELECTIVE_COMPLETION,
    TRANSMIT,
};
use super::event_queue::{EventRegistration, EventSource};
use super::handle::Handle;
use super::listener::private_data_room;
use super::{
    CompletionQueue, ConnectionRequest, EventQueue, Info, MemoryRegion, ReceiveQueue, Slice, library,
};
use crate::operations::{Held, PendingOperation};
use crate::{FabricError, GatherBytes, Operation, PostError, RemoteSlice, Result};

/// libfabric's "no address": the endpoint is connected.
const CONNECTED_PEER: u64 = u64::MAX;
/// The same number, where it means that a message may come from anybody.
pub(super) const ANY_PEER: u64 = u64::MAX;

/// Process-wide numbers of whatever posts operations.
pub(super) fn next_serial() -> u64 {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    SERIAL.fetch_add(1, Ordering::Relaxed)
}

/// What an endpoint reports to, and takes from.
#[derive(Clone, Copy)]
pub struct EndpointQueues<'a> {
    /// Connected, closed.
    pub events: &'a EventQueue,
    /// Operations that have ended.
    pub completions: &'a CompletionQueue,
    /// Where received messages go; `None` for buffers of its own ([`Endpoint::receive`]).
    pub receives: Option<&'a ReceiveQueue>,
    /// Whether [`Endpoint::send_parts`] and [`Endpoint::write_parts`] may leave out completions.
    pub sparse: bool,
}

impl<'a> EndpointQueues<'a> {
    /// With receive buffers of its own, and a completion for every operation.
    #[must_use]
    pub fn new(events: &'a EventQueue, completions: &'a CompletionQueue) -> EndpointQueues<'a> {
        EndpointQueues { events, completions, receives: None, sparse: false }
    }
}

/// One connection: reliable, ordered. A message arrives after the messages and the writes that were posted before it:
/// when it has been received, these are in place (`FI_ORDER_SAS`, `FI_ORDER_SAW`; fi_cq(3) says that this holds whatever
/// the completion of the write means). So does a read (`FI_ORDER_RAW`): when it has completed, the writes before it are in
/// place.
///
/// It is made, gets receives posted, and is then [established](Self::establish). Once [`Event::Connected`](super::Event::Connected) was
/// read it can be used. Dropping it closes the connection; what
/// was under way has then ended without a completion, and its memory is no longer used. See
/// [`Domain::is_spoiled`](super::Domain::is_spoiled) for what that may do to other endpoints.
pub struct Endpoint {
    handle: Handle<FidEp>,
    closing: Closing,
    token: u64,
    connected: Arc<AtomicBool>,
    max_msg_size: usize,
    inject_size: usize,
    parts_max: usize,
    needs_regions: bool,
    sparse: bool,
    /// [`FENCE`] where sends and writes must wait for the reads before them, else 0.
    fence: u64,
    /// Operations posted without asking for a completion, since the last one that did.
    quiet: Mutex<Vec<u64>>,
    role: EndpointOrigin,
}

enum EndpointOrigin {
    /// Connects to this address, as libfabric has it.
    Connects(Vec<u8>),
    Accepts,
}

/// What is to be done once the endpoint is closed.
struct Closing {
    registration: EventRegistration,
    serial: u64,
    completions: CompletionQueue,
    _receives: Option<ReceiveQueue>,
}

impl Drop for Closing {
    fn drop(&mut self) {
        // Dropping these may close regions, which takes locks: not inside these.
        let operations = self.completions.operations().remove_all(|p| p.serial == self.serial);
        if operations.iter().any(|p| p.operation == Operation::Read) {
            self.completions.domain().read_broken_off();
        }
        drop(operations);
        let memories = self.completions.domain().quarantine().closed(self.serial);
        drop(memories);
    }
}

impl Endpoint {
    /// Makes an endpoint that will connect to the address that `info` was [queried](crate::Target::Connect) for. Events
    /// and completions bear `token`.
    ///
    /// # Errors
    /// [`FabricError::NoDestination`] if it was queried for something else; or if the provider refuses.
    pub fn connecting(info: &Info, queues: EndpointQueues<'_>, token: u64) -> Result<Endpoint> {
        let raw = info.raw();
        if raw.dest_addr.is_null() {
            return Err(FabricError::NoDestination);
        }
        // SAFETY: libfabric says how many bytes there are.
        let peer =
            unsafe { std::slice::from_raw_parts(raw.dest_addr.cast::<u8>(), raw.dest_addrlen) }.to_vec();
        let endpoint = Endpoint::create(info, queues, token, EndpointOrigin::Connects(peer))?;
        endpoint.enable()?;
        Ok(endpoint)
    }

    /// Makes an endpoint that will accept `request`.
    ///
    /// # Errors
    /// If the provider refuses; the request is then refused, too.
    pub fn answer(request: ConnectionRequest, queues: EndpointQueues<'_>, token: u64) -> Result<Endpoint> {
        let endpoint = Endpoint::create(request.info(), queues, token, EndpointOrigin::Accepts)?;
        request.into_answered();
        endpoint.enable()?;
        Ok(endpoint)
    }

    fn create(info: &Info, queues: EndpointQueues<'_>, token: u64, role: EndpointOrigin) -> Result<Endpoint> {
        let EndpointQueues { events, completions, receives, sparse } = queues;
        let mut object = std::ptr::null_mut();
        let parent = completions.domain().as_ptr();
        // SAFETY: an open domain, an info of libfabric's, and a place for the result.
        let code = unsafe {
            ((*(*parent).ops).endpoint)(parent, info.as_ptr(), &raw mut object, std::ptr::null_mut())
        };
        library::check("fi_endpoint", code)?;
        // SAFETY: just made, ours.
        let handle = unsafe { Handle::new(object, "fi_endpoint") }?;
        let serial = next_serial();
        let (registration, completions) = (EventRegistration::new(events, handle.fid()), completions.clone());
        let closing = Closing { registration, serial, completions, _receives: receives.cloned() };
        closing.completions.domain().quarantine().opened(serial);
        let connected = Arc::default();
        closing.registration.is_for(EventSource::Endpoint(token, Arc::clone(&connected)));
        let fence = if closing.completions.domain().overtakes_reads() { FENCE } else { 0 };
        Ok(Endpoint {
            handle,
            closing,
            token,
            connected,
            max_msg_size: info.max_msg_size(),
            inject_size: info.inject_size(),
            parts_max: info.send_parts_max(),
            needs_regions: info.mr_mode().local,
            sparse,
            fence,
            quiet: Mutex::default(),
            role,
        })
    }

    fn enable(&self) -> Result<()> {
        let Closing { registration, completions, _receives: receives, .. } = &self.closing;
        let sparse = if self.sparse { SELECTIVE_COMPLETION } else { 0 };
        // SAFETY: all queues are open, and kept so until after the endpoint is closed; enabling takes nothing.
        unsafe {
            self.handle.bind(registration.events().fid(), 0)?;
            self.handle.bind(completions.handle().fid(), TRANSMIT | sparse)?;
            self.handle.bind(completions.handle().fid(), RECV)?;
            if let Some(receives) = receives {
                self.handle.bind(receives.fid(), 0)?;
            }
            // `verbs` (libfabric 1.17) answers with errno when it could not make a queue pair, and librdmacm does not always set
            // that: if it was zero before, the endpoint seems well, and the first receive that is posted ends the process.
            *libc::__errno_location() = libc::ENOMEM;
            self.handle.control("fi_enable", CONTROL_ENABLE, std::ptr::null_mut())
        }
    }

    /// Connects or accepts. That it has come about is told by [`Event::Connected`](super::Event::Connected); `data` goes to
    /// the peer with it.
    ///
    /// # Errors
    /// If `data` is too long or the provider refuses at once.
    pub fn establish(&self, data: &[u8]) -> Result<()> {
        let max = self.max_private_data()?;
        if data.len() > max {
            return Err(FabricError::PrivateData { len: data.len(), max });
        }
        let endpoint = self.handle.as_ptr();
        let (start, len) = (data.as_ptr().cast(), data.len());
        match &self.role {
            EndpointOrigin::Connects(peer) => {
                // SAFETY: an open endpoint, an address of libfabric's, and data of the length said.
                let code = unsafe { ((*(*endpoint).cm).connect)(endpoint, peer.as_ptr().cast(), start, len) };
                library::check("fi_connect", code)
            }
            EndpointOrigin::Accepts => {
                // SAFETY: an open endpoint that was made for a request, and data of the length said.
                library::check("fi_accept", unsafe { ((*(*endpoint).cm).accept)(endpoint, start, len) })
            }
        }
    }

    /// Most private data in a connection request and its answer, in bytes.
    ///
    /// # Errors
    /// If the provider does not say.
    pub fn max_private_data(&self) -> Result<usize> {
        let endpoint = self.handle.as_ptr();
        // SAFETY: an open endpoint.
        unsafe { private_data_room(endpoint.cast(), (*endpoint).ops) }
    }

    /// Posts a buffer for one message.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn receive(&self, into: Slice<'_>, token: u64) -> Result<(), PostError> {
        self.post(into, Operation::Receive, token, |ep, context| {
            // SAFETY: an open endpoint; the buffer stays mapped until the completion or the endpoint's end.
            unsafe {
                let recv = (*(*ep).msg).recv;
                recv(ep, into.start().cast(), into.len(), into.descriptor(), CONNECTED_PEER, context)
            }
        })
    }

    /// Sends a message; not for endpoints that are [sparse](EndpointQueues::sparse). The buffer must stay as it is until the completion, which does not say that the message has arrived.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn send(&self, from: Slice<'_>, token: u64) -> Result<(), PostError> {
        let iov = libc::iovec { iov_base: from.start().cast(), iov_len: from.len() };
        let mut descriptor = from.descriptor();
        self.post(from, Operation::Send, token, |ep, context| {
            let message = FiMsg {
                msg_iov: &raw const iov,
                desc: &raw mut descriptor,
                iov_count: 1,
                addr: CONNECTED_PEER,
                context,
                data: 0,
            };
            // SAFETY: as in `receive`, and a whole message.
            unsafe { ((*(*ep).msg).sendmsg)(ep, &raw const message, COMPLETION | self.fence) }
        })
    }

    /// Sends a message of at most [`Info::inject_size`] bytes, which is copied at once; there is no completion. It takes room
    /// in the completion queue nevertheless, until it has been sent and the queue was polled.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn inject(&self, message: &[u8]) -> Result<(), PostError> {
        if message.len() > self.inject_size {
            return Err(FabricError::TooLong { len: message.len(), max: self.inject_size }.into());
        }
        self.check_connected()?;
        let (earlier, len) = (Vec::new(), message.len());
        let (serial, endpoint, token, operation) = (self.closing.serial, self.token, 0, Operation::Send);
        let pending =
            PendingOperation { serial, endpoint, token, operation, len, earlier, memory: Held::Copied };
        let queue = &self.closing.completions;
        let Ok(number) = queue.operations().insert(pending) else { return Err(PostError::Full) };
        let iov = libc::iovec { iov_base: message.as_ptr().cast_mut().cast(), iov_len: len };
        let message = FiMsg {
            msg_iov: &raw const iov,
            // None at all: `verbs` takes that to mean that the bytes are copied, and looks into any that is given.
            desc: std::ptr::null_mut(),
            iov_count: 1,
            addr: CONNECTED_PEER,
            context: number as *mut c_void,
            data: 0,
        };
        let (object, flags) = (self.handle.as_ptr(), INJECT | COMPLETION | self.fence);
        // Not `fi_inject`: that takes up a place in the provider's queue, too, but one cannot tell when it is free again. A
        // queue of `verbs` that is overrun is lost with all its endpoints.
        // SAFETY: an open endpoint; the message is copied before the call returns.
        let code = unsafe { ((*(*object).msg).sendmsg)(object, &raw const message, flags) };
        let result = posted("fi_sendmsg", code);
        if result.is_err() {
            drop(queue.operations().remove(number));
        }
        result
    }

    /// Reads remote memory into `into`, as many bytes as both have.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn read(&self, into: Slice<'_>, remote: RemoteSlice, token: u64) -> Result<(), PostError> {
        self.transfer(Operation::Read, into, remote, token, |ep, message| {
            // SAFETY: as in `send`. A read is always told of, also where others are not.
            unsafe { ((*(*ep).rma).readmsg)(ep, message, COMPLETION) }
        })
    }

    /// Writes `from` to remote memory; not for endpoints that are [sparse](EndpointQueues::sparse). It is in place there when a later message of this endpoint has been received or
    /// a later read has completed. Its own completion says only that `from` is free again: over `tcp` the peer may not even
    /// have seen it, and may yet refuse it.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn write(&self, from: Slice<'_>, remote: RemoteSlice, token: u64) -> Result<(), PostError> {
        self.transfer(Operation::Write, from, remote, token, |ep, message| {
            // SAFETY: as in `send`.
            unsafe { ((*(*ep).rma).writemsg)(ep, message, COMPLETION | self.fence) }
        })
    }

    fn transfer(
        &self,
        operation: Operation,
        local: Slice<'_>,
        remote: RemoteSlice,
        token: u64,
        call: impl FnOnce(*mut FidEp, *const FiMsgRma) -> isize,
    ) -> Result<(), PostError> {
        if local.len() != remote.len {
            let (len, region_len) = (remote.len, local.len());
            return Err(FabricError::OutOfRange { offset: 0, len, region_len }.into());
        }
        let there = FiRmaIov { addr: remote.address, len: remote.len, key: remote.key };
        let iov = libc::iovec { iov_base: local.start().cast(), iov_len: local.len() };
        let mut descriptor = local.descriptor();
        self.post(local, operation, token, |ep, context| {
            let message = FiMsgRma {
                msg_iov: &raw const iov,
                desc: &raw mut descriptor,
                iov_count: 1,
                addr: CONNECTED_PEER,
                rma_iov: &raw const there,
                rma_iov_count: 1,
                context,
                data: 0,
            };
            call(ep, &raw const message)
        })
    }

    /// Sends a message that is made of `parts`. Without `notify`, on an endpoint that is [sparse](EndpointQueues::sparse),
    /// there is no completion, and the parts are kept until one comes that was asked for later. They are taken out of
    /// `parts`, unless there is an error.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn send_parts(
        &self,
        parts: &mut Vec<GatherBytes>,
        token: u64,
        notify: bool,
    ) -> Result<(), PostError> {
        self.post_parts(parts, Operation::Send, token, notify, |ep, iov, descriptors, context, flags| {
            let message = FiMsg {
                msg_iov: iov.as_ptr(),
                desc: descriptors.as_mut_ptr(),
                iov_count: iov.len(),
                addr: CONNECTED_PEER,
                context,
                data: 0,
            };
            // SAFETY: an open endpoint and a whole message; its parts stay mapped until it has ended.
            unsafe { ((*(*ep).msg).sendmsg)(ep, &raw const message, flags) }
        })
    }

    /// Writes `parts`, one after the other, to remote memory. See [`write`](Self::write) and
    /// [`send_parts`](Self::send_parts).
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn write_parts(
        &self,
        parts: &mut Vec<GatherBytes>,
        remote: RemoteSlice,
        token: u64,
        notify: bool,
    ) -> Result<(), PostError> {
        let len = parts.iter().map(|part| part.bytes.len()).sum();
        if len != remote.len {
            return Err(FabricError::OutOfRange { offset: 0, len: remote.len, region_len: len }.into());
        }
        let target = FiRmaIov { addr: remote.address, len, key: remote.key };
        self.post_parts(parts, Operation::Write, token, notify, |ep, iov, descriptors, context, flags| {
            let message = FiMsgRma {
                msg_iov: iov.as_ptr(),
                desc: descriptors.as_mut_ptr(),
                iov_count: iov.len(),
                addr: CONNECTED_PEER,
                rma_iov: &raw const target,
                rma_iov_count: 1,
                context,
                data: 0,
            };
            // SAFETY: as in `send_parts`.
            unsafe { ((*(*ep).rma).writemsg)(ep, &raw const message, flags) }
        })
    }

    fn post_parts(
        &self,
        parts: &mut Vec<GatherBytes>,
        operation: Operation,
        token: u64,
        notify: bool,
        call: impl FnOnce(*mut FidEp, &[libc::iovec], &mut [*mut c_void], *mut c_void, u64) -> isize,
    ) -> Result<(), PostError> {
        self.check_connected()?;
        let len = self.check_parts(parts)?;
        let notify = notify || !self.sparse;
        let iov: Vec<libc::iovec> = parts
            .iter()
            .map(|part| libc::iovec {
                iov_base: part.bytes.as_ptr().cast_mut().cast(),
                iov_len: part.bytes.len(),
            })
            .collect();
        let mut descriptors: Vec<*mut c_void> = parts
            .iter()
            .map(|part| part.region.as_ref().map_or(std::ptr::null_mut(), MemoryRegion::descriptor))
            .collect();
        // Held while posting, so that whoever asks for a completion is behind those that it stands for.
        let mut quiet = self.quiet.lock().unwrap_or_else(PoisonError::into_inner);
        let earlier = if notify { std::mem::take(&mut *quiet) } else { Vec::new() };
        let (serial, endpoint) = (self.closing.serial, self.token);
        let memory = Held::Parts(std::mem::take(parts));
        let pending = PendingOperation { serial, endpoint, token, operation, len, earlier, memory };
        let queue = &self.closing.completions;
        let number = match queue.operations().insert(pending) {
            Ok(number) => number,
            Err(pending) => {
                *parts = pending.memory.into_parts();
                *quiet = pending.earlier;
                return Err(PostError::Full);
            }
        };
        let flags = self.fence | if notify { COMPLETION } else { 0 };
        let code = call(self.handle.as_ptr(), &iov, &mut descriptors, number as *mut c_void, flags);
        let result = posted(call_name(operation), code);
        match &result {
            Ok(()) if !notify => quiet.push(number),
            Ok(()) => {}
            Err(_) => {
                let pending = queue.operations().remove(number);
                if let Some(pending) = pending {
                    *parts = pending.memory.into_parts();
                    if notify {
                        *quiet = pending.earlier;
                    }
                }
            }
        }
        result
    }

    /// The tables of a `tcp` endpoint that is not connected yet have null for what it cannot do yet (libfabric 1.17).
    fn check_connected(&self) -> Result<()> {
        if self.connected.load(Ordering::Acquire) { Ok(()) } else { Err(FabricError::NotConnected) }
    }

    fn check_parts(&self, parts: &[GatherBytes]) -> Result<usize> {
        if parts.is_empty() || parts.len() > self.parts_max {
            return Err(FabricError::TooManyParts { parts: parts.len(), max: self.parts_max });
        }
        for part in parts {
            match &part.region {
                None if self.needs_regions => {
                    return Err(FabricError::Unregistered { len: part.bytes.len() });
                }
                Some(region) if !region.domain().is(self.closing.completions.domain()) => {
                    return Err(FabricError::OtherDomain);
                }
                Some(region) if !region.contains(&part.bytes) => {
                    let (len, region_len) = (part.bytes.len(), region.len());
                    return Err(FabricError::OutOfRange { offset: 0, len, region_len });
                }
                _ => {}
            }
        }
        let len = parts.iter().map(|part| part.bytes.len()).sum();
        if len > self.max_msg_size {
            return Err(FabricError::TooLong { len, max: self.max_msg_size });
        }
        Ok(len)
    }

    fn post(
        &self,
        slice: Slice<'_>,
        operation: Operation,
        token: u64,
        call: impl FnOnce(*mut FidEp, *mut c_void) -> isize,
    ) -> Result<(), PostError> {
        if slice.len() > self.max_msg_size {
            return Err(FabricError::TooLong { len: slice.len(), max: self.max_msg_size }.into());
        }
        if operation != Operation::Receive {
            self.check_connected()?;
        }
        let region: MemoryRegion = slice.region().clone();
        // Its descriptor would mean something else to this endpoint, or nothing.
        if !region.domain().is(self.closing.completions.domain()) {
            return Err(FabricError::OtherDomain.into());
        }
        let (serial, endpoint) = (self.closing.serial, self.token);
        let (earlier, memory) = (Vec::new(), Held::Region(region));
        let pending =
            PendingOperation { serial, endpoint, token, operation, len: slice.len(), earlier, memory };
        let queue = &self.closing.completions;
        let Ok(number) = queue.operations().insert(pending) else { return Err(PostError::Full) };
        let result = posted(call_name(operation), call(self.handle.as_ptr(), number as *mut c_void));
        if result.is_err() {
            let pending = queue.operations().remove(number);
            drop(pending);
        }
        result
    }

    /// The token that events and completions bear.
    #[must_use]
    pub fn token(&self) -> u64 {
        self.token
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("token", &self.token).finish_non_exhaustive()
    }
}

fn call_name(operation: Operation) -> &'static str {
    match operation {
        Operation::Send => "fi_sendmsg",
        Operation::Receive => "fi_recv",
        Operation::Read => "fi_readmsg",
        Operation::Write => "fi_writemsg",
    }
}

pub(super) fn posted(call: &'static str, code: isize) -> Result<(), PostError> {
    match i32::try_from(code).unwrap_or(-libc::EIO) {
        0 => Ok(()),
        code if code == -libc::EAGAIN => Err(PostError::Full),
        code => Err(library::error(call, -code).into()),
    }
}
