//! [`ControlOutput`]: frames for the control socket.

use bytes::Bytes;
use channel::{EntryHeader, EntryKind};

use crate::messages::{ChannelCall, NO_REPLY, StoreCall, encode};

/// A request for the control socket.
pub(super) struct ControlFrame {
    pub(super) header: EntryHeader,
    /// The encoded call.
    pub(super) control: Vec<u8>,
    /// Pieces of the payload that travels with the request.
    pub(super) data: Vec<Bytes>,
}

/// Frames that the driver has not taken yet, in the order in which the socket carries them.
#[derive(Default)]
pub(super) struct ControlOutput {
    frames: Vec<ControlFrame>,
}

impl ControlOutput {
    pub(super) fn push(&mut self, frame: ControlFrame) {
        self.frames.push(frame);
    }

    /// Adds a call to the channel, with data, that the host does not answer.
    pub(super) fn push_unanswered(&mut self, call: ChannelCall, data: Bytes) {
        let header = EntryHeader::new(EntryKind::Request, 0, NO_REPLY);
        self.push(ControlFrame { header, control: encode(&StoreCall::Channel(call)), data: vec![data] });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Takes all frames.
    pub(super) fn take(&mut self) -> Vec<ControlFrame> {
        std::mem::take(&mut self.frames)
    }
}
