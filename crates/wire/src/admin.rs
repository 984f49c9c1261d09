//! Administrative requests and their answers.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{CodingMode, NodeStatus, PoolInfo, Redundancy, ScrubStatus};

/// A request of an operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum AdminRequest {
    /// Creates a pool.
    PoolCreate {
        /// Its name.
        name: Bytes,
        /// Number of placement groups, a power of two; 0 for the default.
        pg_count: u32,
        /// How its objects are kept from being lost with a target.
        redundancy: Redundancy,
    },
    /// Lists the pools.
    PoolList,
    /// Removes a pool.
    PoolRemove {
        /// Its name.
        name: Bytes,
        /// Whether to remove the objects in it.
        force: bool,
    },
    /// Takes a target out, so that placement groups with redundancy do without it; or in again.
    TargetSetOut {
        /// Its number.
        index: u32,
        /// Out or in.
        out: bool,
    },
    /// Gives a target's number to another one, which the node has from its next start on.
    TargetReplace {
        /// The number.
        index: u32,
        /// The new target.
        uuid: Uuid,
    },
    /// How a pool's scrub stands.
    Scrub {
        /// The pool.
        pool: Bytes,
        /// Begins one if none is under way.
        start: bool,
        /// The one that begins gives objects whose data ends early the size that is recorded of them.
        repair: bool,
    },
    /// Sets how many bytes a second rebuilds and scrubs may move; 0 for no limit.
    SetRebuildRate(u64),
    /// Sets where parity is computed.
    SetCodingMode(CodingMode),
    /// The node's state.
    Status,
    /// Looks for orphaned parts now, and removes them.
    CollectOrphans {
        /// Only parts that are at least that old, in milliseconds.
        older_than_ms: u64,
    },
}

/// The answer to an [`AdminRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum AdminReply {
    /// The request was carried out and has no result.
    Done,
    /// The pools, ordered by name.
    Pools(Vec<PoolInfo>),
    /// The state of the node.
    Status(Box<NodeStatus>),
    /// The progress of a scrub.
    Scrub(Box<ScrubStatus>),
    /// Number of orphaned parts that were removed.
    Collected(u64),
}
