//! The [`Engine`] trait: the only way from a front end to storage.
//!
//! An [`Engine`] changes, reads, queries and lists single objects. The rest of this crate builds
//! striping, compounds and the retry policy on this trait, and relies only on the promises of
//! `docs/semantics.md`. Features beyond these promises have names ([`Capability`]). A front end
//! checks that the engine has the capabilities that it needs, and otherwise refuses the engine.
//!
//! | engine | description |
//! |---|---|
//! | [`NativeEngine`] | a session with an Outboard node |
//! | [`MemEngine`] | the reference model: everything in memory, no concurrency, no failures |
//! | [`FaultyEngine`] | wraps another engine; injects errors, delays and lost answers from a seed |
//! | [`ControlEngine`] | administers a node without a session; refuses requests about objects |
//!
//! Every engine except `ControlEngine` must pass the suite in [`conformance`](crate::conformance).

mod administration;
mod capability;
mod control_only;
mod faulty;
mod limits;
mod mem;
pub mod model;
pub(crate) mod native;
mod request;
mod sink;
mod source;
mod sparse_bytes;

use base::BoxFuture;
use bytes::Bytes;
use tokio::time::Instant;
use wire::{List, Listed, Mutated, Query, QueryAnswer, UploadId};

use crate::{Error, Result};

pub use administration::{Administration, ControlPlane, InProcess};
pub use capability::{Capabilities, Capability};
pub use control_only::ControlEngine;
pub use faulty::{FaultCounts, FaultRates, FaultyEngine};
pub use limits::EngineLimits;
pub use mem::MemEngine;
pub use native::{NativeEngine, SharedConnections};
pub use request::{ChangeRequest, ReadReply, ReadRequest};
pub use sink::{Sink, SinkMemory};
pub(crate) use source::NO_DESCRIPTORS;
pub use source::Source;

/// Storage of objects, as front ends see it.
///
/// The methods for requests return a [`Call`]. Nothing is sent before the call's first
/// [`attempt`](Call::attempt). The caller stops waiting for a call at its `deadline`. The engine
/// may abandon the call at this time, but does not have to. Any thread may call an engine.
pub trait Engine: std::fmt::Debug + Send + Sync {
    /// Returns the name of the engine for messages, such as `native` or `mem`.
    fn name(&self) -> &'static str;

    /// Changes one object: its conditions and operations take effect together or not at all.
    fn mutate(&self, request: ChangeRequest, deadline: Instant) -> BoxCall<'_, Mutated>;

    /// Reads a range of one object, all from the same version of the object.
    fn read(&self, request: ReadRequest, deadline: Instant) -> BoxCall<'_, ReadReply>;

    /// Answers queries about one object, all from the same version of the object.
    fn query(&self, request: Query, deadline: Instant) -> BoxCall<'_, Vec<QueryAnswer>>;

    /// Lists a page of object names.
    fn list(&self, request: List, deadline: Instant) -> BoxCall<'_, Listed>;

    /// Returns an id for the parts of a new striped object. The id is unique among all uploads.
    ///
    /// # Errors
    /// [`Error::Closed`] if the engine is closed.
    fn next_upload(&self) -> Result<UploadId>;

    /// Returns the limits on requests.
    fn limits(&self) -> EngineLimits;

    /// Returns the engine's features beyond `docs/semantics.md`.
    fn capabilities(&self) -> Capabilities;

    /// Returns the administration of the engine's storage; `None` if operators cannot administer
    /// this storage through the engine.
    fn administration(&self) -> Option<&dyn Administration> {
        None
    }

    /// Returns how other engines end this one, and how it ends others; `None` if the engine lacks
    /// [`Capability::Fence`].
    fn fencing(&self) -> Option<&dyn Fencing> {
        None
    }

    /// Closes the engine, within two seconds. Calls in progress fail with [`Error::Closed`];
    /// changes among them may have taken effect. Later attempts and
    /// [`next_upload`](Engine::next_upload) also fail with [`Error::Closed`].
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// The fencing of an engine: an exclusive owner of objects ends the engine of the owner before, so that no
/// change of that engine can take effect late.
pub trait Fencing: Send + Sync {
    /// Returns the name by which another engine can fence this one. The owner stores it where its
    /// successor finds it, before the owner changes anything else.
    ///
    /// # Errors
    /// [`Error::Fenced`] if this engine was fenced, [`Error::Closed`] if it is closed.
    fn owner(&self) -> Result<OwnerName>;

    /// Ends another engine of the same client for good. After the call, no change of that engine takes
    /// effect any more. Its calls fail with [`Error::Fenced`] if the engine was opened as an [exclusive
    /// owner](crate::Options::exclusive). Fencing an engine again has no effect.
    fn fence(&self, owner: &OwnerName, deadline: Instant) -> BoxCall<'_, ()>;
}

/// Name of an engine that owns objects exclusively: up to [`OwnerName::MAX`] bytes with a meaning that
/// only engines of the same kind know.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OwnerName(Bytes);

impl OwnerName {
    /// Maximum length, in bytes.
    pub const MAX: usize = 64;

    /// Creates a name from its bytes.
    ///
    /// # Errors
    /// [`Error::Argument`] if the name is empty or too long.
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Result<OwnerName> {
        let bytes = bytes.into();
        if bytes.is_empty() || bytes.len() > OwnerName::MAX {
            let text =
                format!("the name of an owner has {} bytes instead of 1 to {}", bytes.len(), OwnerName::MAX);
            return Err(Error::Argument(text));
        }
        Ok(OwnerName(bytes))
    }

    /// Returns the bytes of the name.
    #[must_use]
    pub fn as_bytes(&self) -> &Bytes {
        &self.0
    }
}

/// A request to an engine. Dropping the call abandons the request; a change that was already
/// attempted may still take effect.
pub trait Call<T>: Send {
    /// Attempts the request and waits for the outcome. The caller may attempt the same call again,
    /// and does so after a [transient](Error::is_transient) error. A change takes effect at most
    /// once, for any number of attempts. Attempts after the change took effect return the result of
    /// the change.
    fn attempt(&mut self) -> BoxFuture<'_, Result<T>>;

    /// Returns why the engine cannot send the request now; `None` if it can, or does not know.
    fn obstacle(&self) -> Option<String> {
        None
    }
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
