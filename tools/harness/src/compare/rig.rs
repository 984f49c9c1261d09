//! The nodes of both binaries; runs a case on one of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::Side;
use super::cases::{CompareCase, CompareLoad, CompareSample, IN_FLIGHT, LOADS};
use super::settings::CompareSettings;
use crate::Result;
use crate::cleaner::Cleaner;
use crate::evaluation::processes::{Threads, children_cpu_seconds};
use crate::node::{BenchResult, BenchSpec, Node, NodePlacement, ProcessUse};

/// Size of each of the four targets.
pub const TARGET_SIZE: &str = "2GiB";
const TARGETS_GIB: u64 = 8;
const SPARE_GIB: u64 = 2;

const POOL: &str = "bench";
/// Number of the objects of `put` and `get`, and their size in bytes.
const SMALL_OBJECTS: u64 = 8;
const SMALL_BYTES: usize = 1024;

/// Stops the nodes and removes the directory: `$1`, with the binaries as `$2` and `$3`.
const CLEAN: &str = r#"for node in "$1"/old-*; do [ -d "$node" ] && OUTBOARD_DIR=$node "$2" down; done
for node in "$1"/new-*; do [ -d "$node" ] && OUTBOARD_DIR=$node "$3" down; done
rm -rf "$1""#;

/// Everything that is up. Stopped and removed when dropped.
pub struct CompareRig {
    old: Binary,
    new: Binary,
    file: PathBuf,
    loads: Vec<CompareLoad>,
    /// Dropped last, when the nodes are down.
    _cleaner: Cleaner,
}

/// One of the binaries, and its nodes.
struct Binary {
    version: String,
    dpu: Node,
    host: Node,
}

