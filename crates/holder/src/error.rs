//! The errors of this crate.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::framing::FramingError;
use crate::protocol::{
    CALL_FDS_MAX, CALLS_MAX, DEVICE_NAME_BYTES_MAX, DROP_KEYS_MAX, OUTBOX_MAX, REPLY_BYTES_MAX,
    STATE_BYTES_MAX, Versions,
};

/// The reason why the holder refuses a call. A refused call has changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum HolderRefusal {
    /// The holder has no device of this name.
    #[error("the holder has no device `{0}`; add it first")]
    UnknownDevice(String),
    /// The name of the device is in use.
    #[error("the holder has a device `{0}` already; remove it first, or use another name")]
    DeviceExists(String),
    /// The name of the device is not valid.
    #[error(
        "`{0}` is not a name of a device; use 1 to {DEVICE_NAME_BYTES_MAX} bytes without control characters"
    )]
    BadName(String),
    /// The number of devices has reached its limit.
    #[error(
        "the holder has {max} devices, which is its limit; remove devices, or raise the limit `devices_max`"
    )]
    TooManyDevices {
        /// Maximum number of devices.
        max: usize,
    },
    /// The process could run out of descriptors with a further device.
    #[error(
        "a further device may need {needed} descriptors, but only {left} are left for devices; raise the limit of \
         open files (`ulimit -n`), or lower the limit `kept_fds_max`"
    )]
    TooFewDescriptors {
        /// Descriptors that a device may need.
        needed: u64,
        /// Descriptors of the process that no device has reserved.
        left: u64,
    },
    /// The framing cannot be used.
    #[error("the framing cannot be used: {0}")]
    Framing(#[from] FramingError),
    /// The socket of the device cannot be created.
    #[error(transparent)]
    Socket(#[from] SocketFileError),
    /// The front end's connection has ended. The call came too late and has no effect.
    #[error("connection {connection} of device `{device}` has ended; forget its state")]
    ConnectionEnded {
        /// The device.
        device: String,
        /// Number of the connection.
        connection: u64,
    },
    /// The message is not the pending message that this gateway received last.
    #[error(
        "message {number} of device `{device}` is not pending for this gateway; answer each message once, after it \
         was received"
    )]
    NotPending {
        /// The device.
        device: String,
        /// Number of the message.
        number: u64,
    },
    /// The state is too long.
    #[error("the state of a device may have up to {STATE_BYTES_MAX} bytes, not {0}")]
    StateTooLong(usize),
    /// The device would keep too many descriptors.
    #[error(
        "the device would keep {count} descriptors, but {max} are its limit; drop some, or raise `kept_fds_max`"
    )]
    TooManyKeptFds {
        /// Number of descriptors that the call would leave.
        count: usize,
        /// Maximum number of descriptors.
        max: usize,
    },
    /// A call has too many descriptors.
    #[error("a call may have up to {CALL_FDS_MAX} descriptors, not {0}; use several calls")]
    TooManyCallFds(usize),
    /// A call drops too many keys.
    #[error("a call may drop up to {DROP_KEYS_MAX} keys, not {0}; use several calls")]
    TooManyDropKeys(usize),
    /// A message to the front end is too long.
    #[error("a message to a front end may have 1 to {REPLY_BYTES_MAX} bytes, not {0}")]
    BadReplyLength(usize),
    /// A message to the front end has more descriptors than the device's framing permits.
    #[error("a message to this front end may have up to {max} descriptors, not {count}")]
    TooManyReplyFds {
        /// Number of descriptors.
        count: usize,
        /// Maximum number of descriptors.
        max: u32,
    },
    /// The front end does not read its messages.
    #[error(
        "{OUTBOX_MAX} messages wait for the front end of device `{0}`, which does not read; try again later"
    )]
    FrontEndBusy(String),
}

/// The reason why a socket cannot be created at a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum SocketFileError {
    /// The path is relative, does not name a file, is too long, or is not valid UTF-8.
    #[error(
        "`{0}` cannot be the path of a socket; use an absolute path in UTF-8 whose last part has up to 64 bytes"
    )]
    BadPath(String),
    /// A process listens at the path.
    #[error("a process listens at `{0}`; stop it, or use another path")]
    InUse(String),
    /// The path names a file that is not a socket.
    #[error("`{0}` exists and is not a socket; move it away, or use another path")]
    NotASocket(String),
    /// The operating system refused.
    #[error(
        "a socket cannot be created at `{path}`: {reason}; check that its directory exists and is writable"
    )]
    Failed {
        /// The path.
        path: String,
        /// The reason.
        reason: String,
    },
}

/// The reason why a holder cannot start, or had to end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HolderError {
    /// The directory of the control socket does not exist and cannot be created.
    #[error("the directory `{}` of the holder's control socket cannot be used: {source}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// Other users have access to the directory of the control socket.
    #[error(
        "other users have access to the directory `{}` of the holder's control socket (mode {mode:03o}, uid {owner}); \
         use a directory of this user with mode 700", path.display()
    )]
    Exposed {
        /// The directory.
        path: PathBuf,
        /// Permissions of the directory.
        mode: u32,
        /// Uid of the directory's owner.
        owner: u32,
    },
    /// The control socket cannot be created.
    #[error("the holder's control socket: {0}")]
    Socket(#[from] SocketFileError),
}

/// The reason why a gateway cannot use the holder.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No holder answers at the path.
    #[error("no holder answers at `{}`: {reason}; start it", path.display())]
    NotRunning {
        /// Path of the control socket.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A process of another user listens at the path.
    #[error("the process that listens at `{}` belongs to another user (uid {uid}); stop it", path.display())]
    OtherUser {
        /// Path of the control socket.
        path: PathBuf,
        /// Effective uid of the process.
        uid: u32,
    },
    /// Holder and gateway have no version of the protocol in common.
    #[error(
        "the holder uses versions {holder} of the protocol, this gateway versions {gateway}; install a gateway that \
         supports the holder's version, or restart the holder, which disconnects all front ends"
    )]
    OtherVersion {
        /// The versions of the holder.
        holder: Versions,
        /// The versions of this gateway.
        gateway: Versions,
    },
    /// The holder refuses the call.
    #[error(transparent)]
    Refused(#[from] HolderRefusal),
    /// The connection to the holder ended. The outcome of unanswered calls is unknown.
    #[error("the connection to the holder ended: {0}; connect again, and continue from the inventory")]
    Lost(String),
    /// Another gateway has connected to the holder.
    #[error("another gateway has connected to the holder and replaces this gateway; stop this gateway")]
    Replaced,
    /// The holder sent data that violates the protocol.
    #[error("the holder violates the protocol: {0}; connect again")]
    Protocol(String),
    /// Too many calls wait for their answers.
    #[error("{CALLS_MAX} calls wait for answers of the holder; wait for some of them first")]
    TooManyCalls,
}
