//! The report of `outboard status`, built from the supervisor's record, `/proc` and the osd's
//! answer to a status request.

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};

use base::process::ProcessUsage;
use client::{TargetState, TargetStatus};
use serde::{Serialize, Serializer};
use uuid::Uuid;
use wire::{CodingOffload, OffloadState, Placement, Redundancy, Space};

use super::descriptors::FdUsage;
use super::roster::{Roster, RosterError};
use super::state::{NodeState, Process, ProcessState, Role};
use super::units::ByteSize;

/// Status report of a node. Its JSON form is stable: fields are never removed, but new fields may
/// be added.
#[derive(Debug, Default, Serialize)]
pub struct NodeReport {
    /// The node's directory, if the command found the node by its directory.
    pub dir: Option<PathBuf>,
    /// Whether the node's supervisor runs; if the node's directory is unknown, whether the osd
    /// answers.
    pub up: bool,
    /// `dpu` or `host`.
    pub placement: Option<Placement>,
    /// Address for clients.
    pub endpoint: Option<String>,
    /// Name of the engine that moves data between osd and store.
    pub engine: Option<String>,
    /// Whether the engine between osd and store is emulated.
    pub emulated: bool,
    /// All processes.
    pub processes: Vec<ProcessReport>,
    /// All targets.
    pub targets: Vec<TargetReport>,
    /// All pools; empty while the osd does not answer.
    pub pools: Vec<PoolReport>,
    /// The osd's load, while the osd answers.
    pub osd: Option<OsdReport>,
    /// The DMA between osd and store, while the osd answers.
    pub offload: Option<OffloadReport>,
    /// State of parity computation, while the osd answers.
    pub coding: Option<client::CodingStatus>,
    /// The current rebuild, if there is one.
    pub rebuild: Option<RebuildReport>,
    /// Problems of the node.
    pub problems: Vec<String>,
}

/// A rebuild in progress.
#[derive(Debug, Serialize)]
pub struct RebuildReport {
    /// UUID of the target that receives the rebuilt fragments.
    pub target: Uuid,
    /// Name of the pool that is being rebuilt.
    pub pool: String,
    /// Number of degraded placement groups in all pools, including this pool.
    pub groups_left: u32,
    /// Number of objects rebuilt since the osd's start.
    pub objects: u64,
    /// Number of bytes that rebuilds have written since the osd's start.
    pub bytes: u64,
    /// Maximum rate of rebuilds and scrubs in bytes per second; 0 for no limit.
    pub rate_limit: u64,
    /// Reason of the last failure after which a rebuild started again, since the osd's start.
    pub last_failure: Option<String>,
}

impl RebuildReport {
    /// Returns the rebuild in progress, if there is one.
    fn of(status: client::RebuildStatus, groups_left: u32) -> Option<RebuildReport> {
        let client::RebuildStatus { target, pool, objects, bytes, rate_limit, last_failure } = status;
        let (target, pool) = (target?, pool?);
        Some(RebuildReport { target, pool, groups_left, objects, bytes, rate_limit, last_failure })
    }

    fn line(&self) -> String {
        let (bytes, rate) = (ByteSize(self.bytes), ByteSize(self.rate_limit));
        let limit =
            if self.rate_limit == 0 { String::new() } else { format!(", at most {rate:.1} per second") };
        format!(
            "target {}, pool {}; {} placement groups left; {} objects, {bytes:.1} rebuilt since the osd's start{limit}",
            self.target, self.pool, self.groups_left, self.objects
        )
    }
}

/// One process.
#[derive(Debug, Serialize)]
pub struct ProcessReport {
    /// `supervisor`, `store`, `osd` or `node`.
    pub role: Role,
    /// Pid of the process; `None` while the process is down.
    pub pid: Option<u32>,
    /// State of the process.
    pub state: ProcessState,
    /// Time since the start of the process, in seconds.
    pub uptime_seconds: Option<f64>,
    /// How often the role was restarted.
    pub restarts: u64,
    /// How often a process of the role was killed because it hung.
    pub hangs: u64,
    /// How the role's previous process ended.
    pub last_exit: Option<String>,
    /// Address of the process's Prometheus metrics.
    pub metrics: Option<String>,
    /// CPU time since the process's start, in seconds.
    pub cpu_seconds: Option<f64>,
    /// Maximum resident memory since the start of the process, in bytes.
    pub peak_resident_bytes: Option<u64>,
    /// Number of open descriptors.
    pub open_fds: Option<u64>,
    /// Maximum number of open descriptors.
    pub max_fds: Option<u64>,
}

