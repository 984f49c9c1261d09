//! Administrative requests and their replies.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{CodingMode, NodeStatus, PoolInfo, Redundancy, RoleUsage, ScrubStatus};

/// A request of an operator, which administers the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum AdminRequest {
    /// Creates a pool.
    PoolCreate {
        /// Name of the pool.
        name: Bytes,
        /// Number of placement groups, a power of two; 0 for the default.
        pg_count: u32,
        /// Redundancy scheme of the pool.
        redundancy: Redundancy,
    },
    /// Lists the pools.
    PoolList,
    /// Removes a pool.
    PoolRemove {
        /// Name of the pool.
        name: Bytes,
        /// Whether to remove a pool that contains objects.
        force: bool,
    },
    /// Takes a target out of use, or back into use. Placement groups with redundancy continue
    /// without a target that is out.
    TargetSetOut {
        /// Number of the target.
        index: u32,
        /// `true` for out of use, `false` for back into use.
        out: bool,
    },
    /// Replaces a target: gives the target's number to a new target. The node uses the new target
    /// from its next start on.
    TargetReplace {
        /// Number of the target.
        index: u32,
        /// Id of the new target.
        uuid: Uuid,
    },
    /// Queries the progress of a pool's scrub, and optionally starts one.
    Scrub {
        /// Name of the pool.
        pool: Bytes,
        /// Whether to start a scrub if none is running.
        start: bool,
        /// Whether the new scrub repairs objects whose data is shorter than the recorded size.
        repair: bool,
    },
    /// Sets the maximum rate of rebuilds and scrubs, in bytes per second; 0 for no limit.
    SetRebuildRate(u64),
    /// Sets the coding mode, which decides where parity is computed.
    SetCodingMode(CodingMode),
    /// Queries the node's status.
    Status,
    /// Finds and removes orphans now: parts of uploads that no head object refers to.
    CollectOrphans {
        /// Minimum age of the parts to remove, in milliseconds.
        older_than_ms: u64,
    },
    /// Accepts the loss of what only this target has. The reply states the loss.
    TargetForget {
        /// Number of the target.
        index: u32,
        /// `false` to only state the loss.
        accept_loss: bool,
    },
    /// Asks how much the osd and the store use of their machines.
    Usage,
}

/// Reply to an [`AdminRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum AdminReply {
    /// The request was executed and has no result.
    Done,
    /// The pools, ordered by name.
    Pools(Vec<PoolInfo>),
    /// The node's status.
    Status(Box<NodeStatus>),
    /// The progress of a scrub.
    Scrub(Box<ScrubStatus>),
    /// Number of orphans removed.
    Collected(u64),
    /// What would be lost with a target, for each pool that waits for it.
    Loss(Vec<PoolLoss>),
    /// The use of the node's processes. A store that does not answer in time is missing.
    Usage(Vec<RoleUsage>),
}

/// What a pool would lose with a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolLoss {
    /// Name of the pool.
    pub pool: String,
    /// Redundancy scheme of the pool.
    pub redundancy: Redundancy,
    /// Number of the pool's placement groups.
    pub groups: u32,
    /// Placement groups that wait for the target. A pool without redundancy loses all objects of
    /// these groups, and other pools lose the changes that only the target has.
    pub waiting: u32,
    /// Those of these placement groups of which too few available targets have objects. If all targets for
    /// which they wait are lost, they lose all objects.
    pub emptied: u32,
}
