//! Fabrics and domains, from which all other objects are created.

use std::ffi::c_void;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::abi::{CONTROL_GETWAIT, Fid, FidDomain, FidFabric};
use super::handle::Handle;
use super::registered::RegisteredMemory;
use super::{Info, library, siw};
use crate::info::ProviderKind;
use crate::quarantine::MemoryQuarantine;
use crate::{FabricError, Result};

/// A provider that is opened for one network.
#[derive(Clone)]
pub struct Fabric(Arc<Handle<FidFabric>>);

impl Fabric {
    /// Opens the fabric that `info` belongs to.
    ///
    /// # Errors
    /// If the provider fails.
    pub fn open(info: &Info) -> Result<Fabric> {
        // SAFETY: the attributes come from libfabric.
        let fabric = unsafe { library::fabric(info.raw().fabric_attr) }?;
        // SAFETY: the object was just created, and only this function has it.
        Ok(Fabric(Arc::new(unsafe { Handle::new(fabric, "fi_fabric") }?)))
    }

    pub(super) fn as_ptr(&self) -> *mut FidFabric {
        self.0.as_ptr()
    }

    /// Whether all of `queues` are empty and their descriptors will become readable when entries
    /// arrive. Only then may a thread wait for the descriptors.
    ///
    /// # Errors
    /// If the provider fails.
    pub fn may_sleep(&self, queues: &[&dyn Waitable]) -> Result<bool> {
        let mut fids: Vec<*mut Fid> = queues.iter().map(|queue| queue.object().cast()).collect();
        let fabric = self.as_ptr();
        // SAFETY: `fids` lists open objects of this fabric, and the count is its length.
        match unsafe { ((*(*fabric).ops).trywait)(fabric, fids.as_mut_ptr(), fids.len() as i32) } {
            0 => Ok(true),
            code if code == -libc::EAGAIN => Ok(false),
            code => Err(library::error("fi_trywait", -code)),
        }
    }

    pub(crate) fn call_error(&self, call: &'static str, code: i32) -> FabricError {
        library::error(call, code)
    }
}

/// A queue with a descriptor to wait for, either in [`wait`](crate::wait) or in the caller's own
/// poll loop once [`Fabric::may_sleep`] has returned true.
pub trait Waitable: Bindable {
    /// The descriptor, which becomes readable when the queue may have entries.
    fn wait_fd(&self) -> BorrowedFd<'_>;
}

/// Seals [`Waitable`]: only types of this crate implement it.
pub trait Bindable {
    /// The libfabric object.
    fn object(&self) -> *mut c_void;
}

/// Returns the file descriptor of a queue that was opened with `WAIT_FD`.
pub(super) fn wait_fd<T>(queue: &Handle<T>) -> Result<RawFd> {
    let mut fd: RawFd = -1;
    // SAFETY: the command writes a descriptor to `fd`.
    unsafe { queue.control("fi_control(FI_GETWAIT)", CONTROL_GETWAIT, (&raw mut fd).cast()) }?;
    Ok(fd)
}

/// A protection domain. Only endpoints of the domain can reach memory that is registered in it.
#[derive(Clone)]
pub struct Domain(Arc<Inner>);

struct Inner {
    handle: Handle<FidDomain>,
    quarantine: Mutex<MemoryQuarantine<RegisteredMemory>>,
    /// Whether interrupted reads corrupt the provider's state (see [`Domain::is_spoiled`]).
    fragile: bool,
    spoiled: AtomicBool,
    overtakes_reads: bool,
    info: Info,
    fabric: Fabric,
}

impl Domain {
    /// Opens the domain that `info` names, without the workarounds of [`Domain::open`].
    pub(super) fn open_unprepared(fabric: &Fabric, info: Info) -> Result<Domain> {
        let mut domain = std::ptr::null_mut();
        let parent = fabric.as_ptr();
        // SAFETY: the fabric is open, libfabric allocated the info, and the result has room.
        let code = unsafe {
            ((*(*parent).ops).domain)(parent, info.as_ptr(), &raw mut domain, std::ptr::null_mut())
        };
        library::check("fi_domain", code)?;
        // SAFETY: the object was just created, and only this function has it.
        let handle = unsafe { Handle::new(domain, "fi_domain") }?;
        let (fragile, spoiled) = (info.provider_kind() == ProviderKind::Tcp, AtomicBool::new(false));
        let overtakes_reads = siw::overtakes_reads(&info);
        let (fabric, quarantine) = (fabric.clone(), Mutex::default());
        let inner = Inner { handle, quarantine, fragile, spoiled, overtakes_reads, info, fabric };
        Ok(Domain(Arc::new(inner)))
    }

    /// The fabric of the domain.
    #[must_use]
    pub fn fabric(&self) -> &Fabric {
        &self.0.fabric
    }

    /// The info with which the domain was opened.
    #[must_use]
    pub fn info(&self) -> &Info {
        &self.0.info
    }

    /// Whether the domain must be closed, with all its endpoints, and opened again.
    ///
    /// The provider `tcp` (libfabric 1.17) has a bug. When a connection ends while the answer to a
    /// read is arriving, the provider frees the operation twice. Two later operations of the domain
    /// then share the freed memory, so they are mixed up or never end. So a `tcp` domain counts as
    /// spoiled after any failed read, and after an endpoint was closed during a read.
    #[must_use]
    pub fn is_spoiled(&self) -> bool {
        self.0.spoiled.load(Ordering::Relaxed)
    }

    /// Number of bytes of memory in quarantine. The regions of this memory are closed, but peers
    /// may still use the memory. Closing endpoints reduces the number.
    #[must_use]
    pub fn quarantined_bytes(&self) -> usize {
        self.quarantine().held().map(|memory| memory.span().1).sum()
    }

    /// Records that a read failed, or that an endpoint was closed during a read.
    pub(super) fn read_broken_off(&self) {
        if self.0.fragile {
            self.0.spoiled.store(true, Ordering::Relaxed);
        }
    }

    /// Whether sends and writes need a fence, because they may otherwise complete before reads that
    /// were posted earlier.
    pub(super) fn overtakes_reads(&self) -> bool {
        self.0.overtakes_reads
    }

    /// Whether `self` and `other` are the same domain.
    pub(super) fn is(&self, other: &Domain) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(super) fn as_ptr(&self) -> *mut FidDomain {
        self.0.handle.as_ptr()
    }

    pub(super) fn quarantine(&self) -> MutexGuard<'_, MemoryQuarantine<RegisteredMemory>> {
        self.0.quarantine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
