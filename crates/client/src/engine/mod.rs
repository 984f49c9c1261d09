//! The engine seam: the only way from a front end to storage.
//!
//! An [`Engine`] changes, reads, queries and lists single objects. Striping, compounds and the
//! retry policy sit above it, in the rest of this crate, and use only what `docs/semantics.md`
//! promises. Capabilities beyond these promises have names ([`Capability`]): a front end asks for the
//! capabilities that it needs and refuses to open without them.
//!
//! | engine | what it is |
//! |---|---|
//! | [`NativeEngine`] | a session with an Outboard node |
//! | [`MemEngine`] | the reference model: everything in memory, no concurrency, no failures |
//! | [`FaultyEngine`] | wraps another engine; injects errors, delays and lost answers from a seed |
//!
//! The suite in [`conformance`](crate::conformance) runs on every engine.

mod capability;
mod faulty;
mod limits;
mod mem;
pub(crate) mod native;
mod request;
mod sink;
mod source;

use base::BoxFuture;
use tokio::time::Instant;
use wire::{AdminReply, AdminRequest, List, Listed, Mutated, Query, QueryAnswer, UploadId};

use crate::{Error, Result};

pub use capability::{Capabilities, Capability};
pub use faulty::{FaultCounts, FaultRates, FaultyEngine};
pub use limits::EngineLimits;
pub use mem::MemEngine;
pub use native::NativeEngine;
pub use request::{ChangeRequest, ReadReply, ReadRequest};
pub use sink::{Sink, SinkMemory};
pub(crate) use source::NO_DESCRIPTORS;
pub use source::Source;

/// Storage of objects, as front ends see it.
///
/// Every method takes a request in and returns a [`Call`]; nothing is sent before the first
/// [`attempt`](Call::attempt). `deadline` says when the caller stops waiting: an engine may give up
/// then, and need not watch it. Any thread may call an engine.
pub trait Engine: std::fmt::Debug + Send + Sync {
    /// Name of the engine, for messages: `native`, `mem`.
    fn name(&self) -> &'static str;

    /// Changes one object: its conditions and operations take effect together or not at all.
    fn mutate(&self, request: ChangeRequest, deadline: Instant) -> BoxCall<'_, Mutated>;

    /// Reads a range of one object, from one version of it.
    fn read(&self, request: ReadRequest, deadline: Instant) -> BoxCall<'_, ReadReply>;

    /// Answers questions about one object, all from one version of it.
    fn query(&self, request: Query, deadline: Instant) -> BoxCall<'_, Vec<QueryAnswer>>;

    /// Lists a page of object names.
    fn list(&self, request: List, deadline: Instant) -> BoxCall<'_, Listed>;

    /// Administers what stores the objects. Front ends do not use it; an engine may refuse any
    /// request with [`Error::Unsupported`].
    fn administer(&self, request: AdminRequest, deadline: Instant) -> BoxCall<'_, AdminReply>;

    /// Identifier for the parts of a new striped object. No other upload ever has the same one.
    ///
    /// # Errors
    /// [`Error::Closed`] if the engine is closed.
    fn next_upload(&self) -> Result<UploadId>;

    /// Largest requests that the engine takes.
    fn limits(&self) -> EngineLimits;

    /// What the engine offers beyond `docs/semantics.md`.
    fn capabilities(&self) -> Capabilities;

    /// Ends the engine's work: calls under way fail with [`Error::Closed`]. Changes among them may
    /// have taken effect. Takes at most two seconds.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// A request that an engine has taken in. Dropping it gives the request up; a change that was
/// attempted may still take effect.
pub trait Call<T>: Send {
    /// Attempts the request and waits for the outcome. The caller may make another attempt of the
    /// same call, and does so after an error that [passes](Error::is_transient). However many attempts
    /// are made, a change takes effect at most once, and every attempt after that has its result.
    fn attempt(&mut self) -> BoxFuture<'_, Result<T>>;
}

/// A [`Call`] of any engine.
pub type BoxCall<'a, T> = Box<dyn Call<T> + 'a>;

/// A call that fails with the same error at each attempt.
pub(crate) struct Refused<F>(pub(crate) F);

impl<T, F: Fn() -> Error + Send> Call<T> for Refused<F> {
    fn attempt(&mut self) -> BoxFuture<'_, Result<T>> {
        let error = (self.0)();
        Box::pin(async { Err(error) })
    }
}
