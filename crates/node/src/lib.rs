//! What runs a node: its directory and configuration, the supervisor, and what all roles have in common.
//!
//! The roles' own work is in their crates; the command line calls what is here. Nothing here is on the data path.

#![forbid(unsafe_code)]

pub mod announce;
pub mod checkup;
pub mod coding;
pub mod config;
pub mod config_file;
pub mod cpus;
pub mod debug;
pub mod descriptors;
pub mod dir;
pub mod failure;
pub mod keeper;
pub mod keys;
pub mod logging;
pub mod making;
pub mod metrics;
pub mod plan;
pub mod port;
pub mod progress;
pub mod remount;
pub mod report;
pub mod request_side;
pub mod role;
pub mod state;
pub mod store_address;
pub mod supervise;
pub mod targets;
pub mod units;
pub mod watchdog;
