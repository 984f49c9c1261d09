//! The capabilities of a provider.

use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::net::SocketAddr;
use std::ptr::NonNull;

use super::abi::{
    DomainAttr, EP_MSG, FORMAT_UNSPEC, FiInfo, MR_ALLOCATED, MR_LOCAL, MR_PROV_KEY, MR_VIRT_ADDR, MSG,
    NUMERICHOST, ORDER_RAW, ORDER_SAS, ORDER_SAW, PROGRESS_MANUAL, PROTO_IWARP, RMA, SHARED_CONTEXT, SOURCE,
    THREAD_SAFE, TxAttr,
};
use super::library::{self, Library};
use crate::info::ProviderKind;
use crate::{EndpointAddress, FabricError, MrMode, ProviderQuery, Result, address};

/// A provider's offer: a way to create endpoints, with its limits.
pub struct Info {
    info: NonNull<FiInfo>,
}

// SAFETY: plain data that does not change after its creation.
unsafe impl Send for Info {}
// SAFETY: as for `Send`.
unsafe impl Sync for Info {}

impl Info {
    /// Takes ownership of an info that libfabric allocated.
    ///
    /// # Safety
    /// `info` must come from libfabric with all attributes, and no other code may free or change
    /// it.
    pub(super) unsafe fn from_raw(info: *mut FiInfo) -> Result<Info> {
        let info = NonNull::new(info).ok_or_else(|| library::error("fi_getinfo", libc::ENOMEM))?;
        Ok(Info { info })
    }

    pub(super) fn as_ptr(&self) -> *mut FiInfo {
        self.info.as_ptr()
    }

    pub(super) fn raw(&self) -> &FiInfo {
        // SAFETY: `self` owns the info, which stays allocated and unchanged.
        unsafe { self.info.as_ref() }
    }

    pub(super) fn rx_attr(&self) -> *mut super::abi::RxAttr {
        self.raw().rx_attr
    }

    pub(super) fn domain(&self) -> &DomainAttr {
        // SAFETY: libfabric fills in every attribute of an info, and no code changes them.
        unsafe { &*self.raw().domain_attr }
    }

    fn tx(&self) -> &TxAttr {
        // SAFETY: as in `domain`.
        unsafe { &*self.raw().tx_attr }
    }

    /// Name of the provider, such as `tcp` or `verbs`.
    #[must_use]
    pub fn provider(&self) -> String {
        // SAFETY: as in `domain`; libfabric sets the name to a string or null.
        unsafe { text((*self.raw().fabric_attr).prov_name) }
    }

    /// Kind of the provider.
    pub(crate) fn provider_kind(&self) -> ProviderKind {
        ProviderKind::of_name(&self.provider())
    }

    /// Name of the fabric, which is the network as the provider sees it.
    #[must_use]
    pub fn fabric_name(&self) -> String {
        // SAFETY: as in `provider`.
        unsafe { text((*self.raw().fabric_attr).name) }
    }

    /// Name of the domain, which is usually the device.
    #[must_use]
    pub fn domain_name(&self) -> String {
        // SAFETY: as in `provider`.
        unsafe { text(self.domain().name) }
    }

    /// The local address, if the provider has chosen one.
    #[must_use]
    pub fn local_address(&self) -> Option<SocketAddr> {
        let raw = self.raw();
        if raw.src_addr.is_null() {
            return None;
        }
        // SAFETY: libfabric states the length of the address.
        address::decode(unsafe { std::slice::from_raw_parts(raw.src_addr.cast(), raw.src_addrlen) })
    }

