//! Collects the node's status for display.

use std::rc::Rc;

use base::process::OwnUsage;
use messenger::{Admissions, Shortage};
use store::StoreCalls;
use uuid::Uuid;
use wire::{
    CodingStatus, ConnectionStatus, NodeStatus, OffloadStatus, PathStatus, Placement, RebuildStatus,
    RequestTimes, Role, RoleUsage, ShardStatus, ShortageCounts, Space, StagingStatus, TargetState,
    TargetStatus, ThreadTimes,
};

use crate::config::{OsdConfig, UsageSource};
use crate::mailbox::ShardGone;
use crate::map::TargetRecord;
use crate::osd::Osd;
use crate::shard::Shard;
use crate::target::Target;

/// Maximum time to wait for a target's answer.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(2);

/// What one shard contributes to the node's status.
struct ShardReport {
    status: ShardStatus,
    connections: ConnectionStatus,
    paths: Vec<PathStatus>,
    sessions_one_sided: u32,
    times: RequestTimes,
    rebuild: RebuildStatus,
    coding: CodingStatus,
    offload: Option<OffloadStatus>,
    targets: Vec<TargetView>,
}

/// How a shard sees one target.
struct TargetView {
    uuid: Uuid,
    state: TargetState,
    next_try_ms: Option<u64>,
    failure: Option<String>,
    went_back: bool,
}

/// Returns the current status. A target that does not answer is listed with an error.
pub(crate) async fn status(osd: &Osd) -> Result<NodeStatus, ShardGone> {
    let shard = &osd.shard;
    let reports = shard.each(async |shard: Rc<Shard>| report(&shard)).await?;
    let records = shard.map.borrow().targets.clone();
    let targets = records.iter().map(|record| target_status(osd, record, &reports));
    let targets = futures::future::try_join_all(targets).await?;
    let health = osd.health().await?;
    let (mut times, mut thread_ns) = (RequestTimes::default(), ThreadTimes::default());
    let (mut rebuild, mut staging) = (RebuildStatus::default(), StagingStatus::default());
    let (mut coding, mut offload): (Option<CodingStatus>, Option<OffloadStatus>) = (None, None);
    let mut connections = ConnectionStatus::default();
    let mut requests = 0;
    for report in &reports {
        times += report.times;
        thread_ns += report.status.thread_ns;
        rebuild += report.rebuild.clone();
        staging += report.status.staging;
        requests += report.status.requests;
        connections.max_connections = report.connections.max_connections;
        connections.max_handshakes = report.connections.max_handshakes;
        connections.reclaimed += report.connections.reclaimed;
        connections.refused += report.connections.refused;
        if let Some(of_shard) = report.offload.clone() {
            match &mut offload {
                Some(sum) => *sum += of_shard,
                None => offload = Some(of_shard),
            }
        }
        match &mut coding {
            Some(sum) => *sum += report.coding.clone(),
            None => coding = Some(report.coding.clone()),
        }
    }
    // The osd limits sessions, and the messenger limits connections. A client can lose its slot, or
    // get no slot, because of either limit.
    let shortages = osd.shortages();
    connections.reclaimed.sessions = shortages.reclaimed;
    connections.refused.sessions = shortages.refused;
    let first = reports.first();
    let map = shard.map.borrow();
    Ok(NodeStatus {
        node: map.node,
        placement: shard.config.placement,
        engine: shard.config.engine.clone(),
        emulated: shard.config.emulated,
        osd_pid: shard.config.pid,
        uptime_seconds: shard.age.ran().as_secs(),
        map_epoch: map.epoch,
        accepts_altered_map: shard.config.accepts_altered_map,
        health,
        rebuild,
        targets,
        pools: osd.list_pools(|pool| Some(pool.label.clone())),
        paths: first.map(|report| report.paths.clone()).unwrap_or_default(),
        sessions: shard.presence.connected(),
        // Each client has a connection to the first shard.
        sessions_one_sided: first.map_or(0, |report| report.sessions_one_sided),
        connections,
        requests,
        times,
        thread_ns,
        offload,
        coding: coding.unwrap_or_default(),
        staging,
        shards: reports.into_iter().map(|report| report.status).collect(),
    })
}