/// One target. Space is in bytes, and is missing while the target cannot be queried.
#[derive(Debug, Default, Serialize)]
pub struct TargetReport {
    /// Path of the target's file or device, if the command found the node by its directory.
    pub path: Option<PathBuf>,
    /// UUID of the target.
    pub uuid: Uuid,
    /// Number of the target; `None` if the osd does not answer.
    pub id: Option<usize>,
    /// State of the target; `None` if the osd does not answer.
    pub state: Option<ReportedState>,
    /// Whether the operator has accepted the loss of what only this target has.
    pub forgotten: bool,
    /// Why the target cannot be queried.
    pub error: Option<String>,
    /// Space of the target; the keys are missing while the target cannot be queried.
    #[serde(flatten)]
    pub space: Option<Space>,
    /// Fragmentation of free space, from 0 to 1: 1 minus the average length of free extents divided
    /// by the length of the longest free extent.
    pub fragmentation: Option<f64>,
}

/// State of a target, as reports show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ReportedState {
    /// The target is in use.
    In,
    /// The operator has taken the target out of use.
    Out,
    /// The target did not answer in time, and is being probed.
    Slow,
    /// The target reported an I/O error, and is being probed.
    Failing,
    /// The target has failed.
    Failed,
    /// The target has gone back to an earlier state. Pools without redundancy do not use it.
    #[serde(rename = "went back")]
    WentBack,
    /// The target is in use, and is still receiving the changes that it missed.
    #[serde(rename = "catching up")]
    CatchingUp,
}

impl ReportedState {
    /// Returns the state of a target.
    pub fn of(target: &TargetStatus) -> ReportedState {
        match target {
            TargetStatus { out: true, .. } => ReportedState::Out,
            TargetStatus { state: TargetState::Slow, .. } => ReportedState::Slow,
            TargetStatus { state: TargetState::Failing, .. } => ReportedState::Failing,
            TargetStatus { failure: Some(_), .. } => ReportedState::Failed,
            TargetStatus { went_back: true, .. } => ReportedState::WentBack,
            TargetStatus { behind: true, .. } => ReportedState::CatchingUp,
            _ => ReportedState::In,
        }
    }

    /// Returns the name of the state.
    pub fn as_str(self) -> &'static str {
        match self {
            ReportedState::In => "in",
            ReportedState::Out => "out",
            ReportedState::Slow => "slow",
            ReportedState::Failing => "failing",
            ReportedState::Failed => "failed",
            ReportedState::WentBack => "went back",
            ReportedState::CatchingUp => "catching up",
        }
    }
}

impl Display for ReportedState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Returns why a target is not used, and when the node probes the target next. `None` if the target
/// is used.
pub fn trouble(target: &TargetStatus) -> Option<String> {
    if target.went_back && target.failure.is_none() {
        let why = "the target has gone back to an earlier state, and pools without redundancy do not use it; restore its newer content, or accept the loss: outboard target forget ID --accept-loss";
        return Some(why.to_owned());
    }
    let why = target.failure.as_ref()?;
    let why = if target.forgotten { format!("{why}; its loss is accepted") } else { why.clone() };
    Some(match (target.state, target.next_try_ms) {
        (TargetState::Slow | TargetState::Failing, None) => format!("{why}; the node is probing the target"),
        (TargetState::Slow | TargetState::Failing, Some(ms)) => {
            format!("{why}; the node probes the target again in {:.1} s", ms as f64 / 1000.0)
        }
        _ => format!(
            "{why}; the node uses the target again after the store has remounted it, or after `outboard target in`; if its drive is lost, use `outboard target replace`"
        ),
    })
}

