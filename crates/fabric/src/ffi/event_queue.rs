//! Queues of connection events, and the objects that are bound to them.

use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::abi::{EqAttr, Fid, FidEq, FidPep, WAIT_FD};
use super::domain::{Bindable, wait_fd};
use super::handle::Handle;
use super::{Fabric, Waitable, library};
use crate::Result;

/// Requested capacity of a queue, in events. Providers may choose a larger capacity.
const QUEUE_LEN: usize = 64;

/// A queue that reports connection events.
#[derive(Clone)]
pub struct EventQueue(Arc<Inner>);

struct Inner {
    handle: Handle<FidEq>,
    fd: RawFd,
    /// The objects that are bound to the queue, by address, each with the number of its
    /// registration. Addresses are only compared, never dereferenced.
    sources: Mutex<HashMap<usize, (u64, EventSource)>>,
    fabric: Fabric,
}

/// An object to which events belong.
#[derive(Clone)]
pub(super) enum EventSource {
    /// A listener, with its passive endpoint.
    Listener(Weak<BoundObject<FidPep>>),
    /// An endpoint, with its token and whether it has been connected.
    Endpoint(u64, Arc<AtomicBool>),
}

impl EventQueue {
    /// Opens a queue.
    ///
    /// # Errors
    /// If the provider fails.
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
        // SAFETY: the fabric is open, the attributes are complete, and the result has room.
        let code = unsafe {
            let attributes = &raw mut attributes;
            ((*(*parent).ops).eq_open)(parent, attributes, &raw mut queue, std::ptr::null_mut())
        };
        library::check("fi_eq_open", code)?;
        // SAFETY: the object was just created, and only this function has it.
        let handle = unsafe { Handle::new(queue, "fi_eq_open") }?;
        let fd = wait_fd(&handle)?;
        Ok(EventQueue(Arc::new(Inner { handle, fd, sources: Mutex::default(), fabric: fabric.clone() })))
    }

    pub(super) fn handle(&self) -> &Handle<FidEq> {
        &self.0.handle
    }

    /// The source of events of `object`, if it is still bound.
    pub(super) fn source(&self, object: *mut Fid) -> Option<EventSource> {
        self.sources().get(&(object as usize)).map(|(_, source)| source.clone())
    }

    fn sources(&self) -> MutexGuard<'_, HashMap<usize, (u64, EventSource)>> {
        self.0.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn fid(&self) -> *mut Fid {
        self.0.handle.fid()
    }

    /// The fabric of the queue.
    #[must_use]
    pub fn fabric(&self) -> &Fabric {
        &self.0.fabric
    }
}

/// The entry of an object in the table of its event queue. It must be dropped after the object is
/// closed. By then, a new object may have the same address and its own entry in the table. The drop
/// recognises this entry by its other number, and does not remove it.
pub(super) struct EventRegistration {
    object: usize,
    serial: u64,
    events: EventQueue,
}

impl EventRegistration {
    pub(super) fn new(events: &EventQueue, object: *mut Fid) -> EventRegistration {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        EventRegistration { object: object as usize, serial, events: events.clone() }
    }

    /// Sets the source of the object's events. Events before this call are discarded.
    pub(super) fn is_for(&self, source: EventSource) {
        self.events.sources().insert(self.object, (self.serial, source));
    }

    pub(super) fn events(&self) -> &EventQueue {
        &self.events
    }
}

impl Drop for EventRegistration {
    fn drop(&mut self) {
        let mut sources = self.events.sources();
        if sources.get(&self.object).is_some_and(|(serial, _)| *serial == self.serial) {
            sources.remove(&self.object);
        }
    }
}

/// An object that is bound to an event queue. The object is closed before the queue removes the
/// object's entry.
pub(super) struct BoundObject<T> {
    handle: Handle<T>,
    registration: EventRegistration,
}

impl<T> BoundObject<T> {
    /// Binds a new object to `events`.
    pub(super) fn new(handle: Handle<T>, events: &EventQueue) -> Result<BoundObject<T>> {
        let registration = EventRegistration::new(events, handle.fid());
        // SAFETY: the registration keeps the queue open until after the object is closed.
        unsafe { handle.bind(events.fid(), 0) }?;
        Ok(BoundObject { handle, registration })
    }

    pub(super) fn handle(&self) -> &Handle<T> {
        &self.handle
    }

    /// Sets the source of the object's events. Events before this call are discarded.
    pub(super) fn is_for(&self, source: EventSource) {
        self.registration.is_for(source);
    }
}

impl Bindable for EventQueue {
    fn object(&self) -> *mut c_void {
        self.fid().cast()
    }
}

impl Waitable for EventQueue {
    fn wait_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor stays open as long as the queue.
        unsafe { BorrowedFd::borrow_raw(self.0.fd) }
    }
}
