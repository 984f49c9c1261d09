//! Registered memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::mem::{Arena, ArenaBuf, OutsideAccess};

use super::abi::{ENOKEY, FidMr, READ, RECV, REMOTE_READ, REMOTE_WRITE, SEND, WRITE};
use super::handle::Handle;
use super::registered::{ExposedMemory, RegisteredMemory};
use super::{Domain, PeerBuffer, library};
use crate::{Access, FabricError, RemoteRegion, Result};

/// Maximum number of random keys to try if the chosen keys are in use.
const KEY_TRIES: usize = 8;

/// Registered memory. Clones refer to the same region. The region closes when the last clone is
/// dropped and no operation uses it. If a peer may still be using the memory, the memory stays
/// mapped until all endpoints that were open when the region closed are closed. After a call of
/// [`settle`](Self::settle), the memory is released as soon as the region closes.
#[derive(Clone)]
pub struct MemoryRegion(Arc<Inner>);

struct Inner {
    /// `None` only while the region is being dropped.
    handle: Option<Handle<FidMr>>,
    /// The provider's descriptor of the region, which operations must state.
    descriptor: *mut std::ffi::c_void,
    key: u64,
    access: Access,
    /// Whether the peer that received the key has ended all its accesses.
    settled: AtomicBool,
    memory: RegisteredMemory,
    domain: Domain,
}

// SAFETY: only the provider, which is thread-safe, dereferences the descriptor.
unsafe impl Send for Inner {}
// SAFETY: as for `Send`.
unsafe impl Sync for Inner {}

impl MemoryRegion {
    /// Registers the whole `arena`. If the provider lets the caller choose the key, the key is
    /// random.
    ///
    /// # Errors
    /// [`FabricError::Allocated`] if `access` lets peers use the memory, and an allocator owns pages
    /// of the arena. Otherwise if the provider fails, usually because the limit on locked memory is
    /// too low.
    pub fn register(domain: &Domain, arena: &Arc<Arena>, access: Access) -> Result<MemoryRegion> {
        if access.is_remote() {
            admit(arena, 0, arena.len())?;
        }
        MemoryRegion::open(domain, RegisteredMemory::Arena(Arc::clone(arena)), access)
    }

    /// Registers the whole arena of `memory`. Operations and peers may also access the arena's
    /// buffers. See [`register`](Self::register).
    ///
    /// # Errors
    /// If the provider fails.
    pub fn register_outside(domain: &Domain, memory: &OutsideAccess, access: Access) -> Result<MemoryRegion> {
        MemoryRegion::open(domain, RegisteredMemory::Outside(memory.clone()), access)
    }

    /// Registers exactly the bytes of `memory`. See [`register`](Self::register).
    ///
    /// # Errors
    /// If the provider fails, or if `access` lets peers write to [`ExposedMemory::Bytes`].
    pub fn expose(domain: &Domain, memory: ExposedMemory, access: Access) -> Result<MemoryRegion> {
        let writable = !matches!(access, Access::RemoteRead | Access::Messages | Access::Outgoing);
        if writable && matches!(memory, ExposedMemory::Bytes(_)) {
            return Err(FabricError::Immutable);
        }
        MemoryRegion::open(domain, RegisteredMemory::Exposed(memory), access)
    }

    fn open(domain: &Domain, memory: RegisteredMemory, access: Access) -> Result<MemoryRegion> {
        let rights = match access {
            Access::Local => SEND | RECV | READ | WRITE,
            Access::Messages => SEND | RECV,
            Access::Outgoing => SEND | WRITE,
            Access::ReadSink => READ,
            Access::RemoteRead => REMOTE_READ,
            Access::RemoteWrite => REMOTE_WRITE,
            Access::Remote => SEND | RECV | READ | WRITE | REMOTE_READ | REMOTE_WRITE,
        };
        let mut result = register(domain, &memory, rights);
        for _ in 1..KEY_TRIES {
            if matches!(result, Err(FabricError::Call { code: ENOKEY, .. })) {
                result = register(domain, &memory, rights);
            }
        }
        let handle = result?;
        // SAFETY: the region is open.
        let (descriptor, key) = unsafe { ((*handle.as_ptr()).mem_desc, (*handle.as_ptr()).key) };
        let (handle, settled, domain) = (Some(handle), AtomicBool::new(false), domain.clone());
        Ok(MemoryRegion(Arc::new(Inner { handle, descriptor, key, access, settled, memory, domain })))
    }

