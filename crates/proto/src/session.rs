//! Ids that the OSD makes for its clients.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A client's session with a node: the space of its request numbers. Made by the OSD when a client first connects and
/// presented again whenever the client reconnects, also after the OSD was restarted.
///
/// The first 48 bits are the OSD's clock in milliseconds since 1970, the rest is random.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionId(pub u128);

impl SessionId {
    /// An id made at `now_ms`, in milliseconds since 1970, of random bits.
    #[must_use]
    pub fn new(now_ms: u64, random: u128) -> SessionId {
        SessionId((u128::from(now_ms) << 80) | (random & ((1 << 80) - 1)))
    }

    /// When it was made, by the OSD's clock, in milliseconds since 1970.
    #[must_use]
    pub fn made_ms(self) -> u64 {
        (self.0 >> 80) as u64
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One upload of a striped object: a session and a number that its client chose. As long as the session is connected
/// the upload's parts are not collected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct UploadId {
    /// Whose upload it is.
    pub session: SessionId,
    /// Unique within the session.
    pub number: u64,
}

impl UploadId {
    /// The id as it is hashed and stored: session, then number, big-endian.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 24] {
        let mut out = [0; 24];
        out[..16].copy_from_slice(&self.session.0.to_be_bytes());
        out[16..].copy_from_slice(&self.number.to_be_bytes());
        out
    }

    /// The reverse of [`UploadId::to_bytes`]; `None` unless there are exactly 24 bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<UploadId> {
        let (session, number) = bytes.split_at_checked(16)?;
        Some(UploadId {
            session: SessionId(u128::from_be_bytes(session.try_into().ok()?)),
            number: u64::from_be_bytes(number.try_into().ok()?),
        })
    }
}
