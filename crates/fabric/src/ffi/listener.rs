//! Listening for connections.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use super::abi::{FidPep, OPT_CM_DATA_SIZE, OPT_ENDPOINT};
use super::event_queue::{BoundObject, EventQueue, EventSource};
use super::handle::Handle;
use super::{Fabric, Info, library};
use crate::{FabricError, Result, address};

/// Room for any socket address.
const MAX_ADDRESS: usize = 128;

/// How often a free port is asked for. The kernel's rdma_cm keeps account of its own ports only: one that it gives may be in use
/// by a TCP connection, and iWARP's are that, too.
const FREE_PORT_TRIES: usize = 16;

/// Listens at an address. Connection requests appear as [`FabricEvent`](super::FabricEvent)s of its queue. It
/// closes when it and the last unanswered request have been dropped.
pub struct FabricListener {
    inner: Arc<BoundObject<FidPep>>,
    address: SocketAddr,
}

impl FabricListener {
    /// Listens at the address that `info` was [queried](crate::EndpointAddress::Listen) for.
    ///
    /// # Errors
    /// If the address is in use or is not a local one.
    pub fn open(info: &Info, events: &EventQueue) -> Result<FabricListener> {
        let mut tries = if info.local_address().is_some_and(|a| a.port() == 0) { FREE_PORT_TRIES } else { 1 };
        loop {
            tries -= 1;
            match FabricListener::try_open(info, events) {
                Err(FabricError::Call { code: libc::EADDRINUSE, .. }) if tries > 0 => {}
                result => return result,
            }
        }
    }

    fn try_open(info: &Info, events: &EventQueue) -> Result<FabricListener> {
        let fabric: &Fabric = events.fabric();
        let mut object = std::ptr::null_mut();
        let parent = fabric.as_ptr();
        // SAFETY: an open fabric, an info of libfabric's, and a place for the result.
        let code = unsafe {
            ((*(*parent).ops).passive_ep)(parent, info.as_ptr(), &raw mut object, std::ptr::null_mut())
        };
        library::check("fi_passive_ep", code)?;
        // SAFETY: just made, ours.
        let handle = unsafe { Handle::new(object, "fi_passive_ep") }?;
        let inner = Arc::new(BoundObject::new(handle, events)?);
        inner.is_for(EventSource::Listener(Arc::downgrade(&inner)));
        // SAFETY: an open endpoint that is bound to its queue.
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
        // SAFETY: an open endpoint, and a buffer of the size said.
        let code = unsafe {
            ((*(*object).cm).getname)(self.handle().fid(), bytes.as_mut_ptr().cast(), &raw mut len)
        };
        library::check("fi_getname", code)?;
        let format = info.raw().addr_format;
        address::decode(&bytes[..len.min(MAX_ADDRESS)]).ok_or(FabricError::AddressFormat { format })
    }

    fn max_private_data(&self) -> Result<usize> {
        let object = self.handle().as_ptr();
        // SAFETY: an open endpoint.
        unsafe { private_data_room(object.cast(), (*object).ops) }
    }

    /// `data` must have room ([`max_private_data`](Self::max_private_data)).
    fn reject(&self, request: *mut super::abi::Fid, data: &[u8]) -> Result<()> {
        let object = self.handle().as_ptr();
        // SAFETY: an open endpoint, a request of its that was not answered, and data of the length said.
        let code = unsafe { ((*(*object).cm).reject)(object, request, data.as_ptr().cast(), data.len()) };
        library::check("fi_reject", code)
    }
}

/// Most private data, in bytes.
///
/// # Safety
/// `object` must be an open endpoint and `ops` its table.
pub(super) unsafe fn private_data_room(
    object: *mut super::abi::Fid,
    ops: *const super::abi::EpOps,
) -> Result<usize> {
    let mut room = 0_usize;
    let mut len = size_of::<usize>();
    // SAFETY: the caller's promise, and a place of the option's type.
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

    /// The data that the peer gave with its request. Some providers append zeros. It must not be
    /// trusted.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// What an endpoint for it will be like.
    #[must_use]
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Refuses it; `data` tells the peer why.
    ///
    /// # Errors
    /// If `data` is too long: the peer is then refused without it. Or if the peer has gone.
    pub fn refuse(mut self, data: &[u8]) -> Result<()> {
        let max = self.listener.max_private_data()?;
        if data.len() > max {
            return Err(FabricError::PrivateData { len: data.len(), max });
        }
        self.answered = true;
        self.listener.reject(self.info.raw().handle, data)
    }

    /// From here on the request belongs to an endpoint.
    pub(super) fn into_answered(mut self) {
        self.answered = true;
    }
}

impl Drop for ConnectionRequest {
    fn drop(&mut self) {
        if !self.answered
            && let Err(e) = self.listener.reject(self.info.raw().handle, &[])
        {
            tracing::debug!("a connection request could not be refused: {e}");
        }
    }
}

impl fmt::Debug for ConnectionRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionRequest").field("info", &self.info).finish_non_exhaustive()
    }
}
