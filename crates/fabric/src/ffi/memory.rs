//! Registered memory.

use std::sync::Arc;

use base::mem::Arena;

use super::abi::{ENOKEY, FidMr, READ, RECV, REMOTE_READ, REMOTE_WRITE, SEND, WRITE};
use super::handle::Handle;
use super::{Domain, library};
use crate::{Access, FabricError, RemoteRegion, Result};

/// How often another key is tried if one is in use.
const KEY_TRIES: usize = 8;

/// An arena, registered with a domain. Clones are the same region; it is closed when the last one is dropped and no
/// operation uses it any more. The arena stays mapped for longer if a peer may be writing to it: until the endpoints of
/// that time are closed.
#[derive(Clone)]
pub struct MemoryRegion(Arc<Inner>);

struct Inner {
    /// Taken out when dropped.
    handle: Option<Handle<FidMr>>,
    /// What operations want to see of it.
    descriptor: *mut std::ffi::c_void,
    key: u64,
    access: Access,
    arena: Arc<Arena>,
    domain: Domain,
}

// SAFETY: the descriptor is a token of the provider's, which is thread safe.
unsafe impl Send for Inner {}
// SAFETY: as for `Send`.
unsafe impl Sync for Inner {}

impl MemoryRegion {
    /// Registers all of `arena`. Where the provider lets us choose, the key is random; otherwise it is the provider's.
    ///
    /// # Errors
    /// If the provider refuses: usually because too little memory may be locked.
    pub fn register(domain: &Domain, arena: &Arc<Arena>, access: Access) -> Result<MemoryRegion> {
        let local = SEND | RECV | READ | WRITE;
        let rights = match access {
            Access::Local => local,
            Access::Remote => local | REMOTE_READ | REMOTE_WRITE,
        };
        let mut result = register(domain, arena, rights);
        for _ in 1..KEY_TRIES {
            if matches!(result, Err(FabricError::Call { code: ENOKEY, .. })) {
                result = register(domain, arena, rights);
            }
        }
        let handle = result?;
        // SAFETY: an open region.
        let (descriptor, key) = unsafe { ((*handle.as_ptr()).mem_desc, (*handle.as_ptr()).key) };
        let (handle, arena, domain) = (Some(handle), Arc::clone(arena), domain.clone());
        Ok(MemoryRegion(Arc::new(Inner { handle, descriptor, key, access, arena, domain })))
    }

    /// Length, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.arena.len()
    }

    /// Never true: an arena has at least one page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What a peer must know to use it. Of no use to a peer if it was registered with [`Access::Local`].
    #[must_use]
    pub fn remote(&self) -> RemoteRegion {
        let (start, len) = self.0.arena.as_raw();
        let virtual_address = self.0.domain.info().mr_mode().virtual_address;
        let base = if virtual_address { start as u64 } else { 0 };
        RemoteRegion { key: self.0.key, base, len: len as u64 }
    }

    /// The `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`].
    pub fn slice(&self, offset: usize, len: usize) -> Result<Slice<'_>> {
        let region_len = self.len();
        if offset.checked_add(len).is_none_or(|end| end > region_len) {
            return Err(FabricError::OutOfRange { offset, len, region_len });
        }
        Ok(Slice { region: self, offset, len })
    }

    /// The domain it is registered with.
    #[must_use]
    pub fn domain(&self) -> &Domain {
        &self.0.domain
    }

    /// The memory.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.0.arena
    }
}

fn register(domain: &Domain, arena: &Arena, rights: u64) -> Result<Handle<FidMr>> {
    let (start, len) = arena.as_raw();
    let parent = domain.as_ptr();
    let key = random_key(domain);
    let mut region = std::ptr::null_mut();
    // SAFETY: an open domain, memory that is mapped and stays so for as long as the region is open, and a place for the
    // result.
    let code = unsafe {
        let context = std::ptr::null_mut();
        let reg = (*(*parent).mr).reg;
        reg(parent.cast(), start.cast(), len, rights, 0, key, 0, &raw mut region, context)
    };
    library::check("fi_mr_reg", code)?;
    // SAFETY: just made, ours.
    unsafe { Handle::new(region, "fi_mr_reg") }
}

/// As many random bits as keys of the provider have.
fn random_key(domain: &Domain) -> u64 {
    let info = domain.info();
    if info.mr_mode().provider_key {
        return 0;
    }
    let bits = 8 * u32::try_from(info.domain().mr_key_size.clamp(1, 8)).unwrap_or(8);
    rand::random::<u64>() >> (64 - bits)
}

impl Drop for Inner {
    fn drop(&mut self) {
        drop(self.handle.take());
        if self.access == Access::Remote {
            let released = self.domain.quarantine().hold(Arc::clone(&self.arena));
            drop(released);
        }
    }
}

/// A range inside a [`MemoryRegion`].
#[derive(Clone, Copy)]
pub struct Slice<'a> {
    region: &'a MemoryRegion,
    offset: usize,
    len: usize,
}

impl Slice<'_> {
    pub(super) fn region(&self) -> &MemoryRegion {
        self.region
    }

    pub(super) fn descriptor(&self) -> *mut std::ffi::c_void {
        self.region.0.descriptor
    }

    /// Address of the first byte.
    pub(super) fn start(&self) -> *mut u8 {
        let (start, _) = self.region.0.arena.as_raw();
        // SAFETY: the offset was checked to be inside.
        unsafe { start.add(self.offset) }
    }

    /// Length, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