/// Serializes a value in its text form, as the command line shows it.
fn as_text<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// One pool.
#[derive(Debug, Serialize)]
pub struct PoolReport {
    /// Name of the pool.
    pub name: String,
    /// Number of the pool.
    pub id: u32,
    /// Number of placement groups.
    pub placement_groups: u32,
    /// Redundancy scheme: `single`, `mirror:N`, `ec:K+M`.
    #[serde(serialize_with = "as_text")]
    pub redundancy: Redundancy,
    /// Number of placement groups that have fewer targets than the redundancy scheme requires.
    pub degraded: u32,
    /// Number of placement groups that have too few targets to serve requests.
    pub unavailable: u32,
}

/// The DMA between osd and store. The keys of its health are beside the other keys.
#[derive(Debug, Serialize)]
pub struct OffloadReport {
    /// Health of the DMA.
    #[serde(flatten)]
    pub health: client::HealthStatus,
    /// Bytes of memory in quarantine, because a late transfer may still access them.
    pub quarantined_bytes: u64,
    /// Number of bytes that had already arrived when DMA failed, and that were not sent again.
    pub kept_bytes: u64,
    /// Number of bytes sent over the control socket instead of by DMA.
    pub fallback_bytes: u64,
    /// Armed faults of the osd.
    pub faults: Vec<String>,
}

impl From<client::OffloadStatus> for OffloadReport {
    fn from(status: client::OffloadStatus) -> OffloadReport {
        let client::OffloadStatus { health, quarantined_bytes, kept_bytes, fallback_bytes, faults } = status;
        OffloadReport { health, quarantined_bytes, kept_bytes, fallback_bytes, faults }
    }
}

/// Describes refused and reclaimed connections; empty if there were none.
fn turned_away(connections: &client::ConnectionStatus) -> String {
    let counts = [("reclaimed", connections.reclaimed.total()), ("refused", connections.refused.total())];
    let some = counts.into_iter().filter(|(_, count)| *count > 0);
    some.map(|(what, count)| format!("; {count} connections {what}")).collect()
}

/// The osd's load.
#[derive(Debug, Serialize)]
pub struct OsdReport {
    /// Time since the osd's start, in seconds.
    pub uptime_seconds: u64,
    /// Networks other than TCP over which clients can reach the osd.
    pub paths: Vec<client::PathStatus>,
    /// Number of connected clients.
    pub sessions: u32,
    /// Number of connected clients that now use a network other than TCP.
    pub sessions_by_path: u32,
    /// Limits on connections, and counts of refused and reclaimed connections.
    pub connections: client::ConnectionStatus,
    /// Number of requests in progress.
    pub requests: u32,
    /// Total staging memory, in bytes.
    pub staging_total: u64,
    /// Free staging memory, in bytes.
    pub staging_free: u64,
    /// Lowest amount of free staging memory since the osd's start, in bytes.
    pub staging_least_free: u64,
    /// Breakdown of request times since the osd's start.
    pub times: client::RequestTimes,
    /// Time that the osd's threads have spent in tasks, in ns, by class of task.
    pub thread_ns: client::ThreadTimes,
    /// The osd's shards.
    pub shards: Vec<client::ShardStatus>,
}

impl OsdReport {
    /// Describes the shards: their number, and the part of each in the work.
    fn shards_line(&self) -> String {
        let work = |shard: &client::ShardStatus| {
            let times = shard.thread_ns;
            times.messenger + times.osd + times.channel
        };
        let all: u64 = self.shards.iter().map(work).sum::<u64>().max(1);
        let parts = self.shards.iter().map(|shard| format!("{}%", (work(shard) * 100 + all / 2) / all));
        format!("{}, with {} of the work", self.shards.len(), parts.collect::<Vec<_>>().join(", "))
    }

    fn network(&self) -> String {
        let paths: Vec<String> =
            self.paths.iter().map(|path| format!(", {} at {}", path.name, path.endpoint)).collect();
        let others = match (self.paths.is_empty(), self.sessions_by_path) {
            (true, _) => String::new(),
            (false, count) => format!(", {count} of them not over tcp"),
        };
        let sessions = if self.sessions == 1 { "session" } else { "sessions" };
        let turned_away = turned_away(&self.connections);
        format!("tcp{}; {} {sessions}{others}{turned_away}", paths.concat(), self.sessions)
    }
}

/// The problem of a node that is stopped.
const DOWN: &str = "the node is down; start it with `outboard up`";

