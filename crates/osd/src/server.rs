//! Starts and stops an osd.

use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use base::pool::BufferPool;
use base::thread::ThreadClass;
use messenger::NetworkStack;
use store::ObjectStore;
use tokio::sync::oneshot;
use tokio::task::LocalSet;
use uuid::Uuid;

use crate::config::OsdConfig;
use crate::osd::Osd;
use crate::serve;
use crate::start_error::StartError;
use crate::task::spawn;

/// Maximum time that a stopping osd waits for requests in progress.
const DRAIN: Duration = Duration::from_secs(5);
/// Maximum time that a stopping osd waits for the targets to store the node's age.
const LAST_WORD: Duration = Duration::from_millis(500);

/// What an osd announces when clients can connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OsdStarted {
    /// The address that clients connect to.
    pub endpoint: String,
    /// UUID of the node to which all targets belong.
    pub node: Uuid,
    /// UUIDs of the node's targets. The index of a target in this list is its number.
    pub targets: Vec<Uuid>,
}

/// A running osd. Dropping it stops the osd without waiting for requests in progress.
#[derive(Debug)]
pub struct OsdServer {
    endpoint: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl OsdServer {
    /// Starts an osd on its own thread, `osd-0`. Returns once clients can connect.
    ///
    /// `targets` are all targets of the node with their ids, in any order. `staging` is the staging
    /// memory, which must have room for at least a few segments of 2 MiB. `listen` is an address in
    /// the network stack's form (`host:port`).
    ///
    /// This call blocks until the osd has started. The stores must be able to make progress while
    /// the calling thread is blocked.
    ///
    /// # Errors
    /// If the targets do not all belong to one node or cannot be read, or if the address is in use.
    pub fn start(
        config: OsdConfig,
        targets: Vec<(Uuid, Arc<dyn ObjectStore>)>,
        staging: BufferPool,
        stack: Arc<dyn NetworkStack>,
        listen: &str,
    ) -> Result<OsdServer, StartError> {
        let (started, wait) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let listen = listen.to_owned();
        let body = move || {
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(e) => return drop(started.send(Err(e.into()))),
            };
            let serve = async move {
                let ready = |result| drop(started.send(result));
                OsdServer::serve(config, targets, staging, stack, &listen, ready, async {
                    drop(stopped.await)
                })
                .await;
            };
            LocalSet::new().block_on(&runtime, serve);
        };
        let thread = base::thread::spawn(ThreadClass::Osd, "0", body)?;
        let OsdStarted { endpoint, .. } = wait.recv().map_err(|_| StartError::Died)??;
        Ok(OsdServer { endpoint, stop: Some(stop), thread: Some(thread) })
    }

    /// Returns the address that clients connect to.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Stops the osd. The osd accepts no more connections, and waits up to five seconds for
    /// requests in progress. This call blocks until the osd has stopped.
    pub fn stop(mut self) {
        if let Some(stop) = self.stop.take() {
            // If the receiver was dropped, the osd has already stopped.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            // The panic hook has already reported a panic of the thread.
            drop(thread.join());
        }
    }

    /// Runs an osd on the current thread until `stop` resolves. The caller must run in a
    /// [`LocalSet`]. Simulations and programs with their own event loop use this function. `ready`
    /// receives the announcement, or the reason why the osd did not start.
    pub async fn serve(
        config: OsdConfig,
        targets: Vec<(Uuid, Arc<dyn ObjectStore>)>,
        staging: BufferPool,
        stack: Arc<dyn NetworkStack>,
        listen: &str,
        ready: impl FnOnce(Result<OsdStarted, StartError>),
        stop: impl Future<Output = ()>,
    ) {
        let osd = match Osd::open(config, targets, staging).await {
            Ok(osd) => osd,
            Err(e) => return ready(Err(e)),
        };
        let listener = match stack.listen(listen).await {
            Ok(listener) => listener,
            Err(e) => return ready(Err(e.into())),
        };
        match port_of(&listener.endpoint()) {
            Ok(port) => osd.port.set(port),
            Err(e) => return ready(Err(e)),
        }
        osd.paths.replace(listener.paths());
        osd.admissions.replace(Some(listener.admissions()));
        let started = {
            let map = osd.map.borrow();
            let targets = map.targets.iter().map(|record| record.uuid).collect();
            OsdStarted { endpoint: listener.endpoint(), node: map.node, targets }
        };
        ready(Ok(started));
        let removing: Vec<_> = osd.map.borrow().pools.iter().filter(|p| p.removing).cloned().collect();
        removing.iter().for_each(|record| osd.empty_in_background(osd.make_pool(record)));
        let collector = spawn(Rc::clone(&osd).collect_for_ever());
        let upkeep = spawn(Rc::clone(&osd).look_after_redundancy());
        let accepting = spawn(serve::accept(Rc::clone(&osd), listener));
        stop.await;
        accepting.abort();
        collector.abort();
        upkeep.abort();
        let drained = async {
            while osd.requests.get() > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(DRAIN, drained).await.is_err() {
            tracing::warn!(
                requests = osd.requests.get(),
                "the osd stops although requests are still in progress"
            );
        }
        osd.age.save(&osd.targets, &osd.witness, LAST_WORD).await;
    }
}

/// Returns the port of a listener's address.
fn port_of(endpoint: &str) -> Result<u16, StartError> {
    let port = endpoint.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    port.ok_or_else(|| StartError::NoPort(endpoint.to_owned()))
}
