//! The errors of this crate.

use std::path::PathBuf;

use crate::KeyHash;

/// The reason why a proof, a key or a credential file is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// The text is not a key hash.
    #[error("`{0}` is not a key hash; a key hash has 64 hexadecimal digits")]
    BadKeyHash(String),
    /// The private key cannot be used.
    #[error("the private key cannot be used: {0}; use an Ed25519 or P-256 key in PKCS #8 PEM form")]
    BadKey(String),
    /// The server proved another key than expected.
    #[error(
        "the server has the key {found}, but {expected} is expected: it is another node, or an attacker; check the \
         address, or use the credential file of this node"
    )]
    OtherServer {
        /// The key of the expected server.
        expected: KeyHash,
        /// The key that the server proved.
        found: KeyHash,
    },
    /// The handshake failed.
    #[error("the peer could not be authenticated: {0}")]
    Handshake(String),
    /// The peer sent more bytes than a handshake needs.
    #[error("the peer's handshake exceeds {limit} bytes")]
    HandshakeTooLong {
        /// The limit, in bytes.
        limit: usize,
    },
    /// This side has no key for the role of client or of server.
    #[error("this process may not act as {0} of this protocol")]
    NoRole(&'static str),
    /// Other users have access to a file with a private key.
    #[error(
        "{} contains a private key, but other users have access to it (mode {mode:03o}); run `chmod 600 {}`, and replace \
         the key if others may have read it", path.display(), path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Permissions of the file.
        mode: u32,
    },
    /// A file with a private key belongs to another user, who can read and replace the key.
    #[error(
        "{} contains a private key, but belongs to another user (uid {owner}, not {reader}); run the command as that \
         user, or make a copy with `install -m 600`, and name the copy", path.display()
    )]
    OtherOwner {
        /// The file.
        path: PathBuf,
        /// Uid of the file's owner.
        owner: u32,
        /// Effective uid of this process.
        reader: u32,
    },
    /// A file with a private key cannot be read or written.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason, and the remedy.
        reason: String,
    },
}