    /// The address of the peer to connect to, or of the peer that requests a connection. `None` if
    /// the provider does not report it.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        let raw = self.raw();
        if raw.dest_addr.is_null() {
            return None;
        }
        // SAFETY: libfabric states the length of the address.
        address::decode(unsafe { std::slice::from_raw_parts(raw.dest_addr.cast(), raw.dest_addrlen) })
    }

    /// Creates a copy of the info.
    ///
    /// # Errors
    /// If memory is exhausted.
    pub fn duplicate(&self) -> Result<Info> {
        // SAFETY: the info comes from libfabric, and only the caller has the copy.
        unsafe { Info::from_raw(library::dupinfo(self.info.as_ptr())) }
    }

    /// Maximum number of memory parts that one message can consist of.
    #[must_use]
    pub fn send_parts_max(&self) -> usize {
        self.tx().iov_limit.max(1)
    }

    /// Maximum length of a message or transfer, in bytes.
    #[must_use]
    pub fn max_msg_size(&self) -> usize {
        // SAFETY: as in `domain`.
        unsafe { (*self.raw().ep_attr).max_msg_size }
    }

    /// Maximum length of a message that can be [injected](crate::Endpoint::inject), in bytes.
    #[must_use]
    pub fn inject_size(&self) -> usize {
        self.tx().inject_size
    }

    /// Maximum number of sends, reads and writes that an endpoint can have in progress.
    #[must_use]
    pub fn transmit_depth(&self) -> usize {
        self.tx().size
    }

    /// Maximum number of receives that an endpoint can have posted.
    #[must_use]
    pub fn receive_depth(&self) -> usize {
        // SAFETY: as in `domain`.
        unsafe { (*self.raw().rx_attr).size }
    }

    /// Maximum number of receives that a [shared receive queue](crate::ReceiveQueue) can have
    /// posted.
    #[must_use]
    pub fn shared_receive_depth(&self) -> usize {
        match self.provider_kind() {
            ProviderKind::Verbs => self.receive_depth(),
            // These providers keep receives in a list without a limit.
            ProviderKind::Tcp | ProviderKind::Other => usize::MAX,
        }
    }

    /// Recommended maximum number of endpoints per completion queue. `depth` is the number of
    /// operations that the queue was opened for. With `shared_receive`, the endpoints have no
    /// receives of their own. `verbs` (libfabric 1.17) reserves entries of the queue for the
    /// receives of each endpoint. `tcp` checks each endpoint whenever the queue is polled, even if
    /// the endpoint is idle.
    #[must_use]
    pub fn endpoints_per_queue(&self, depth: usize, shared_receive: bool) -> usize {
        const LOOKED_AT: usize = 48;
        match self.provider_kind() {
            ProviderKind::Verbs if shared_receive => usize::MAX,
            ProviderKind::Verbs => (depth / self.receive_depth().max(1)).max(1),
            ProviderKind::Tcp | ProviderKind::Other => LOOKED_AT,
        }
    }

    /// Whether a peer can write to all registered memory, and not only to memory that is
    /// [registered for it](crate::Access::Remote). This is true over iWARP: the destination of a
    /// read of remote memory must be writable for the peer, and the read request tells the peer the
    /// key.
    #[must_use]
    pub fn exposes_local_memory(&self) -> bool {
        // SAFETY: as in `domain`.
        unsafe { (*self.raw().ep_attr).protocol == PROTO_IWARP }
    }

    /// The provider's requirements for registered memory.
    #[must_use]
    pub fn mr_mode(&self) -> MrMode {
        let mode = self.domain().mr_mode;
        MrMode {
            local: mode & MR_LOCAL != 0,
            virtual_address: mode & MR_VIRT_ADDR != 0,
            allocated: mode & MR_ALLOCATED != 0,
            provider_key: mode & MR_PROV_KEY != 0,
        }
    }
}

impl fmt::Debug for Info {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Info")
            .field("provider", &self.provider())
            .field("fabric", &self.fabric_name())
            .field("domain", &self.domain_name())
            .field("local_address", &self.local_address())
            .field("max_msg_size", &self.max_msg_size())
            .field("inject_size", &self.inject_size())
            .field("transmit_depth", &self.transmit_depth())
            .field("receive_depth", &self.receive_depth())
            .field("mr_mode", &self.mr_mode())
            .field("exposes_local_memory", &self.exposes_local_memory())
            .finish()
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: `self` is the only owner of the info.
        unsafe { library::freeinfo(self.info.as_ptr()) };
    }
}

