//! The foundation of all other crates: shared memory and buffer pools, block checksums, thread
//! classes, CPU time accounting, latency phases, the health of offloads, fault injection, budgets
//! per peer address, the release of reservations of cancelled callers, and adaptive polling.
//!
//! This crate does not depend on objects, networks or drives. `unsafe` code is in [`mem`], which
//! maps memory, and in [`pool`], which hands out ranges of mapped memory.

pub mod block;
pub mod buddy;
pub mod budget;
pub mod fault;
pub mod health;
pub mod mem;
pub mod phases;
pub mod pool;
pub mod process;
pub mod reclaim;
pub mod spinner;
pub mod thread;
pub mod work;

/// A future that may be sent between threads. Object-safe asynchronous traits return it.
pub type BoxFuture<'a, T> = std::pin::Pin<Box<dyn std::future::Future<Output = T> + Send + 'a>>;
