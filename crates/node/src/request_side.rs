//! The part of a node that handles requests: an osd that uses stores in this process, or stores in
//! another process through an attachment.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base::fault::Faults;
use base::mem::Arena;
use base::pool::BufferPool;
use channel::ofi::{OfiEngine, OfiOptions};
use channel::{DmaEngine, Profile, ShmEngine, ShmOptions};
use messenger::UseAs;
use osd::{OffloadSource, OsdConfig, OsdServer, StripesAt};
use proxy::{Attachment, AttachmentOptions, StoreEndpoint};
use store::ObjectStore;
use store::stripes::Engines;
use tokio::sync::oneshot;
use uuid::Uuid;
use wire::Placement;

use super::announce::Ready;
use super::coding;
use super::config::{self, Config};
use super::debug::{ChannelTuning, Controls};
use crate::failure::{Doing, Failure, Result};
use crate::identity::ExpectedNode;
use crate::witness_file::WitnessFile;

/// Maximum size of a staging buffer, in bytes: two segments of 2 MiB.
const LARGEST_BUFFER: usize = 4 << 20;

/// Maximum number of segments of one request that are received, moved or written concurrently.
const SEGMENTS: usize = 3;

/// UUIDs and stores of the targets.
pub type Targets = Vec<(Uuid, Arc<dyn ObjectStore>)>;

/// Location of the stores.
pub enum Stores {
    /// In this process, with the engines that compute parity.
    Here(Targets, Arc<Engines>),
    /// In a separate process.
    Behind(StoreEndpoint),
}

/// The resources of an osd: its stores, staging memory, and the engine that moves payload.
struct Backend {
    targets: Targets,
    pool: BufferPool,
    placement: Placement,
    engine: String,
    emulated: bool,
    stripes: StripesAt,
    /// The attachment to a store's process. It must exist as long as the osd runs.
    attachment: Option<Attachment>,
}

impl Backend {
    async fn open(stores: Stores, config: &Config, controls: &Controls) -> Result<Backend> {
        match stores {
            Stores::Here(targets, engines) => {
                let arena =
                    Arena::anonymous(config.osd.staging.0 as usize).doing("reserving staging memory")?;
                Ok(Backend {
                    targets,
                    pool: BufferPool::new(arena, 0, LARGEST_BUFFER),
                    placement: Placement::Host,
                    engine: "none".to_owned(),
                    emulated: false,
                    stripes: StripesAt::Here(Some(engines)),
                    attachment: None,
                })
            }
            Stores::Behind(endpoint) => Backend::join(endpoint, config, controls).await,
        }
    }

    async fn join(endpoint: StoreEndpoint, config: &Config, controls: &Controls) -> Result<Backend> {
        let channel = &config.channel;
        let faults = controls.faults().clone();
        let mut options = AttachmentOptions {
            engine: Some(start_engine(channel, &faults).doing("starting the DMA engine")?),
            overdue: channel.overdue.0,
            cool_down: channel.cool_down.0,
            verify_every: channel.verify_every,
            tuning: attachment_tuning(channel.tuning()),
            faults,
            outstanding: config.channel.requests,
            wait_for_store: config.osd.store_patience.0,
            ..AttachmentOptions::default()
        };
        options.memory.layout.data_len = config.channel.window.0;
        options.memory.pool_len = config.osd.staging.0 as usize;
        options.memory.largest_buffer = LARGEST_BUFFER;
        let attachment = Attachment::connect(endpoint, options).await.doing("attaching to the store")?;
        let store = |(index, info): (usize, &channel::TargetInfo)| {
            (info.uuid, attachment.store(index) as Arc<dyn ObjectStore>)
        };
        Ok(Backend {
            targets: attachment.targets().iter().enumerate().map(store).collect(),
            pool: attachment.pool().clone(),
            placement: Placement::Dpu,
            engine: attachment.engine().name().to_owned(),
            emulated: attachment.engine().is_emulated(),
            stripes: StripesAt::There(attachment.store_set()),
            attachment: Some(attachment),
        })
    }
}

fn start_engine(channel: &config::ChannelSection, faults: &Faults) -> channel::Result<Arc<dyn DmaEngine>> {
    match &channel.engine {
        config::EngineKind::Ofi(provider) => {
            let (provider, faults) = (provider.clone(), faults.clone());
            Ok(OfiEngine::start(OfiOptions { provider, faults, ..OfiOptions::default() })?)
        }
        config::EngineKind::Shm => {
            let profile = match channel.profile {
                config::EngineProfile::Memcpy => Profile::Memcpy,
                config::EngineProfile::Bf3Paper => Profile::Bf3Paper,
            };
            Ok(ShmEngine::start(ShmOptions { profile, faults: faults.clone(), ..ShmOptions::default() })?)
        }
    }
}

