//! The hint to a processor that some bytes will be read soon.

/// Bytes that a processor fetches at a time.
pub(crate) const CACHE_LINE: usize = 64;

/// Has memory bring the cache line at the start of `bytes`.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn prefetch(bytes: &[u8]) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: every processor of this kind has the instruction, and no address makes it fail.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().cast()) };
}

/// Nothing: the language has no such instruction here.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn prefetch(_: &[u8]) {}
