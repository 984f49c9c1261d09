//! [`StartError`]: the reason why an osd did not start.

use messenger::MessengerError;
use store::StoreError;
use uuid::Uuid;

/// Reason why an osd did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// No targets were given.
    #[error("no targets were given; name at least one")]
    NoTargets,
    /// A target was given twice.
    #[error("target {0} was given twice; name each target once")]
    SameTarget(Uuid),
    /// A target of the node is missing.
    #[error("target {target} of node {node} is missing; start with all targets of the node")]
    MissingTarget {
        /// The target.
        target: Uuid,
        /// The node.
        node: Uuid,
    },
    /// A target belongs to another node, or has lost its content.
    #[error(
        "target {target} does not belong to node {node}, or was formatted again; start with the node's own targets"
    )]
    ForeignTarget {
        /// The target.
        target: Uuid,
        /// The node.
        node: Uuid,
    },
    /// All available targets have an older map than the node's last one.
    #[error(
        "a missing target has a newer map of node {node} than the available targets; bring back one of the targets {missing}, or, if they are lost for good, accept the loss: outboard target forget ID --accept-loss"
    )]
    OutdatedMap {
        /// The node.
        node: Uuid,
        /// The missing targets.
        missing: String,
    },
    /// The witness is lost, and targets that cannot be read may have a newer map.
    #[error(
        "the witness is lost, and targets that cannot be read may have a newer map of node {node}: {unreadable} ({why}); bring one of them back, or, if they are lost for good, accept the loss: outboard target forget ID --accept-loss"
    )]
    UncertainMap {
        /// The node.
        node: Uuid,
        /// The targets.
        unreadable: String,
        /// Why one of them cannot be read.
        why: String,
    },
    /// All targets are available, but they are older copies.
    #[error(
        "all targets have an older map of node {node} than the one that was saved last, so they are older copies; restore newer copies, or accept the loss: outboard target forget ID --accept-loss"
    )]
    OldCopies {
        /// The node.
        node: Uuid,
    },
    /// The witness cannot be stored.
    #[error("{0}; make its file writable, and free some space on its file system")]
    Witness(StoreError),
    /// A target's copy of the node's map cannot be read.
    #[error("the node's map on target {target} is corrupt: {detail}; run fsck")]
    CorruptMap {
        /// The target.
        target: Uuid,
        /// Description of the damage.
        detail: String,
    },
    /// A failure of a target prevents the start.
    #[error("the osd cannot start because of target {target}: {source}")]
    Target {
        /// The target.
        target: Uuid,
        /// Error of the target.
        source: StoreError,
    },
    /// The osd cannot listen on the address.
    #[error("the osd cannot listen for clients: {0}")]
    Listen(#[from] MessengerError),
    /// The operating system refused to start a thread of the osd.
    #[error("cannot start a thread of the osd: {0}; check the limits on processes and files")]
    Os(#[from] std::io::Error),
    /// The osd's thread ended before the osd had started.
    #[error("the osd's thread ended unexpectedly; see the log")]
    Died,
}
