//! The entry: a node and its pools.

use std::sync::Arc;
use std::time::Duration;

use messenger::NetworkStack;
use uuid::Uuid;
use wire::{AdminReply, AdminRequest, CodingMode, NodeStatus, PoolInfo, PoolName, Redundancy, ScrubStatus};

use crate::engine::{Capability, Engine, NativeEngine};
use crate::requests::Requests;
use crate::{Error, Options, Pool, Result};

/// A client of an [`Engine`]: the entry to its pools and objects. Clones share it. Any thread may
/// use it.
///
/// Over the [`NativeEngine`] a client is a session with a node. [`Client::close`] ends the session,
/// and so does dropping the last clone. Both tell the node, which then forgets the results of the
/// session's requests. After a drop, a task on the runtime that the client was connected on tells
/// the node: if that runtime ends at once, close the client first.
#[derive(Clone)]
pub struct Client {
    requests: Arc<Requests>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("engine", &self.engine()).finish()
    }
}

impl Client {
    /// Connects to a node at `host:port`, over the stack that the options [choose](Options::stack).
    /// Must be called on a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Network`] if the node cannot be reached, [`Error::Node`] if it refuses this client.
    pub async fn connect(endpoint: &str, options: Options) -> Result<Client> {
        let engine = NativeEngine::connect(endpoint, &options).await?;
        Ok(Client::over(Arc::new(engine), options))
    }

    /// Connects to a node over any network stack. Must be called on a tokio runtime, which then
    /// serves the connection.
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

    /// A client of any engine. The options that describe a connection are not used.
    #[must_use]
    pub fn over(engine: Arc<dyn Engine>, options: Options) -> Client {
        Client { requests: Arc::new(Requests::new(engine, options)) }
    }

    /// The engine.
    #[must_use]
    pub fn engine(&self) -> &dyn Engine {
        self.requests.engine()
    }

    /// Checks that the engine has all capabilities of `needed`. A front end calls this before it
    /// opens.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names the first capability that the engine lacks.
    pub fn require(&self, needed: &[Capability]) -> Result<()> {
        let engine = self.engine();
        match engine.capabilities().missing(needed) {
            None => Ok(()),
            Some(capability) => Err(Error::Unsupported(format!(
                "the engine \"{}\" lacks the capability \"{capability}\"; use an engine that has it",
                engine.name()
            ))),
        }
    }

    pub(crate) fn requests(&self) -> &Requests {
        &self.requests
    }

    /// A pool by its name. Nothing is sent: whether it exists shows with its first use.
    ///
    /// # Errors
    /// [`Error::Name`].
    pub fn pool(&self, name: &str) -> Result<Pool> {
        Ok(Pool::new(self.clone(), PoolName::new(name)?, String::new()))
    }

    /// Creates a pool.
    ///
    /// # Errors
    /// [`NodeError::PoolExists`](wire::Error::PoolExists) among others.
    pub async fn create_pool(&self, name: &str) -> Result<()> {
        self.create_pool_with(name, 0, Redundancy::Single).await
    }

    /// Creates a pool with a number of placement groups (a power of two, or 0 for the default), whose objects are
    /// kept from being lost with a target in that way.
    ///
    /// # Errors
    /// [`NodeError::PoolExists`](wire::Error::PoolExists) among others.
    pub async fn create_pool_with(&self, name: &str, pg_count: u32, redundancy: Redundancy) -> Result<()> {
        let name = PoolName::new(name)?.to_string().into();
        self.done(AdminRequest::PoolCreate { name, pg_count, redundancy }).await
    }

    /// Takes a target out, so that placement groups with redundancy do without it and give its place to another one, if
    /// there is one; or takes it in again. `index` is its number in [`NodeStatus::targets`].
    ///
    /// # Errors
    /// If there is no such target, or too few are left to change the node's map.
    pub async fn set_target_out(&self, index: u32, out: bool) -> Result<()> {
        self.done(AdminRequest::TargetSetOut { index, out }).await
    }

