//! Collects the node's status for display.

use messenger::Shortage;
use store::StoreCalls;
use wire::{ConnectionStatus, NodeStatus, ShortageCounts, Space, StagingStatus, TargetState, TargetStatus};

use crate::map::TargetRecord;
use crate::osd::Osd;
use crate::target::Target;

/// Maximum time to wait for a target's answer.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(2);

/// Returns the current status. A target that does not answer is listed with an error.
pub(crate) async fn status(osd: &Osd) -> NodeStatus {
    let records = osd.map.borrow().targets.clone();
    let targets = records.iter().map(|record| async {
        let target = osd.targets.iter().find(|t| t.uuid == record.uuid);
        target_status(osd, record, target.map(|t| &**t)).await
    });
    let targets = futures::future::join_all(targets).await;
    let (free, fewest) = osd.staging.free_bytes();
    let map = osd.map.borrow();
    NodeStatus {
        node: map.node,
        placement: osd.config.placement,
        engine: osd.config.engine.clone(),
        emulated: osd.config.emulated,
        osd_pid: osd.config.pid,
        uptime_seconds: osd.age.ran().as_secs(),
        map_epoch: map.epoch,
        health: osd.health(),
        rebuild: osd.rebuilds.status(osd.pace.rate()),
        targets,
        pools: osd.list_pools(),
        paths: osd.paths.borrow().clone(),
        sessions: osd.sessions.borrow().connected(),
        sessions_one_sided: osd.one_sided_connections(),
        connections: connections(osd),
        requests: osd.requests.get(),
        times: osd.times.requests(),
        thread_ns: osd.times.thread(),
        offload: osd.config.offload.as_ref().map(|source| (source.0)()),
        coding: osd.coding.status(),
        staging: StagingStatus {
            total_bytes: osd.staging.arena().len() as u64,
            free_bytes: free as u64,
            least_free_bytes: fewest as u64,
        },
    }
}

fn connections(osd: &Osd) -> ConnectionStatus {
    let admissions = osd.admissions.borrow();
    let Some(admissions) = admissions.as_ref() else { return ConnectionStatus::default() };
    let shortages = osd.sessions.borrow().shortages();
    // The osd limits sessions, and the messenger limits connections. A client can lose its slot, or
    // get no slot, because of either limit.
    let counts = |count: &dyn Fn(Shortage) -> u64, sessions| ShortageCounts {
        handshakes: count(Shortage::Handshakes),
        connections: count(Shortage::Connections),
        detached: count(Shortage::Detached),
        descriptors: count(Shortage::Descriptors),
        sessions,
    };
    ConnectionStatus {
        max_connections: admissions.max_connections() as u64,
        max_handshakes: admissions.max_handshakes() as u64,
        reclaimed: counts(&|shortage| admissions.reclaimed(shortage), shortages.reclaimed),
        refused: counts(&|shortage| admissions.refused(shortage), shortages.refused),
    }
}

async fn target_status(osd: &Osd, record: &TargetRecord, target: Option<&Target>) -> TargetStatus {
    let failure = target.map_or(Some("the target is not present".into()), Target::failure);
    let (state, next_try) = target.map_or((TargetState::Failed, None), Target::state);
    let next_try_ms = next_try.map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
    let space = space(target).await;
    let (uuid, out, behind) = (record.uuid, record.out, osd.is_behind(record.uuid));
    let went_back = target.and_then(Target::went_back) == Some(true);
    TargetStatus {
        uuid,
        out,
        forgotten: record.forgotten || record.given_up,
        went_back,
        behind,
        state,
        failure,
        next_try_ms,
        space,
    }
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
