//! Completion queues.

use std::ffi::c_void;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::abi::{CQ_FORMAT_MSG, CqAttr, CqErrEntry, CqMsgEntry, EAVAIL, FidCq, WAIT_FD};
use super::domain::{Bindable, wait_fd};
use super::handle::Handle;
use super::{Domain, Info, Waitable, library};
use crate::info::ProviderKind;
use crate::operations::{Held, Operations, PendingOperation};
use crate::{Completion, FabricError, Operation, Result};

/// Maximum number of entries that one call of the provider returns.
const BATCH: usize = 16;
/// Maximum number of batches that [`CompletionQueue::poll`] reads, so that the caller can do other
/// work.
const BATCHES: usize = 16;

/// Returns the queue size to request from the provider. `verbs` (libfabric 1.17) reserves as many
/// entries of the queue as an endpoint can post receives. `verbs` makes this reservation for each
/// endpoint, as long as the queue has enough free entries. Sends use the remaining entries. If no
/// entry remains, `verbs` reports forever that the queue is full.
fn size_for(info: &Info, depth: usize) -> usize {
    let set_aside = info.receive_depth();
    if info.provider_kind() != ProviderKind::Verbs || set_aside == 0 {
        return depth;
    }
    // With many endpoints, a size of one entry less than a multiple of the reservation leaves the
    // most entries for sends.
    (depth + 1).next_multiple_of(set_aside) - 1
}

/// A queue that reports completed operations. It serves any number of endpoints of one domain.
#[derive(Clone)]
pub struct CompletionQueue(Arc<Inner>);

struct Inner {
    handle: Handle<FidCq>,
    fd: RawFd,
    operations: Mutex<Operations>,
    domain: Domain,
}

impl CompletionQueue {
    /// Opens a queue for up to `depth` operations at a time. Further operations are
    /// [refused](crate::PostError::Full).
    ///
    /// # Errors
    /// If the provider fails, for example because the device has no queue of that size.
    pub fn open(domain: &Domain, depth: usize) -> Result<CompletionQueue> {
        let mut attributes = CqAttr {
            size: size_for(domain.info(), depth),
            flags: 0,
            format: CQ_FORMAT_MSG,
            wait_obj: WAIT_FD,
            signaling_vector: 0,
            wait_cond: 0,
            wait_set: std::ptr::null_mut(),
        };
        let mut queue = std::ptr::null_mut();
        let parent = domain.as_ptr();
        // SAFETY: the domain is open, the attributes are complete, and the result has room.
        let code = unsafe {
            let attributes = &raw mut attributes;
            ((*(*parent).ops).cq_open)(parent, attributes, &raw mut queue, std::ptr::null_mut())
        };
        library::check("fi_cq_open", code)?;
        // SAFETY: the object was just created, and only this function has it.
        let handle = unsafe { Handle::new(queue, "fi_cq_open") }?;
        let fd = wait_fd(&handle)?;
        let operations = Mutex::new(Operations::new(depth));
        Ok(CompletionQueue(Arc::new(Inner { handle, fd, operations, domain: domain.clone() })))
    }

    /// Moves completions to `out`, and allows the provider to move data. Some completions may
    /// remain for the next call.
    ///
    /// # Errors
    /// If the queue has failed. The queue cannot be used any more.
    pub fn poll(&self, out: &mut Vec<Completion>) -> Result<()> {
        const EMPTY: CqMsgEntry = CqMsgEntry { op_context: std::ptr::null_mut(), flags: 0, len: 0 };
        let queue = self.0.handle.as_ptr();
        for _ in 0..BATCHES {
            let mut entries = [EMPTY; BATCH];
            // SAFETY: the queue is open, and `entries` has room for `BATCH` entries of the queue's
            // format.
            let read = unsafe { ((*(*queue).ops).read)(queue, entries.as_mut_ptr().cast(), BATCH) };
            match i32::try_from(read).unwrap_or(0) {
                code if code == -libc::EAGAIN => return Ok(()),
                code if code == -EAVAIL => self.take_error(out)?,
                code if code < 0 => return Err(library::error("fi_cq_read", -code)),
                count => {
                    let taken = &entries[..BATCH.min(count as usize)];
                    out.extend(taken.iter().filter_map(|e| self.complete(e.op_context, e.len, Ok(()))));
                    // Reading an empty queue of `tcp` costs a system call.
                    if taken.len() < BATCH {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    fn take_error(&self, out: &mut Vec<Completion>) -> Result<()> {
        let queue = self.0.handle.as_ptr();
        let mut entry = CqErrEntry {
            op_context: std::ptr::null_mut(),
            flags: 0,
            len: 0,
            buf: std::ptr::null_mut(),
            data: 0,
            tag: 0,
            olen: 0,
            err: 0,
            prov_errno: 0,
            err_data: std::ptr::null_mut(),
            err_data_size: 0,
            later: [0; 8],
        };
        // SAFETY: the queue is open, and `entry` has room for an error entry.
        let read = unsafe { ((*(*queue).ops).readerr)(queue, &raw mut entry, 0) };
        match i32::try_from(read).unwrap_or(0) {
            code if code == -libc::EAGAIN => Ok(()),
            code if code < 0 => Err(library::error("fi_cq_readerr", -code)),
            _ => {
                let error = library::error("the operation", entry.err);
                out.extend(self.complete(entry.op_context, 0, Err(error)));
                Ok(())
            }
        }
    }

    /// Ends the operation with the number `context`. Returns `None` if the operation's endpoint was
    /// closed, or if the caller gets no completion for the operation.
    fn complete(
        &self,
        context: *mut c_void,
        received: usize,
        result: Result<(), FabricError>,
    ) -> Option<Completion> {
        let pending = self.operations().remove(context as u64)?;
        let PendingOperation { endpoint, token, operation, .. } = pending;
        if result.is_ok() && !pending.earlier.is_empty() {
            let mut operations = self.operations();
            let ended: Vec<_> = pending.earlier.iter().map(|number| operations.remove(*number)).collect();
            drop(operations);
            drop(ended);
        }
        if matches!(pending.memory, Held::Copied) {
            return None;
        }
        if operation == Operation::Read && result.is_err() {
            self.0.domain.read_broken_off();
        }
        let len = if operation == Operation::Receive { received.min(pending.len) } else { pending.len };
        Some(Completion { endpoint, token, operation, len, result })
    }

    pub(super) fn operations(&self) -> MutexGuard<'_, Operations> {
        self.0.operations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The domain of the queue.
    #[must_use]
    pub fn domain(&self) -> &Domain {
        &self.0.domain
    }

    pub(super) fn handle(&self) -> &Handle<FidCq> {
        &self.0.handle
    }
}

impl Bindable for CompletionQueue {
    fn object(&self) -> *mut c_void {
        self.0.handle.fid().cast()
    }
}

impl Waitable for CompletionQueue {
    fn wait_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor stays open as long as the queue.
        unsafe { BorrowedFd::borrow_raw(self.0.fd) }
    }
}
