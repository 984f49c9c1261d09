//! Runs the nodes of both binaries, and measures a case on one of them.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::Side;
use super::cases::{
    CompareCase, CompareLoad, CompareSample, IN_FLIGHT, NodeKind, NodeSetup, POOL, REBUILD_OBJECTS,
};
use super::settings::CompareSettings;
use crate::Result;
use crate::cleaner::Cleaner;
use crate::evaluation::processes::{Threads, children_cpu_seconds};
use crate::node::{BenchResult, BenchSpec, Node, ProcessUse};
use crate::redundancy::watch::{WatchedState, wait_until, wait_until_whole};

/// Free space that remains on the drive while the nodes run, in MiB.
const SPARE_MIB: u64 = 2048;

/// Number of objects that `put` and `get` use.
const SMALL_OBJECTS: u64 = 8;
/// Size of each of these objects, in bytes.
const SMALL_BYTES: usize = 1024;

/// Stops the nodes and removes the work directory `$1`. `$2` is the old binary, and `$3` the new
/// one.
const CLEAN: &str = r#"for node in "$1"/old-*; do [ -d "$node" ] && OUTBOARD_DIR=$node "$2" down; done
for node in "$1"/new-*; do [ -d "$node" ] && OUTBOARD_DIR=$node "$3" down; done
rm -rf "$1""#;

/// The running nodes and their work directory. Dropping the rig stops the nodes and removes the
/// directory.
pub struct CompareRig {
    old: Binary,
    new: Binary,
    file: PathBuf,
    cases: Vec<CompareCase>,
    /// The last field, so that the directory is removed after the nodes are down.
    _cleaner: Cleaner,
}

/// One of the binaries, and its nodes.
struct Binary {
    version: String,
    nodes: Vec<BinaryNode>,
}

struct BinaryNode {
    kind: NodeKind,
    setup: NodeSetup,
    node: Node,
    /// The target that the next rebuild takes out.
    next: Cell<u32>,
}

