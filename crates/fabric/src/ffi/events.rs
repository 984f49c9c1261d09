//! Event queues: what happens to connections.

use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::abi::{
    EAVAIL, EVENT_CONNECTED, EVENT_CONNREQ, EVENT_SHUTDOWN, EqAttr, EqCmEntry, EqErrEntry, Fid, FidEq,
    WAIT_FD,
};
use super::domain::{Object, wait_fd};
use super::handle::Handle;
use super::listener::ListenerInner;
use super::{ConnectionRequest, Fabric, Info, Waitable, library};
use crate::{FabricError, Result};

/// Most private data that is taken from an event, in bytes; providers allow a few hundred.
const MAX_DATA: usize = 1024;
/// Events that a queue can hold, which providers may exceed.
const QUEUE_LEN: usize = 64;

/// Errors with which providers end the reading of a queue when it is but a connection that has failed. Over iWARP its own port may
/// be one of TCP's ([`Listener::open`](super::Listener::open)).
const OF_A_CONNECTION: [i32; 13] = [
    libc::EADDRINUSE,
    libc::EADDRNOTAVAIL,
    libc::EACCES,
    libc::EPERM,
    libc::ENOMEM,
    libc::ENOBUFS,
    libc::ECONNREFUSED,
    libc::ECONNRESET,
    libc::ECONNABORTED,
    libc::ETIMEDOUT,
    libc::EHOSTUNREACH,
    libc::ENETUNREACH,
    libc::ENOTCONN,
];

/// Something that happened to a connection. Endpoints are named by their tokens.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A peer wants to connect.
    ConnectionRequest(ConnectionRequest),
    /// The connection stands.
    Connected {
        /// Token of the endpoint.
        endpoint: u64,
        /// What the peer gave on accepting; some providers append zeros. Empty on the accepting side.
        data: Vec<u8>,
    },
    /// The peer, or the provider after an error, has closed the connection. To be answered by dropping the endpoint: what is
    /// under way may otherwise take long to fail.
    Closed {
        /// Token of the endpoint.
        endpoint: u64,
    },
    /// The connection did not come about, or has failed.
    Failed {
        /// Token of the endpoint.
        endpoint: u64,
        /// Why.
        error: FabricError,
        /// What the peer gave on refusing; some providers append zeros.
        data: Vec<u8>,
    },
    /// Some connection did not come about, and the provider does not say which (`verbs` over iWARP): it may be any that
    /// is being established.
    SomeFailed {
        /// Why.
        error: FabricError,
    },
}

/// Tells what happens to connections.
#[derive(Clone)]
pub struct EventQueue(Arc<Inner>);

struct Inner {
    handle: Handle<FidEq>,
    fd: RawFd,
    /// Who is bound to it, by address of the object, with the number of the registration. Never followed: only compared.
    sources: Mutex<HashMap<usize, (u64, Source)>>,
    fabric: Fabric,
}

#[derive(Clone)]
pub(super) enum Source {
    Listener(Weak<ListenerInner>),
    /// Its token, and whether it has been connected.
    Endpoint(u64, Arc<AtomicBool>),
}

#[repr(C)]
struct CmBuffer {
    entry: EqCmEntry,
    data: [u8; MAX_DATA],
}

impl EventQueue {
    /// Opens a queue.
    ///
    /// # Errors
    /// If the provider refuses.
    pub fn open(fabric: &Fabric) -> Result<EventQueue> {
        let mut attributes = EqAttr {
            size: QUEUE_LEN,
            flags: 0,
            wait_obj: WAIT_FD,
            signaling_vector: 0,
            wait_set: std::ptr::null_mut(),
        };
        let mut queue = std::ptr::null_mut();
        let parent = fabric.as_ptr();
        // SAFETY: an open fabric, whole attributes, and a place for the result.
        let code = unsafe {
            let attributes = &raw mut attributes;
            ((*(*parent).ops).eq_open)(parent, attributes, &raw mut queue, std::ptr::null_mut())
        };
        library::check("fi_eq_open", code)?;
        // SAFETY: just made, ours.
        let handle = unsafe { Handle::new(queue, "fi_eq_open") }?;
        let fd = wait_fd(&handle)?;
        Ok(EventQueue(Arc::new(Inner { handle, fd, sources: Mutex::default(), fabric: fabric.clone() })))
    }