    /// Length of the region, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.memory.span().1
    }

    /// Whether the region has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The description that a peer needs to access the region. A peer can use the description only
    /// if the region is registered for remote access.
    #[must_use]
    pub fn remote(&self) -> RemoteRegion {
        let (start, len) = self.0.memory.span();
        let virtual_address = self.0.domain.info().mr_mode().virtual_address;
        let base = if virtual_address { start as u64 } else { 0 };
        RemoteRegion { key: self.0.key, base, len: len as u64 }
    }

    /// Records that the peer with the key has ended all its accesses. The memory is then released
    /// as soon as the region is closed.
    ///
    /// # Safety
    /// No access of a peer to the region may be in progress or begin later. Software providers
    /// continue an access in progress even after the region is closed.
    pub unsafe fn settle(&self) {
        self.0.settled.store(true, Ordering::Relaxed);
    }

    /// Returns the range of `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`] if the range is not inside the region. [`FabricError::Allocated`]
    /// if the region was registered without an [`OutsideAccess`], and an allocator owns pages of the
    /// range. [`FabricError::Immutable`] if the region is [`ExposedMemory::Bytes`].
    pub fn slice(&self, offset: usize, len: usize) -> Result<Slice<'_>> {
        let region_len = self.len();
        if offset.checked_add(len).is_none_or(|end| end > region_len) {
            return Err(FabricError::OutOfRange { offset, len, region_len });
        }
        match &self.0.memory {
            RegisteredMemory::Arena(arena) => admit(arena, offset, len)?,
            RegisteredMemory::Exposed(ExposedMemory::Bytes(_)) => return Err(FabricError::Immutable),
            RegisteredMemory::Outside(_) | RegisteredMemory::Exposed(ExposedMemory::Buffer(_)) => {}
        }
        Ok(Slice { region: self, buffer: None, offset, len })
    }

    /// Returns the range of `len` bytes at `offset` of `buffer`. The region is the buffer's own, or
    /// the buffer's whole arena. An operation with this range keeps the buffer until the operation
    /// has ended.
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`] if the range is not inside the buffer, or the buffer is not
    /// inside the region.
    pub fn slice_of<'a>(&'a self, buffer: &'a PeerBuffer, offset: usize, len: usize) -> Result<Slice<'a>> {
        let region_len = buffer.len();
        match self.offset_of(buffer.start(), region_len) {
            Some(at) if offset.checked_add(len).is_some_and(|end| end <= region_len) => {
                Ok(Slice { region: self, buffer: Some(buffer), offset: at + offset, len })
            }
            _ => Err(FabricError::OutOfRange { offset, len, region_len }),
        }
    }

    /// Returns the range of `buffer`, which must be inside the region.
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`] if the buffer is not inside the region.
    ///
    /// # Safety
    /// Until every operation that is posted with the slice has ended, or its endpoint or queue is
    /// closed, no code may access the bytes of the buffer or drop the buffer.
    pub unsafe fn slice_of_lent(&self, buffer: &ArenaBuf) -> Result<Slice<'_>> {
        let (start, _) = buffer.arena().as_raw();
        let (offset, len) = (buffer.offset(), buffer.len());
        match self.offset_of(start.wrapping_add(offset), len) {
            Some(offset) => Ok(Slice { region: self, buffer: None, offset, len }),
            None => Err(FabricError::OutOfRange { offset, len, region_len: self.len() }),
        }
    }

    /// The offset of the `len` bytes at `start`, if they are inside the region.
    fn offset_of(&self, start: *const u8, len: usize) -> Option<usize> {
        let (region, region_len) = self.0.memory.span();
        let at = (start as usize).checked_sub(region as usize)?;
        at.checked_add(len).is_some_and(|end| end <= region_len).then_some(at)
    }

    /// Whether `bytes` are inside the region.
    #[must_use]
    pub fn contains(&self, bytes: &[u8]) -> bool {
        self.offset_of(bytes.as_ptr(), bytes.len()).is_some()
    }

    /// The domain in which the region is registered.
    #[must_use]
    pub fn domain(&self) -> &Domain {
        &self.0.domain
    }

    /// The arena, if the region is a whole arena.
    #[must_use]
    pub fn arena(&self) -> Option<&Arc<Arena>> {
        match &self.0.memory {
            RegisteredMemory::Arena(arena) => Some(arena),
            RegisteredMemory::Outside(access) => Some(access.arena()),
            RegisteredMemory::Exposed(_) => None,
        }
    }

    pub(super) fn descriptor(&self) -> *mut std::ffi::c_void {
        self.0.descriptor
    }
}

