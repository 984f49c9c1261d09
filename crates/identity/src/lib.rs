//! Identities, and how two processes prove theirs to each other.
//!
//! A user, a node or a service is identified by a key. Its name elsewhere is the [`KeyHash`]. There
//! are no passwords and no certificate authorities. An [`Identity`] holds a private key, and a
//! self-signed certificate that carries the public key in a TLS handshake. [`Trust`] says which
//! identity a process proves, and whose proof it accepts. [`Handshake`] performs TLS 1.3 over any
//! way of exchanging bytes, and gives both sides a common [`ProofKey`]. With this key, each side
//! proves later that it took part in the handshake. [`Credentials`] is the file from which a client
//! reads its identity. [`read_secret`] reads a file with a private key, and refuses a file to which
//! other users have access.
//!
//! This crate does no network I/O. The messenger, the host–DPU channel and the control plane use it.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod credentials;
mod error;
pub mod fuzz;
mod handshake;
mod key;
mod proof;
mod provider;
mod secret_file;
mod trust;

pub use credentials::Credentials;
pub use error::IdentityError;
pub use handshake::{Handshake, MAX_HANDSHAKE_BYTES, proven_key, server_name, server_refused};
pub use key::{Identity, KeyHash};
pub use proof::{ProofKey, random_secret};
pub use secret_file::read_secret;
pub use trust::{Caller, MAIN_TENANT, NODE_ADMIN, OnlyProcess, Protocol, Trust, UserDirectory, UserName};
