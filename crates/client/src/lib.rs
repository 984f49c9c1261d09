//! The client of an Outboard node: objects in pools.
//!
//! A [`Client`] keeps one session with a node and reconnects by itself; requests that were under way are repeated
//! and never take effect twice, whichever of the two processes on the other side was restarted meanwhile. Objects
//! larger than [`Options::stripe_threshold`] are striped over several store objects without the caller noticing.
//! Everything is asynchronous and runs on the caller's tokio runtime; nothing here knows of drives or of the DPU.
//!
//! ```no_run
//! # async fn example() -> client::Result<()> {
//! use client::{Client, Options};
//!
//! let client = Client::connect("127.0.0.1:7700", Options::default()).await?;
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
//! What users may rely on is written down in `docs/semantics.md`.

#![forbid(unsafe_code)]

mod client;
mod compound;
pub mod conformance;
mod download;
pub mod engine;
mod error;
mod list;
mod object;
mod options;
mod pool;
mod requests;
mod upload;

pub use client::Client;
pub use compound::Compound;
pub use download::RangeReader;
pub use error::{Error, Result};
pub use list::Listing;
pub use object::{Description, Object, OmapPage, PutOptions};
pub use options::Options;
pub use pool::Pool;
pub use wire::{
    CodingHealth, CodingMode, CodingOffload, CodingPlaceStatus, CodingSent, CodingStatus, ConnectionStatus,
    Error as NodeError, Manifest, Mutated, NameError, NodeStatus, ObjectName, OffloadState, OffloadStatus,
    PhaseTimes, Placement, PoolHealth, PoolInfo, PoolName, RebuildStatus, Redundancy, RequestTimes,
    ScrubStatus, Space, StatAnswer as Stat, TargetState, TargetStatus,
};
