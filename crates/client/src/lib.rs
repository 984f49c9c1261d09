//! The client library of an Outboard node: access to objects in pools.
//!
//! A [`Client`] keeps one session with a node. If the connection is lost, the client reconnects by
//! itself and repeats unanswered requests. A change never takes effect twice, even if the osd or
//! the store restarts meanwhile. Objects larger than [`Options::stripe_threshold`] are stored in
//! several parts, which callers do not see. All operations are asynchronous and run on the caller's
//! tokio runtime. This crate contains no code about drives or the DPU.
//!
//! ```no_run
//! # async fn example() -> client::Result<()> {
//! use client::{Client, Options};
//!
//! let client = Client::connect("127.0.0.1:7400", Options::default()).await?;
//! client.create_pool("photos").await?;
//! let pool = client.pool("photos")?;
//! let beach = pool.object("summer/beach.jpg")?;
//! beach.put("…").await?;
//! assert_eq!(beach.get().await?, "…");
//!
//! let mut names = pool.list("summer/");
//! while let Some(name) = names.next().await? {
//!     println!("{name}");
//! }
//! # Ok(()) }
//! ```
//!
//! `docs/semantics.md` states the promises on which users may rely.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod client;
mod compound;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod download;
pub mod engine;
mod error;
mod group_merge;
mod handle;
mod list;
mod object;
mod options;
mod pool;
mod requests;
mod upload;

pub use client::Client;
pub use compound::{Compound, PutOptions};
pub use download::RangeReader;
pub use error::{Error, Result, Waited};
pub use list::Listing;
pub use object::{Description, Object, OmapPage};
pub use options::{ControlWay, Options};
pub use pool::Pool;
pub use wire::{
    CodingMode, CodingOffload, CodingPlaceStatus, CodingSent, CodingStatus, ConnectionStatus, DpuDevices,
    Error as NodeError, HealthStatus, Manifest, Mutated, NameError, NodeStatus, ObjectName, OffloadState,
    OffloadStatus, PathStatus, PhaseTimes, Placement, PoolHealth, PoolInfo, PoolLoss, PoolName,
    RebuildStatus, Redundancy, RequestTimes, Role, RoleUsage, ScrubStatus, ShardStatus, ShortageCounts,
    SkippedGroups, Space, StagingStatus, StatAnswer, TargetState, TargetStatus, ThreadTimes,
};
