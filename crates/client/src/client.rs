//! [`Client`]: access to a node and its pools.

use std::sync::Arc;
use std::time::Duration;

use messenger::NetworkStack;
use uuid::Uuid;
use wire::{
    AdminReply, AdminRequest, CodingMode, Mutated, NodeStatus, PoolInfo, PoolLoss, PoolName, Query,
    QueryAnswer, Redundancy, RoleUsage, ScrubStatus,
};

use crate::engine::{
    Capability, ChangeRequest, Engine, NativeEngine, OwnerName, ReadReply, ReadRequest, SharedConnections,
};
use crate::requests::{Requests, lacks};
use crate::{Error, Options, Pool, Result};

/// Provides access to the pools and objects of an [`Engine`]. Clones share the engine and the limit
/// on requests in flight. Any thread may use a client. The administrative methods fail with
/// [`Error::Unsupported`] if the engine has no [administration](Engine::administration).
///
/// Over the [`NativeEngine`], a client is a session with a node. [`Client::close`] ends the
/// session, and so does dropping the last clone. In both cases the client tells the node that the
/// session has ended, and the node discards the results of the session's requests. After a drop, a
/// task on the client's runtime tells the node. If that runtime is about to end, call
/// [`Client::close`] first.
#[derive(Clone)]
pub struct Client {
    pub(crate) requests: Arc<Requests>,
    /// The tenant whose pools the client administers; `None` for the user's own.
    tenant: Option<String>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("engine", &self.engine()).finish()
    }
}

impl Client {
    /// Connects to a node at `host:port`, over the network stack that the options
    /// [select](Options::stack). Must be called on a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Network`] if the node cannot be reached, [`Error::Node`] if it refuses this client.
    pub async fn connect(endpoint: &str, options: Options) -> Result<Client> {
        let engine = NativeEngine::connect(endpoint, &options).await?;
        Ok(Client::over(Arc::new(engine), options))
    }

    /// Connects to a node over the given network stack. Must be called on a tokio runtime, which
    /// then runs the connection.
    ///
    /// # Errors
    /// [`Error::Network`] if the node cannot be reached, [`Error::Node`] if it refuses this client.
    pub async fn connect_over(
        stack: Arc<dyn NetworkStack>,
        endpoint: &str,
        options: Options,
    ) -> Result<Client> {
        let engine = NativeEngine::connect_over(stack, endpoint, &options).await?;
        Ok(Client::over(Arc::new(engine), options))
    }

    /// Opens a session on connections that it shares with the sessions of other clients. Must be
    /// called on a tokio runtime, which then runs the connections that are opened for this session.
    /// The options select no network stack, and name the same identity as the network stack.
    ///
    /// # Errors
    /// [`Error::Network`] if the node cannot be reached, [`Error::Node`] if it refuses this client.
    pub async fn connect_sharing(
        connections: &SharedConnections,
        endpoint: &str,
        options: Options,
    ) -> Result<Client> {
        let engine = NativeEngine::connect_sharing(connections, endpoint, &options).await?;
        Ok(Client::over(Arc::new(engine), options))
    }

    /// Creates a client of an engine of any kind. Options about connections have no effect.
    #[must_use]
    pub fn over(engine: Arc<dyn Engine>, options: Options) -> Client {
        Client { requests: Arc::new(Requests::new(engine, options)), tenant: None }
    }

    /// Returns the engine.
    #[must_use]
    pub fn engine(&self) -> &dyn Engine {
        self.requests.engine()
    }

    /// Checks that the engine has all capabilities in `needed`. A front end calls this method
    /// before it uses the engine.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names the first capability that the engine lacks.
    pub fn require(&self, needed: &[Capability]) -> Result<()> {
        let engine = self.engine();
        match engine.capabilities().missing(needed) {
            None => Ok(()),
            Some(capability) => Err(Error::Unsupported(lacks(engine, capability))),
        }
    }

    /// Returns a pool by its name without sending a request. If the pool does not exist, its first
    /// use fails.
    ///
    /// # Errors
    /// [`Error::Name`] if the name is invalid.
    pub fn pool(&self, name: &str) -> Result<Pool> {
        Ok(Pool::new(Arc::clone(&self.requests), PoolName::new(name)?, String::new()))
    }

    /// Creates a pool.
    ///
    /// # Errors
    /// [`NodeError::PoolExists`](wire::Error::PoolExists) if the pool exists already, or another
    /// error.
    pub async fn create_pool(&self, name: &str) -> Result<()> {
        self.create_pool_with(name, 0, Redundancy::Single).await
    }

    /// Creates a pool with a number of placement groups (a power of two, or 0 for the default) and
    /// a redundancy scheme.
    ///
    /// # Errors
    /// [`NodeError::PoolExists`](wire::Error::PoolExists) if the pool exists already, or another
    /// error.
    pub async fn create_pool_with(&self, name: &str, pg_count: u32, redundancy: Redundancy) -> Result<()> {
        let name = PoolName::new(name)?.to_string().into();
        let tenant = self.tenant.clone();
        self.done(AdminRequest::PoolCreate { name, pg_count, redundancy, tenant }).await
    }

