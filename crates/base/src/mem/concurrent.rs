//! Copies of bytes that other threads, processes or devices may read and write at the same time.
//!
//! An ordinary copy of these bytes is a data race, whose effect the language does not define. The
//! copies in this module are defined: each byte is read or written individually, as if by a relaxed
//! atomic access. So a concurrent change can only make the copied bytes arbitrary. The copies are
//! as fast as `memcpy`, because they call the `memcpy` of the C library. The call is in inline
//! assembly, so that the compiler makes no assumptions about the accesses.

/// Copies `len` bytes from `src` to `dst`, each as if by a relaxed atomic load and store.
///
/// # Safety
/// Both ranges must be mapped for as long as the copy runs, and must not overlap. Each range is
/// either private to the caller, or memory that this process accesses only by this function.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise. `memcpy` follows the C calling convention, and the stack is
    // aligned for a call, because `nostack` is not given.
    unsafe {
        std::arch::asm!(
            "call {memcpy}",
            memcpy = sym libc::memcpy,
            inout("rdi") dst => _,
            inout("rsi") src => _,
            inout("rdx") len => _,
            clobber_abi("C"),
        );
    }
}

/// Copies `len` bytes from `src` to `dst`, each as if by a relaxed atomic load and store.
///
/// # Safety
/// Both ranges must be mapped for as long as the copy runs, and must not overlap. Each range is
/// either private to the caller, or memory that this process accesses only by this function.
#[cfg(target_arch = "aarch64")]
pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise. `memcpy` follows the C calling convention, and the stack is
    // aligned for a call, because `nostack` is not given.
    unsafe {
        std::arch::asm!(
            "bl {memcpy}",
            memcpy = sym libc::memcpy,
            inout("x0") dst => _,
            inout("x1") src => _,
            inout("x2") len => _,
            clobber_abi("C"),
        );
    }
}

/// Copies `len` bytes from `src` to `dst`, each by a relaxed atomic load and store.
///
/// # Safety
/// Both ranges must be mapped for as long as the copy runs, and must not overlap. Each range is
/// either private to the caller, or memory that this process accesses only by this function.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    use std::sync::atomic::{AtomicU8, Ordering};
    for at in 0..len {
        // SAFETY: the caller's promise; bytes have no alignment, and private memory may be accessed
        // by atomic operations too. The source is only loaded from.
        unsafe {
            let byte = AtomicU8::from_ptr(src.add(at).cast_mut()).load(Ordering::Relaxed);
            AtomicU8::from_ptr(dst.add(at)).store(byte, Ordering::Relaxed);
        }
    }
}
