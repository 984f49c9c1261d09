//! The foundation of all other crates: shared memory and buffer pools, block checksums, thread
//! classes, CPU time accounting, latency phases, the health of offloads, fault injection, budgets
//! per peer address, the release of reservations of cancelled callers, adaptive polling, connections
//! from a chosen address, and the sources of time, randomness and tasks that a simulation replaces.
//!
//! This crate does not depend on objects, messages or drives. `unsafe` code is in [`mem`], which
//! maps memory, and in [`pool`], which hands out ranges of mapped memory.

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod block;
pub mod buddy;
pub mod budget;
pub mod clock;
pub mod collections;
pub mod dial;
pub mod entropy;
pub mod fault;
pub mod health;
pub mod mem;
pub mod mutant;
pub mod phases;
pub mod pool;
pub mod process;
pub mod reclaim;
pub mod spinner;
pub mod task;
pub mod thread;
pub mod watch;
pub mod work;

/// A future that may be sent between threads. Object-safe asynchronous traits return it.
pub type BoxFuture<'a, T> = std::pin::Pin<Box<dyn std::future::Future<Output = T> + Send + 'a>>;
