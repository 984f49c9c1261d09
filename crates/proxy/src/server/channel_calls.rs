//! The osd's calls to the channel itself, and the closing and opening of the rings.

use std::task::Context;

use base::pool::Lease;
use bytes::Bytes;
use channel::{ChannelError, EntryHeader, EntryKind, HEADER_LEN};
use store::{Result, StoreError};

use super::calls::claim;
use super::host_attachment::{HostAttachment, Rings};
use crate::messages::{CallAnswer, CallOutcome, ChannelCall, encode, shorten};

/// Maximum length of a probe, in bytes.
const MAX_PROBE: u32 = 64 << 10;

impl HostAttachment {
    /// Executes a call to the channel at once, and answers it unless the call is a `Put`.
    pub(super) fn channel_call(
        &mut self,
        cx: &mut Context<'_>,
        header: EntryHeader,
        call: ChannelCall,
        payload: &Bytes,
    ) -> channel::Result<()> {
        let Some(rings) = &mut self.rings else {
            return Err(ChannelError::Protocol("this attachment has no host memory".into()));
        };
        let mut data = Bytes::new();
        let outcome: CallOutcome = match call {
            ChannelCall::Export { offset, len } => rings.export(offset, len).map(|()| CallAnswer::Done),
            ChannelCall::Put { offset } => {
                // Later calls depend on these bytes, so a failure here ends the attachment.
                return rings.put_bytes(offset, payload).map_err(|e| ChannelError::Protocol(e.to_string()));
            }
            ChannelCall::Get { offset, len } => rings.get_bytes(offset, len).map(|bytes| {
                data = bytes;
                CallAnswer::Done
            }),
            ChannelCall::Positions => {
                let (taken, head) = rings.positions();
                Ok(CallAnswer::Positions { taken, head })
            }
            ChannelCall::Close { taken } => {
                let taken = if rings.is_closed() { rings.positions().1 } else { taken };
                let (position, head) = rings.close()?;
                // The osd expects this answer before any reply that the ring had carried.
                self.answer(header, &Ok(CallAnswer::Positions { taken: position, head }), Bytes::new());
                return self.replies_by_socket(taken);
            }
            ChannelCall::Offer => rings.offer().map(CallAnswer::Offer),
            ChannelCall::Probe { len } => rings.probe(cx, len).map(|rung| CallAnswer::Probed { rung }),
            ChannelCall::Open => rings.open(cx).map(|()| CallAnswer::Done),
        };
        self.answer(header, &outcome.map_err(shorten), data);
        Ok(())
    }

    fn answer(&mut self, request: EntryHeader, outcome: &CallOutcome, data: Bytes) {
        let header = EntryHeader::new(EntryKind::Reply, request.target, request.id);
        self.control.push(header, &encode(outcome), [data]);
    }

    /// Sends the replies in the outbox from position `taken` over the control socket.
    fn replies_by_socket(&mut self, taken: u64) -> channel::Result<()> {
        let Some(rings) = &mut self.rings else { return Ok(()) };
        for frame in rings.unfetched(taken)? {
            let header = EntryHeader { position: 0, consumed: 0, ..frame.header };
            self.control.push(header, &frame.control, [frame.data]);
        }
        Ok(())
    }
}

impl Rings {
    fn export(&self, offset: u64, len: u64) -> Result<()> {
        let region = self.memory.layout.data_offset() as u64..self.memory.layout.len() as u64;
        let inside = offset >= region.start && offset.checked_add(len).is_some_and(|end| end <= region.end);
        if inside && len > 0 {
            return Ok(());
        }
        let what = format!("{len} bytes at {offset} are not in the data region {region:?}");
        Err(StoreError::InvalidArgument(what))
    }

    pub(super) fn lease(&self) -> &Lease {
        &self.memory.data
    }

    fn put_bytes(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let (mut buffer, _) = claim(Some(self.lease()), offset, bytes.len() as u64)?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }

    fn get_bytes(&self, offset: u64, len: u64) -> Result<Bytes> {
        if len > (channel::MAX_FRAME - 2 * HEADER_LEN) as u64 {
            let what = "the data of one request".to_owned();
            return Err(StoreError::TooLarge { what, size: len, limit: channel::MAX_FRAME as u64 });
        }
        let (buffer, _) = claim(Some(self.lease()), offset, len)?;
        Ok(Bytes::copy_from_slice(&buffer))
    }

    fn probe(&mut self, cx: &mut Context<'_>, len: u32) -> Result<u64> {
        if !self.is_closed() || len > MAX_PROBE || len as usize > self.memory.layout.inbound().len {
            return Err(StoreError::InvalidArgument(format!(
                "a probe of {len} bytes is too long, or the rings are still open"
            )));
        }
        let rung = self.rung_while_closed(cx)?;
        if rung == 0 {
            // Over a network, this call may arrive before the doorbell. The osd then repeats the
            // call.
            return Ok(rung);
        }
        let (inbound, outbox) = (self.memory.layout.inbound(), self.memory.layout.outbox());
        let mut bytes = vec![0; len as usize];
        let arena = &self.memory.arena;
        let echoed = arena.copy_out(inbound.offset, &mut bytes) && arena.copy_in(outbox.offset, &bytes);
        debug_assert!(echoed, "rings are inside their memory");
        self.ring_osd(u64::from(len)).map_err(|e| StoreError::Io(e.to_string()))?;
        Ok(rung)
    }
}