impl NodeReport {
    /// Creates the report of a node of which only the address is known, and not the directory.
    pub fn of_endpoint(endpoint: &str) -> NodeReport {
        NodeReport { endpoint: Some(endpoint.to_owned()), ..NodeReport::default() }
    }

    /// Adds the node's roster, and the problem if it is damaged or missing. `has_run` is whether
    /// the node has been started.
    pub fn add_roster(&mut self, roster: Result<Option<Roster>, RosterError>, has_run: bool) {
        match roster {
            // The supervisor's record was deleted while the node was stopped.
            Ok(Some(roster)) if self.placement.is_none() && !self.up => {
                self.problems = vec![DOWN.to_owned()];
                self.targets = roster
                    .targets()
                    .iter()
                    .map(|t| TargetReport::of(t.path().to_owned(), t.uuid()))
                    .collect();
            }
            Ok(Some(_)) => {}
            Ok(None) if has_run => self.problems.push(
                "the node's roster node.json is missing; restart the node while all targets are present, \
                 or restore the file from a backup"
                    .to_owned(),
            ),
            Ok(None) => {}
            Err(e) => self.problems.push(e.to_string()),
        }
    }

    /// Creates the report of a node from its supervisor's record. If the node is not up, the record
    /// describes its last run.
    pub fn of_state(dir: &Path, up: bool, state: Option<NodeState>) -> NodeReport {
        let dir = Some(dir.to_owned());
        let Some(state) = state else {
            return NodeReport {
                dir,
                up,
                problems: vec!["the node has not been started yet; start it with `outboard up`".to_owned()],
                ..NodeReport::default()
            };
        };
        let processes: Vec<ProcessReport> =
            state.processes.iter().map(|p| ProcessReport::of(p, up)).collect();
        let down = processes.iter().filter(|p| p.pid.is_none()).map(|p| {
            let how = p.last_exit.as_ref().map_or(String::new(), |e| format!(" ({e})"));
            format!("the {} is down{how}", p.role.as_str())
        });
        let mut problems: Vec<String> = down.collect();
        problems.extend(processes.iter().filter(|p| p.state == ProcessState::Hung).map(|p| {
            let why = p.last_exit.as_deref().unwrap_or("hung");
            format!("the {} is being killed and started again: {why}", p.role.as_str())
        }));
        if !up {
            problems = vec![DOWN.to_owned()];
        }
        let targets = state.targets.into_iter().map(|t| TargetReport::of(t.path, t.uuid));
        NodeReport {
            dir,
            up,
            placement: Some(state.placement),
            endpoint: state.endpoint.filter(|_| up),
            engine: state.engine,
            emulated: state.emulated,
            processes,
            targets: targets.collect(),
            problems,
            ..NodeReport::default()
        }
    }

    /// Returns whether a store runs in a process of its own on this machine.
    pub fn has_store(&self) -> bool {
        self.processes.iter().any(|process| process.role == Role::Store && process.pid.is_some())
    }

    /// Adds an armed fault of a role to the report's problems.
    pub fn add_fault(&mut self, role: Role, fault: impl Display) {
        let role = role.as_str();
        self.problems.push(format!("FAULT ARMED in the {role}: {fault}; `outboard debug clear` disarms it"));
    }

