//! Listening for connections.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use super::abi::{FidPep, OPT_CM_DATA_SIZE, OPT_ENDPOINT};
use super::event_queue::{BoundObject, EventQueue, EventSource};
use super::handle::Handle;
use super::{Fabric, Info, library};
use crate::{FabricError, Result, address};

/// Size of a buffer that has room for any socket address, in bytes.
const MAX_ADDRESS: usize = 128;

/// Maximum number of attempts to get a free port. The kernel's rdma_cm knows only its own ports.
/// Over iWARP, whose ports are TCP ports, rdma_cm may choose a port that a TCP connection uses.
const FREE_PORT_TRIES: usize = 16;

/// A listener at an address. Connection requests appear as [`FabricEvent`](super::FabricEvent)s in
/// its event queue. The listening endpoint closes when the listener and the last unanswered request
/// have been dropped.
pub struct FabricListener {
    inner: Arc<BoundObject<FidPep>>,
    address: SocketAddr,
}

impl FabricListener {
    /// Listens at the address that `info` was [queried](crate::EndpointAddress::Listen) for.
    ///
    /// # Errors
    /// If the address is in use, or is not an address of this machine.
    pub fn open(info: &Info, events: &EventQueue) -> Result<FabricListener> {
        let mut tries = if info.local_address().is_some_and(|a| a.port() == 0) { FREE_PORT_TRIES } else { 1 };
        loop {
            tries -= 1;
            match FabricListener::try_open(info, events) {
                Err(e) if e.is_address_in_use() && tries > 0 => {}
                result => return result,
            }
        }
    }

    fn try_open(info: &Info, events: &EventQueue) -> Result<FabricListener> {
        let fabric: &Fabric = events.fabric();
        let mut object = std::ptr::null_mut();
        let parent = fabric.as_ptr();
        // SAFETY: the fabric is open, libfabric allocated the info, and the result has room.
        let code = unsafe {
            ((*(*parent).ops).passive_ep)(parent, info.as_ptr(), &raw mut object, std::ptr::null_mut())
        };
        library::check("fi_passive_ep", code)?;
        // SAFETY: the object was just created, and only this function has it.
        let handle = unsafe { Handle::new(object, "fi_passive_ep") }?;
        let inner = Arc::new(BoundObject::new(handle, events)?);
        inner.is_for(EventSource::Listener(Arc::downgrade(&inner)));
        // SAFETY: the endpoint is open and bound to its event queue.
        library::check("fi_listen", unsafe { ((*(*object).cm).listen)(object) })?;
        let address = inner.name(info)?;
        Ok(FabricListener { inner, address })
    }

    /// The listener's address, with the actual port.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Maximum length of private data in a connection request and its answer, in bytes.
    ///
    /// # Errors
    /// If the provider does not report it.
    pub fn max_private_data(&self) -> Result<usize> {
        self.inner.max_private_data()
    }
}

/// A passive endpoint, closed when the listener and the last unanswered request have been dropped.
impl BoundObject<FidPep> {
    fn name(&self, info: &Info) -> Result<SocketAddr> {
        let mut bytes = [0_u8; MAX_ADDRESS];
        let mut len = MAX_ADDRESS;
        let object = self.handle().as_ptr();
        // SAFETY: the endpoint is open, and the buffer has the stated size.
        let code = unsafe {
            ((*(*object).cm).getname)(self.handle().fid(), bytes.as_mut_ptr().cast(), &raw mut len)
        };
        library::check("fi_getname", code)?;
        let format = info.raw().addr_format;
        address::decode(&bytes[..len.min(MAX_ADDRESS)]).ok_or(FabricError::AddressFormat { format })
    }

    fn max_private_data(&self) -> Result<usize> {
        let object = self.handle().as_ptr();
        // SAFETY: the endpoint is open.
        unsafe { private_data_room(object.cast(), (*object).ops) }
    }

    /// Refuses `request` and sends `data` to the peer. `data` must not be longer than
    /// [`max_private_data`](Self::max_private_data).
    fn reject(&self, request: *mut super::abi::Fid, data: &[u8]) -> Result<()> {
        let object = self.handle().as_ptr();
        // SAFETY: the endpoint is open, its request was not answered before, and `data` has the
        // stated length.
        let code = unsafe { ((*(*object).cm).reject)(object, request, data.as_ptr().cast(), data.len()) };
        library::check("fi_reject", code)
    }
}

/// Returns the maximum length of private data, in bytes.
///
/// # Safety
/// `object` must be an open endpoint, and `ops` its function table.
pub(super) unsafe fn private_data_room(
    object: *mut super::abi::Fid,
    ops: *const super::abi::EpOps,
) -> Result<usize> {
    let mut room = 0_usize;
    let mut len = size_of::<usize>();
    // SAFETY: as the caller promises; `room` has the option's type.
    let code = unsafe {
        ((*ops).getopt)(object, OPT_ENDPOINT, OPT_CM_DATA_SIZE, (&raw mut room).cast(), &raw mut len)
    };
    library::check("fi_getopt", code).map(|()| room)
}

/// A peer's connection request. An endpoint [answers](super::Endpoint::answer) it. Dropping the
/// request refuses it.
pub struct ConnectionRequest {
    listener: Arc<BoundObject<FidPep>>,
    info: Info,
    data: Vec<u8>,
    answered: bool,
}

impl ConnectionRequest {
    pub(super) fn new(listener: Arc<BoundObject<FidPep>>, info: Info, data: Vec<u8>) -> ConnectionRequest {
        ConnectionRequest { listener, info, data, answered: false }
    }

    /// The data that the peer sent with its request. Some providers append zeros. The caller must
    /// not trust the data.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// The provider's offer for an endpoint that answers the request.
    #[must_use]
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Refuses the request. The peer receives `data`, which can state the reason.
    ///
    /// # Errors
    /// If `data` is too long. The request is then refused without data. Also if the connection to
    /// the peer is lost before the refusal is sent.
    pub fn refuse(mut self, data: &[u8]) -> Result<()> {
        let max = self.listener.max_private_data()?;
        if data.len() > max {
            return Err(FabricError::PrivateData { len: data.len(), max });
        }
        self.answered = true;
        self.listener.reject(self.info.raw().handle, data)
    }

    /// Marks the request as answered by an endpoint, so that dropping it does not refuse it.
    pub(super) fn into_answered(mut self) {
        self.answered = true;
    }
}

impl Drop for ConnectionRequest {
    fn drop(&mut self) {
        if !self.answered
            && let Err(e) = self.listener.reject(self.info.raw().handle, &[])
        {
            tracing::debug!("cannot refuse a connection request: {e}");
        }
    }
}

impl fmt::Debug for ConnectionRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionRequest").field("info", &self.info).finish_non_exhaustive()
    }
}
