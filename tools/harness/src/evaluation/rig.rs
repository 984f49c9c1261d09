//! The systems under test: one node per configuration and a Ceph, each in its own directory on the
//! same drive. All systems run during the whole evaluation. While one system is measured, the
//! others are idle.

use std::fs;
use std::path::Path;

use super::ceph::{self, Cluster};
use super::plan::{ENGINES, LINKED, Subjects};
use super::settings::{EvaluationSettings, LINKED_GIB};
use super::workload::{
    ABLATIONS, Ablation, AccessMode, Case, EmulatedLink, IN_FLIGHT_SWEEP, Network, Set, TestedSystem,
};
use crate::Result;
use crate::ceiling::FioFile;
use crate::cleaner::Cleaner;
use crate::machines::{Machine, Machines, NODE_ADDRESS};
use crate::node::{BenchResult, BenchSpec, Node, NodePlacement};

/// Size of fio's file, in GiB.
const FIO_GIB: u64 = 1;
/// Free space that remains on the drive during the evaluation, in GiB.
const SPARE_GIB: u64 = 3;

/// The running systems.
pub struct EvaluationRig {
    nodes: Vec<(TestedSystem, Node)>,
    /// The Ceph cluster. `None` if Ceph is not measured or did not start.
    pub ceph: Option<Cluster>,
    /// The file for fio on the same drive.
    pub fio: FioFile,
    ablations: Vec<Ablation>,
    in_flight_sweep: Vec<u32>,
    linked: Option<LinkedNodes>,
    _cleaner: Cleaner,
}

/// Nodes in one network namespace, whose clients run in another one.
struct LinkedNodes {
    /// Each node with its address.
    nodes: Vec<(TestedSystem, Node, String)>,
    machines: Machines,
}

impl LinkedNodes {
    fn up(settings: &EvaluationSettings) -> Result<LinkedNodes> {
        let machines = Machines::make()?;
        let mut nodes = Vec::new();
        for config in LINKED {
            let (name, placement) = match config {
                TestedSystem::Host => ("node-linked-host", NodePlacement::Host),
                _ => ("node-linked-dpu", NodePlacement::Dpu),
            };
            let node =
                Node::new(&settings.work.join(name))?.within(machines.enter(Machine::Node), NODE_ADDRESS);
            let node = node.with_env("OUTBOARD_NETWORK_STACKS", Network::Tcp.name());
            node.up_quietly(placement, 1, &format!("{LINKED_GIB}GiB"))?;
            node.run_quietly(&["pool", "create", "bench"])?;
            let endpoint = node.status()?.endpoint.ok_or("the node has no address")?;
            nodes.push((config, node, endpoint));
        }
        Ok(LinkedNodes { nodes, machines })
    }

    fn bench(&self, case: &Case, link: EmulatedLink, seconds: u32) -> Result<BenchResult> {
        let (_, node, endpoint) =
            self.nodes.iter().find(|(c, ..)| *c == case.config).ok_or("no node has this configuration")?;
        self.machines.shape(link.bits_per_second())?;
        let (size, objects) = (case.size.to_string(), case.objects().to_string());
        let mode = case.mode.name();
        let spec = BenchSpec { mode, object_size: &size, in_flight: case.in_flight, seconds };
        let within = self.machines.enter(Machine::Client);
        node.bench_from(&within, endpoint, "bench", spec, &["--objects", &objects])
    }
}

impl EvaluationRig {
    /// Creates the work directory and starts all systems. Optional systems that cannot start are
    /// omitted; the reasons are added to `missing`.
    ///
    /// # Errors
    /// If there is too little space, or a node does not start.
    pub fn up(
        settings: &EvaluationSettings,
        missing: &mut Vec<String>,
        say: &dyn Fn(&str),
    ) -> Result<EvaluationRig> {
        fs::create_dir_all(&settings.work).map_err(|e| {
            format!(
                "cannot create {} ({e}); set OUTBOARD_REPORT_WORK to a writable directory",
                settings.work.display()
            )
        })?;
        let cleaner = cleaner(&settings.work)?;
        let ceph_gib = space_for_ceph(settings, missing)?;
        say("starting nodes (this writes all blocks of their targets)");
        let host = node(settings, TestedSystem::Host, Network::Tcp)?;
        let (memcpy, in_flight_sweep) = node_of_networks(settings, missing)?;
        let mut nodes = vec![host, memcpy];
        let engines = if settings.quick { &ENGINES[..1] } else { &ENGINES };
        for config in engines.iter().copied() {
            match node(settings, config, Network::Tcp) {
                Ok(up) => nodes.push(up),
                Err(why) => missing.push(format!("{}: {why}", config.label())),
            }
        }
        say("starting Ceph");
        let cluster = ceph_gib.map(|gib| Cluster::up(&settings.work.join("ceph"), gib));
        let ceph = match cluster.transpose() {
            Ok(cluster) => cluster,
            Err(why) => {
                missing.push(format!("Ceph: {why}"));
                None
            }
        };
        missing.extend(ceph.as_ref().and_then(|c| c.handicap.clone()));
        let fio = FioFile::create(&settings.work, u32::try_from(FIO_GIB << 10)?)?;
        let ablations = if settings.quick { Vec::new() } else { ablations(&nodes[1].1, missing)? };
        let linked = (!settings.quick).then(|| LinkedNodes::up(settings)).transpose();
        let linked = linked.unwrap_or_else(|why| {
            missing.push(format!("figure 6 over links between network namespaces: {why}"));
            None
        });
        let rig = EvaluationRig { nodes, ceph, fio, ablations, in_flight_sweep, linked, _cleaner: cleaner };
        if let Some(objects) = settings.large_set() {
            say("writing the large set");
            if let Err(why) = rig.fill_large_set(settings, objects) {
                missing.push(format!("the large set: cannot write all of its objects: {why}"));
            }
        }
        Ok(rig)
    }

