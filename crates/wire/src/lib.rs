//! The object protocol between a client and an osd.
//!
//! This crate defines object names, the mapping of names to targets, requests, replies, errors, and
//! the encoding of requests and replies. It contains only data types and pure functions, and does
//! no I/O. A decoder does not panic on any input, and allocates memory only in proportion to the
//! length of the input. The messenger carries encoded requests and replies in message headers; see
//! `docs/object-protocol.md`.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod accounts;
mod admin;
mod bulk;
mod codec;
mod coding;
mod disks;
mod error;
pub mod limits;
mod name;
pub mod placement;
mod redundancy;
mod reply;
mod request;
mod rights;
mod session;
mod states;
mod status;
mod usage;

pub use accounts::{AccountName, AccountRequest, TenantInfo, UserInfo, check_account};
pub use admin::{AdminReply, AdminRequest, ChannelTuning, PoolLoss, SessionInfo, TuningChange};
pub use bulk::{BulkDescriptor, BulkDirection, BulkOwner, BulkSegment, MemoryKind, RemoteMemory};
pub use codec::{
    DecodeError, VERSION, VERSION_EXTENTS, VERSION_OLDEST, VERSION_OWNERS, VERSION_STRANDS, decode_body,
    decode_head, decode_reply, encode_reply, encode_request,
};
pub use coding::{CodingMode, CodingModeError, CodingRatio};
pub use disks::{DiskCommand, DiskInfo, DiskReply, DiskRequest, DiskSpace, FrontEnd, SnapshotInfo};
pub use error::{AdministratorOf, Error, Result};
pub use name::{NameError, ObjectName, PoolName, WireName, is_system_namespace};
pub use redundancy::{DEFAULT_STRIPE_UNIT, MAX_COPIES, MAX_STRIPE, Redundancy, default_stripe_unit};
pub use reply::{Listed, Mutated, ObjectReply, QueryAnswer, Reply, ReplyBody, SkippedGroups, StatAnswer};
pub use request::{
    Condition, Data, List, Manifest, Mutate, Mutation, ObjectRequest, OpBytes, PartId, Query, QueryOp, Read,
    ReadFirst, RequestBody, RequestHead,
};
pub use rights::{AccessGrant, RightsError, Scope, Verb, Verbs, Within};
pub use session::{SessionId, UploadId};
pub use states::{CodingOffload, OffloadState, Placement};
pub use status::{
    CodingPlaceStatus, CodingSent, CodingStatus, ConnectionStatus, DpuDevices, HealthStatus, NodeStatus,
    OffloadStatus, PathStatus, PhaseTimes, PoolHealth, PoolInfo, RebuildStatus, RequestTimes, ScrubStatus,
    ShardStatus, ShortageCounts, Space, StagingStatus, TargetState, TargetStatus, ThreadTimes,
};
pub use usage::{Role, RoleUsage};
