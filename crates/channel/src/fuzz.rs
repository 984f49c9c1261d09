//! Entry points for fuzzing the decoders of the handshakes of the channel. Not part of the API.

use crate::handshake::{ChannelHello, ChannelWelcome, HelloVersions, decode};
use crate::ofi::Greeting;

/// Decodes the first frames of the control socket.
pub fn handshake(bytes: &[u8]) {
    // Fuzzing checks for panics only; ignore the results.
    let _ = decode::<HelloVersions>(bytes).map(|versions| versions.check());
    let _ = decode::<ChannelHello>(bytes).map(|hello| hello.seat.check());
    let _ = decode::<std::result::Result<ChannelWelcome, String>>(bytes);
}

/// Decodes the private data of a connection request.
///
/// # Panics
/// If a greeting has another encoded form than the data.
pub fn private_data(bytes: &[u8]) {
    if let Some(greeting) = Greeting::decode(bytes) {
        assert!(bytes.starts_with(&greeting.encode()), "{greeting:?}");
    }
}
