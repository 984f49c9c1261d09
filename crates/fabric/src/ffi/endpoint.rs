//! Connected endpoints.

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::abi::{
    COMPLETION, CONTROL_ENABLE, FENCE, FiMsg, FiMsgRma, FiRmaIov, FidEp, INJECT, RECV, SELECTIVE_COMPLETION,
    TRANSMIT,
};
use super::event_queue::{EventRegistration, EventSource};
use super::handle::Handle;
use super::listener::private_data_room;
use super::posting::{held, next_serial, posted};
use super::{
    CompletionQueue, ConnectionRequest, EventQueue, Info, MemoryRegion, ReceiveQueue, Slice, library,
};
use crate::operations::{Held, PendingOperation};
use crate::{FabricError, GatherBytes, Operation, PostError, RemoteSlice, Result};

/// libfabric's value for "no address", because a connected endpoint has only one peer.
const CONNECTED_PEER: u64 = u64::MAX;

/// The queues that an endpoint reports to and receives from.
#[derive(Clone, Copy)]
pub struct EndpointQueues<'a> {
    /// Reports that the endpoint connected or closed.
    pub events: &'a EventQueue,
    /// Reports completed operations.
    pub completions: &'a CompletionQueue,
    /// The shared queue of receive buffers. `None` for an endpoint with buffers of its own
    /// ([`Endpoint::receive`]).
    pub receives: Option<&'a ReceiveQueue>,
    /// Whether [`Endpoint::send_parts`] and [`Endpoint::write_parts`] may omit completions.
    pub sparse: bool,
}

impl<'a> EndpointQueues<'a> {
    /// Returns queues for an endpoint that has its own receive buffers and reports a completion for
    /// every operation.
    #[must_use]
    pub fn new(events: &'a EventQueue, completions: &'a CompletionQueue) -> EndpointQueues<'a> {
        EndpointQueues { events, completions, receives: None, sparse: false }
    }
}

/// One reliable, ordered connection. A message arrives after the messages and writes that were
/// posted before it. When the message has been received, the data of these writes is in place.
/// libfabric guarantees this order by `FI_ORDER_SAS` and `FI_ORDER_SAW`. According to fi_cq(3), the
/// order does not depend on what the completion of a write means. Likewise, when a read has
/// completed, the data of earlier writes is in place (`FI_ORDER_RAW`).
///
/// The caller creates the endpoint, posts receives, and then [establishes](Self::establish) the
/// connection. The endpoint can be used once
/// [`FabricEvent::Connected`](super::FabricEvent::Connected) has been read. Dropping the endpoint
/// closes the connection. Operations in progress then end without a completion, and their memory is
/// no longer used. See [`Domain::is_spoiled`](super::Domain::is_spoiled) for the effect on other
/// endpoints.
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
    /// [`FENCE`] if sends and writes must wait for earlier reads, otherwise 0.
    fence: u64,
    /// Numbers of the operations without a completion that were posted after the last operation
    /// with a completion.
    quiet: Mutex<Vec<u64>>,
    role: EndpointOrigin,
}

enum EndpointOrigin {
    /// Connects to this address, in libfabric's encoding.
    Connects(Vec<u8>),
    Accepts,
}

/// Releases the endpoint's resources when dropped, which happens after the endpoint is closed.
struct Closing {
    registration: EventRegistration,
    serial: u64,
    completions: CompletionQueue,
    _receives: Option<ReceiveQueue>,
}

impl Drop for Closing {
    fn drop(&mut self) {
        // Dropping an operation may close regions, which takes locks. So the operations are dropped
        // only after the lock on the table is released.
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
    /// Creates an endpoint that will connect to the address that `info` was
    /// [queried](crate::EndpointAddress::Connect) for. Its events and completions carry `token`.
    ///
    /// # Errors
    /// [`FabricError::NoDestination`] if the query named no address to connect to. Other errors if
    /// the provider fails.
    pub fn connecting(info: &Info, queues: EndpointQueues<'_>, token: u64) -> Result<Endpoint> {
        let raw = info.raw();
        if raw.dest_addr.is_null() {
            return Err(FabricError::NoDestination);
        }
        // SAFETY: libfabric states the length of the address.
        let peer =
            unsafe { std::slice::from_raw_parts(raw.dest_addr.cast::<u8>(), raw.dest_addrlen) }.to_vec();
        let endpoint = Endpoint::create(info, queues, token, EndpointOrigin::Connects(peer))?;
        endpoint.enable()?;
        Ok(endpoint)
    }

    /// Creates an endpoint that will accept `request`.
    ///
    /// # Errors
    /// If the provider fails. The peer's attempt to connect then fails, too.
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
        // SAFETY: the domain is open, libfabric allocated the info, and the result has room.
        let code = unsafe {
            ((*(*parent).ops).endpoint)(parent, info.as_ptr(), &raw mut object, std::ptr::null_mut())
        };
        library::check("fi_endpoint", code)?;
        // SAFETY: the object was just created, and only this function has it.
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
        // SAFETY: all queues stay open until after the endpoint is closed. The command to enable
        // needs no argument.
        unsafe {
            self.handle.bind(registration.events().fid(), 0)?;
            self.handle.bind(completions.handle().fid(), TRANSMIT | sparse)?;
            self.handle.bind(completions.handle().fid(), RECV)?;
            if let Some(receives) = receives {
                self.handle.bind(receives.fid(), 0)?;
            }
            // If `verbs` (libfabric 1.17) cannot create a queue pair, it returns errno, which
            // librdmacm does not always set. If errno were zero, the endpoint would seem usable,
            // and the first posted receive would crash the process. So errno is set to an error
            // first.
            *libc::__errno_location() = libc::ENOMEM;
            self.handle.control("fi_enable", CONTROL_ENABLE, std::ptr::null_mut())
        }
    }