impl CompareRig {
    /// Starts a node of either placement for each binary. Loads that one of the binaries does not know are left out, which
    /// is said.
    ///
    /// # Errors
    /// If a binary lacks an option that every load needs, there is too little space, or a node does not come up.
    pub fn up(settings: &CompareSettings, say: &dyn Fn(&str)) -> Result<CompareRig> {
        let beside = || Ok::<_, std::io::Error>(std::env::current_exe()?.with_file_name("outboard"));
        let new = settings.new.clone().map_or_else(beside, Ok)?;
        let programs = [fs::canonicalize(&settings.old), fs::canonicalize(&new)];
        let [old, new] = programs;
        let old = old.map_err(|e| format!("the old binary {}: {e}", settings.old.display()))?;
        let new = new.map_err(|e| format!("the new binary: {e}; build it by make, or name it by --with"))?;
        let parent = std::env::var_os("OUTBOARD_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
        let dir = parent.join(format!("outboard-compare-{}", std::process::id()));
        fs::create_dir_all(&dir)?;
        let cleaner = Cleaner::watch(CLEAN, [dir.as_path(), &old, &new])?;
        check_space(&dir)?;
        let (old, new) = (copied(&old, &dir, Side::Old)?, copied(&new, &dir, Side::New)?);
        say(&format!("starting four nodes in {} (their targets are written in full)", dir.display()));
        let (old, new) = (Binary::up(&old, &dir, Side::Old)?, Binary::up(&new, &dir, Side::New)?);
        let (loads, missing): (Vec<CompareLoad>, Vec<CompareLoad>) =
            LOADS.into_iter().partition(|load| [&old, &new].iter().all(|binary| binary.knows(load)));
        for load in missing {
            say(&format!("left out, because not both binaries know it: {load:?}"));
        }
        let file = dir.join("small");
        fs::write(&file, (0..SMALL_BYTES).map(|i| (i * 31 % 251) as u8).collect::<Vec<u8>>())?;
        let rig = CompareRig { old, new, file, loads, _cleaner: cleaner };
        if rig.loads.contains(&CompareLoad::Get) {
            rig.put_small_objects()?;
        }
        Ok(rig)
    }

    /// Stores what `get` reads, however few objects a run of `put` gets to.
    fn put_small_objects(&self) -> Result<()> {
        for binary in [&self.old, &self.new] {
            for node in [&binary.dpu, &binary.host] {
                (0..SMALL_OBJECTS).try_for_each(|i| node.run_quietly(&["put", &small(i), self.file()?]))?;
            }
        }
        Ok(())
    }

    fn file(&self) -> Result<&str> {
        Ok(self.file.to_str().ok_or("the path of the work directory is not text; set OUTBOARD_BENCH_DIR")?)
    }

    /// What both binaries can be measured with.
    #[must_use]
    pub fn cases(&self) -> Vec<CompareCase> {
        let of = |placement| self.loads.iter().map(move |load| CompareCase { placement, load: *load });
        [NodePlacement::Dpu, NodePlacement::Host].into_iter().flat_map(of).collect()
    }

    /// What a binary says that it is.
    #[must_use]
    pub fn version(&self, side: Side) -> &str {
        &self.binary(side).version
    }

    /// Runs a case for some seconds.
    ///
    /// # Errors
    /// If an operation fails.
    pub fn measure(&self, side: Side, case: &CompareCase, seconds: u32) -> Result<CompareSample> {
        let binary = self.binary(side);
        let node = match case.placement {
            NodePlacement::Dpu => &binary.dpu,
            NodePlacement::Host => &binary.host,
        };
        match case.load {
            CompareLoad::Bench { mode, size, objects } => {
                let load = BenchSpec { mode, object_size: size, in_flight: IN_FLIGHT, seconds };
                let found = node.bench_with(POOL, load, &["--objects", objects])?;
                if found.errors > 0 {
                    return Err(format!("{} operations failed", found.errors).into());
                }
                Ok(sample_of(&found))
            }
            CompareLoad::Put => commands(node, seconds, "put", self.file()?),
            CompareLoad::Get => commands(node, seconds, "get", "-"),
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
    fn up(program: &Path, dir: &Path, side: Side) -> Result<Binary> {
        let node = |placement: NodePlacement| -> Result<Node> {
            let dir = dir.join(format!("{}-{}", side.name(), placement.name()));
            Ok(Node::of_program(program, &dir))
        };
        let (dpu, host) = (node(NodePlacement::Dpu)?, node(NodePlacement::Host)?);
        let version = dpu.command(&["--version"]).output()?;
        let version = String::from_utf8_lossy(&version.stdout).trim().to_owned();
        let binary = Binary { version, dpu, host };
        let up = ["--detach", "--listen", "--placement", "--targets", "--target-size"];
        let bench = ["--pool", "--object-size", "--objects", "--in-flight", "--seconds", "--json"];
        for (command, options) in [("up", &up[..]), ("bench", &bench), ("status", &["--json"])] {
            let help = binary.help(command).unwrap_or_default();
            if let Some(lacking) = options.iter().find(|option| !help.contains(**option)) {
                let (side, program) = (side.name(), program.display());
                return Err(format!(
                    "the {side} binary {program} has no \"{command} {lacking}\"; choose one that has"
                )
                .into());
            }
        }
        for (node, placement) in [(&binary.dpu, NodePlacement::Dpu), (&binary.host, NodePlacement::Host)] {
            node.up_quietly(placement, 1, TARGET_SIZE)?;
            node.run_quietly(&["pool", "create", POOL])?;
        }
        Ok(binary)
    }

    /// What `outboard COMMAND --help` prints; none if there is no such command.
    fn help(&self, command: &str) -> Option<String> {
        let output = self.dpu.command(&[command, "--help"]).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn knows(&self, load: &CompareLoad) -> bool {
        match load {
            CompareLoad::Bench { mode, .. } => {
                self.help("bench").is_some_and(|help| help.split_whitespace().any(|word| word.contains(mode)))
            }
            CompareLoad::Put => self.help("put").is_some(),
            CompareLoad::Get => self.help("get").is_some(),
        }
    }
}

/// CPU time is summed up by thread. `outboard bench` takes that of a whole process from a clock that ticks every 10 ms, if
/// one of its threads has ended, and a short run of large reads uses little more.
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

/// Whether a process of that role runs on the storage host, in its placement.
fn is_host(role: &str) -> bool {
    ["store", "node"].contains(&role)
}

/// Runs `outboard put|get OBJECT FILE` again and again, and counts the CPU time of the commands and of the node.
fn commands(node: &Node, seconds: u32, command: &str, file: &str) -> Result<CompareSample> {
    let processes: Vec<(bool, u32)> =
        node.status()?.processes.iter().filter_map(|p| Some((is_host(&p.role), p.pid?))).collect();
    let read = || processes.iter().map(|(_, pid)| Threads::of(*pid)).collect::<Vec<_>>();
    let (clients_before, before) = (children_cpu_seconds(), read());
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
    let elapsed = started.elapsed().as_secs_f64();
    let clients = children_cpu_seconds() - clients_before;
    let used: Vec<f64> =
        read().iter().zip(&before).map(|(now, before)| now.cpu_seconds_since(before)).collect();
    let host: f64 = processes.iter().zip(&used).filter(|((is_host, _), _)| *is_host).map(|(_, s)| s).sum();
    let per_op = |seconds: f64| seconds * 1e6 / ops as f64;
    Ok(CompareSample {
        ops_per_s: ops as f64 / elapsed,
        node_cpu_us: per_op(clients + used.iter().sum::<f64>()),
        host_cpu_us: per_op(host),
    })
}

/// Name of a small object.
fn small(index: u64) -> String {
    format!("{POOL}/small-{index}")
}

/// Copies a binary to `dir`. A program takes 8 % more page faults to start from the file that the linker wrote than from a
/// copy (`perf stat outboard --version`). So both sides run copies.
fn copied(program: &Path, dir: &Path, side: Side) -> Result<PathBuf> {
    let copy = dir.join(format!("outboard-{}", side.name()));
    fs::copy(program, &copy).map_err(|e| format!("copy of {}: {e}", program.display()))?;
    fs::File::open(&copy)?.sync_all()?;
    Ok(copy)
}

fn check_space(dir: &Path) -> Result<()> {
    let free = rustix::fs::statvfs(dir)?;
    let (free_gib, needed) = (free.f_bavail * free.f_frsize / (1 << 30), TARGETS_GIB + SPARE_GIB);
    if free_gib >= needed {
        return Ok(());
    }
    let dir = dir.display();
    Err(format!("{needed} GiB are needed at {dir}, {free_gib} are free; set OUTBOARD_BENCH_DIR").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_that_of_the_threads_and_the_hosts_is_the_stores() {
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