impl CompareRig {
    /// Starts the nodes of the suite for each binary. Skips loads that one of the binaries does not
    /// support, and reports them to `say`.
    ///
    /// # Errors
    /// If a binary lacks an option that every load needs, if the drive has too little space, or if
    /// a node does not start.
    pub fn up(settings: &CompareSettings, say: &dyn Fn(&str)) -> Result<CompareRig> {
        let beside = || Ok::<_, std::io::Error>(std::env::current_exe()?.with_file_name("outboard"));
        let new = settings.new.clone().map_or_else(beside, Ok)?;
        let programs = [fs::canonicalize(&settings.old), fs::canonicalize(&new)];
        let [old, new] = programs;
        let old = old.map_err(|e| format!("cannot find the old binary {}: {e}", settings.old.display()))?;
        let new = new.map_err(|e| {
            format!("cannot find the new binary: {e}; build it with make, or name it with --with")
        })?;
        let parent = std::env::var_os("OUTBOARD_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
        let dir = parent.join(format!("outboard-compare-{}", std::process::id()));
        fs::create_dir_all(&dir)?;
        let cleaner = Cleaner::watch(CLEAN, [dir.as_path(), &old, &new])?;
        let nodes = settings.suite.nodes();
        let target_mib: u64 = nodes.iter().map(|(_, s, _)| 2 * u64::from(s.targets) * s.target_mib).sum();
        check_space(&dir, target_mib + SPARE_MIB)?;
        let (old, new) = (copied(&old, &dir, Side::Old)?, copied(&new, &dir, Side::New)?);
        let count = 2 * nodes.len();
        say(&format!(
            "starting {count} nodes in {} (this writes all blocks of their targets)",
            dir.display()
        ));
        let setups: Vec<(NodeKind, NodeSetup)> =
            nodes.iter().map(|(kind, setup, _)| (*kind, *setup)).collect();
        let (old, new) =
            (Binary::up(&old, &dir, Side::Old, &setups)?, Binary::up(&new, &dir, Side::New, &setups)?);
        let known = |load: &CompareLoad| [&old, &new].iter().all(|binary| binary.knows(load));
        let mut cases = Vec::new();
        for (node, _, loads) in nodes {
            let (loads, missing): (Vec<CompareLoad>, Vec<CompareLoad>) =
                loads.iter().partition(|load| known(load));
            for load in missing {
                say(&format!("skipping a load that one of the binaries does not support: {load:?}"));
            }
            cases.extend(loads.into_iter().map(|load| CompareCase { node, load }));
        }
        let file = dir.join("small");
        fs::write(&file, (0..SMALL_BYTES).map(|i| (i * 31 % 251) as u8).collect::<Vec<u8>>())?;
        let rig = CompareRig { old, new, file, cases, _cleaner: cleaner };
        if rig.cases.iter().any(|case| case.load == CompareLoad::Get) {
            rig.put_small_objects()?;
        }
        Ok(rig)
    }

    /// Stores the objects that `get` reads, because a short run of `put` may not store all of them.
    fn put_small_objects(&self) -> Result<()> {
        for binary in [&self.old, &self.new] {
            for BinaryNode { node, .. } in &binary.nodes {
                (0..SMALL_OBJECTS).try_for_each(|i| node.run_quietly(&["put", &small(i), self.file()?]))?;
            }
        }
        Ok(())
    }

    fn file(&self) -> Result<&str> {
        Ok(self.file.to_str().ok_or(
            "the path of the work directory is not UTF-8; set OUTBOARD_BENCH_DIR to another directory",
        )?)
    }

    /// Returns the cases that both binaries support.
    #[must_use]
    pub fn cases(&self) -> Vec<CompareCase> {
        self.cases.clone()
    }

    /// Returns the version that a binary reports.
    #[must_use]
    pub fn version(&self, side: Side) -> &str {
        &self.binary(side).version
    }

    /// Runs a case on one binary for `seconds`.
    ///
    /// # Errors
    /// If an operation fails.
    pub fn measure(&self, side: Side, case: &CompareCase, seconds: u32) -> Result<CompareSample> {
        let binary = self.binary(side);
        let measured = binary
            .nodes
            .iter()
            .find(|node| node.kind == case.node)
            .ok_or("no node of this kind is running")?;
        let node = &measured.node;
        match case.load {
            CompareLoad::Bench { pool, mode, size, objects } => {
                let load = BenchSpec { mode, object_size: size, in_flight: IN_FLIGHT, seconds };
                let found = node.bench_with(pool, load, &["--objects", objects])?;
                if found.errors > 0 {
                    return Err(format!("{} operations failed", found.errors).into());
                }
                Ok(sample_of(&found))
            }
            CompareLoad::Put => commands(node, seconds, "put", self.file()?),
            CompareLoad::Get => commands(node, seconds, "get", "-"),
            CompareLoad::Rebuild => measured.rebuild(),
        }
    }

    fn binary(&self, side: Side) -> &Binary {
        match side {
            Side::Old => &self.old,
            Side::New => &self.new,
        }
    }
}

impl Binary {
    fn up(program: &Path, dir: &Path, side: Side, setups: &[(NodeKind, NodeSetup)]) -> Result<Binary> {
        let node = |(kind, setup): &(NodeKind, NodeSetup)| {
            let node = Node::of_program(program, &dir.join(format!("{}-{}", side.name(), kind.name())));
            BinaryNode { kind: *kind, setup: *setup, node, next: Cell::new(0) }
        };
        let nodes: Vec<BinaryNode> = setups.iter().map(node).collect();
        let version = nodes[0].node.command(&["--version"]).output()?;
        let version = String::from_utf8_lossy(&version.stdout).trim().to_owned();
        let binary = Binary { version, nodes };
        let up = ["--detach", "--listen", "--placement", "--targets", "--target-size"];
        let bench = ["--pool", "--object-size", "--objects", "--in-flight", "--seconds", "--json"];
        for (command, options) in [("up", &up[..]), ("bench", &bench), ("status", &["--json"])] {
            let help = binary.help(command).unwrap_or_default();
            if let Some(lacking) = options.iter().find(|option| !help.contains(**option)) {
                let (side, program) = (side.name(), program.display());
                return Err(format!(
                    "the {side} binary {program} does not support \"{command} {lacking}\"; choose a binary that does"
                )
                .into());
            }
        }
        binary.nodes.iter().try_for_each(BinaryNode::up)?;
        Ok(binary)
    }

