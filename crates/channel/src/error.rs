//! Errors of the channel. Each one ends at most the attachment in which it happens.

/// Result of a channel's call.
pub type Result<T, E = ChannelError> = std::result::Result<T, E>;

/// Why an attachment could not be opened, or had to end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The socket failed, or the peer closed it.
    #[error("control socket failed: {0}; the peer has gone or is restarting")]
    Socket(#[from] std::io::Error),
    /// The peer sent something that the protocol does not allow.
    #[error("peer broke the channel's protocol: {0}; its attachment was ended")]
    Protocol(String),
    /// The peer refused the attachment.
    #[error("peer refused the attachment: {0}")]
    Refused(String),
    /// Memory could not be had, or what the peer offered is not acceptable.
    #[error(transparent)]
    Memory(#[from] base::mem::MemError),
    /// libfabric, or the connection that it made, failed.
    #[error(transparent)]
    Fabric(#[from] fabric::FabricError),
    /// An engine was given access to host memory in a form that only another kind of engine takes.
    #[error("engine {engine} cannot use {what}; have the osd and the store use the same kind of engine")]
    WrongMemoryAccess {
        /// The engine.
        engine: String,
        /// What it was given.
        what: &'static str,
    },
    /// A transfer that the engine cannot do: too long, an unknown region, a range outside one.
    #[error("DMA transfer refused: {0}")]
    Transfer(String),
    /// The engine has stopped.
    #[error("DMA engine {0} has stopped; restart the osd")]
    EngineStopped(String),
}

impl ChannelError {
    pub(crate) fn protocol(what: impl Into<String>) -> ChannelError {
        ChannelError::Protocol(what.into())
    }
}