    /// Connects, or accepts the request, and sends `data` to the peer.
    /// [`FabricEvent::Connected`](super::FabricEvent::Connected) reports that the connection is
    /// established.
    ///
    /// # Errors
    /// If `data` is too long, or the provider fails at once.
    pub fn establish(&self, data: &[u8]) -> Result<()> {
        let max = self.max_private_data()?;
        if data.len() > max {
            return Err(FabricError::PrivateData { len: data.len(), max });
        }
        let endpoint = self.handle.as_ptr();
        let (start, len) = (data.as_ptr().cast(), data.len());
        match &self.role {
            EndpointOrigin::Connects(peer) => {
                // SAFETY: the endpoint is open, the address comes from libfabric, and `data` has
                // the stated length.
                let code = unsafe { ((*(*endpoint).cm).connect)(endpoint, peer.as_ptr().cast(), start, len) };
                library::check("fi_connect", code)
            }
            EndpointOrigin::Accepts => {
                // SAFETY: the open endpoint was created for a request, and `data` has the stated
                // length.
                library::check("fi_accept", unsafe { ((*(*endpoint).cm).accept)(endpoint, start, len) })
            }
        }
    }

    /// Maximum length of private data in a connection request and its answer, in bytes.
    ///
    /// # Errors
    /// If the provider does not report it.
    pub fn max_private_data(&self) -> Result<usize> {
        let endpoint = self.handle.as_ptr();
        // SAFETY: the endpoint is open.
        unsafe { private_data_room(endpoint.cast(), (*endpoint).ops) }
    }

    /// Posts a buffer for one message.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn receive(&self, into: Slice<'_>, token: u64) -> Result<(), PostError> {
        self.post(into, Operation::Receive, token, |ep, context| {
            // SAFETY: the endpoint is open. The buffer stays mapped until the operation completes
            // or the endpoint is closed.
            unsafe {
                let recv = (*(*ep).msg).recv;
                recv(ep, into.start().cast(), into.len(), into.descriptor(), CONNECTED_PEER, context)
            }
        })
    }

    /// Sends a message. Must not be called on [sparse](EndpointQueues::sparse) endpoints. If the
    /// bytes change before the completion is reported, the peer gets arbitrary bytes. The completion
    /// does not mean that the message has arrived.
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
            // SAFETY: as in `receive`, and the message is complete.
            unsafe { ((*(*ep).msg).sendmsg)(ep, &raw const message, COMPLETION | self.fence) }
        })
    }

    /// Sends a message of at most [`Info::inject_size`] bytes, which is copied at once. No
    /// completion is reported. The message still occupies an entry of the completion queue until it
    /// has been sent and the queue is polled.
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
            // Without a descriptor, `verbs` copies the bytes. If a descriptor were given, `verbs`
            // would use it.
            desc: std::ptr::null_mut(),
            iov_count: 1,
            addr: CONNECTED_PEER,
            context: number as *mut c_void,
            data: 0,
        };
        let (object, flags) = (self.handle.as_ptr(), INJECT | COMPLETION | self.fence);
        // `fi_inject` also occupies an entry of the provider's queue, but does not report when the
        // entry is free again. A `verbs` queue that overruns is lost with all its endpoints. So the
        // message is sent with `fi_sendmsg`, which reports a completion.
        // SAFETY: the endpoint is open, and the message is copied before the call returns.
        let code = unsafe { ((*(*object).msg).sendmsg)(object, &raw const message, flags) };
        let result = posted("fi_sendmsg", code);
        if result.is_err() {
            drop(queue.operations().remove(number));
        }
        result
    }

    /// Reads remote memory into `into`. Both must have the same length.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn read(&self, into: Slice<'_>, remote: RemoteSlice, token: u64) -> Result<(), PostError> {
        self.transfer(Operation::Read, into, remote, token, |ep, message| {
            // SAFETY: as in `send`. A read always requests a completion, also on sparse endpoints.
            unsafe { ((*(*ep).rma).readmsg)(ep, message, COMPLETION) }
        })
    }

    /// Writes `from` to remote memory. Must not be called on [sparse](EndpointQueues::sparse)
    /// endpoints. The data is in place when a later message of this endpoint has been received or a
    /// later read has completed. The completion of the write means only that `from` is free again:
    /// over `tcp`, the peer may not have seen the data yet and may still refuse it.
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

    /// Sends a message that consists of `parts`. On success, `parts` is empty afterwards. If
    /// `notify` is false, a [sparse](EndpointQueues::sparse) endpoint reports no completion, and
    /// holds the parts until the next completion that was requested.
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
            // SAFETY: the endpoint is open and the message is complete. Its parts stay mapped until
            // the operation has ended.
            unsafe { ((*(*ep).msg).sendmsg)(ep, &raw const message, flags) }
        })
    }

    /// Writes `parts`, one after the other, to one range of remote memory. See
    /// [`write`](Self::write) and [`send_parts`](Self::send_parts).
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
        // The lock is held while posting. So an operation with a completion is posted after the
        // operations in `earlier`, whose end its completion implies.
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

    /// Checks that the endpoint is connected. Before that, the function tables of a `tcp` endpoint
    /// contain null pointers (libfabric 1.17).
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
        // A region's descriptor is valid only in the region's own domain.
        if !slice.region().domain().is(self.closing.completions.domain()) {
            return Err(FabricError::OtherDomain.into());
        }
        let (serial, endpoint) = (self.closing.serial, self.token);
        let (earlier, memory) = (Vec::new(), held(slice));
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

    /// The token in the endpoint's events and completions.
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