    /// Returns the output of `outboard COMMAND --help`, or `None` if the command does not exist.
    fn help(&self, command: &str) -> Option<String> {
        let output = self.nodes[0].node.command(&[command, "--help"]).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn knows(&self, load: &CompareLoad) -> bool {
        match load {
            CompareLoad::Bench { mode, .. } => {
                self.help("bench").is_some_and(|help| help.split_whitespace().any(|word| word.contains(mode)))
            }
            CompareLoad::Put => self.help("put").is_some(),
            CompareLoad::Get => self.help("get").is_some(),
            CompareLoad::Rebuild => self.help("target").is_some(),
        }
    }
}

impl BinaryNode {
    /// Starts the node and prepares the pools and targets that its loads need.
    fn up(&self) -> Result<()> {
        let NodeSetup { targets, target_mib, pools } = self.setup;
        self.node.up_quietly(self.kind.placement(), targets, &format!("{target_mib}MiB"))?;
        for (pool, redundancy) in pools {
            self.node.run_quietly(&["pool", "create", pool, "--redundancy", redundancy])?;
        }
        match self.kind {
            NodeKind::Dpu | NodeKind::Host => Ok(()),
            NodeKind::Degraded => {
                self.node.run_quietly(&["target", "out", &(targets - 1).to_string()])?;
                let patience = Duration::from_secs(60);
                wait_until(&self.node, patience, "degraded", WatchedState::is_degraded_and_idle).map(drop)
            }
            NodeKind::Spare => {
                let load = BenchSpec { mode: "read", object_size: "4MiB", in_flight: 8, seconds: 1 };
                self.node.bench_with("ec", load, &["--objects", REBUILD_OBJECTS])?;
                // After this rebuild, one target is empty. It receives the fragments of the target
                // that the next rebuild takes out.
                self.rebuild().map(drop)
            }
        }
    }

