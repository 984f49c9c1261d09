//! The request-handling side of a node: an OSD over stores in this process, or over a session with a store's process.

use std::sync::Arc;

use base::mem::Arena;
use base::pool::BufferPool;
use messenger::TcpStack;
use osd::{Osd, OsdConfig};
use proxy::{Endpoint, Session, SessionOptions};
use store::ObjectStore;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::announce::Ready;
use super::config::{Config, Placement};
use crate::failure::{Doing, Failure, Result};

/// Largest staging buffer, in bytes: two segments of a DMA transfer.
const LARGEST_BUFFER: usize = 4 << 20;

/// Targets with their ids.
pub type Targets = Vec<(Uuid, Arc<dyn ObjectStore>)>;

/// Where the stores are.
pub enum Stores {
    /// In this process.
    Here(Targets),
    /// In another one.
    Behind(Endpoint),
}

/// The stores as the OSD sees them, the memory that payload is staged in, and what moves it.
struct Backend {
    targets: Targets,
    pool: BufferPool,
    placement: Placement,
    engine: String,
    emulated: bool,
    /// Lives as long as the OSD.
    _session: Option<Session>,
}

impl Backend {
    async fn open(stores: Stores, config: &Config) -> Result<Backend> {
        match stores {
            Stores::Here(targets) => {
                let arena =
                    Arena::anonymous(config.osd.staging.0 as usize).doing("reserving staging memory")?;
                Ok(Backend {
                    targets,
                    pool: BufferPool::new(arena, 0, LARGEST_BUFFER),
                    placement: Placement::Host,
                    engine: "none".to_owned(),
                    emulated: false,
                    _session: None,
                })
            }
            Stores::Behind(endpoint) => Backend::join(endpoint, config).await,
        }
    }

    async fn join(endpoint: Endpoint, config: &Config) -> Result<Backend> {
        let mut options = SessionOptions {
            outstanding: config.channel.requests,
            wait_for_store: config.osd.store_patience.0,
            ..SessionOptions::default()
        };
        options.memory.layout.data_len = config.channel.window.0;
        options.memory.pool_len = config.osd.staging.0 as usize;
        options.memory.largest_buffer = LARGEST_BUFFER;
        let session = Session::connect(endpoint, options).await.doing("joining the store")?;
        let store = |(index, info): (usize, &channel::TargetInfo)| {
            (Uuid::from_u128(info.uuid), session.store(index) as Arc<dyn ObjectStore>)
        };
        Ok(Backend {
            targets: session.targets().iter().enumerate().map(store).collect(),
            pool: session.pool().clone(),
            placement: Placement::Dpu,
            engine: session.engine().name().to_owned(),
            emulated: session.engine().is_emulated(),
            _session: Some(session),
        })
    }
}

/// Serves clients on this thread, which must be in a `LocalSet`, until `stop` resolves. `started` learns how clients
/// connect, or why they cannot.
pub async fn serve(
    stores: Stores,
    config: Arc<Config>,
    listen: String,
    started: oneshot::Sender<Result<Ready>>,
    stop: impl Future<Output = ()>,
) {
    let backend = match Backend::open(stores, &config).await {
        Ok(backend) => backend,
        Err(failure) => return drop(started.send(Err(failure))),
    };
    let osd_config = OsdConfig {
        placement: backend.placement.as_str().to_owned(),
        engine: backend.engine.clone(),
        emulated: backend.emulated,
        transfer_timeout: config.osd.transfer_timeout.0,
        store_patience: config.osd.store_patience.0,
        session_expiry: config.osd.session_expiry.0,
        orphan_grace: config.osd.orphan_grace.0,
        collect_interval: config.osd.collect_interval.0,
        requests_per_connection: config.osd.requests_per_connection,
        sessions: config.osd.sessions,
        ..OsdConfig::default()
    };
    let ready = |result: std::result::Result<String, osd::StartError>| {
        let ready = result.map(|endpoint| Ready {
            endpoint: Some(endpoint),
            engine: Some(backend.engine),
            emulated: backend.emulated,
            ..Ready::default()
        });
        // Whoever waits for this may have been told to stop meanwhile.
        let _ = started.send(ready.map_err(|e| Failure::new(format!("starting the osd at {listen}"), e)));
    };
    let stack = Arc::new(TcpStack::default());
    Osd::serve(osd_config, backend.targets, backend.pool, stack, &listen, ready, stop).await;
}
