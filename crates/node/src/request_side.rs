//! The part of a node that handles requests: an osd that uses stores in this process, or stores in
//! another process through an attachment.

use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base::BoxFuture;
use base::block::BLOCK_SIZE;
use base::budget::spare_descriptors;
use base::fault::Faults;
use base::mem::Arena;
use base::pool::BufferPool;
use channel::ofi::{OfiEngine, OfiOptions};
use channel::{DmaEngine, MemoryLayout, Profile, SeatClaim, ShmEngine, ShmOptions};
use control::GatewayRegistry;
use identity::{ProofKey, Trust};
use messenger::{NetworkStack, UseAs};
use osd::{
    AuditAt, AuditSink, DebugAt, Directory, FirstShard, FurtherShard, GatewaysAt, OffloadSource, OsdConfig,
    ShardResources, StripesAt, UsageSource,
};
use proxy::{Attachment, AttachmentOptions, StoreEndpoint};
use store::ObjectStore;
use store::stripes::Engines;
use tokio::sync::oneshot;
use uuid::Uuid;
use wire::limits::MAX_SHARDS;
use wire::{ChannelTuning, DiskReply, DiskRequest, Placement};

use super::announce::Ready;
use super::coding;
use super::config::{self, Config};
use super::debug::Controls;
use crate::failure::{Doing, Failure, Result};
use crate::roster::ExpectedNode;
use crate::witness_file::WitnessFile;

/// Maximum size of a staging buffer, in bytes: two segments of 2 MiB.
const LARGEST_BUFFER: usize = 4 << 20;

/// Maximum number of segments of one request that are received, moved or written concurrently.
const SEGMENTS: usize = 3;

/// UUIDs and stores of the targets.
pub type Targets = Vec<(Uuid, Arc<dyn ObjectStore>)>;

/// Unit of the memory that the shards divide, in bytes.
const UNIT: u64 = LARGEST_BUFFER as u64;
/// Minimum of staging memory, and of host memory for payload, of one shard, in bytes.
const LEAST_MEMORY: u64 = 8 << 20;
/// Minimum number of unanswered requests that one shard may send to the store.
const LEAST_OUTSTANDING: usize = 64;

/// Location of the stores.
#[derive(Clone)]
pub enum Stores {
    /// In this process, with the engines that compute parity.
    Here(Targets, Arc<Engines>),
    /// In a separate process.
    Behind(StoreEndpoint, Trust),
}

/// What all shards of an osd have in common.
#[derive(Clone)]
pub struct ShardCommon {
    /// Location of the stores.
    pub stores: Stores,
    /// The configuration of the node.
    pub config: Arc<Config>,
    /// Settings that can change while the role runs.
    pub controls: Controls,
    /// The node that the targets must belong to.
    pub expected: ExpectedNode,
    /// Identifies this run of the osd to the store.
    pub run: u128,
    /// Number of shards.
    pub shards: u16,
    /// The identity of the node, and its users.
    pub trust: Trust,
    /// The DPU's secret key.
    pub dpu_key: ProofKey,
    /// Changes with the administrator's key.
    pub admin_revision: u64,
    /// The audit log.
    pub audit: Arc<dyn AuditSink>,
    /// The users in the node's map.
    pub users: Directory,
    /// Address of the control plane.
    pub control: SocketAddr,
    /// The gateways that are connected to the control plane.
    pub gateways: GatewayRegistry,
}

/// Passes requests about disks from the osd to the gateways.
struct ConnectedGateways(GatewayRegistry);

impl osd::Gateways for ConnectedGateways {
    fn execute(&self, tenant: u32, request: DiskRequest) -> BoxFuture<'static, wire::Result<DiskReply>> {
        self.0.execute(tenant, request)
    }
}

impl ShardCommon {
    /// Returns a shard's part of memory that the shards divide, in bytes. With several shards, it is
    /// a multiple of 4 MiB.
    fn part(&self, total: u64) -> u64 {
        if self.shards == 1 {
            return total;
        }
        (total / u64::from(self.shards) / UNIT * UNIT).max(LEAST_MEMORY)
    }

    fn outstanding(&self) -> usize {
        if self.shards == 1 {
            return self.config.channel.requests;
        }
        (self.config.channel.requests / usize::from(self.shards)).max(LEAST_OUTSTANDING)
    }
}

/// Returns the maximum host memory and the maximum number of unanswered requests of all shards of an
/// osd that may have any number of shards. `layout` is the memory of an osd with one shard.
pub fn store_limits(layout: MemoryLayout, requests: usize) -> (usize, usize) {
    let shards = usize::from(MAX_SHARDS);
    let rings = layout.len() - layout.data_len as usize;
    let memory = layout.data_len as usize + shards * (rings + LEAST_MEMORY as usize);
    (memory, requests + shards * LEAST_OUTSTANDING)
}

