//! [`StartError`]: why an OSD did not start.

use messenger::MessengerError;
use store::StoreError;
use uuid::Uuid;

/// Why an OSD did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// There is nothing to store on.
    #[error("no targets were given; name at least one")]
    NoTargets,
    /// A target was given twice.
    #[error("target {0} was given twice; name each once")]
    SameTarget(Uuid),
    /// A target of the node is not there.
    #[error("target {target} of node {node} is missing; start with all targets of the node")]
    MissingTarget {
        /// The target.
        target: Uuid,
        /// The node.
        node: Uuid,
    },
    /// A target is not of this node, or has lost what it had.
    #[error(
        "target {target} does not belong to node {node}, or was made anew; start with the node's own targets"
    )]
    ForeignTarget {
        /// The target.
        target: Uuid,
        /// The node.
        node: Uuid,
    },
    /// A target's copy of the node's map cannot be read.
    #[error("the node's map on target {target} is corrupt: {detail}; run fsck")]
    CorruptMap {
        /// The target.
        target: Uuid,
        /// What does not fit.
        detail: String,
    },
    /// A target failed.
    #[error("target {target}: {source}")]
    Target {
        /// The target.
        target: Uuid,
        /// Its error.
        source: StoreError,
    },
    /// The address cannot be listened at.
    #[error("cannot listen: {0}")]
    Listen(#[from] MessengerError),
    /// The operating system refused.
    #[error("cannot start the OSD's thread: {0}; check the limits on processes and files")]
    Os(#[from] std::io::Error),
    /// The OSD's thread ended before it had started.
    #[error("the OSD's thread ended unexpectedly; see the log")]
    Died,
}