    /// Takes a target out of use, or back into use. Placement groups with redundancy stop using a
    /// target that is out, and replace it by a spare target if there is one. `index` is the
    /// target's number in [`NodeStatus::targets`].
    ///
    /// # Errors
    /// If the target does not exist, if too few other targets have its data, or if the remaining
    /// targets are too few to change the node's map.
    pub async fn set_target_out(&self, index: u32, out: bool) -> Result<()> {
        self.done(AdminRequest::TargetSetOut { index, out }).await
    }

    /// Accepts the loss of what only one target has, so that placement groups stop waiting for the
    /// target. Returns what each pool loses, for the pools that wait for it. With `accept_loss`
    /// false, only returns the loss. The decision concerns the placement groups that wait for the
    /// target now, and ends when they continue. For pools without redundancy, it ends when the target works again or is replaced.
    ///
    /// # Errors
    /// If the target does not exist, or if no placement group waits for it.
    pub async fn forget_target(&self, index: u32, accept_loss: bool) -> Result<Vec<PoolLoss>> {
        match self.ask(AdminRequest::TargetForget { index, accept_loss }).await? {
            AdminReply::Loss(loss) => Ok(loss),
            other => Err(unexpected(&other)),
        }
    }

    /// Gives a target's number to a new target. The node uses the new target from its next start.
    ///
    /// # Errors
    /// If the target does not exist, or if placement groups need it and its loss was not accepted
    /// ([`Client::forget_target`]).
    pub async fn replace_target(&self, index: u32, uuid: Uuid) -> Result<()> {
        self.done(AdminRequest::TargetReplace { index, uuid }).await
    }

    /// Starts a scrub of a pool unless one is already running. Returns the status of this scrub. A
    /// scrub verifies all stored data and reconstructs damaged fragments. With `repair`, it also
    /// extends each object whose data is shorter than its recorded size, if the missing bytes are
    /// certainly zeros.
    ///
    /// # Errors
    /// If the pool does not exist, or if `repair` is set and a scrub without `repair` is running.
    pub async fn start_scrub(&self, pool: &str, repair: bool) -> Result<ScrubStatus> {
        self.scrub(pool, true, repair).await
    }

    /// Returns the status of a pool's scrub.
    ///
    /// # Errors
    /// If the pool does not exist.
    pub async fn scrub_status(&self, pool: &str) -> Result<ScrubStatus> {
        self.scrub(pool, false, false).await
    }

    async fn scrub(&self, pool: &str, start: bool, repair: bool) -> Result<ScrubStatus> {
        let pool = PoolName::new(pool)?.to_string().into();
        match self.ask(AdminRequest::Scrub { pool, start, repair, tenant: self.tenant.clone() }).await? {
            AdminReply::Scrub(status) => Ok(*status),
            other => Err(unexpected(&other)),
        }
    }

    /// Sets the maximum rate of rebuilds and scrubs, in bytes per second; 0 for no limit. The
    /// setting lasts until the node's next start.
    ///
    /// # Errors
    /// If the node does not answer.
    pub async fn set_rebuild_rate(&self, bytes_per_second: u64) -> Result<()> {
        self.done(AdminRequest::SetRebuildRate(bytes_per_second)).await
    }

    /// Sets the coding mode, which decides where parity is computed. The setting lasts until the
    /// node's next start.
    ///
    /// # Errors
    /// If the node does not answer, or has no DPU that can compute parity.
    pub async fn set_coding_mode(&self, mode: CodingMode) -> Result<()> {
        self.done(AdminRequest::SetCodingMode(mode)).await
    }

    /// Lists the pools, ordered by name.
    ///
    /// # Errors
    /// If the node does not answer.
    pub async fn pools(&self) -> Result<Vec<PoolInfo>> {
        match self.ask(AdminRequest::PoolList { tenant: self.tenant.clone() }).await? {
            AdminReply::Pools(pools) => Ok(pools),
            other => Err(unexpected(&other)),
        }
    }

    /// Removes a pool. Unless `force` is set, the pool must be empty. The node frees the pool's
    /// space in the background.
    ///
    /// # Errors
    /// [`NodeError::PoolNotEmpty`](wire::Error::PoolNotEmpty) if the pool contains objects and
    /// `force` is not set, or another error.
    pub async fn remove_pool(&self, name: &str, force: bool) -> Result<()> {
        let name = PoolName::new(name)?.to_string().into();
        self.done(AdminRequest::PoolRemove { name, force, tenant: self.tenant.clone() }).await
    }

    /// Returns the node's status.
    ///
    /// # Errors
    /// If the node does not answer.
    pub async fn status(&self) -> Result<NodeStatus> {
        match self.ask(AdminRequest::Status).await? {
            AdminReply::Status(status) => Ok(*status),
            other => Err(unexpected(&other)),
        }
    }

