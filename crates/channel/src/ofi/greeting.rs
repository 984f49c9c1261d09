//! The content of a connection request: 36 bytes of private data, which fit into any provider's
//! limit.
//!
//! ```text
//!   0      4        6       7       8         12       28       36
//!   +------+--------+-------+-------+---------+--------+--------+
//!   | OBFI | version| queue | queues| attempt | secret | engine |      little endian
//!   +------+--------+-------+-------+---------+--------+--------+
//! ```
//!
//! The engine counts its attempts to connect to an attachment. A connection of a later attempt
//! replaces the connections of an earlier attempt, because the host may not have noticed that the
//! earlier connections closed. Only the engine that connected first can do so.

use super::QUEUES;

/// Version of the protocol on the connections.
const VERSION: u16 = 2;
const LEN: usize = 36;

/// The content of a connection request, which identifies the attachment and the requested
/// connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Greeting {
    pub(super) queue: usize,
    pub(super) attempt: u32,
    pub(super) secret: u128,
    /// Random number of the engine.
    pub(super) engine: u64,
}

impl Greeting {
    pub(crate) fn encode(self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..4].copy_from_slice(b"OBFI");
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = self.queue as u8;
        bytes[7] = QUEUES as u8;
        bytes[8..12].copy_from_slice(&self.attempt.to_le_bytes());
        bytes[12..28].copy_from_slice(&self.secret.to_le_bytes());
        bytes[28..].copy_from_slice(&self.engine.to_le_bytes());
        bytes
    }

    /// Decodes a greeting. Returns `None` if `data` does not start with a greeting of this version.
    /// Ignores later bytes, because providers may append zeros.
    pub(crate) fn decode(data: &[u8]) -> Option<Greeting> {
        let bytes: &[u8; LEN] = data.first_chunk()?;
        let attempt = u32::from_le_bytes(*bytes[8..].first_chunk()?);
        let secret = u128::from_le_bytes(*bytes[12..].first_chunk()?);
        let engine = u64::from_le_bytes(*bytes[28..].first_chunk()?);
        let greeting = Greeting { queue: usize::from(bytes[6]), attempt, secret, engine };
        (greeting.queue < QUEUES && greeting.encode() == *bytes).then_some(greeting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_greetings_of_this_version_are_decoded() {
        let greeting = Greeting { queue: 3, attempt: 7, secret: 1 << 100 | 5, engine: 1 << 50 | 6 };
        let bytes = greeting.encode();
        assert_eq!(Greeting::decode(&[&bytes[..], &[0; 30]].concat()), Some(greeting));
        assert_eq!(Greeting::decode(&bytes[..LEN - 1]), None);
        for (at, wrong) in [(0, b'X'), (4, 9), (6, QUEUES as u8), (7, 1)] {
            let mut other = bytes;
            other[at] = wrong;
            assert_eq!(Greeting::decode(&other), None, "{at}");
        }
    }
}
