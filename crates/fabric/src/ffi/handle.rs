//! Ownership of a libfabric object.

use std::ptr::NonNull;

use super::abi::Fid;
use super::library;

/// Owns an object of libfabric, and closes the object when dropped. All objects that were created
/// from this object must be closed first. So a struct declares the handle of an object before the
/// handle of the object's parent.
pub(super) struct Handle<T> {
    object: NonNull<T>,
    what: &'static str,
    closed: bool,
}

// SAFETY: domains are opened with FI_THREAD_SAFE, so any thread may call the functions of their
// objects.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as for `Send`.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Handle<T> {
    /// Takes ownership of an object that `call` has just created.
    ///
    /// # Safety
    /// `object` must be null, or point to an object of libfabric that starts with a [`Fid`] and
    /// that no other code closes.
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
        // SAFETY: the object is open, its table comes from libfabric, and the caller guarantees
        // that `other` is valid.
        library::check("fi_bind", unsafe { ((*(*fid).ops).bind)(fid, other, flags) })
    }

    /// Runs a control command.
    ///
    /// # Safety
    /// `argument` must be a valid argument of `command`.
    pub(super) unsafe fn control(
        &self,
        call: &'static str,
        command: i32,
        argument: *mut std::ffi::c_void,
    ) -> crate::Result<()> {
        let fid = self.fid();
        // SAFETY: the object is open, its table comes from libfabric, and the caller guarantees
        // that `argument` is valid.
        library::check(call, unsafe { ((*(*fid).ops).control)(fid, command, argument) })
    }
}

impl<T> Handle<T> {
    /// Closes the object before its handle is dropped, for owners that must do work after the
    /// object is closed.
    pub(super) fn close(&mut self) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        let fid = self.fid();
        // SAFETY: the object is open, and only `self` may close it.
        let code = unsafe { ((*(*fid).ops).close)(fid) };
        if code != 0 {
            tracing::error!(
                "cannot close the object that {} returned: {}",
                self.what,
                library::error("fi_close", -code)
            );
        }
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        self.close();
    }
}
