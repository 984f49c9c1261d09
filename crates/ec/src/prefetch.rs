//! Prefetching: tells the processor that some bytes will be read soon.

/// Size of a cache line in bytes.
pub(crate) const CACHE_LINE: usize = 64;

/// Prefetches the cache line at the start of `bytes`.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn prefetch(bytes: &[u8]) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: all x86-64 processors have the instruction, and it accepts any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().cast()) };
}

/// Does nothing: Rust has no stable prefetch instruction for this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn prefetch(_: &[u8]) {}
