//! Connection events that event queues report.

use std::sync::atomic::Ordering;

use super::abi::{EAVAIL, EVENT_CONNECTED, EVENT_CONNREQ, EVENT_SHUTDOWN, EqCmEntry, EqErrEntry};
use super::event_queue::{EventQueue, EventSource};
use super::{ConnectionRequest, Info, library};
use crate::{FabricError, Result};

/// Maximum length of the private data that is copied from an event, in bytes. Providers allow a few
/// hundred bytes.
const MAX_DATA: usize = 1024;
/// Errors that reading an event queue returns when only one connection has failed, and the queue
/// still works. For example, the local port of a connection over iWARP may be in use by TCP (see
/// `FREE_PORT_TRIES` in `listener`).
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

/// An event of a connection. A token identifies the endpoint of the event.
#[derive(Debug)]
#[non_exhaustive]
pub enum FabricEvent {
    /// A peer requests a connection.
    ConnectionRequest(ConnectionRequest),
    /// The connection is established.
    Connected {
        /// Token of the endpoint.
        endpoint: u64,
        /// The data that the peer sent when it accepted the connection. Some providers append
        /// zeros. The data is empty on the accepting side.
        data: Vec<u8>,
    },
    /// The peer, or the provider after an error, has closed the connection. The caller should drop
    /// the endpoint, because operations in progress may otherwise take long to fail.
    Closed {
        /// Token of the endpoint.
        endpoint: u64,
    },
    /// The connection could not be established, or has failed.
    Failed {
        /// Token of the endpoint.
        endpoint: u64,
        /// The reason of the failure.
        error: FabricError,
        /// The data that the peer sent when it refused the connection. Some providers append zeros.
        data: Vec<u8>,
    },
    /// A connection could not be established, but the provider (`verbs` over iWARP) does not report
    /// which connection. It may be any connection that is being established.
    SomeFailed {
        /// The reason of the failure.
        error: FabricError,
    },
}

#[repr(C)]
struct CmBuffer {
    entry: EqCmEntry,
    data: [u8; MAX_DATA],
}

impl EventQueue {
    /// Returns the next event, if there is one.
    ///
    /// # Errors
    /// If the queue has failed. The queue cannot be used any more.
    pub fn read(&self) -> Result<Option<FabricEvent>> {
        loop {
            let entry = EqCmEntry { fid: std::ptr::null_mut(), info: std::ptr::null_mut() };
            let mut buffer = CmBuffer { entry, data: [0; MAX_DATA] };
            let mut kind = 0;
            let queue = self.handle().as_ptr();
            // SAFETY: the queue is open, and the buffer has the stated size.
            let read = unsafe {
                let out = (&raw mut buffer).cast();
                ((*(*queue).ops).read)(queue, &raw mut kind, out, size_of::<CmBuffer>(), 0)
            };
            let event = match i32::try_from(read).unwrap_or(0) {
                code if code == -libc::EAGAIN => return Ok(None),
                code if code == -EAVAIL => self.take_error()?,
                code if OF_A_CONNECTION.contains(&-code) => {
                    Some(FabricEvent::SomeFailed { error: library::error("a connection", -code) })
                }
                code if code < 0 => return Err(library::error("fi_eq_read", -code)),
                len => self.decode(kind, buffer, len as usize)?,
            };
            if event.is_some() {
                return Ok(event);
            }
        }
    }

    /// Decodes an event. Returns `None` if the object of the event has been closed.
    fn decode(&self, kind: u32, buffer: CmBuffer, len: usize) -> Result<Option<FabricEvent>> {
        let CmBuffer { entry, data } = buffer;
        let data = data[..len.saturating_sub(size_of::<EqCmEntry>()).min(MAX_DATA)].to_vec();
        let event = match (kind, self.source(entry.fid)) {
            (EVENT_CONNREQ, source) => {
                // SAFETY: the event transfers the ownership of the info to its reader.
                let info = unsafe { Info::from_raw(entry.info) }?;
                let Some(EventSource::Listener(listener)) = source else { return Ok(None) };
                let listener = listener.upgrade();
                listener.map(|l| FabricEvent::ConnectionRequest(ConnectionRequest::new(l, info, data)))
            }
            (EVENT_CONNECTED, Some(EventSource::Endpoint(endpoint, connected))) => {
                connected.store(true, Ordering::Release);
                Some(FabricEvent::Connected { endpoint, data })
            }
            (EVENT_SHUTDOWN, Some(EventSource::Endpoint(endpoint, _))) => {
                Some(FabricEvent::Closed { endpoint })
            }
            _ => None,
        };
        Ok(event)
    }

    fn take_error(&self) -> Result<Option<FabricEvent>> {
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
        let queue = self.handle().as_ptr();
        // SAFETY: the queue is open, and the entry has room for data.
        let read = unsafe { ((*(*queue).ops).readerr)(queue, &raw mut entry, 0) };
        match i32::try_from(read).unwrap_or(0) {
            code if code == -libc::EAGAIN => return Ok(None),
            code if code < 0 => return Err(library::error("fi_eq_readerr", -code)),
            _ => {}
        }
        let Some(EventSource::Endpoint(endpoint, _)) = self.source(entry.fid) else {
            return Ok(None);
        };
        let data = data[..entry.err_data_size.min(MAX_DATA)].to_vec();
        Ok(Some(FabricEvent::Failed { endpoint, error: library::error("the connection", entry.err), data }))
    }
}
