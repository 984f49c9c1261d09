//! One connection of an attachment: an endpoint, and doorbells in both directions. Both sides use
//! this code.

use std::sync::Arc;

use base::mem::Arena;
use fabric::{Access, Completion, Domain, Endpoint, MemoryRegion, PostError};

use super::credits::{DoorbellCredits, MESSAGE, RECEIVES};
use crate::Result;

/// Distance between the buffers of consecutive messages, in bytes.
const SLOT: usize = 64;
/// Maximum number of messages being sent. Their buffers follow the buffers of the receives.
const SENDS: usize = RECEIVES;
/// Maximum number of messages of a connection that are being sent or received. The completion queue
/// needs room for each of them.
pub(super) const DEPTH: usize = RECEIVES + SENDS;

/// An endpoint with posted receives.
pub(super) struct EngineEndpoint {
    pub(super) endpoint: Endpoint,
    pub(super) established: bool,
    credits: DoorbellCredits,
    slots: MemoryRegion,
    memory: Arc<Arena>,
    /// Free slots for messages to send.
    free: Vec<usize>,
}

impl EngineEndpoint {
    /// Wraps `endpoint` and posts its receives. The caller must establish the endpoint afterwards.
    pub(super) fn new(endpoint: Endpoint, domain: &Domain) -> Result<EngineEndpoint> {
        let memory = Arena::anonymous(DEPTH * SLOT)?;
        let slots = MemoryRegion::register(domain, &memory, Access::Messages)?;
        let free = (RECEIVES..DEPTH).collect();
        let line = EngineEndpoint {
            endpoint,
            established: false,
            credits: DoorbellCredits::default(),
            slots,
            memory,
            free,
        };
        for slot in 0..RECEIVES {
            line.receive(slot).map_err(fail)?;
        }
        Ok(line)
    }

    fn receive(&self, slot: usize) -> Result<(), PostError> {
        self.endpoint.receive(self.slots.slice(slot * SLOT, SLOT)?, slot as u64)
    }

    /// Adds `count` to the peer's doorbell. The next call of [`flush`](Self::flush) sends it.
    pub(super) fn ring(&mut self, count: u64) {
        self.credits.ring(count);
    }

    /// Sends pending messages. Returns `false` if the provider's queue is full.
    pub(super) fn flush(&mut self) -> Result<bool> {
        if !self.established {
            return Ok(true);
        }
        while let Some(message) = self.credits.message() {
            // Without a free slot, stop here. The completion that frees a slot calls this function
            // again.
            let Some(slot) = self.free.last().copied() else { break };
            let inside = self.memory.copy_in(slot * SLOT, &message);
            debug_assert!(inside, "slots are inside their memory");
            match self.endpoint.send(self.slots.slice(slot * SLOT, MESSAGE)?, slot as u64) {
                Ok(()) => {
                    self.free.pop();
                    self.credits.sent();
                }
                Err(PostError::Full) => return Ok(false),
                Err(e) => return Err(fail(e)),
            }
        }
        Ok(true)
    }

    /// Handles the completion of a send.
    pub(super) fn sent(&mut self, completion: &Completion) {
        self.free.push(completion.token as usize);
    }

    /// Handles the successful completion of a receive. Returns the doorbell's count, or 0 if the
    /// message only returns credits.
    pub(super) fn received(&mut self, completion: &Completion) -> Result<u64> {
        let slot = completion.token as usize % RECEIVES;
        let mut message = [0; MESSAGE + 1];
        let len = completion.len.min(message.len());
        let inside = self.memory.copy_out(slot * SLOT, &mut message[..len]);
        debug_assert!(inside, "slots are inside their memory");
        self.receive(slot).map_err(fail)?;
        self.credits.received(&message[..len])
    }
}

/// Converts the error of a post that must not fail.
fn fail(error: PostError) -> crate::ChannelError {
    match error {
        PostError::Failed(e) => e.into(),
        full => crate::ChannelError::Transfer(full.to_string()),
    }
}
