//! [`Error`]: the reasons why a connection ends early.

use std::io;
use std::time::Duration;

/// The reason why the server ended a connection, or lost it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The socket failed, or the client closed it within a message.
    #[error("the connection to the client failed: {0}")]
    Io(#[from] io::Error),
    /// The client has violated the protocol.
    #[error("the client violated the protocol: {0}")]
    Violation(#[from] NbdViolation),
    /// The client did not complete the negotiation in time.
    #[error("the client did not complete the negotiation within {0:?}")]
    NegotiationTimeout(Duration),
    /// The client asked for an export that does not exist, by an option that permits no error reply.
    #[error("the client asked for the export {0:?}, which does not exist")]
    UnknownExport(String),
    /// The disk was detached while the client used it. Contains the error text of the disk.
    #[error("{0}")]
    Detached(String),
    /// The client did not receive its last replies in time.
    #[error("the client did not receive the last replies within {0:?}")]
    CloseTimeout(Duration),
}

/// A violation of the protocol after which the server cannot interpret the bytes of the client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NbdViolation {
    /// The client set flags that the server did not offer.
    #[error("it set the unknown flags {0:#x}")]
    ClientFlags(u32),
    /// An option does not begin with the magic number of options.
    #[error("an option began with {0:#018x} instead of the magic number")]
    OptionMagic(u64),
    /// The data of an option is too long to skip, or an export name is too long.
    #[error("option {kind} announced {len} bytes of data")]
    OptionTooLong {
        /// Number of the option.
        kind: u32,
        /// Announced length, in bytes.
        len: u32,
    },
    /// An export name that permits no error reply is not valid.
    #[error("its export name is not valid: {0}")]
    ExportName(&'static str),
    /// The client sent too many options.
    #[error("it sent more than {0} options")]
    TooManyOptions(u32),
    /// A request does not begin with the magic number of requests.
    #[error("a request began with {0:#010x} instead of the magic number")]
    RequestMagic(u32),
    /// The data of a request to write is too long to skip.
    #[error("a request to write announced {len} bytes; the maximum is {max}")]
    PayloadTooLong {
        /// Announced length, in bytes.
        len: u32,
        /// Maximum length, in bytes.
        max: u32,
    },
}
