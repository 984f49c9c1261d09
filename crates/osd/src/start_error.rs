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
    /// A target belongs to another node.
    #[error("target {target} does not belong to node {node}; start with the node's own targets")]
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
        "the witness is lost, and targets that cannot be read may have a newer map of node {node}: {unreadable} ({why}); bring them back, and accept the loss of those that are lost for good: outboard target forget ID --accept-loss"
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
    /// No target has a map, although the node has had one.
    #[error(
        "no target has the map of node {node}, so all of them were formatted again or are older copies; restore newer copies of the targets, or create a new node in another directory"
    )]
    NoMap {
        /// The node.
        node: Uuid,
    },
    /// The targets belong to another node.
    #[error("the targets belong to node {found}, but this is node {node}; start with the node's own targets")]
    OtherNode {
        /// The node.
        node: Uuid,
        /// The node of the targets.
        found: Uuid,
    },
    /// The witness cannot be read, but may be intact.
    #[error(
        "the witness cannot be read: {0}; make its file readable, or, if that is not possible, remove the file: a lost witness is replaced, but placement groups with missing targets then wait for them"
    )]
    UnreadableWitness(#[source] std::io::Error),
    /// The witness cannot be stored.
    #[error("{0}; make its file writable, and free some space on its file system")]
    Witness(StoreError),
    /// The DPU has not written the copy of the node's map on a target.
    #[error(
        "the node's map on target {target} was not written by this node's DPU: the storage host has altered it or put back a copy from an earlier version, or the key in keys/dpu was replaced; restore the target, or restore keys/dpu from its backup; if the key is lost for good and you trust the storage host, start the node once with OUTBOARD_OSD_ACCEPT_ALTERED_MAP=true, and check the users afterwards (`outboard user ls`)"
    )]
    AlteredMap {
        /// The target.
        target: Uuid,
    },
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
    /// The listener's address has no port, which clients need.
    #[error("the osd listens at {0}, which has no port; listen at an address of the form host:port")]
    NoPort(String),
    /// The port of a shard would exceed the greatest port number.
    #[error(
        "shard {offset} of the osd needs port {first} + {offset}, which is above 65535; listen to a smaller port, or \
         use fewer shards (osd.shards)"
    )]
    PortsEnd {
        /// Port of the first shard.
        first: u16,
        /// Number of the shard.
        offset: u16,
    },
    /// The operating system refused to start a thread of the osd.
    #[error("cannot start a thread of the osd: {0}; check the limits on processes and files")]
    Os(#[from] std::io::Error),
    /// The osd's thread ended before the osd had started.
    #[error("the osd's thread ended unexpectedly; see the log")]
    Died,
}