    /// Adds the osd's answer to a status request.
    pub fn add_answer(&mut self, answer: client::NodeStatus) {
        self.up = true;
        self.placement = Some(answer.placement);
        self.engine = Some(answer.engine);
        self.emulated = answer.emulated;
        if answer.accepts_altered_map {
            self.problems.push(
                "the osd accepts a map that the storage host may have altered; check the users (`outboard user ls`), \
                 and start the node again without osd.accept_altered_map"
                    .to_owned(),
            );
        }
        if let Some(offload) = &answer.offload {
            let health = &offload.health;
            if health.state != OffloadState::Active {
                let unknown = "the store is not connected, or is reached over TCP without the engine ofi";
                let why = health.last_failure.as_deref().unwrap_or(unknown);
                self.problems.push(format!(
                    "DMA is {} (payload is sent over the control socket): {why}",
                    health.state
                ));
            }
            offload.faults.iter().for_each(|fault| self.add_fault(Role::Osd, fault));
        }
        self.offload = answer.offload.map(OffloadReport::from);
        for (place, health) in [("host", &answer.coding.host.health), ("DPU", &answer.coding.offload.health)]
        {
            if !matches!(health.state, OffloadState::Active | OffloadState::NotInUse) {
                let why = health.last_failure.as_deref().unwrap_or("the reason is unknown");
                self.problems.push(format!("parity computation by the {place} is {}: {why}", health.state));
            }
        }
        self.coding = Some(answer.coding);
        self.osd = Some(OsdReport {
            uptime_seconds: answer.uptime_seconds,
            paths: answer.paths,
            sessions: answer.sessions,
            sessions_by_path: answer.sessions_one_sided,
            connections: answer.connections,
            requests: answer.requests,
            staging_total: answer.staging.total_bytes,
            staging_free: answer.staging.free_bytes,
            staging_least_free: answer.staging.least_free_bytes,
            times: answer.times,
            thread_ns: answer.thread_ns,
            shards: answer.shards,
        });
        self.pools = answer.pools.into_iter().map(|pool| PoolReport::of(pool, &answer.health)).collect();
        self.problems.extend(self.pools.iter().filter_map(PoolReport::problem));
        let left = self.pools.iter().map(|pool| pool.degraded).sum();
        self.rebuild = RebuildReport::of(answer.rebuild, left);
        for (id, target) in answer.targets.into_iter().enumerate() {
            let uuid = target.uuid;
            let known = self.targets.iter().position(|t| t.uuid == uuid);
            let at = known.unwrap_or_else(|| {
                self.targets.push(TargetReport { uuid, ..TargetReport::default() });
                self.targets.len() - 1
            });
            self.targets[at].id = Some(id);
            let state = ReportedState::of(&target);
            self.targets[at].state = Some(state);
            self.targets[at].forgotten = target.forgotten;
            if let Some(why) = trouble(&target) {
                self.problems.push(match state {
                    ReportedState::WentBack => format!("target {uuid}: {why}"),
                    state => format!("target {uuid} is {state}: {why}"),
                });
            } else if let Err(why) = &target.space {
                self.problems.push(format!("target {uuid}: {why}"));
            }
            self.targets[at].set_space(target);
        }
    }
}

impl ProcessReport {
    fn of(process: &Process, up: bool) -> ProcessReport {
        let alive = up && process.is_alive();
        let usage = if alive { ProcessUsage::read(process.pid).ok() } else { None };
        let descriptors = if alive { FdUsage::of(process.pid).ok() } else { None };
        ProcessReport {
            role: process.role,
            pid: alive.then_some(process.pid),
            state: match process.state {
                state if alive => state,
                _ if !up => ProcessState::Stopped,
                _ => ProcessState::Waiting,
            },
            uptime_seconds: alive.then(|| process.uptime().as_secs_f64()),
            restarts: process.restarts,
            hangs: process.hangs,
            last_exit: process.last_exit.clone(),
            metrics: process.metrics.clone().filter(|_| alive),
            cpu_seconds: usage.as_ref().map(|u| u.total.cpu_seconds()),
            peak_resident_bytes: usage.map(|u| u.peak_resident_bytes),
            open_fds: descriptors.map(|d| d.open),
            max_fds: descriptors.map(|d| d.most),
        }
    }
}

impl PoolReport {
    fn of(pool: client::PoolInfo, health: &[client::PoolHealth]) -> PoolReport {
        let health = health.iter().find(|health| health.pool == pool.name);
        PoolReport {
            id: pool.id,
            placement_groups: pool.pg_count,
            redundancy: pool.redundancy,
            degraded: health.map_or(0, |health| health.degraded),
            unavailable: health.map_or(0, |health| health.unavailable),
            name: pool.name,
        }
    }

    fn problem(&self) -> Option<String> {
        let (name, all) = (&self.name, self.placement_groups);
        match (self.degraded, self.unavailable) {
            (0, 0) => None,
            (n, 0) => Some(format!(
                "pool {name}: {n} of {all} placement groups have fewer targets than the redundancy scheme requires; `outboard target ls` shows the missing targets"
            )),
            (_, n) => Some(format!(
                "pool {name}: {n} of {all} placement groups have too few targets to serve requests, or were not checked yet; bring missing targets back"
            )),
        }
    }

