//! The osd: the role that serves clients. It runs on the DPU, or on the host as the baseline for
//! benchmarks. The osd keeps no durable state of its own: the stores keep all of it. Each change
//! updates an object's data and all related state in one transaction.
//!
//! An osd consists of [`shards`], each with its own thread and its share of the placement groups
//! (`shard`). The first shard also has the state of the whole osd (`osd`). The shards exchange
//! messages (`mailbox`), but not for requests on single objects. These are the other main modules:
//!
//! - `serve` decodes each request, finds its session and sends the reply.
//! - `gather` pulls a write's data into staging memory and stages the data in the store.
//! - `mutate` waits for a change's turn on the object (`turnstile`) and checks the change's
//!   conditions (`conditions`). `draft` computes the transaction from the latest state (`chain`), and
//!   the placement group (`pg`) adds the request's result to the transaction. `mutate` returns when
//!   the transaction is durable.
//! - `read`, `query` and `list` execute reads, queries and listings. They return only durable data:
//!   a request that has seen a pending change waits for it (`observers`).
//! - `audit` compares the size in each object's record with the size of the object's stored data.
//! - `map` is the durable record of the node's targets, pools and accounts, and its storage.
//!   `change_map` changes the map. `pools` creates and removes pools.
//! - `collect` removes orphans and expired results.
//!
//! One thread owns the state of each shard, so the state needs no locks. The osd reaches the store
//! only through [`ObjectStore`](store::ObjectStore). The store may therefore run in the same process
//! or behind the host–DPU channel.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod account_requests;
mod accounts;
mod admin;
mod age;
mod audit;
mod audit_log;
mod authorize;
mod backing;
mod block_transform;
mod chain;
mod change_map;
mod clients;
mod collect;
mod conditions;
mod config;
mod debug_controls;
mod directory;
mod draft;
mod ended;
mod expectation;
mod fail;
mod gateways;
mod gather;
mod gone;
mod health;
mod ids;
mod inflight;
mod list;
mod list_filter;
mod mailbox;
mod map;
mod mutate;
mod object;
mod observers;
mod osd;
mod parts;
mod patience;
mod pg;
mod pool;
mod pool_table;
mod pools;
mod presence;
mod pull_choice;
mod query;
mod read;
mod rebuilds;
mod request;
mod request_count;
mod scrub;
mod scrubs;
mod seal;
mod serve;
mod server;
mod sessions;
mod shard;
mod share;
mod sole_target;
mod space;
mod start_error;
mod status;
mod target;
mod targets;
mod task;
mod tenant_share;
mod timed;
mod times;
mod turnstile;
mod upkeep;
mod witness;
mod written;

pub use admin::OsdAdministrator;
pub use array::{CodingConfig, StripesAt, Thresholds};
pub use audit::inspect_object;
pub use audit_log::{AuditAt, AuditEvent, AuditKind, AuditSink};
pub use config::{OffloadSource, OsdConfig, TargetRetry, UsageSource};
pub use debug_controls::{DebugAt, DebugControls};
pub use directory::Directory;
pub use gateways::{Gateways, GatewaysAt};
pub use server::{FirstShard, FurtherShard, OsdServer, OsdStarted, ShardResources, shards};
pub use sessions::{SessionOwner, session_id};
pub use start_error::StartError;
pub use witness::{WitnessAt, WitnessStorage};
