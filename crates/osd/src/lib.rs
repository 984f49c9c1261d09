//! The OSD: the role that serves clients. It runs on the DPU, or on the host as the baseline. The
//! OSD keeps no durable state of its own: the stores keep all of it, and one transaction changes
//! the data and the related state.
//!
//! [`OsdServer::start`] runs an OSD on its own thread. These modules handle a request:
//!
//! - `serve` decodes the request and finds its session.
//! - `gather` pulls a write's data into staging memory and stages the data in the store.
//! - `mutate` waits for the object's `turnstile` and checks the conditions. `draft` computes the
//!   transaction, and the placement group (`pg`) adds the request's result to it. `mutate` replies
//!   once the transaction is durable.
//! - `read` and `list` reply with durable data only.
//! - `audit` compares the recorded sizes of objects with the stored sizes.
//! - `map` names the node's targets and `pools`.
//! - `collect` removes orphans and expired results.
//!
//! One thread owns all state of an OSD, so the state needs no locks. The OSD reaches the store only
//! through [`ObjectStore`](store::ObjectStore), so the store may be in the same process or behind a
//! channel.

#![forbid(unsafe_code)]

mod admin;
mod age;
mod audit;
mod backing;
mod change_map;
mod clock;
mod collect;
mod config;
mod draft;
mod fail;
mod gather;
mod gone;
mod health;
mod ids;
mod inflight;
mod list;
mod map;
mod mutate;
mod object;
mod osd;
mod parts;
mod patience;
mod pg;
mod pool;
mod pools;
mod read;
mod rebuilds;
mod request;
mod scrub;
mod scrubs;
mod serve;
mod server;
mod sessions;
mod space;
mod start_error;
mod status;
mod target;
mod targets;
mod task;
mod timed;
mod times;
mod turnstile;
mod upkeep;
mod written;

pub use array::{CodingConfig, StripesAt};
pub use audit::inspect_object;
pub use clock::WallClock;
pub use config::{OffloadSource, OsdConfig, TargetRetry};
pub use server::OsdServer;
pub use start_error::StartError;
