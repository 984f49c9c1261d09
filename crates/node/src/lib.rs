//! Runs a node: contains its directory, its configuration, the supervisor, and its roles.
//!
//! Other crates do the work of the roles: `osd`, `store` and `proxy`. The command line (crate
//! `outboard`) calls this crate. No code in this crate is on the data path.

#![forbid(unsafe_code)]

pub mod announce;
pub mod audit_file;
pub mod checkup;
pub mod coding;
pub mod config;
pub mod config_file;
pub mod control_port;
pub mod cpus;
pub mod debug;
pub mod debug_socket;
pub mod descriptors;
pub mod dir;
pub mod durable;
pub mod failure;
pub mod keeper;
pub mod keys;
pub mod logging;
pub mod machine_memory;
pub mod making;
pub mod metrics;
pub mod node_keys;
pub mod plan;
pub mod port;
pub mod progress;
pub mod remount;
pub mod report;
pub mod request_side;
pub mod role;
pub mod roles;
pub mod roster;
pub mod state;
pub mod store_address;
pub mod supervise;
pub mod targets;
pub mod units;
pub mod watchdog;
mod witness_file;