impl std::fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key is a secret, so it is not printed.
        f.debug_struct("MemoryRegion")
            .field("len", &self.len())
            .field("access", &self.0.access)
            .finish_non_exhaustive()
    }
}

/// Checks that operations and peers may access the `len` bytes at `offset` of `arena`.
fn admit(arena: &Arena, offset: usize, len: usize) -> Result<()> {
    arena.admit(offset, len).map_err(|_| FabricError::Allocated { offset, len })
}

fn register(domain: &Domain, memory: &RegisteredMemory, rights: u64) -> Result<Handle<FidMr>> {
    let (start, len) = memory.span();
    let parent = domain.as_ptr();
    let key = random_key(domain);
    let mut region = std::ptr::null_mut();
    // SAFETY: the domain is open, the memory stays mapped as long as the region is open, and
    // `region` has room for the result.
    let code = unsafe {
        let context = std::ptr::null_mut();
        let reg = (*(*parent).mr).reg;
        reg(parent.cast(), start.cast(), len, rights, 0, key, 0, &raw mut region, context)
    };
    library::check("fi_mr_reg", code)?;
    // SAFETY: the object was just created, and only this function has it.
    unsafe { Handle::new(region, "fi_mr_reg") }
}

/// Returns a random key of the provider's key size, or 0 if the provider chooses the key.
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
        if self.access.is_remote() && !self.settled.load(Ordering::Relaxed) {
            let released = self.domain.quarantine().hold(self.memory.clone());
            drop(released);
        }
    }
}

/// A range inside a [`MemoryRegion`], for an operation that reads or changes it. No allocator owns
/// the bytes, or a [`PeerBuffer`] contains them, or the contract of [`OutsideAccess::new`] or
/// [`MemoryRegion::slice_of_lent`] covers the operation.
#[derive(Clone, Copy)]
pub struct Slice<'a> {
    region: &'a MemoryRegion,
    /// The buffer that contains the range, if the caller named one.
    buffer: Option<&'a PeerBuffer>,
    offset: usize,
    len: usize,
}

impl Slice<'_> {
    pub(super) fn region(&self) -> &MemoryRegion {
        self.region
    }

    pub(super) fn buffer(&self) -> Option<&PeerBuffer> {
        self.buffer
    }

    pub(super) fn descriptor(&self) -> *mut std::ffi::c_void {
        self.region.descriptor()
    }

    /// Address of the slice's first byte.
    pub(super) fn start(&self) -> *mut u8 {
        let (start, _) = self.region.0.memory.span();
        // SAFETY: the functions that create slices have checked that the offset is inside the
        // region.
        unsafe { start.add(self.offset) }
    }

    /// Length of the slice, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the slice has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
