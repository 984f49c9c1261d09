//! Tokens of endpoints. An event or completion with the token of an earlier attempt to connect
//! concerns connections that were replaced, and must be ignored.

/// Identifies an endpoint of a connection in this process. The token keeps only 24 bits of the
/// attempt, which are enough to distinguish recent attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token {
    /// Number of the host's attachment or of the engine's peer.
    pub(super) owner: u32,
    attempt: u32,
    pub(super) queue: usize,
}

impl Token {
    const ATTEMPTS: u32 = 0xff_ffff;

    pub(super) fn new(owner: u32, attempt: u32, queue: usize) -> Token {
        Token { owner, attempt: attempt & Self::ATTEMPTS, queue }
    }

    /// Whether the endpoint belongs to this attempt to connect.
    pub(super) fn is_of(self, attempt: u32) -> bool {
        self.attempt == attempt & Self::ATTEMPTS
    }

    pub(super) fn encode(self) -> u64 {
        u64::from(self.owner) << 32 | u64::from(self.attempt) << 8 | self.queue as u64
    }

    pub(super) fn decode(token: u64) -> Token {
        Token::new((token >> 32) as u32, (token >> 8) as u32, (token & 0xff) as usize)
    }
}
