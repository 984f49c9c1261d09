//! Redundancy, measured on a whole node: what pools cost, how fast a lost target is rebuilt and what that costs clients, and where
//! the coding of a write is done. `outboard-redundancy` is its only caller.
//!
//! Each part interleaves what it compares, in several rounds; ceilings are measured in the same rounds. Figures are medians of the
//! rounds, ratios are medians of the rounds' ratios (`evaluation::stats`). `book` keeps them, `watch` says what the node is doing, `plot` draws;
//! `quiet` looks whether others use the machine.

pub mod book;
pub mod coding;
pub mod plot;
pub mod pools;
pub mod quiet;
pub mod rebuild;
pub mod settings;
pub mod watch;
