//! The engine's side of one queue's connection to one peer. It tracks the operations in progress
//! and the writes that are known to be in place.

use fabric::{PostError, RemoteRegion, Slice};

use super::bounce::BounceBuffer;
use super::hazards::Footprint;
use super::line::EngineEndpoint;

/// Maximum number of operations in progress on a connection.
pub(super) const WINDOW: usize = 32;
/// Length of the read that confirms earlier writes, in bytes.
const PROBE: usize = 8;

/// One connection and its operations, which are numbered from 1 in posting order.
pub(super) struct OperationQueue {
    pub(super) line: EngineEndpoint,
    /// The memory that receives the data of reads, if reads must not write to their destinations
    /// directly. It is set before the first read. Declared after the endpoint, so that it is
    /// dropped after it.
    pub(super) bounce: Option<BounceBuffer>,
    /// Number of the last operation that was posted.
    last: u64,
    /// Number of the last write that was posted.
    pub(super) last_write: u64,
    /// Number of the last read that was posted.
    last_read: u64,
    /// All writes up to this number are in place in the peer's memory.
    pub(super) confirmed: u64,
    under_way: Vec<UnderWay>,
}

struct UnderWay {
    number: u64,
    /// The operation's chain and footprint; `None` for a read that only confirms writes.
    of: Option<(u64, Footprint)>,
}

impl OperationQueue {
    pub(super) fn new(line: EngineEndpoint) -> OperationQueue {
        let (last, last_write, last_read, confirmed) = (0, 0, 0, 0);
        OperationQueue { line, bounce: None, last, last_write, last_read, confirmed, under_way: Vec::new() }
    }

    /// Whether an operation that accesses this memory can be posted now.
    pub(super) fn has_room_for(&self, footprint: &Footprint) -> bool {
        let mut earlier = self.under_way.iter().filter_map(|op| op.of.as_ref());
        let bounce = self.bounce.as_ref().filter(|_| footprint.read);
        self.under_way.len() < WINDOW
            && bounce.is_none_or(|buffer| buffer.has_room_for(footprint.remote.len()))
            && !earlier.any(|(_, earlier)| footprint.must_follow(earlier))
    }

    /// Posts one transfer of the chain `chain`, and returns the transfer's operation number. If the
    /// connection has a bounce buffer, a read moves its data there instead of to `local`.
    pub(super) fn post(
        &mut self,
        chain: u64,
        footprint: Footprint,
        local: Slice<'_>,
        memory: &RemoteRegion,
    ) -> Result<u64, PostError> {
        let number = self.last + 1;
        let remote = memory.slice(footprint.remote.start, footprint.remote.len())?;
        if footprint.read {
            match &mut self.bounce {
                None => self.line.endpoint.read(local, remote, number)?,
                Some(buffer) => {
                    let slot = buffer.reserve(number, footprint.remote.len())?.ok_or(PostError::Full)?;
                    if let Err(e) = self.line.endpoint.read(slot, remote, number) {
                        buffer.cancel(number);
                        return Err(e);
                    }
                }
            }
            self.last_read = number;
        } else {
            self.line.endpoint.write(local, remote, number)?;
            self.last_write = number;
        }
        self.last = number;
        self.under_way.push(UnderWay { number, of: Some((chain, footprint)) });
        Ok(number)
    }

    /// Ensures that the writes up to `number` will be confirmed. Posts a confirming read, unless a
    /// read was posted after these writes or another confirming read is in progress.
    pub(super) fn confirm(
        &mut self,
        number: u64,
        scratch: Slice<'_>,
        memory: &RemoteRegion,
    ) -> Result<(), PostError> {
        let probing = self.under_way.iter().any(|op| op.of.is_none());
        if self.confirmed >= number || self.last_read > number || probing {
            return Ok(());
        }
        let probe = self.last + 1;
        self.line.endpoint.read(scratch, memory.slice(0, PROBE)?, probe)?;
        (self.last, self.last_read) = (probe, probe);
        self.under_way.push(UnderWay { number: probe, of: None });
        Ok(())
    }

    /// Handles the successful completion of a read or a write. Returns the operation's chain and
    /// footprint. Returns `None` if the operation only confirms writes or is not known.
    pub(super) fn complete(&mut self, number: u64) -> Option<(u64, Footprint)> {
        let at = self.under_way.iter().position(|op| op.number == number)?;
        let UnderWay { of, .. } = self.under_way.swap_remove(at);
        if of.as_ref().is_none_or(|(_, footprint)| footprint.read) {
            self.confirmed = self.confirmed.max(number);
        }
        of
    }
}

/// The scratch memory that receives the data of confirming reads.
pub(super) fn scratch(port: &super::port::EngineDomain) -> fabric::Result<Slice<'_>> {
    port.scratch.slice(0, PROBE)
}
