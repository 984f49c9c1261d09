//! The common parts of the demo, the benchmark and the report. They drive a node through the
//! `outboard` program as a user would, measure the machine's ceilings (drive, loopback TCP,
//! memory), and print tables. `evaluation` is the report, `redundancy` measures pools with
//! redundancy, `scale` measures many objects, and `compare` compares an old binary with a new one.
//! `rounds` has the common parts of `redundancy` and `scale`.
//!
//! These programs link no other crate of the project. Their results are therefore results of the
//! command line.

#![forbid(unsafe_code)]

pub mod ceiling;
pub mod cleaner;
pub mod compare;
pub mod evaluation;
pub mod machines;
pub mod node;
pub mod redundancy;
pub mod report;
pub mod rounds;
pub mod scale;
pub mod tree;

/// Result of a function of the harness. An error ends the program, which prints the error's
/// message.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