    fn line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let degraded = self.degraded + self.unavailable;
        let PoolReport { name, id, redundancy, placement_groups, .. } = self;
        writeln!(f, "{name:<36} {id:>6} {redundancy:<10} {placement_groups:>16} {degraded:>8}")
    }
}

impl TargetReport {
    /// Creates the report of a target whose state is unknown.
    fn of(path: PathBuf, uuid: Uuid) -> TargetReport {
        TargetReport { path: Some(path), uuid, ..TargetReport::default() }
    }

    fn set_space(&mut self, status: client::TargetStatus) {
        let space = match status.space {
            Ok(space) => space,
            Err(why) => {
                self.error = Some(why);
                return;
            }
        };
        let mean = space.free as f64 / space.free_extents.max(1) as f64;
        let longest = space.largest_free_extent.max(1) as f64;
        self.fragmentation = Some(if space.free == 0 { 0.0 } else { (1.0 - mean / longest).max(0.0) });
        self.space = Some(space);
    }
}

impl Display for NodeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        writeln!(f, "node       {}", if self.up { "up" } else { "down" })?;
        if let Some(dir) = &self.dir {
            writeln!(f, "directory  {}", dir.display())?;
        }
        writeln!(f, "endpoint   {}", or_dash(&self.endpoint))?;
        let emulated = if self.emulated { " (emulated)" } else { "" };
        writeln!(
            f,
            "placement  {}, engine {}{emulated}",
            self.placement.map_or("-", Placement::as_str),
            or_dash(&self.engine)
        )?;
        if let Some(osd) = &self.osd {
            writeln!(f, "network    {}", osd.network())?;
            if osd.shards.len() > 1 {
                writeln!(f, "shards     {}", osd.shards_line())?;
            }
        }
        if let Some(o) = &self.offload {
            let since = format!("{} failures, {} recoveries", o.health.failures, o.health.recoveries);
            writeln!(f, "offload    DMA {}, {since}", o.health.state)?;
        }
        if let Some(coding) = self.coding.as_ref().filter(|_| self.has_parity()) {
            writeln!(f, "coding     {}", coding_line(coding))?;
        }
        if let Some(rebuild) = &self.rebuild {
            writeln!(f, "rebuilding {}", rebuild.line())?;
        }
        if !self.processes.is_empty() {
            writeln!(
                f,
                "\n{:<11} {:>8} {:<9} {:>9} {:>8} {:>4} {:>9} {:>11} {:>13}  METRICS",
                "PROCESS", "PID", "STATE", "UPTIME", "RESTARTS", "HUNG", "CPU", "PEAK MEMORY", "DESCRIPTORS"
            )?;
        }
        self.processes.iter().try_for_each(|p| p.line(f))?;
        if !self.targets.is_empty() {
            writeln!(
                f,
                "\n{:>2} {:<36} {:<11} {:>11} {:>11} {:>10} {:>6} {:>6} {:>11}  PATH",
                "ID", "TARGET", "STATE", "SIZE", "FREE", "FRAGMENTED", "INDEX", "LOG", "CACHE"
            )?;
        }
        self.targets.iter().try_for_each(|t| t.line(f))?;
        if self.osd.is_some() {
            writeln!(
                f,
                "\n{:<36} {:>6} {:<10} {:>16} {:>8}",
                "POOL", "ID", "REDUNDANCY", "PLACEMENT GROUPS", "DEGRADED"
            )?;
            self.pools.iter().try_for_each(|p| p.line(f))?;
        }
        if !self.problems.is_empty() {
            writeln!(f, "\nPROBLEMS")?;
        }
        self.problems.iter().try_for_each(|problem| writeln!(f, "  {problem}"))
    }
}

impl NodeReport {
    fn has_parity(&self) -> bool {
        self.pools.iter().any(|pool| matches!(pool.redundancy, Redundancy::ErasureCode { .. }))
    }
}

