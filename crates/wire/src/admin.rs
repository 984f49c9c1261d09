//! Administrative requests and their replies.

use std::fmt;

use base::fault::{Armed, Fault};
use bytes::Bytes;
use serde::Serialize;
use uuid::Uuid;

use crate::{
    AccessGrant, AccountRequest, CodingMode, DiskReply, DiskRequest, NodeStatus, PoolInfo, Redundancy, Role,
    RoleUsage, ScrubStatus, SessionId, TenantInfo, UserInfo,
};

/// A request of an operator, which administers the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdminRequest {
    /// Creates a pool.
    PoolCreate {
        /// Name of the pool.
        name: Bytes,
        /// Number of placement groups, a power of two; 0 for the default.
        pg_count: u32,
        /// Redundancy scheme of the pool.
        redundancy: Redundancy,
        /// The pool's tenant; `None` for the caller's tenant.
        tenant: Option<String>,
    },
    /// Lists the pools of a tenant to which the caller has a right.
    PoolList {
        /// The tenant; `None` for the caller's tenant.
        tenant: Option<String>,
    },
    /// Removes a pool.
    PoolRemove {
        /// Name of the pool.
        name: Bytes,
        /// Whether to remove a pool that contains objects.
        force: bool,
        /// The pool's tenant; `None` for the caller's tenant.
        tenant: Option<String>,
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
        /// The pool's tenant; `None` for the caller's tenant.
        tenant: Option<String>,
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
    /// Lists or changes tenants and users.
    Accounts(AccountRequest),
    /// Asks for a capability of the caller.
    IssueCapability {
        /// The rights of the capability; `None` for all rights of the caller.
        grants: Option<Vec<AccessGrant>>,
        /// Hash of the holder's key; `None` for the caller's key.
        key: Option<[u8; 32]>,
        /// Time for which the capability is valid, in seconds; 0 for the maximum.
        lifetime_s: u32,
    },
    /// Asks who the caller is.
    WhoAmI,
    /// Lists the open sessions.
    ListSessions,
    /// Ends a session: its connections close, and it cannot be resumed. The client may open another one.
    KillSession(SessionId),
    /// Asks for the last entries of the audit log.
    Audit {
        /// Maximum number of entries.
        limit: u32,
    },
    /// Arms a fault in the osd's process.
    ArmFault(Fault),
    /// Lists the armed faults of the osd's process.
    ListFaults,
    /// Disarms all faults of the osd's process. The reply lists them.
    ClearFaults,
    /// Sets how the osd uses the channel, until its next start.
    TuneChannel(TuningChange),
    /// Manages virtual disks. A gateway of the caller's tenant executes the request.
    Disk(DiskRequest),
    /// Begins to serve as a gateway of the caller's tenant. A repetition checks whether the gateway may
    /// continue.
    ServeGateway {
        /// Name of the gateway.
        name: String,
    },
}

/// How the osd uses the channel to its store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelTuning {
    /// Whether the segments of a request are received, moved and written concurrently.
    pub pipeline: bool,
    /// Number of host-memory windows that stay registered for DMA. With 0, each request registers
    /// its own window.
    pub region_cache: u64,
    /// Maximum length of a DMA transfer, in bytes; the engine's own limit also applies.
    pub max_transfer: u64,
    /// Number of DMA queues in use. With 1, short requests wait for long requests.
    pub dma_queues: u64,
    /// How long the osd's side polls for completions before it sleeps, in microseconds.
    pub poll_us: u64,
}

/// Changes of the configured [`ChannelTuning`]. A field without a value means the configured value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TuningChange {
    /// See [`ChannelTuning::pipeline`].
    pub pipeline: Option<bool>,
    /// See [`ChannelTuning::region_cache`].
    pub region_cache: Option<u64>,
    /// See [`ChannelTuning::max_transfer`].
    pub max_transfer: Option<u64>,
    /// See [`ChannelTuning::dma_queues`].
    pub dma_queues: Option<u64>,
    /// See [`ChannelTuning::poll_us`].
    pub poll_us: Option<u64>,
}

impl TuningChange {
    /// Returns the configured tuning with the changes.
    #[must_use]
    pub fn applied_to(self, configured: ChannelTuning) -> ChannelTuning {
        ChannelTuning {
            pipeline: self.pipeline.unwrap_or(configured.pipeline),
            region_cache: self.region_cache.unwrap_or(configured.region_cache),
            max_transfer: self.max_transfer.unwrap_or(configured.max_transfer),
            dma_queues: self.dma_queues.unwrap_or(configured.dma_queues),
            poll_us: self.poll_us.unwrap_or(configured.poll_us),
        }
    }
}

impl fmt::Display for TuningChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TuningChange { pipeline, region_cache, max_transfer, dma_queues, poll_us } = *self;
        let changes = [
            pipeline.map(|on| format!("pipeline={on}")),
            region_cache.map(|windows| format!("region_cache={windows}")),
            max_transfer.map(|bytes| format!("max_transfer={bytes}")),
            dma_queues.map(|queues| format!("dma_queues={queues}")),
            poll_us.map(|us| format!("poll_us={us}")),
        ];
        let changes: Vec<String> = changes.into_iter().flatten().collect();
        if changes.is_empty() { f.write_str("as configured") } else { f.write_str(&changes.join(", ")) }
    }
}

/// Reply to an [`AdminRequest`].
#[derive(Debug, Clone, PartialEq, Eq)]
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
    /// The tenants, ordered by name.
    Tenants(Vec<TenantInfo>),
    /// The users, ordered by name.
    Users(Vec<UserInfo>),
    /// A capability.
    Capability(Bytes),
    /// The caller.
    Me(Box<UserInfo>),
    /// The open sessions, ordered by id.
    Sessions(Vec<SessionInfo>),
    /// Entries of the audit log, the oldest first: objects of JSON.
    Audit(Vec<String>),
    /// The faults that are armed, or were armed until now.
    Faults {
        /// Role of the process: `Osd` or `Node`.
        role: Role,
        /// The faults, in the order in which they were armed.
        armed: Vec<Armed>,
    },
    /// The new tuning of the channel.
    Tuned(ChannelTuning),
    /// The answer of a gateway.
    Disk(DiskReply),
    /// Number of the tenant that the gateway serves.
    Gateway(u32),
}

/// An open session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionInfo {
    /// Id of the session.
    pub id: SessionId,
    /// Name of the user: `TENANT/USER`.
    pub user: String,
    /// Address of the client.
    pub peer: String,
    /// Time at which the session was opened, in milliseconds since 1970. After a restart of the osd, the
    /// time at which it was resumed.
    pub opened_ms: u64,
    /// Number of connections; 0 if the client is disconnected.
    pub connections: u32,
}

/// What a pool would lose with a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
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