/// The resources of a shard: its stores, staging memory, and the engine that moves payload.
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
    async fn open(common: &ShardCommon, number: u16) -> Result<Backend> {
        let staging = common.part(common.config.osd.staging.0) as usize;
        match common.stores.clone() {
            Stores::Here(targets, engines) => {
                let arena = Arena::anonymous(staging).doing("reserving staging memory")?;
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
            Stores::Behind(endpoint, trust) => {
                Backend::join((endpoint, trust), common, number, staging).await
            }
        }
    }

    async fn join(
        (endpoint, trust): (StoreEndpoint, Trust),
        common: &ShardCommon,
        number: u16,
        staging: usize,
    ) -> Result<Backend> {
        let config = &common.config;
        let channel = &config.channel;
        let faults = common.controls.faults().clone();
        let mut options = AttachmentOptions {
            engine: Some(start_engine(channel, &faults, number).doing("starting the DMA engine")?),
            overdue: channel.overdue.0,
            cool_down: channel.cool_down.0,
            verify_every: channel.verify_every,
            tuning: attachment_tuning(channel.tuning()),
            trust,
            faults,
            outstanding: common.outstanding(),
            seat: SeatClaim { osd: common.run, seat: number, seats: common.shards },
            wait_for_store: config.osd.store_patience.0,
            ..AttachmentOptions::default()
        };
        options.memory.layout.data_len = common.part(config.channel.window.0);
        options.memory.pool_len = staging;
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

/// Minimum of the maximum length of a segment, in bytes. If the transfers of the engine are shorter, a
/// segment consists of several transfers, because each segment also costs messages.
const LEAST_SEGMENT: usize = 256 << 10;

/// Returns the maximum length of a segment of a request: the longest transfer of the engine, in whole
/// blocks, but at most half of the largest staging buffer, so that a request has several segments.
fn segment(max_transfer: Option<usize>) -> usize {
    let half = LARGEST_BUFFER / 2;
    let longest = max_transfer.unwrap_or(half).clamp(LEAST_SEGMENT, half);
    longest - longest % BLOCK_SIZE
}

impl Backend {
    /// Returns the maximum length of a segment of a request, in bytes.
    fn segment(&self) -> usize {
        segment(self.attachment.as_ref().map(|attachment| attachment.engine().max_transfer()))
    }
}

/// Starts the DMA engine of the shard with this number.
fn start_engine(
    channel: &config::ChannelSection,
    faults: &Faults,
    number: u16,
) -> channel::Result<Arc<dyn DmaEngine>> {
    match &channel.engine {
        config::EngineKind::Ofi(provider) => {
            let (provider, faults) = (provider.clone(), faults.clone());
            Ok(OfiEngine::start(OfiOptions { provider, faults, number, ..OfiOptions::default() })?)
        }
        config::EngineKind::Shm => {
            let profile = match channel.profile {
                config::EngineProfile::Memcpy => Profile::Memcpy,
                config::EngineProfile::Bf3Paper => Profile::Bf3Paper,
                config::EngineProfile::Bf3Serial => Profile::Bf3Serial,
            };
            Ok(ShmEngine::start(ShmOptions {
                profile,
                faults: faults.clone(),
                number,
                ..ShmOptions::default()
            })?)
        }
    }
}

fn attachment_tuning(tuning: ChannelTuning) -> proxy::DmaTuning {
    proxy::DmaTuning {
        queues: tuning.dma_queues as usize,
        region_cache: tuning.region_cache as usize,
        poll: Duration::from_micros(tuning.poll_us),
        max_transfer: Some(tuning.max_transfer as usize),
    }
}

/// Returns the maximum number of segments of a request that are in progress at the same time.
fn segments(tuning: ChannelTuning) -> usize {
    if tuning.pipeline { SEGMENTS } else { 1 }
}

/// A shard whose resources are open.
struct OpenShard {
    backend: Backend,
    resources: ShardResources,
    stack: Arc<dyn NetworkStack>,
}

/// Opens the resources of a shard.
async fn open(common: &ShardCommon, number: u16) -> Result<OpenShard> {
    let config = &common.config;
    let backend = Backend::open(common, number).await?;
    let tuning = config.channel.tuning();
    let in_flight = Arc::new(AtomicUsize::new(segments(tuning)));
    if let Some(attachment) = backend.attachment.clone() {
        let in_flight = Arc::clone(&in_flight);
        let tune = move |tuning| {
            in_flight.store(segments(tuning), Ordering::Relaxed);
            attachment.tune(attachment_tuning(tuning));
        };
        common.controls.tune_with(tuning, Box::new(tune));
    }
    let offload = backend
        .attachment
        .clone()
        .map(|attachment| OffloadSource(Arc::new(move || attachment.status().offload)));
    let store_usage = backend.attachment.as_ref().map(|attachment| {
        let stores = attachment.store_set();
        UsageSource(Arc::new(move || stores.usage()))
    });
    let faults = common.controls.faults().clone();
    let osd_config = OsdConfig {
        coding: coding::osd_config(config, common.shards, backend.placement, backend.stripes.clone(), faults),
        segments_in_flight: in_flight,
        segment: backend.segment(),
        offload,
        store_usage,
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
        forgotten: common.expected.forgotten.clone(),
        node: common.expected.node,
        dpu_key: common.dpu_key.clone(),
        admin_revision: common.admin_revision,
        accepts_altered_map: config.osd.accept_altered_map,
        users: common.users.clone(),
        audit: AuditAt(Some(Arc::clone(&common.audit))),
        control: Some(common.control.to_string()),
        debug: DebugAt(Some(Arc::new(common.controls.clone()))),
        gateways: GatewaysAt(Some(Arc::new(ConnectedGateways(common.gateways.clone())))),
        orphan_grace: config.osd.orphan_grace.0,
        collect_interval: config.osd.collect_interval.0,
        requests_per_connection: config.osd.requests_per_connection,
        sessions: config.osd.sessions,
        ..OsdConfig::default()
    };
    let mut options = config.network.options();
    options.faults = common.controls.faults().clone();
    options.connection.max_connections = config.osd.sessions;
    options.connection.max_handshakes = config.osd.handshakes;
    options.connection.trust = common.trust.clone();
    if common.shards > 1 {
        // Each shard has a listener, and all of them use the descriptors of the process.
        options.connection.max_descriptors = Some(spare_descriptors() / usize::from(common.shards));
    }
    let choice = config.network.stacks.with_port_offset(number);
    let stack = messenger::open(&choice, &options, UseAs::Server).doing("opening the network")?;
    let (targets, staging) = (backend.targets.clone(), backend.pool.clone());
    let resources = ShardResources { config: osd_config, targets, staging };
    Ok(OpenShard { backend, resources, stack })
}

impl Backend {
    /// Resolves when the store has restarted with different targets. A new process must serve them.
    async fn superseded(&self) {
        match &self.attachment {
            Some(attachment) => attachment.superseded().await,
            None => std::future::pending().await,
        }
    }

    /// Runs `serve` with a future that resolves when the shard must stop.
    ///
    /// # Errors
    /// If the store has restarted with different targets.
    async fn until_stopped(
        &self,
        stop: impl Future<Output = ()>,
        serve: impl AsyncFnOnce(std::pin::Pin<&mut dyn Future<Output = ()>>),
    ) -> Result<()> {
        let is_superseded = Cell::new(false);
        let stop = async {
            tokio::select! {
                () = stop => {}
                () = self.superseded() => is_superseded.set(true),
            }
        };
        let mut stop = std::pin::pin!(stop);
        serve(stop.as_mut()).await;
        if is_superseded.get() {
            let why = "the store has restarted with different targets; the osd restarts to use them";
            return Err(Failure::new("serving clients", why));
        }
        Ok(())
    }
}

/// Serves clients on the first shard, on this thread, which must be in a `LocalSet`, until `stop`
/// resolves. `started` receives the address for clients, or the reason why serving cannot start.
///
/// # Errors
/// If the store has restarted with different targets. A new process must serve these targets.
pub async fn serve(
    shard: FirstShard,
    common: ShardCommon,
    listen: String,
    started: oneshot::Sender<Result<Ready>>,
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let OpenShard { backend, resources, stack } = match open(&common, 0).await {
        Ok(opened) => opened,
        Err(failure) => {
            let _ = started.send(Err(failure));
            return Ok(());
        }
    };
    let ready = |result: std::result::Result<osd::OsdStarted, osd::StartError>| {
        let ready = result.map(|osd| Ready {
            endpoint: Some(osd.endpoint),
            control: Some(common.control.to_string()),
            node: Some(osd.node),
            numbered: osd.targets,
            engine: Some(backend.engine.clone()),
            emulated: backend.emulated,
            ..Ready::default()
        });
        // Ignore the error: the receiver no longer exists if a signal has stopped the role
        // meanwhile.
        let _ = started.send(ready.map_err(|e| Failure::new(format!("starting the osd at {listen}"), e)));
    };
    backend.until_stopped(stop, async |stop| shard.serve(resources, stack, &listen, ready, stop).await).await
}

/// Serves clients on a further shard, as [`serve`] does.
///
/// # Errors
/// If the shard's resources cannot be opened, or the store has restarted with different targets.
pub async fn serve_further(
    number: u16,
    shard: FurtherShard,
    common: ShardCommon,
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let OpenShard { backend, resources, stack } = open(&common, number).await?;
    backend.until_stopped(stop, async |stop| shard.serve(resources, stack, stop).await).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_a_transfer_of_the_engine_within_limits() {
        assert_eq!(segment(None), 2 << 20);
        assert_eq!(segment(Some((1 << 20) + 17)), 1 << 20);
        assert_eq!((segment(Some(4096)), segment(Some(1 << 30))), (256 << 10, 2 << 20));
    }
}