/// # Safety
/// `s` must be a terminated string or null.
unsafe fn text(s: *const c_char) -> String {
    if s.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned()
}

impl Library {
    /// Returns the providers' offers, best first.
    ///
    /// # Errors
    /// [`FabricError::NoProvider`] if there is no offer. Other errors if a provider failed.
    pub fn query(self, query: &ProviderQuery) -> Result<Vec<Info>> {
        let hints = hints(query)?;
        let (node, service, flags) = endpoint_name(query.target)?;
        // SAFETY: libfabric allocated the hints.
        match unsafe { library::getinfo(node.as_deref(), service.as_deref(), flags, hints.as_ptr()) } {
            // SAFETY: libfabric has just returned the list.
            Ok(list) => unsafe { take_list(list) },
            Err(libc::ENODATA) => Err(FabricError::NoProvider { wanted: query.to_string() }),
            Err(code) => Err(library::error("fi_getinfo", code)),
        }
    }
}

/// Returns the arguments `node`, `service` and `flags` of `fi_getinfo`. All providers parse the
/// strings in the same way, and addresses in strings need no encoding.
fn endpoint_name(target: EndpointAddress) -> Result<(Option<CString>, Option<CString>, u64)> {
    let (address, flags) = match target {
        EndpointAddress::Any => return Ok((None, None, 0)),
        EndpointAddress::Listen(address) => (address, SOURCE),
        EndpointAddress::Connect(address) => (address, 0),
    };
    let node = library::c_string(&address.ip().to_string())?;
    let service = library::c_string(&address.port().to_string())?;
    Ok((Some(node), Some(service), flags | NUMERICHOST))
}

/// Returns the requirements for the offers of providers.
fn hints(query: &ProviderQuery) -> Result<Info> {
    // SAFETY: null requests an empty info with all attributes.
    let raw = unsafe { library::dupinfo(std::ptr::null()) };
    // SAFETY: the object was just created, and only this function has it.
    let hints = unsafe { Info::from_raw(raw) }?;
    // SAFETY: the info was just created with all attributes, and only this function has it. The
    // name is allocated by `strdup`, because libfabric frees it by `free`.
    unsafe {
        (*raw).caps = MSG | RMA;
        (*raw).addr_format = FORMAT_UNSPEC;
        (*(*raw).ep_attr).kind = EP_MSG;
        (*(*raw).tx_attr).msg_order = ORDER_RAW | ORDER_SAW | ORDER_SAS;
        (*(*raw).rx_attr).msg_order = ORDER_RAW | ORDER_SAW | ORDER_SAS;
        let domain = (*raw).domain_attr;
        (*domain).mr_mode = MR_LOCAL | MR_VIRT_ADDR | MR_ALLOCATED | MR_PROV_KEY;
        (*domain).threading = THREAD_SAFE;
        // Without manual progress, `tcp` starts a thread without a name, so Outboard could not
        // attribute the thread's CPU time.
        (*domain).control_progress = PROGRESS_MANUAL;
        (*domain).data_progress = PROGRESS_MANUAL;
        if query.shared_receive {
            (*(*raw).ep_attr).rx_ctx_cnt = SHARED_CONTEXT;
        }
        if let Some(provider) = &query.provider {
            (*(*raw).fabric_attr).prov_name = libc::strdup(library::c_string(provider)?.as_ptr());
        }
    }
    Ok(hints)
}

/// Copies each element of `list`, then frees the list.
///
/// # Safety
/// `list` must come from `fi_getinfo`.
unsafe fn take_list(list: *mut FiInfo) -> Result<Vec<Info>> {
    let mut out = Vec::new();
    let mut at = list;
    let mut result = Ok(());
    while !at.is_null() {
        // SAFETY: `at` is an element of the list.
        match unsafe { Info::from_raw(library::dupinfo(at)) } {
            Ok(info) => out.push(info),
            Err(e) => result = Err(e),
        }
        // SAFETY: `at` is an element of the list.
        at = unsafe { (*at).next };
    }
    // SAFETY: the list is not used any more.
    unsafe { library::freeinfo(list) };
    result.map(|()| out)
}
