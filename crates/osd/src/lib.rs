//! The OSD: the request-handling side of a storage node. It runs on the DPU (or on the host, which is the baseline), and
//! keeps nothing of its own: all durable state lives in the stores, written by the same transactions as the data.
//!
//! [`OsdServer::start`] runs one on a thread of its own. Inside, from a request's point of view: `serve` decodes it and finds
//! its session; `gather` pulls a write's data into staging buffers and stages it in the store; `mutate` waits for the
//! object's `turnstile`, checks conditions, has `draft` work out the transaction, lets the placement group (`pg`) add the
//! request's result to it, and answers once it is durable; `read` and `list` answer with durable data only; `audit` compares
//! what is recorded of objects with what is stored. The node's
//! `map` names targets and `pools`; `collect` tidies up.
//!
//! Everything of an OSD lives on one thread, without locks. The store is reached through
//! [`ObjectStore`](store::ObjectStore) only, so it may be in this process or behind a channel.

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

pub use array::{CodingConfig, NewObjects, StripesAt};
pub use audit::inspect_object;
pub use clock::WallClock;
pub use config::{OffloadSource, OsdConfig, TargetRetry};
pub use server::OsdServer;
pub use start_error::StartError;