/// Returns how much the processes of the node use of their machines. A process whose use cannot be
/// read is missing.
pub(crate) async fn usage(config: &OsdConfig) -> Vec<RoleUsage> {
    let role = match config.placement {
        Placement::Dpu => Role::Osd,
        Placement::Host => Role::Node,
    };
    let mut roles = Vec::new();
    match OwnUsage::read() {
        Ok(usage) => roles.push(RoleUsage { role, usage }),
        Err(error) => tracing::warn!(%error, "the use of this process cannot be read"),
    }
    if let Some(UsageSource(ask)) = &config.store_usage {
        match tokio::time::timeout(PATIENCE, ask()).await {
            Ok(Ok(usage)) => roles.push(RoleUsage { role: Role::Store, usage }),
            Ok(Err(error)) => tracing::warn!(%error, "the store does not report its use"),
            Err(_) => tracing::warn!("the store did not report its use within {PATIENCE:?}"),
        }
    }
    roles
}

/// Returns what a shard contributes to the status.
fn report(shard: &Shard) -> ShardReport {
    let (free, fewest) = shard.staging.free_bytes();
    let endpoint = shard.endpoint();
    let view = |target: &Rc<Target>| {
        let (state, next_try) = target.state();
        TargetView {
            uuid: target.uuid,
            state,
            next_try_ms: next_try.map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)),
            failure: target.failure(),
            went_back: target.went_back() == Some(true),
        }
    };
    ShardReport {
        status: ShardStatus {
            endpoint: endpoint.map(|endpoint| endpoint.address.clone()).unwrap_or_default(),
            sessions: shard.clients.sessions(),
            requests: shard.requests.now(),
            completed: shard.requests.completed(),
            messages: shard.peers.sent(),
            thread_ns: shard.times.thread(),
            staging: StagingStatus {
                total_bytes: shard.staging.arena().len() as u64,
                free_bytes: free as u64,
                least_free_bytes: fewest as u64,
            },
        },
        connections: endpoint.map(|endpoint| connections(&endpoint.admissions)).unwrap_or_default(),
        paths: endpoint.map(|endpoint| endpoint.paths.clone()).unwrap_or_default(),
        sessions_one_sided: shard.clients.one_sided(),
        times: shard.times.requests(),
        rebuild: shard.rebuilds.status(shard.pace.rate()),
        coding: shard.coding.status(),
        offload: shard.config.offload.as_ref().map(|source| (source.0)()),
        targets: shard.targets.iter().map(view).collect(),
    }
}

fn connections(admissions: &Admissions) -> ConnectionStatus {
    let counts = |count: &dyn Fn(Shortage) -> u64| ShortageCounts {
        handshakes: count(Shortage::Handshakes),
        connections: count(Shortage::Connections),
        detached: count(Shortage::Detached),
        descriptors: count(Shortage::Descriptors),
        sessions: 0,
    };
    ConnectionStatus {
        max_connections: admissions.max_connections() as u64,
        max_handshakes: admissions.max_handshakes() as u64,
        reclaimed: counts(&|shortage| admissions.reclaimed(shortage)),
        refused: counts(&|shortage| admissions.refused(shortage)),
    }
}

/// Returns the status of a target: the state on the shard that is worst off, and the failure there.
async fn target_status(
    osd: &Osd,
    record: &TargetRecord,
    reports: &[ShardReport],
) -> Result<TargetStatus, ShardGone> {
    let uuid = record.uuid;
    let views = reports.iter().flat_map(|report| &report.targets).filter(|view| view.uuid == uuid);
    let worst =
        views.clone().reduce(|worst, view| if view.state as u8 > worst.state as u8 { view } else { worst });
    let target = osd.shard.target(uuid);
    Ok(TargetStatus {
        uuid,
        out: record.out,
        forgotten: record.forgotten || record.given_up,
        went_back: views.clone().any(|view| view.went_back),
        behind: osd.is_behind(uuid).await?,
        state: worst.map_or(TargetState::Failed, |view| view.state),
        failure: worst.map_or_else(|| Some("the target is not present".into()), |view| view.failure.clone()),
        next_try_ms: worst.and_then(|view| view.next_try_ms),
        space: space(target.as_deref()).await,
    })
}

async fn space(target: Option<&Target>) -> Result<Space, String> {
    let target = target
        .ok_or("the target is not present; once it is attached, the node uses it from its next start")?;
    match tokio::time::timeout(PATIENCE, target.store.space()).await {
        Ok(Ok(space)) => Ok(space),
        Ok(Err(e)) => Err(e.to_string()),
        Err(_) => Err("the target's store does not answer; see the log of the store".into()),
    }
}
