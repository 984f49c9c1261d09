//! What the demo, the benchmark and the report share: a node driven through the `outboard` program, as a user would, the ceilings of the
//! machine (drive, loopback TCP, memory) to compare it with, and the tables they print. `evaluation` is the
//! report itself, `redundancy` the measurements of pools that survive the loss of targets, `compare` an old binary against a
//! new one.
//!
//! Nothing of the project is linked here: what these programs show is what the command line does.

#![forbid(unsafe_code)]

pub mod ceiling;
pub mod cleaner;
pub mod compare;
pub mod evaluation;
pub mod node;
pub mod redundancy;
pub mod report;
pub mod tree;

/// What goes wrong in a harness ends it, with a sentence.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
