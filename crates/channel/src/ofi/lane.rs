//! The engine's side of one queue's connection to one peer. It tracks the operations in progress
//! and the writes that are known to be in place.

use fabric::{PostError, RemoteRegion, Slice};

use super::hazards::Footprint;
use super::line::EngineEndpoint;

/// Maximum number of operations in progress on a connection.
pub(super) const WINDOW: usize = 32;
/// Length of the read that confirms earlier writes, in bytes.
const PROBE: usize = 8;

/// One connection and its operations, which are numbered from 1 in posting order.
pub(super) struct OperationQueue {
    pub(super) line: EngineEndpoint,
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

/// An operation that has completed.
pub(super) struct CompletedOperation {
    pub(super) number: u64,
    /// The operation's chain; `None` for a read that only confirms writes.
    pub(super) chain: Option<u64>,
}

impl OperationQueue {
    pub(super) fn new(line: EngineEndpoint) -> OperationQueue {
        OperationQueue { line, last: 0, last_write: 0, last_read: 0, confirmed: 0, under_way: Vec::new() }
    }

    /// Whether an operation that accesses this memory can be posted now.
    pub(super) fn has_room_for(&self, footprint: &Footprint) -> bool {
        let mut earlier = self.under_way.iter().filter_map(|op| op.of.as_ref());
        self.under_way.len() < WINDOW && !earlier.any(|(_, earlier)| footprint.must_follow(earlier))
    }

    /// Posts one transfer of the chain `chain`, and returns the transfer's operation number.
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
            self.line.endpoint.read(local, remote, number)?;
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

    /// Handles the successful completion of a read or a write. Returns `None` if the operation is
    /// not known.
    pub(super) fn complete(&mut self, number: u64, read: bool) -> Option<CompletedOperation> {
        let at = self.under_way.iter().position(|op| op.number == number)?;
        let UnderWay { of, .. } = self.under_way.swap_remove(at);
        if read {
            self.confirmed = self.confirmed.max(number);
        }
        Some(CompletedOperation { number, chain: of.map(|(chain, _)| chain) })
    }
}

/// The scratch memory that receives the data of confirming reads.
pub(super) fn scratch(port: &super::port::EngineDomain) -> fabric::Result<Slice<'_>> {
    port.scratch.slice(0, PROBE)
}