/// Describes in one line where parity is computed.
pub fn coding_line(coding: &client::CodingStatus) -> String {
    let emulated = if coding.emulated { " (emulated)" } else { "" };
    let busy = if coding.host_busy { "busy" } else { "not busy" };
    format!(
        "{}, offload {}{emulated}; host {busy} ({} %); tasks in the last second: {} to the host, {} to the offload; {} tasks wait",
        coding.mode,
        coding.engine.map_or("none", CodingOffload::as_str),
        coding.host_utilization_percent,
        coding.alpha,
        coding.beta,
        coding.queued
    )
}

fn bytes(size: Option<u64>) -> String {
    size.map_or_else(|| "-".to_owned(), |size| format!("{:.1}", ByteSize(size)))
}

impl ProcessReport {
    fn descriptors(&self) -> String {
        match (self.open_fds, self.max_fds) {
            (Some(open), Some(most)) => format!("{open}/{most}"),
            _ => "-".to_owned(),
        }
    }

    fn line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |s: Option<f64>| s.map_or_else(|| "-".to_owned(), |s| format!("{s:.1} s"));
        writeln!(
            f,
            "{:<11} {:>8} {:<9} {:>9} {:>8} {:>4} {:>9} {:>11} {:>13}  {}",
            self.role.as_str(),
            self.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
            self.state.as_str(),
            seconds(self.uptime_seconds),
            self.restarts,
            self.hangs,
            seconds(self.cpu_seconds),
            bytes(self.peak_resident_bytes),
            self.descriptors(),
            self.metrics.as_deref().unwrap_or("-"),
        )
    }
}

/// Returns the used share of a space of which the free and all bytes are known.
fn used(space: Option<(u64, u64)>) -> String {
    let share = |(free, total): (u64, u64)| {
        format!("{} %", (total.saturating_sub(free) * 100).checked_div(total).unwrap_or(0))
    };
    space.map_or_else(|| "-".to_owned(), share)
}

impl TargetReport {
    fn line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>2} {:<36} {:<11} {:>11} {:>11} {:>10} {:>6} {:>6} {:>11}  {}",
            self.id.map_or_else(|| "-".to_owned(), |id| id.to_string()),
            self.uuid,
            self.state.map_or("-", ReportedState::as_str),
            bytes(self.space.map(|space| space.total)),
            bytes(self.space.map(|space| space.free)),
            self.fragmentation.map_or_else(|| "-".to_owned(), |x| format!("{:.1} %", x * 100.0)),
            used(self.space.map(|space| (space.index_free, space.index_total))),
            used(self.space.map(|space| (space.log_free, space.log_total))),
            bytes(self.space.map(|space| space.cache_used)),
            self.path.as_ref().map_or_else(String::new, |p| p.display().to_string()),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::MountedTarget;

    fn state() -> NodeState {
        let mut live = Process { state: ProcessState::Running, ..Process::new(Role::Supervisor) };
        live.set_pid(std::process::id());
        let dead = Process {
            state: ProcessState::Waiting,
            restarts: 2,
            last_exit: Some("killed by signal 9".into()),
            ..Process::new(Role::Store)
        };
        NodeState {
            placement: Placement::Dpu,
            endpoint: Some("127.0.0.1:1".into()),
            control: None,
            engine: Some("shm".into()),
            emulated: true,
            targets: vec![MountedTarget { path: "targets/0.img".into(), uuid: Uuid::from_u128(1) }],
            processes: vec![live, dead],
        }
    }

    #[test]
    fn the_report_names_roles_that_are_down() {
        let report = NodeReport::of_state(Path::new("/n"), true, Some(state()));
        assert_eq!(report.problems, ["the store is down (killed by signal 9)"]);
        assert!(report.processes[0].pid.is_some() && report.processes[0].cpu_seconds.is_some());
        assert!(report.processes[1].pid.is_none());
        let text = report.to_string();
        assert!(text.contains("shm (emulated)") && text.contains("killed by signal 9"), "{text}");
    }

    #[test]
    fn the_report_of_a_stopped_node_shows_no_address_and_no_live_process() {
        let report = NodeReport::of_state(Path::new("/n"), false, Some(state()));
        assert_eq!(report.endpoint, None, "a stale address is not reported");
        assert!(report.processes.iter().all(|p| p.pid.is_none() && p.state == ProcessState::Stopped));
        assert!(!NodeReport::of_state(Path::new("/n"), false, None).up);
    }
}
