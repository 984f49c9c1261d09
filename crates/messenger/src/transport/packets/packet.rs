//! The header of every packet.
//!
//! ```text
//!   0                8          12         16
//!   +----------------+----------+----------+----------------------------------+
//!   | token          | granted  | reserved | content: frames, or part of one  |
//!   +----------------+----------+----------+----------------------------------+
//! ```
//!
//! All integers are little endian. The receiver gave `token` to the sender when the endpoints
//! connected. The token identifies the connection of a packet that arrives in a shared receive
//! queue. The token is random, so that no client can impersonate another client. `granted` is the
//! total number of packets that the receiver of this packet may send on this transport, modulo 2³².

/// Maximum length of a packet, in bytes. Every receive buffer has this size.
pub const PACKET_BYTES: usize = 16 << 10;

/// Length of a packet's header, in bytes.
pub(in crate::transport) const HEADER_BYTES: usize = 16;

/// Maximum length of a packet's content, in bytes.
pub(crate) const ROOM_BYTES: usize = PACKET_BYTES - HEADER_BYTES;

/// Payloads of up to this length, in bytes, travel in packets. For longer payloads, a one-sided
/// transfer is faster. A payload of this length, its message header and the packet header fit into
/// one packet.
pub(crate) const EAGER_BYTES: usize = 4 << 10;

/// Number of packets that each side may send before it receives a grant. A side whose peer sends
/// few packets grants no more than this number in advance.
pub(in crate::transport) const FIRST_GRANT: u32 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::transport) struct PacketHeader {
    pub(in crate::transport) token: u64,
    pub(in crate::transport) granted: u32,
}

impl PacketHeader {
    pub(in crate::transport) fn encode(self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..8].copy_from_slice(&self.token.to_le_bytes());
        out[8..12].copy_from_slice(&self.granted.to_le_bytes());
        out
    }

    /// Decodes a packet's header. Returns `None` if the packet is too short.
    pub(in crate::transport) fn decode(packet: &[u8]) -> Option<PacketHeader> {
        let fixed = packet.first_chunk::<HEADER_BYTES>()?;
        let token = u64::from_le_bytes(fixed[..8].try_into().ok()?);
        let granted = u32::from_le_bytes(fixed[8..12].try_into().ok()?);
        Some(PacketHeader { token, granted })
    }
}

/// Packet credits of one direction, counted modulo 2³² since the transport was established.
#[derive(Debug, Clone, Copy)]
pub(in crate::transport) struct PacketCredits {
    pub(in crate::transport) used: u32,
    pub(in crate::transport) granted: u32,
}

/// Maximum number of unused credits that a peer may have granted.
const MOST: u32 = 1 << 16;

impl PacketCredits {
    pub(in crate::transport) fn new() -> PacketCredits {
        PacketCredits { used: 0, granted: FIRST_GRANT }
    }

    pub(in crate::transport) fn left(self) -> u32 {
        self.granted.wrapping_sub(self.used)
    }

    /// Takes one credit. Returns `false` if none is left.
    pub(in crate::transport) fn take(&mut self) -> bool {
        let has = self.left() > 0;
        if has {
            self.used = self.used.wrapping_add(1);
        }
        has
    }

    /// Records the peer's grant. Packets are ordered, so the grant never decreases. Returns `false`
    /// if the grant is invalid.
    pub(in crate::transport) fn on_granted(&mut self, granted: u32) -> bool {
        let sane = granted.wrapping_sub(self.used) <= MOST;
        if sane {
            self.granted = granted;
        }
        sane
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoded_packet_header_is_decoded_and_a_short_packet_is_rejected() {
        let header = PacketHeader { token: 0x0123_4567_89ab_cdef, granted: u32::MAX };
        assert_eq!(PacketHeader::decode(&header.encode()), Some(header));
        assert_eq!(PacketHeader::decode(&header.encode()[..15]), None);
        assert_eq!(PacketHeader::decode(&[]), None);
    }

    #[test]
    fn packet_credits_wrap_around_and_invalid_grants_are_refused() {
        let mut credits = PacketCredits { used: u32::MAX - 1, granted: u32::MAX };
        assert!(credits.take());
        assert!(!credits.take());
        assert!(credits.on_granted(2));
        assert_eq!(credits.left(), 3);
        assert!(!credits.on_granted(1 << 30));
        assert!(!credits.on_granted(u32::MAX - 1), "a grant is never below the used credits");
        assert_eq!(credits.left(), 3);
    }
}
