//! What every other crate stands on: aligned shared memory and the buffer pool over it, block
//! checksums, the naming and accounting of threads, where the time of requests goes, the health of offloads,
//! injected faults, budgets of peer addresses, answers that outlive their caller, and adaptive polling.
//!
//! Nothing here knows of objects, networks or drives. `unsafe` is in [`mem`], which maps memory, and
//! in [`pool`], which hands out ranges of it.

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

/// A future that may be sent between threads; what object-safe asynchronous traits return.
pub type BoxFuture<'a, T> = std::pin::Pin<Box<dyn std::future::Future<Output = T> + Send + 'a>>;
