//! The retry policy: the number and the time limit of a request's attempts.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;
use wire::{AdminReply, AdminRequest, List, Listed, Mutated, Query, QueryAnswer};

use crate::engine::{BoxCall, Capability, ChangeRequest, Engine, Fencing, OwnerName, ReadReply, ReadRequest};
use crate::{Error, Options, Result, Waited};

/// Pause before the second attempt of a request. The pause doubles with each further attempt, up to
/// [`RETRY_PAUSE_MAX`].
const RETRY_PAUSE: Duration = Duration::from_millis(20);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Sends requests to an engine, at most [`Options::requests_in_flight`] at a time. It repeats a
/// request after transient errors with an increasing pause, until [`Options::request_timeout`] has
/// passed. Dropping the future of a request abandons the request; a change may still take effect.
pub(crate) struct Requests {
    engine: Arc<dyn Engine>,
    options: Options,
    permits: Semaphore,
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Requests").field("engine", &self.engine).finish_non_exhaustive()
    }
}

impl Requests {
    pub(crate) fn new(engine: Arc<dyn Engine>, options: Options) -> Requests {
        let options = options.clamped(&engine.limits());
        let permits = Semaphore::new(options.requests_in_flight);
        Requests { engine, options, permits }
    }

    pub(crate) fn engine(&self) -> &dyn Engine {
        &*self.engine
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    pub(crate) async fn mutate(&self, request: ChangeRequest) -> Result<Mutated> {
        self.run(|deadline| self.engine.mutate(request, deadline)).await
    }

    pub(crate) async fn read(&self, request: ReadRequest) -> Result<ReadReply> {
        self.run(|deadline| self.engine.read(request, deadline)).await
    }

    pub(crate) async fn query(&self, request: Query) -> Result<Vec<QueryAnswer>> {
        self.run(|deadline| self.engine.query(request, deadline)).await
    }

    pub(crate) async fn list(&self, request: List) -> Result<Listed> {
        self.run(|deadline| self.engine.list(request, deadline)).await
    }

    pub(crate) async fn administer(&self, request: AdminRequest) -> Result<AdminReply> {
        let Some(administration) = self.engine.administration() else {
            return Err(Error::Unsupported(format!(
                "the engine \"{}\" has no administration; administer its storage with the tools of that storage",
                self.engine.name()
            )));
        };
        self.run(|deadline| administration.administer(request, deadline)).await
    }

    pub(crate) async fn fence(&self, owner: &OwnerName) -> Result<()> {
        let fencing = self.fencing()?;
        self.run(|deadline| fencing.fence(owner, deadline)).await
    }

    /// Returns the fencing of the engine.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the engine lacks it.
    pub(crate) fn fencing(&self) -> Result<&dyn Fencing> {
        let lacks = || Error::Unsupported(lacks(self.engine(), Capability::Fence));
        self.engine.fencing().ok_or_else(lacks)
    }

    /// Closes the engine. Requests that wait for a permit fail.
    pub(crate) async fn close(&self) {
        self.permits.close();
        self.engine.close().await;
    }

    async fn run<'a, T>(&'a self, begin: impl FnOnce(Instant) -> BoxCall<'a, T>) -> Result<T> {
        let timeout = self.options.request_timeout;
        let deadline = Instant::now() + timeout;
        let mut begun = None;
        let attempts = async {
            let _permit = self.permits.acquire().await.map_err(|_| Error::Closed)?;
            let call = begun.insert(begin(deadline));
            let mut pause = RETRY_PAUSE;
            loop {
                match call.attempt().await {
                    Err(e) if e.is_transient() => {
                        tracing::debug!(error = %e, "attempting a request again after a transient error")
                    }
                    outcome => return outcome,
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RETRY_PAUSE_MAX);
            }
        };
        if let Ok(outcome) = tokio::time::timeout_at(deadline, attempts).await {
            return outcome;
        }
        let why = begun.and_then(|call| call.obstacle());
        Err(Error::TimedOut(Waited { after: timeout, why }))
    }
}

/// Returns the message for an engine that lacks a capability.
pub(crate) fn lacks(engine: &dyn Engine, capability: Capability) -> String {
    let name = engine.name();
    format!("the engine \"{name}\" lacks the capability \"{capability}\"; use an engine that has it")
}