    /// Returns the systems and options to measure.
    #[must_use]
    pub fn subjects(&self) -> Subjects {
        let nodes = self.nodes.iter().map(|(config, _)| *config);
        let (engines, nodes): (Vec<_>, Vec<_>) = nodes.partition(|config| ENGINES.contains(config));
        let configs = nodes.into_iter().chain(self.ceph.as_ref().map(|_| TestedSystem::Ceph)).collect();
        let linked =
            self.linked.iter().flat_map(|linked| &linked.nodes).map(|(config, ..)| *config).collect();
        let (ablations, in_flight_sweep) = (self.ablations.clone(), self.in_flight_sweep.clone());
        Subjects { configs, engines, linked, ablations, in_flight_sweep }
    }

    /// Returns the processes of all systems: system, role and pid.
    ///
    /// # Errors
    /// If a node does not answer.
    pub fn processes(&self) -> Result<Vec<(TestedSystem, String, u32)>> {
        let mut found = Vec::new();
        for (config, node) in &self.nodes {
            let up = node.status()?.processes.into_iter();
            found.extend(up.filter_map(|p| Some((*config, p.role, p.pid?))));
        }
        let daemons = self.ceph.iter().flat_map(Cluster::daemons);
        found.extend(daemons.map(|(name, pid)| (TestedSystem::Ceph, name.to_owned(), pid)));
        Ok(found)
    }

    /// Runs `outboard bench` on the node of a case.
    ///
    /// # Errors
    /// If the program or one of its operations fails.
    pub fn bench(&self, settings: &EvaluationSettings, case: &Case, seconds: u32) -> Result<BenchResult> {
        if let Some(link) = case.link {
            let linked = self.linked.as_ref().ok_or("no node has a network namespace")?;
            return without_errors(linked.bench(case, link, seconds)?);
        }
        let (_, node) =
            self.nodes.iter().find(|(c, _)| *c == case.config).ok_or("no node has this configuration")?;
        let (pool, objects) = match case.set {
            Set::Usual => ("bench", case.objects()),
            Set::Large => ("large", settings.large_set().ok_or("a quick run has no large set")?),
        };
        let (size, block) = (case.object_size().to_string(), case.size.to_string());
        let workload =
            BenchSpec { mode: case.mode.name(), object_size: &size, in_flight: case.in_flight, seconds };
        let objects = objects.to_string();
        let mut more = vec!["--objects", &objects];
        if case.object_size() != case.size {
            more.extend(["--block-size", &block]);
        }
        more.extend(case.network.iter().flat_map(|network| ["--network", network.name()]));
        let tune = |options: &mut dyn Iterator<Item = &str>| {
            node.run_quietly(&["debug", "tune"].into_iter().chain(options).collect::<Vec<_>>())
        };
        if let Some(options) = &case.ablation {
            tune(&mut options.split(' '))?;
        }
        let outcome = node.bench_with(pool, workload, &more);
        if case.ablation.is_some() {
            tune(&mut std::iter::empty())?;
        }
        without_errors(outcome?)
    }

    fn fill_large_set(&self, settings: &EvaluationSettings, objects: u64) -> Result<()> {
        for config in [TestedSystem::Host, TestedSystem::DpuMemcpy] {
            let case = Case { mode: AccessMode::Randread, in_flight: 64, ..Case::large_set(config) };
            self.bench(settings, &case, 1)?;
        }
        self.ceph.as_ref().map_or(Ok(()), |ceph| ceph.fill_large_set(objects))
    }
}

fn without_errors(result: BenchResult) -> Result<BenchResult> {
    if result.errors > 0 {
        return Err(format!("{} of {} operations failed", result.errors, result.ops + result.errors).into());
    }
    Ok(result)
}

