//! Ids of sessions and uploads.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Id of a client's session with a node. Each session has its own request numbers. The osd creates
/// the session when a client first connects. When the client reconnects, even after a restart of
/// the osd, the client presents the id again.
///
/// The bits are, from the highest to the lowest: 48 bits for the *generation* of the osd, 32 bits
/// for the *number* of the session within the generation, and 48 random bits. Ids are ordered by
/// generation, then by number. No part of an id depends on a clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionId(pub u128);

impl SessionId {
    /// The first generation. Ids from older versions of the node start with a time in milliseconds
    /// since 1970 instead of a generation. Until the year 6429, this time is below the first
    /// generation, so these ids are ordered before all ids that contain a generation.
    pub const FIRST_GENERATION: u64 = 1 << 47;

    /// Creates the id of a session from its generation, its number and the bits by which the osd
    /// recognises the id. Only the lower 48 bits of `generation` and `proof` are used.
    #[must_use]
    pub fn new(generation: u64, number: u32, proof: u64) -> SessionId {
        let low = |bits: u64| u128::from(bits & ((1 << 48) - 1));
        SessionId(low(generation) << 80 | u128::from(number) << 48 | low(proof))
    }

    /// Returns the generation in which the session was created:
    /// [`FIRST_GENERATION`](SessionId::FIRST_GENERATION) plus the number of earlier starts of the
    /// osd.
    #[must_use]
    pub fn generation(self) -> u64 {
        (self.0 >> 80) as u64
    }

    /// Returns the session's number within its generation, counted from 1.
    #[must_use]
    pub fn number(self) -> u32 {
        (self.0 >> 48) as u32
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl std::str::FromStr for SessionId {
    type Err = String;

    fn from_str(text: &str) -> Result<SessionId, String> {
        let is_valid = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let id = is_valid.then(|| u128::from_str_radix(text, 16).ok()).flatten();
        id.map(SessionId).ok_or_else(|| "the id of a session has 32 hexadecimal digits".to_owned())
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Id of an upload of a striped object: a session, and a number that the client chose. The
/// collector (the background task that removes orphans) keeps the upload's parts as long as the
/// session is connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct UploadId {
    /// Session of the client that uploads the object.
    pub session: SessionId,
    /// Number of the upload, unique within the session.
    pub number: u64,
}

impl UploadId {
    /// Returns the form of the id that is hashed and stored: the session, then the number, both
    /// big-endian.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 24] {
        let mut out = [0; 24];
        out[..16].copy_from_slice(&self.session.0.to_be_bytes());
        out[16..].copy_from_slice(&self.number.to_be_bytes());
        out
    }

    /// Decodes the form that [`UploadId::to_bytes`] returns. Returns `None` if the length is not 24
    /// bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<UploadId> {
        let (session, number) = bytes.split_at_checked(16)?;
        Some(UploadId {
            session: SessionId(u128::from_be_bytes(session.try_into().ok()?)),
            number: u64::from_be_bytes(number.try_into().ok()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn session_ids_are_ordered_by_their_generation_and_number(
            (a, b) in (0u64..1 << 48, 0u64..1 << 48), numbers: (u32, u32), random: (u64, u64),
        ) {
            let (first, second) = (SessionId::new(a, numbers.0, random.0), SessionId::new(b, numbers.1, random.1));
            prop_assert_eq!((first.generation(), first.number()), (a, numbers.0));
            if (a, numbers.0) != (b, numbers.1) {
                prop_assert_eq!(first < second, (a, numbers.0) < (b, numbers.1));
            }
        }
    }
}
