//! Capabilities: signed statements of what a user may do on a node.
//!
//! The control plane issues a capability to a user ([`CapabilityKey::sign`]). The client presents it
//! when it opens a session. The osd verifies it without asking anyone
//! ([`CapabilityKey::verify`]), and compiles it into [`Rights`], which the osd consults for each
//! request.
//!
//! A capability is a CBOR Web Token (RFC 8392) in a `COSE_Sign1` (RFC 9052) with an Ed25519 signature.
//! It names the key of its holder (`cnf`, RFC 8747), so it is useless to others: the osd compares this
//! key with the key that the client has proved. `docs/capability.md` describes the claims.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod claims;
mod rights;
mod signing;

pub use claims::{ClaimedGrant, Claims};
pub use rights::{Resource, Rights};
pub use signing::{CAPABILITY_BYTES_MAX, CapabilityError, CapabilityKey, LIFETIME_MAX};