/// Returns the size of Ceph's file in GiB. Returns `None` if Ceph is switched off or if the drive
/// has too little space for it.
fn space_for_ceph(settings: &EvaluationSettings, missing: &mut Vec<String>) -> Result<Option<u64>> {
    let free = rustix::fs::statvfs(&settings.work)?;
    let free_gib = free.f_bavail * free.f_frsize / (1 << 30);
    let others = settings.all_targets_gib() + FIO_GIB + SPARE_GIB;
    let (wanted, least) = settings.ceph_gib();
    if free_gib < others {
        let work = settings.work.display();
        return Err(format!(
            "the evaluation needs {others} GiB in {work}, but only {free_gib} GiB are free; set OUTBOARD_REPORT_WORK to a directory with more space"
        )
        .into());
    }
    if !settings.ceph {
        missing.push("Ceph: switched off by CEPH=0".to_owned());
        return Ok(None);
    }
    let gib = wanted.min(free_gib - others);
    if gib < least {
        missing.push(format!(
            "Ceph: it needs {least} GiB beside the {others} GiB for the nodes and fio, but only {free_gib} GiB are free"
        ));
        return Ok(None);
    }
    Ok(Some(gib))
}

/// Starts the node on which network stacks are compared. Returns the node, and the numbers of
/// requests in flight for the comparison. There is no comparison in a quick run, or if the node
/// does not start with `ofi:tcp`. In these cases the node serves only TCP, and the list is empty.
fn node_of_networks(
    settings: &EvaluationSettings,
    missing: &mut Vec<String>,
) -> Result<((TestedSystem, Node), Vec<u32>)> {
    if !settings.quick {
        match node(settings, TestedSystem::DpuMemcpy, Network::OfiTcp) {
            Ok(node) => return Ok((node, IN_FLIGHT_SWEEP.to_vec())),
            Err(why) => missing.push(format!("4 KiB writes over ofi:tcp compared with tcp: {why}")),
        }
    }
    Ok((node(settings, TestedSystem::DpuMemcpy, Network::Tcp)?, Vec::new()))
}

/// Creates and starts the node of a configuration. The node serves `network` in addition to TCP.
/// Its clients use TCP unless a case selects another network stack.
fn node(
    settings: &EvaluationSettings,
    config: TestedSystem,
    network: Network,
) -> Result<(TestedSystem, Node)> {
    let (name, placement, profile) = match config {
        TestedSystem::Host => ("node-host", NodePlacement::Host, "memcpy"),
        TestedSystem::DpuBf3 => ("node-bf3", NodePlacement::Dpu, "bf3-paper"),
        TestedSystem::DpuBf3Serial => ("node-bf3-serial", NodePlacement::Dpu, "bf3-serial"),
        TestedSystem::DpuOfi => ("node-ofi", NodePlacement::Dpu, "memcpy"),
        TestedSystem::DpuMemcpy | TestedSystem::Ceph => ("node-memcpy", NodePlacement::Dpu, "memcpy"),
    };
    let node = Node::new(&settings.work.join(name))?
        .with_env("OUTBOARD_CHANNEL_PROFILE", profile)
        .with_env("OUTBOARD_CHANNEL_ENGINE", if config == TestedSystem::DpuOfi { "ofi:tcp" } else { "shm" })
        .with_env("OUTBOARD_NETWORK_STACKS", network.name())
        .with_env("OUTBOARD_NETWORK", Network::Tcp.name());
    // The output of `up` is not needed, because the commands find the node by its directory.
    node.up_quietly(placement, 1, &format!("{}GiB", settings.target_gib(config)))?;
    for pool in ["bench", "large"] {
        node.run_quietly(&["pool", "create", pool])?;
    }
    Ok((config, node))
}

/// Returns the ablations that this build supports, and adds the other ablations to `missing`.
fn ablations(node: &Node, missing: &mut Vec<String>) -> Result<Vec<Ablation>> {
    let help = node.command(&["debug", "tune", "--help"]).output()?;
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    let (has, has_not): (Vec<_>, Vec<_>) = ABLATIONS.into_iter().partition(|a| help.contains(a.name()));
    if !has_not.is_empty() {
        let names: Vec<&str> = has_not.iter().map(Ablation::name).collect();
        missing.push(format!("ablations: `outboard debug tune` lacks the options {}", names.join(", ")));
    }
    Ok(has)
}

/// Stops all systems and removes the work directory `$1`. `$2` is the program `outboard`, and `$3`
/// is the script that stops Ceph.
const CLEAN: &str = r#"for node in "$1"/node-*; do [ -d "$node" ] && OUTBOARD_DIR=$node "$2" down; done
"$3" "$1/ceph"
rm -rf "$1""#;

fn cleaner(work: &Path) -> Result<Cleaner> {
    let program = std::env::current_exe()?.with_file_name("outboard");
    Cleaner::watch(CLEAN, [fs::canonicalize(work)?, program, ceph::scripts().join("down")])
}
