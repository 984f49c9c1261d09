//! Entry points for fuzzing the decoders of peer input. Not part of the API.

use bytes::Bytes;

use crate::framing::{Cutter, Framing};
use crate::protocol::{GatewayHello, HolderWelcome, ToGateway, ToHolder, decode};

/// Cuts `stream` into messages, with reads of up to `read_bytes_max` bytes. Returns the messages before
/// the first violation.
pub fn cut(framing: Framing, stream: &[u8], read_bytes_max: usize) -> Vec<Bytes> {
    let mut messages = Vec::new();
    if framing.check().is_err() {
        return messages;
    }
    let mut cutter = Cutter::new(framing);
    let mut rest = stream;
    while !rest.is_empty() {
        let space = cutter.space();
        assert!(!space.is_empty() && space.len() <= framing.message_bytes_max as usize, "reads have a bound");
        let len = space.len().min(rest.len()).min(read_bytes_max.max(1));
        space[..len].copy_from_slice(&rest[..len]);
        rest = &rest[len..];
        match cutter.fill(len, Vec::new()) {
            Ok(message) => messages.extend(message.map(|message| message.bytes)),
            Err(_) => break,
        }
    }
    messages
}

/// Decodes the body of a frame of the control protocol.
pub fn control(body: &[u8]) {
    // Fuzzing checks for panics only; ignore the results.
    let _ = (decode::<ToHolder>(body), decode::<ToGateway>(body));
    let _ = (GatewayHello::decode(body), HolderWelcome::decode(body));
}
