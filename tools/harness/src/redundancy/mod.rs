//! Measures redundancy on a whole node: the cost of redundancy schemes for large objects and for
//! small changes, the speed of rebuilds and their effect on clients, and the effect of the coding
//! place on writes and on the host.
//! `outboard-redundancy` is the only caller.
//!
//! Each part interleaves the runs that it compares, in several rounds, and measures ceilings in the
//! same rounds. Values are medians of the rounds, and ratios are medians of the ratios of the
//! rounds (`evaluation::stats`, `rounds`). `watch` reads the state of the node.

pub mod blocks;
pub mod coding;
pub mod pools;
pub mod rebuild;
pub mod scheme;
pub mod settings;
pub mod watch;
