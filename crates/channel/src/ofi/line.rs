//! One connection of an attachment, as both sides have it: an endpoint and doorbells both ways.

use std::sync::Arc;

use base::mem::Arena;
use fabric::{Access, Completion, Domain, Endpoint, MemoryRegion, PostError};

use super::credits::{DoorbellCredits, MESSAGE, RECEIVES};
use crate::Result;

/// Bytes between the buffers of two messages.
const SLOT: usize = 64;
/// Messages that are being sent at most; their buffers lie behind those of the receives.
const SENDS: usize = RECEIVES;
/// Operations of a line that have completions, at most.
pub(super) const DEPTH: usize = RECEIVES + SENDS;

/// An endpoint with receives posted.
pub(super) struct EngineEndpoint {
    pub(super) endpoint: Endpoint,
    pub(super) established: bool,
    credits: DoorbellCredits,
    slots: MemoryRegion,
    memory: Arc<Arena>,
    /// Slots of messages that may be sent.
    free: Vec<usize>,
}

impl EngineEndpoint {
    /// Posts the receives; the endpoint is to be established after that.
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

    /// Rings the peer's doorbell, when [`flush`](Self::flush) is called next.
    pub(super) fn ring(&mut self, count: u64) {
        self.credits.ring(count);
    }

    /// Sends what is to be sent; `false` if there is something that could not be.
    pub(super) fn flush(&mut self) -> Result<bool> {
        if !self.established {
            return Ok(true);
        }
        while let Some(message) = self.credits.message() {
            // Without a slot, the completion that frees one brings us back here.
            let Some(slot) = self.free.last().copied() else { break };
            let inside = self.memory.copy_in(slot * SLOT, &message);
            debug_assert!(inside, "slots are inside");
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

    /// A send has completed.
    pub(super) fn sent(&mut self, completion: &Completion) {
        self.free.push(completion.token as usize);
    }

    /// A receive has completed well: gives the doorbell's count, or 0.
    pub(super) fn received(&mut self, completion: &Completion) -> Result<u64> {
        let slot = completion.token as usize % RECEIVES;
        let mut message = [0; MESSAGE + 1];
        let len = completion.len.min(message.len());
        let inside = self.memory.copy_out(slot * SLOT, &mut message[..len]);
        debug_assert!(inside, "slots are inside");
        self.receive(slot).map_err(fail)?;
        self.credits.received(&message[..len])
    }
}

/// A post that must not fail has failed.
fn fail(error: PostError) -> crate::ChannelError {
    match error {
        PostError::Failed(e) => e.into(),
        full => crate::ChannelError::Transfer(full.to_string()),
    }
}