    /// Returns how much the node's processes use of their machines. A process that does not report
    /// its use in time is missing. The supervisor never reports it.
    ///
    /// # Errors
    /// If the node does not answer.
    pub async fn usage(&self) -> Result<Vec<RoleUsage>> {
        match self.ask(AdminRequest::Usage).await? {
            AdminReply::Usage(usage) => Ok(usage),
            other => Err(unexpected(&other)),
        }
    }

    /// Removes orphans: parts of uploads to which no head object refers. If the upload was
    /// committed and then replaced, its parts are removed at once. Other orphans are removed if
    /// they are at least `older_than` old and their uploader has been disconnected for at least
    /// this time. The node also removes orphans periodically. Returns the number of removed
    /// orphans.
    ///
    /// # Errors
    /// If the node does not answer.
    pub async fn collect_orphans(&self, older_than: Duration) -> Result<u64> {
        let older_than_ms = u64::try_from(older_than.as_millis()).unwrap_or(u64::MAX);
        match self.ask(AdminRequest::CollectOrphans { older_than_ms }).await? {
            AdminReply::Collected(count) => Ok(count),
            other => Err(unexpected(&other)),
        }
    }

    /// Changes an object, as [`Engine::mutate`] does. Repeats the request after transient errors.
    ///
    /// # Errors
    /// The error of the last attempt, or [`Error::TimedOut`].
    pub async fn mutate(&self, request: ChangeRequest) -> Result<Mutated> {
        self.requests.mutate(request).await
    }

    /// Reads a range of an object, as [`Engine::read`] does. Repeats the request after transient
    /// errors.
    ///
    /// # Errors
    /// The error of the last attempt, or [`Error::TimedOut`].
    pub async fn read(&self, request: ReadRequest) -> Result<ReadReply> {
        self.requests.read(request).await
    }

    /// Answers queries about an object, as [`Engine::query`] does. Repeats the request after
    /// transient errors.
    ///
    /// # Errors
    /// The error of the last attempt, or [`Error::TimedOut`].
    pub async fn query(&self, request: Query) -> Result<Vec<QueryAnswer>> {
        self.requests.query(request).await
    }

    /// Ends the session and tells the node, which takes at most two seconds. Unanswered requests
    /// fail with [`Error::Closed`]; changes among them may have taken effect.
    pub async fn close(&self) {
        self.requests.close().await;
    }

    /// Returns a client that administers the pools of another tenant: its calls about pools concern this
    /// tenant. Objects are always those of the user's own tenant.
    #[must_use]
    pub fn in_tenant(&self, tenant: Option<String>) -> Client {
        Client { tenant, ..self.clone() }
    }

    /// Returns the name by which a successor fences this client (see
    /// [`Fencing::owner`](crate::engine::Fencing::owner)).
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the engine lacks the capability, [`Error::Fenced`] or [`Error::Closed`] if
    /// the client has ended.
    pub fn owner(&self) -> Result<OwnerName> {
        self.requests.fencing()?.owner()
    }

    /// Ends another client for good: once this succeeds, none of its changes takes effect any more.
    /// Repeats the request after transient errors.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the engine lacks the capability; otherwise the error of the last attempt,
    /// or [`Error::TimedOut`]. After each error, the other client may have ended, or not.
    pub async fn fence(&self, owner: &OwnerName) -> Result<()> {
        self.requests.fence(owner).await
    }

    /// Makes a request of an operator. Repeats it after transient errors.
    ///
    /// # Errors
    /// The error of the last attempt, or [`Error::TimedOut`].
    pub async fn administer(&self, request: AdminRequest) -> Result<AdminReply> {
        self.requests.administer(request).await
    }

    async fn ask(&self, request: AdminRequest) -> Result<AdminReply> {
        self.requests.administer(request).await
    }

    async fn done(&self, request: AdminRequest) -> Result<()> {
        match self.ask(request).await? {
            AdminReply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }
}

/// Returns the error for an answer of the wrong kind.
fn unexpected(reply: &AdminReply) -> Error {
    Error::Protocol(format!("unexpected answer {reply:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{ControlEngine, MemEngine};

    #[test]
    fn a_required_capability_that_the_engine_lacks_is_refused() {
        let memory = Client::over(Arc::new(MemEngine::new()), Options::default());
        memory.require(&Capability::ALL).unwrap();
        let engine = ControlEngine::new(&Options::default(), || None);
        let client = Client::over(Arc::new(engine), Options::default());
        client.require(&[]).unwrap();
        for capability in Capability::ALL {
            let error = client.require(&[capability]).unwrap_err();
            let Error::Unsupported(what) = &error else { panic!("{error}") };
            assert!(what.contains(capability.name()) && what.contains("control"), "{error}");
        }
    }
}
