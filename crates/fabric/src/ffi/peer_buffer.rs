//! [`PeerBuffer`]: a buffer that peers or operations in progress may change.

use std::ops::Range;
use std::sync::Arc;

use base::mem::ArenaBuf;

/// A buffer that peers or operations in progress may change. Safe code cannot read or write its
/// bytes. [`into_inner`](Self::into_inner) returns the buffer when its regions are closed and the
/// operations on it have ended. Clones refer to the same buffer.
#[derive(Debug, Clone)]
pub struct PeerBuffer(Arc<ArenaBuf>);

impl PeerBuffer {
    /// Takes `buf` out of this process's use.
    #[must_use]
    pub fn new(buf: ArenaBuf) -> PeerBuffer {
        PeerBuffer(Arc::new(buf))
    }

    /// Returns the buffer. Returns `None` if this is not its last user. Other users are clones,
    /// open regions, memory in quarantine and operations in progress.
    #[must_use]
    pub fn into_inner(self) -> Option<ArenaBuf> {
        Arc::into_inner(self.0)
    }

    /// Length, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the buffer has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The bytes of `range`, while other ranges of the buffer may still change.
    ///
    /// # Safety
    /// No operation may change the bytes of `range` while the slice exists, and the protocol with
    /// the peer must forbid that the peer changes them. A peer can violate the protocol, so the
    /// caller must use the bytes only as payload (see the documentation of [`base::mem`]).
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    #[must_use]
    pub unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len(), "range outside the buffer");
        // SAFETY: the range is inside the buffer, which stays allocated as long as `self`. By the
        // caller's promise, its bytes do not change.
        unsafe { std::slice::from_raw_parts(self.start().add(range.start), range.len()) }
    }

    /// Copies `data` to offset `at`, as the device of a simulated peer does.
    ///
    /// # Safety
    /// The caller has the rights of an operation in progress: no other operation accesses the range
    /// during the copy, and no slice of [`bytes`](Self::bytes) covers it.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    pub unsafe fn copy_in(&self, at: usize, data: &[u8]) {
        assert!(at.checked_add(data.len()).is_some_and(|end| end <= self.len()), "range outside the buffer");
        // SAFETY: the range is inside the buffer, which stays allocated as long as `self`. `data` is
        // borrowed, so it is not part of the buffer. By the caller's promise, no code accesses the
        // range meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.start().add(at), data.len()) };
    }

    /// Address of the first byte.
    pub(super) fn start(&self) -> *mut u8 {
        let (start, _) = self.0.arena().as_raw();
        // SAFETY: a buffer is inside its arena.
        unsafe { start.add(self.0.offset()) }
    }
}