    /// The next event, if there is one.
    ///
    /// # Errors
    /// If the queue has failed; it is of no more use then.
    pub fn read(&self) -> Result<Option<Event>> {
        loop {
            let entry = EqCmEntry { fid: std::ptr::null_mut(), info: std::ptr::null_mut() };
            let mut buffer = CmBuffer { entry, data: [0; MAX_DATA] };
            let mut kind = 0;
            let queue = self.0.handle.as_ptr();
            // SAFETY: an open queue, and a buffer of the size said.
            let read = unsafe {
                let out = (&raw mut buffer).cast();
                ((*(*queue).ops).read)(queue, &raw mut kind, out, size_of::<CmBuffer>(), 0)
            };
            let event = match i32::try_from(read).unwrap_or(0) {
                code if code == -libc::EAGAIN => return Ok(None),
                code if code == -EAVAIL => self.take_error()?,
                code if OF_A_CONNECTION.contains(&-code) => {
                    Some(Event::SomeFailed { error: library::error("a connection", -code) })
                }
                code if code < 0 => return Err(library::error("fi_eq_read", -code)),
                len => self.decode(kind, buffer, len as usize)?,
            };
            if event.is_some() {
                return Ok(event);
            }
        }
    }

    /// `None` for an event of something that was closed meanwhile.
    fn decode(&self, kind: u32, buffer: CmBuffer, len: usize) -> Result<Option<Event>> {
        let CmBuffer { entry, data } = buffer;
        let data = data[..len.saturating_sub(size_of::<EqCmEntry>()).min(MAX_DATA)].to_vec();
        let sources = self.sources();
        let event = match (kind, sources.get(&(entry.fid as usize)).map(|(_, source)| source)) {
            (EVENT_CONNREQ, source) => {
                // SAFETY: an info that this event hands over to us.
                let info = unsafe { Info::from_raw(entry.info) }?;
                let Some(Source::Listener(listener)) = source else { return Ok(None) };
                let listener = listener.upgrade();
                listener.map(|l| Event::ConnectionRequest(ConnectionRequest::new(l, info, data)))
            }
            (EVENT_CONNECTED, Some(Source::Endpoint(endpoint, connected))) => {
                connected.store(true, Ordering::Release);
                Some(Event::Connected { endpoint: *endpoint, data })
            }
            (EVENT_SHUTDOWN, Some(Source::Endpoint(endpoint, _))) => {
                Some(Event::Closed { endpoint: *endpoint })
            }
            _ => None,
        };
        Ok(event)
    }

    fn take_error(&self) -> Result<Option<Event>> {
        let mut data = [0_u8; MAX_DATA];
        let mut entry = EqErrEntry {
            fid: std::ptr::null_mut(),
            context: std::ptr::null_mut(),
            data: 0,
            err: 0,
            prov_errno: 0,
            err_data: data.as_mut_ptr().cast(),
            err_data_size: MAX_DATA,
        };
        let queue = self.0.handle.as_ptr();
        // SAFETY: an open queue, and an entry with room for data.
        let read = unsafe { ((*(*queue).ops).readerr)(queue, &raw mut entry, 0) };
        match i32::try_from(read).unwrap_or(0) {
            code if code == -libc::EAGAIN => return Ok(None),
            code if code < 0 => return Err(library::error("fi_eq_readerr", -code)),
            _ => {}
        }
        let Some((_, Source::Endpoint(endpoint, _))) = self.sources().get(&(entry.fid as usize)).cloned()
        else {
            return Ok(None);
        };
        let data = data[..entry.err_data_size.min(MAX_DATA)].to_vec();
        Ok(Some(Event::Failed { endpoint, error: library::error("the connection", entry.err), data }))
    }

    fn sources(&self) -> MutexGuard<'_, HashMap<usize, (u64, Source)>> {
        self.0.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn fid(&self) -> *mut Fid {
        self.0.handle.fid()
    }

    /// The fabric it was opened in.
    #[must_use]
    pub fn fabric(&self) -> &Fabric {
        &self.0.fabric
    }
}

/// What a queue knows of an object that is bound to it. To be dropped once the object is closed; by then another one may
/// have got its address, and a registration of its own.
pub(super) struct Registration {
    object: usize,
    serial: u64,
    events: EventQueue,
}

impl Registration {
    pub(super) fn new(events: &EventQueue, object: *mut Fid) -> Registration {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        Registration { object: object as usize, serial, events: events.clone() }
    }

    /// From here on there are events of the object.
    pub(super) fn is_for(&self, source: Source) {
        self.events.sources().insert(self.object, (self.serial, source));
    }

    pub(super) fn events(&self) -> &EventQueue {
        &self.events
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut sources = self.events.sources();
        if sources.get(&self.object).is_some_and(|(serial, _)| *serial == self.serial) {
            sources.remove(&self.object);
        }
    }
}

impl Object for EventQueue {
    fn object(&self) -> *mut c_void {
        self.fid().cast()
    }
}

impl Waitable for EventQueue {
    fn wait_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the queue keeps it open as long as it is open itself.
        unsafe { BorrowedFd::borrow_raw(self.0.fd) }
    }
}