fn attachment_tuning(tuning: ChannelTuning) -> proxy::DmaTuning {
    proxy::DmaTuning {
        queues: tuning.dma_queues,
        region_cache: tuning.region_cache,
        poll: Duration::from_micros(tuning.poll_us),
        max_transfer: Some(tuning.max_transfer.0 as usize),
    }
}

/// Returns the maximum number of segments of a request that are in progress at the same time.
fn segments(tuning: ChannelTuning) -> usize {
    if tuning.pipeline { SEGMENTS } else { 1 }
}

/// Serves clients on this thread, which must be in a `LocalSet`, until `stop` resolves. `started`
/// receives the address for clients, or the reason why serving cannot start.
///
/// # Errors
/// If the store has restarted with different targets. A new process must serve these targets.
pub async fn serve(
    stores: Stores,
    config: Arc<Config>,
    listen: String,
    controls: Controls,
    expected: ExpectedNode,
    started: oneshot::Sender<Result<Ready>>,
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let backend = match Backend::open(stores, &config, &controls).await {
        Ok(backend) => backend,
        Err(failure) => {
            let _ = started.send(Err(failure));
            return Ok(());
        }
    };
    let tuning = config.channel.tuning();
    let in_flight = Arc::new(AtomicUsize::new(segments(tuning)));
    if let Some(attachment) = backend.attachment.clone() {
        let in_flight = Arc::clone(&in_flight);
        let tune = move |tuning| {
            in_flight.store(segments(tuning), Ordering::Relaxed);
            attachment.tune(attachment_tuning(tuning));
        };
        controls.tune_with(tuning, Box::new(tune));
    }
    let offload = backend
        .attachment
        .clone()
        .map(|attachment| OffloadSource(Arc::new(move || attachment.status().offload)));
    let faults = controls.faults().clone();
    let osd_config = OsdConfig {
        coding: coding::osd_config(&config, backend.placement, backend.stripes.clone(), faults),
        segments_in_flight: in_flight,
        offload,
        placement: backend.placement,
        engine: backend.engine.clone(),
        emulated: backend.emulated,
        transfer_timeout: config.osd.transfer_timeout.0,
        store_patience: config.osd.store_patience.0,
        target_timeout: config.osd.target_timeout.0,
        rebuild_rate: config.osd.rebuild_rate.0,
        rebuild_share: config.osd.rebuild_share,
        missed_objects_per_pg: config.osd.missed_objects_per_pg,
        session_expiry: config.osd.session_expiry.0,
        witness: Some(WitnessFile::at(config.osd.witness.as_ref())),
        forgotten: expected.forgotten,
        node: expected.node,
        orphan_grace: config.osd.orphan_grace.0,
        collect_interval: config.osd.collect_interval.0,
        requests_per_connection: config.osd.requests_per_connection,
        sessions: config.osd.sessions,
        ..OsdConfig::default()
    };
    let ready = |result: std::result::Result<osd::OsdStarted, osd::StartError>| {
        let ready = result.map(|started| Ready {
            endpoint: Some(started.endpoint),
            node: Some(started.node),
            numbered: started.targets,
            engine: Some(backend.engine),
            emulated: backend.emulated,
            ..Ready::default()
        });
        // Ignore the error: the receiver no longer exists if a signal has stopped the role
        // meanwhile.
        let _ = started.send(ready.map_err(|e| Failure::new(format!("starting the osd at {listen}"), e)));
    };
    let mut options = config.network.options();
    options.connection.max_connections = config.osd.sessions;
    options.connection.max_handshakes = config.osd.handshakes;
    let stack = match messenger::open(&config.network.stacks, &options, UseAs::Server) {
        Ok(stack) => stack,
        Err(e) => {
            ready(Err(e.into()));
            return Ok(());
        }
    };
    let mut is_superseded = false;
    let stop = async {
        let superseded = async {
            match &backend.attachment {
                Some(attachment) => attachment.superseded().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stop => {}
            () = superseded => is_superseded = true,
        }
    };
    OsdServer::serve(osd_config, backend.targets, backend.pool, stack, &listen, ready, stop).await;
    if is_superseded {
        let why = "the store has restarted with different targets; the osd restarts to use them";
        return Err(Failure::new("serving clients", why));
    }
    Ok(())
}