    /// Gives a target's number to another one, which the node is to be started with next.
    ///
    /// # Errors
    /// If there is no such target, or a pool without redundancy may need it.
    pub async fn replace_target(&self, index: u32, uuid: Uuid) -> Result<()> {
        self.done(AdminRequest::TargetReplace { index, uuid }).await
    }

    /// Compares what a pool's targets have with what they should have, and makes damaged fragments anew from others.
    /// Begins a scrub if none is under way, and says how it stands. With `repair`, the scrub also gives objects whose
    /// data ends early the size that is recorded of them, where the missing bytes are zeros for certain.
    ///
    /// # Errors
    /// If there is no such pool, or a scrub without `repair` is under way and this one is to repair.
    pub async fn start_scrub(&self, pool: &str, repair: bool) -> Result<ScrubStatus> {
        self.scrub(pool, true, repair).await
    }

    /// How a pool's scrub stands.
    ///
    /// # Errors
    /// If there is no such pool.
    pub async fn scrub_status(&self, pool: &str) -> Result<ScrubStatus> {
        self.scrub(pool, false, false).await
    }

    async fn scrub(&self, pool: &str, start: bool, repair: bool) -> Result<ScrubStatus> {
        let pool = PoolName::new(pool)?.to_string().into();
        match self.ask(AdminRequest::Scrub { pool, start, repair }).await? {
            AdminReply::Scrub(status) => Ok(*status),
            other => Err(unexpected(&other)),
        }
    }

    /// Sets how many bytes a second rebuilds and scrubs may move, until the node is started again; 0 for no limit.
    ///
    /// # Errors
    /// If the node does not answer.
    pub async fn set_rebuild_rate(&self, bytes_per_second: u64) -> Result<()> {
        self.done(AdminRequest::SetRebuildRate(bytes_per_second)).await
    }

    /// Sets where the parity of staged data is computed, until the node restarts.
    ///
    /// # Errors
    /// If the node does not answer, or has no DPU to compute on.
    pub async fn set_coding_mode(&self, mode: CodingMode) -> Result<()> {
        self.done(AdminRequest::SetCodingMode(mode)).await
    }

    /// The pools, ordered by name.
    ///
    /// # Errors
    /// If the node does not answer.
    pub async fn pools(&self) -> Result<Vec<PoolInfo>> {
        match self.ask(AdminRequest::PoolList).await? {
            AdminReply::Pools(pools) => Ok(pools),
            other => Err(unexpected(&other)),
        }
    }

    /// Removes a pool. Unless `force`d, it must be empty. Its space is given back in the background.
    ///
    /// # Errors
    /// [`NodeError::PoolNotEmpty`](wire::Error::PoolNotEmpty) among others.
    pub async fn remove_pool(&self, name: &str, force: bool) -> Result<()> {
        let name = PoolName::new(name)?.to_string().into();
        self.done(AdminRequest::PoolRemove { name, force }).await
    }

    /// The node's state.
    ///
    /// # Errors
    /// If the node does not answer.
    pub async fn status(&self) -> Result<NodeStatus> {
        match self.ask(AdminRequest::Status).await? {
            AdminReply::Status(status) => Ok(*status),
            other => Err(unexpected(&other)),
        }
    }

    /// Removes parts of striped objects that no head names, if they are at least that old and their uploader is gone.
    /// The node does so by itself from time to time; this does it now. Returns how many it removed.
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

    /// Ends the session and tells the node; waits at most two seconds until that was sent. Requests
    /// under way fail with [`Error::Closed`]; changes among them may have taken effect.
    pub async fn close(&self) {
        self.requests.close().await;
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

/// An answer of the wrong kind.
fn unexpected(reply: &AdminReply) -> Error {
    Error::Protocol(format!("unexpected answer {reply:?}"))
}
