//! Ownership of a libfabric object.

use std::ptr::NonNull;

use super::abi::Fid;
use super::library;

/// An object of libfabric, closed when dropped. Everything made from it must have been closed by then: whoever holds a
/// handle puts it before what it was made from.
pub(super) struct Handle<T> {
    object: NonNull<T>,
    what: &'static str,
    closed: bool,
}

// SAFETY: objects are opened in domains with FI_THREAD_SAFE, whose calls may be made from any thread.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as for `Send`.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Handle<T> {
    /// Takes over an object that `call` has just made.
    ///
    /// # Safety
    /// `object` is null or points to an object of libfabric that starts with a [`Fid`] and that nobody else closes.
    pub(super) unsafe fn new(object: *mut T, call: &'static str) -> crate::Result<Handle<T>> {
        let object = NonNull::new(object).ok_or_else(|| library::error(call, libc::ENOMEM))?;
        Ok(Handle { object, what: call, closed: false })
    }

    pub(super) fn as_ptr(&self) -> *mut T {
        self.object.as_ptr()
    }

    pub(super) fn fid(&self) -> *mut Fid {
        self.object.as_ptr().cast()
    }

    /// Binds another object to this one.
    ///
    /// # Safety
    /// `other` must be an open object that outlives this one.
    pub(super) unsafe fn bind(&self, other: *mut Fid, flags: u64) -> crate::Result<()> {
        let fid = self.fid();
        // SAFETY: the object is open, its table is libfabric's, and `other` is as promised.
        library::check("fi_bind", unsafe { ((*(*fid).ops).bind)(fid, other, flags) })
    }

    /// Runs a control command.
    ///
    /// # Safety
    /// `argument` must be what `command` asks for.
    pub(super) unsafe fn control(
        &self,
        call: &'static str,
        command: i32,
        argument: *mut std::ffi::c_void,
    ) -> crate::Result<()> {
        let fid = self.fid();
        // SAFETY: the object is open, its table is libfabric's, and `argument` is as promised.
        library::check(call, unsafe { ((*(*fid).ops).control)(fid, command, argument) })
    }
}

impl<T> Handle<T> {
    /// Closes the object before its handle is dropped, for owners that have something to do after that.
    pub(super) fn close(&mut self) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        let fid = self.fid();
        // SAFETY: the object is open and ours alone to close.
        let code = unsafe { ((*(*fid).ops).close)(fid) };
        if code != 0 {
            tracing::error!("{}: cannot be closed: {}", self.what, library::error("fi_close", -code));
        }
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        self.close();
    }
}
