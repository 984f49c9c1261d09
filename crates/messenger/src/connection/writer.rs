//! The sending side of a stream transport: gathers queued frames into one vectored write.

use std::io;

use tokio::io::{AsyncWrite, AsyncWriteExt};

use super::batch::Batch;
use super::outbound::Piggyback;
use super::send_limits::BulkSlotsInUse;
use super::{ConnectionState, Shared};

impl Shared {
    /// Fills `batch` with queued frames, or only with control frames if `holds_messages` is true.
    /// Returns whether the connection is being closed.
    pub(super) fn gather(&self, batch: &mut Batch, holds_messages: bool) -> bool {
        batch.clear();
        let mut state = self.lock();
        let state = &mut *state;
        let piggyback = Piggyback { received: state.inbound.received(), granted: state.inbound.granted() };
        state.outbound.gather(batch, &piggyback, holds_messages);
        if batch.frames() > 0 {
            state.inbound.on_reported();
            self.stir_if_busy(state);
        }
        state.status != ConnectionState::Open
    }

    /// Writes queued frames until the transport breaks, or until the connection is being closed and
    /// everything is written.
    pub(super) async fn write_loop(&self, writer: &mut (dyn AsyncWrite + Send + Unpin)) -> io::Result<()> {
        let mut batch = Batch::default();
        loop {
            let closing = self.gather(&mut batch, false);
            if batch.frames() == 0 {
                if closing {
                    return self.write_close(writer, self.end.reason().text()).await;
                }
                self.wake_writer.notified().await;
                continue;
            }
            let slots = self.on_gathered(&mut batch);
            batch.write(writer, &self.watch).await?;
            self.metrics.sent_bytes.increment(batch.bytes() as u64);
            self.metrics.copied_bytes.increment(batch.copied_bytes() as u64);
            drop(slots);
        }
    }

    /// Handles a batch that is about to be written: the position of its frames in the send order is
    /// fixed.
    pub(super) fn on_gathered(&self, batch: &mut Batch) -> BulkSlotsInUse<'_> {
        self.metrics.sent_messages.increment(batch.messages as u64);
        self.metrics.queue_depth.decrement(batch.messages as f64);
        for placed in batch.placed.drain(..) {
            // The pushing caller may have stopped waiting; ignore the error.
            let _ = placed.send(());
        }
        self.send_limits.bulk_slots_in_use(batch.bulk_slots)
    }

    /// Tells the peer that the connection ends.
    pub(super) async fn write_close(
        &self,
        writer: &mut (dyn AsyncWrite + Send + Unpin),
        reason: &str,
    ) -> io::Result<()> {
        let batch = Batch::closing(reason);
        batch.write(writer, &self.watch).await?;
        writer.shutdown().await
    }
}