    /// Takes the next target out, waits until the node has rebuilt its fragments, and adds the
    /// target again.
    fn rebuild(&self) -> Result<CompareSample> {
        let next = self.next.get().to_string();
        self.next.set((self.next.get() + 1) % self.setup.targets);
        let sample = counted(&self.node, || {
            self.node.run_quietly(&["target", "out", &next])?;
            wait_until_whole(&self.node)?;
            Ok(1)
        })?;
        self.node.run_quietly(&["target", "in", &next])?;
        // The node then removes the stale fragments from the target.
        std::thread::sleep(Duration::from_secs(1));
        wait_until_whole(&self.node)?;
        Ok(sample)
    }
}

/// Returns the sample of a run of `outboard bench`. CPU time is summed over thread classes, if the
/// output contains them. If a thread of a process has ended, `outboard bench` takes the CPU time of
/// the whole process from a clock that ticks every 10 ms. This clock is too coarse for a short run
/// of large reads.
fn sample_of(found: &BenchResult) -> CompareSample {
    let used = |process: &ProcessUse| match process.by_class.is_empty() {
        true => process.cpu_seconds,
        false => process.by_class.values().map(|class| class.cpu_seconds).sum(),
    };
    let per_op = |seconds: f64| seconds * 1e6 / found.ops.max(1) as f64;
    CompareSample {
        ops_per_s: found.iops,
        node_cpu_us: per_op(found.processes.iter().map(used).sum()),
        host_cpu_us: per_op(found.processes.iter().filter(|p| is_host(&p.role)).map(used).sum()),
    }
}

/// Whether a process with this role runs on the storage host (`store` in `dpu` placement, `node` in
/// `host` placement).
fn is_host(role: &str) -> bool {
    ["store", "node"].contains(&role)
}

/// Runs `outboard put|get OBJECT FILE` repeatedly for `seconds`.
fn commands(node: &Node, seconds: u32, command: &str, file: &str) -> Result<CompareSample> {
    counted(node, || {
        let started = Instant::now();
        let mut ops = 0;
        while started.elapsed() < Duration::from_secs(u64::from(seconds)) {
            let name = small(ops % SMALL_OBJECTS);
            let output = node.command(&[command, &name, file]).stdin(Stdio::null()).output()?;
            if !output.status.success() {
                return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned().into());
            }
            ops += 1;
        }
        Ok(ops)
    })
}

/// Runs and measures `operations`, which returns the number of operations. Counts the CPU time of
/// the node and of the commands that `operations` runs.
fn counted(node: &Node, operations: impl FnOnce() -> Result<u64>) -> Result<CompareSample> {
    let processes: Vec<(bool, u32)> =
        node.status()?.processes.iter().filter_map(|p| Some((is_host(&p.role), p.pid?))).collect();
    let read = || processes.iter().map(|(_, pid)| Threads::of(*pid)).collect::<Vec<_>>();
    let (clients_before, before) = (children_cpu_seconds(), read());
    let started = Instant::now();
    let ops = operations()?;
    let elapsed = started.elapsed().as_secs_f64();
    let clients = children_cpu_seconds() - clients_before;
    let used: Vec<f64> =
        read().iter().zip(&before).map(|(now, before)| now.cpu_seconds_since(before)).collect();
    let host: f64 = processes.iter().zip(&used).filter(|((is_host, _), _)| *is_host).map(|(_, s)| s).sum();
    let per_op = |seconds: f64| seconds * 1e6 / ops.max(1) as f64;
    Ok(CompareSample {
        ops_per_s: ops as f64 / elapsed,
        node_cpu_us: per_op(clients + used.iter().sum::<f64>()),
        host_cpu_us: per_op(host),
    })
}

/// Returns the name of a small object.
fn small(index: u64) -> String {
    format!("{POOL}/small-{index}")
}

/// Copies a binary to `dir` and returns the path of the copy. The start of a program causes 8 %
/// more page faults from the file that the linker wrote than from a copy (`perf stat outboard
/// --version`). So copies of both binaries are measured.
fn copied(program: &Path, dir: &Path, side: Side) -> Result<PathBuf> {
    let copy = dir.join(format!("outboard-{}", side.name()));
    fs::copy(program, &copy).map_err(|e| format!("cannot copy {}: {e}", program.display()))?;
    fs::File::open(&copy)?.sync_all()?;
    Ok(copy)
}

fn check_space(dir: &Path, needed_mib: u64) -> Result<()> {
    let free = rustix::fs::statvfs(dir)?;
    let free_mib = free.f_bavail * free.f_frsize / (1 << 20);
    if free_mib >= needed_mib {
        return Ok(());
    }
    let dir = dir.display();
    Err(format!(
        "{dir} has {free_mib} MiB free, but the comparison needs {needed_mib} MiB; set OUTBOARD_BENCH_DIR to a directory with more space"
    )
    .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_summed_over_thread_classes_and_host_cpu_is_that_of_the_store() {
        let found: BenchResult = serde_json::from_str(
            r#"{"ops":1000,"errors":0,"mb_per_s":1,"iops":500,"latency_us":{"mean":1,"p50":1,"p99":1},
            "host_cpu_us_per_op":0,"node_cpu_us_per_op":0,"processes":[
            {"role":"client","cpu_seconds":1.0},
            {"role":"osd","cpu_seconds":9.0,"by_class":{"osd":{"cpu_seconds":0.25},"dma":{"cpu_seconds":0.25}}},
            {"role":"store","cpu_seconds":9.0,"by_class":{"chan":{"cpu_seconds":0.5}}}]}"#,
        )
        .unwrap();
        let expected = CompareSample { ops_per_s: 500.0, node_cpu_us: 2000.0, host_cpu_us: 500.0 };
        assert_eq!(sample_of(&found), expected);
    }
}
