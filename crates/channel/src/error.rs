//! Errors of the channel. An error ends at most the attachment in which it occurs.

/// Result of a function of this crate.
pub type Result<T, E = ChannelError> = std::result::Result<T, E>;

/// Why an attachment could not be opened, or why it ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The socket failed, or the peer closed it.
    #[error("control socket failed: {0}; the peer has stopped or is restarting")]
    Socket(#[from] std::io::Error),
    /// The peer violated the protocol.
    #[error("peer broke the channel's protocol: {0}; its attachment was ended")]
    Protocol(String),
    /// The peer or this side refused the attachment, or a part of it such as a memory range.
    #[error("attachment refused: {0}")]
    Refused(String),
    /// The osd has claimed a seat that does not exist.
    #[error(
        "seat {seat} of {seats} does not exist; an osd has 1 to {} seats, counted from 0",
        crate::MAX_SEATS
    )]
    NoSuchSeat {
        /// The number of the claimed seat.
        seat: u16,
        /// The number of seats that the osd claims to have.
        seats: u16,
    },
    /// Memory could not be allocated, or the memory that the peer sent is unacceptable.
    #[error(transparent)]
    Memory(#[from] base::mem::MemError),
    /// libfabric or one of its connections failed.
    #[error(transparent)]
    Fabric(#[from] fabric::FabricError),
    /// The engine does not support this form of access to host memory.
    #[error("engine {engine} cannot use {what}; configure the same kind of engine for osd and store")]
    WrongMemoryAccess {
        /// The engine's name.
        engine: String,
        /// The form of access that the caller has passed to the engine.
        what: &'static str,
    },
    /// The transfer is invalid: it is too long, in an unknown region, or outside its region.
    #[error("DMA transfer refused: {0}")]
    Transfer(String),
    /// The engine has stopped.
    #[error("DMA engine {0} has stopped; restart the process that runs it")]
    EngineStopped(String),
}

impl ChannelError {
    pub(crate) fn protocol(what: impl Into<String>) -> ChannelError {
        ChannelError::Protocol(what.into())
    }
}
