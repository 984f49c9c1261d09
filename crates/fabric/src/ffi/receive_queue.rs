//! Receive buffers that endpoints share.

use std::ffi::c_void;
use std::sync::Arc;

use super::abi::{Fid, FidEp};
use super::handle::Handle;
use super::posting::{held, next_serial, posted};
use super::{CompletionQueue, Info, Slice, library};
use crate::operations::PendingOperation;
use crate::{FabricError, Operation, PostError, Result};

/// libfabric's value for a receive that accepts a message from any peer.
const ANY_PEER: u64 = u64::MAX;

/// Receive buffers for messages from any endpoint that was created with the queue
/// (`fi_srx_context`). A completion has the queue's token instead of the endpoint's. So each
/// message must identify its sender.
#[derive(Clone)]
pub struct ReceiveQueue(Arc<Inner>);

struct Inner {
    handle: Handle<FidEp>,
    completions: CompletionQueue,
    serial: u64,
    token: u64,
}

impl ReceiveQueue {
    /// Opens a queue for endpoints that use `completions`, in the domain of `completions`. `info`
    /// must have been queried with [`shared_receive`](crate::ProviderQuery::shared_receive).
    ///
    /// # Errors
    /// If the provider or the device does not support shared receive queues.
    pub fn open(info: &Info, completions: &CompletionQueue, token: u64) -> Result<ReceiveQueue> {
        let parent = completions.domain().as_ptr();
        let mut queue = std::ptr::null_mut();
        // SAFETY: the domain is open, libfabric allocated the attributes, and the result has room.
        let code = unsafe {
            ((*(*parent).ops).srx_ctx)(parent, info.rx_attr(), &raw mut queue, std::ptr::null_mut())
        };
        library::check("fi_srx_context", code)?;
        // SAFETY: the object was just created, and only this function has it.
        let handle = unsafe { Handle::new(queue, "fi_srx_context") }?;
        let serial = next_serial();
        Ok(ReceiveQueue(Arc::new(Inner { handle, completions: completions.clone(), serial, token })))
    }

    /// Posts a buffer for one message.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn receive(&self, into: Slice<'_>, token: u64) -> Result<(), PostError> {
        let queue = &self.0.completions;
        if !into.region().domain().is(queue.domain()) {
            return Err(FabricError::OtherDomain.into());
        }
        let pending = PendingOperation {
            serial: self.0.serial,
            endpoint: self.0.token,
            token,
            operation: Operation::Receive,
            len: into.len(),
            earlier: Vec::new(),
            memory: held(into),
        };
        let Ok(number) = queue.operations().insert(pending) else { return Err(PostError::Full) };
        let context = number as *mut c_void;
        let queue_object = self.0.handle.as_ptr();
        // SAFETY: the queue is open. The buffer stays mapped until the operation completes or the
        // queue is closed.
        let code = unsafe {
            let recv = (*(*queue_object).msg).recv;
            recv(queue_object, into.start().cast(), into.len(), into.descriptor(), ANY_PEER, context)
        };
        let result = posted("fi_recv", code);
        if result.is_err() {
            drop(queue.operations().remove(number));
        }
        result
    }

    pub(super) fn fid(&self) -> *mut Fid {
        self.0.handle.fid()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Dropping an operation may close regions, which takes locks. So the operations are dropped
        // only after the lock on the table is released.
        let serial = self.serial;
        self.handle.close();
        let operations = self.completions.operations().remove_all(|p| p.serial == serial);
        drop(operations);
    }
}
