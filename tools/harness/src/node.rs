//! A node, driven through the `outboard` program.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::Result;

/// How the node's roles are placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodePlacement {
    /// OSD and store are two processes, joined by the host–DPU channel.
    Dpu,
    /// Everything in one process.
    Host,
}

impl NodePlacement {
    /// As the command line has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            NodePlacement::Dpu => "dpu",
            NodePlacement::Host => "host",
        }
    }
}

/// A node in a directory of its own; stopped when dropped.
#[derive(Debug)]
pub struct Node {
    program: PathBuf,
    dir: PathBuf,
    environment: Vec<(String, String)>,
}

/// The parts of `outboard status --json` that the harness looks at.
#[derive(Debug, Deserialize)]
pub struct StatusOutput {
    /// Every process of the node.
    pub processes: Vec<NodeProcess>,
}

/// One process of a node.
#[derive(Debug, Deserialize)]
pub struct NodeProcess {
    /// Its role.
    pub role: String,
    /// Its process id; none while it is down.
    pub pid: Option<u32>,
    /// How often it was restarted.
    pub restarts: u64,
}

/// The parts of `outboard bench --json` that the harness looks at.
#[derive(Debug, Clone, Deserialize)]
pub struct BenchResult {
    /// Operations done.
    pub ops: u64,
    /// Operations that failed.
    pub errors: u64,
    /// Throughput in 10^6 bytes per second.
    pub mb_per_s: f64,
    /// Operations per second.
    pub iops: f64,
    /// Latency of an operation.
    pub latency_us: BenchLatency,
    /// CPU time of the store process (`dpu`) or of the node's one process (`host`) per operation, in µs.
    pub host_cpu_us_per_op: f64,
    /// CPU time of all processes, client and emulated hardware included, per operation, in µs.
    pub node_cpu_us_per_op: f64,
    /// What each process used, the client included.
    #[serde(default)]
    pub processes: Vec<ProcessUse>,
    /// Where an operation's time goes, if the node knows.
    #[serde(default)]
    pub breakdown_us: Option<BenchBreakdown>,
}

/// What a process used during a measurement.
#[derive(Debug, Clone, Deserialize)]
pub struct ProcessUse {
    /// `store`, `osd`, `node`, `supervisor` or `client`.
    pub role: String,
    /// User and system time.
    pub cpu_seconds: f64,
    /// The same by thread class.
    #[serde(default)]
    pub by_class: BTreeMap<String, ClassUsage>,
}

/// What a class of threads used during a measurement.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct ClassUsage {
    /// User and system time.
    pub cpu_seconds: f64,
    /// Voluntary and involuntary; none of a class that shares its thread with another.
    #[serde(default)]
    pub context_switches: f64,
}

/// Where the time of an operation goes, as table 3 of the paper divides it: means, in µs. The parts exclude each other and add up.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct BenchBreakdown {
    /// All of it; of what `outboard bench` reports, the osd's part of the latency.
    pub total: f64,
    /// Writing to the drive.
    pub host_write: f64,
    /// Its DMA transfers themselves.
    pub dma: f64,
    /// Waiting for the DMA engine.
    pub dma_wait: f64,
    /// The rest.
    pub others: f64,
}

/// Latency in microseconds.
#[derive(Debug, Clone, Deserialize)]
pub struct BenchLatency {
    /// Arithmetic mean.
    pub mean: f64,
    /// Half of the operations took no longer.
    pub p50: f64,
    /// 99 % of the operations took no longer.
    pub p99: f64,
}

/// What to measure.
#[derive(Debug, Clone, Copy)]
pub struct BenchSpec<'a> {
    /// `write`, `read` or `randread`.
    pub mode: &'a str,
    /// As the command line has it, e.g. `4MiB`.
    pub object_size: &'a str,
    /// Operations in flight.
    pub in_flight: u32,
    /// Duration.
    pub seconds: u32,
}

impl Node {
    /// The node in `dir`, run by the `outboard` program that was built beside this one.
    ///
    /// # Errors
    /// If that program is not there.
    pub fn new(dir: &Path) -> Result<Node> {
        let program = std::env::current_exe()?.with_file_name("outboard");
        if !program.exists() {
            return Err(format!("{} is not built; run this by make", program.display()).into());
        }
        Ok(Node::of_program(&program, dir))
    }

    /// The node in `dir`, run by a given `outboard` program.
    #[must_use]
    pub fn of_program(program: &Path, dir: &Path) -> Node {
        Node { program: program.to_owned(), dir: dir.to_owned(), environment: Vec::new() }
    }

    /// The same node, its commands run with an environment variable.
    #[must_use]
    pub fn with_env(mut self, key: &str, value: &str) -> Node {
        self.environment.push((key.to_owned(), value.to_owned()));
        self
    }

    /// Its directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A command of `outboard` on this node.
    #[must_use]
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(args).env("OUTBOARD_DIR", &self.dir).env_remove("OUTBOARD_ENDPOINT");
        command.envs(self.environment.iter().map(|(k, v)| (k, v)));
        command
    }

    /// Runs a command of `outboard`; its output goes where ours goes.
    ///
    /// # Errors
    /// If it fails.
    pub fn run(&self, args: &[&str]) -> Result<()> {
        let status = self.command(args).status()?;
        if !status.success() {
            return Err(format!("outboard {} failed: {status}", args.join(" ")).into());
        }
        Ok(())
    }

    /// Runs a command of `outboard`; what it prints is not shown.
    ///
    /// # Errors
    /// If it fails: what it says about that.
    pub fn run_quietly(&self, args: &[&str]) -> Result<()> {
        let output = self.command(args).stdout(Stdio::null()).output()?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(format!("outboard {} failed, {}: {why}", args.join(" "), output.status).into());
        }
        Ok(())
    }

    /// Starts a command of `outboard` and does not wait for it.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(&self, args: &[&str]) -> Result<Child> {
        Ok(self.command(args).spawn()?)
    }

    /// Runs a command of `outboard` that prints JSON.
    ///
    /// # Errors
    /// If it fails or prints something else.
    pub fn json<T: serde::de::DeserializeOwned>(&self, args: &[&str]) -> Result<T> {
        let output = self.command(args).stderr(Stdio::inherit()).output()?;
        if !output.status.success() {
            return Err(format!("outboard {} failed: {}", args.join(" "), output.status).into());
        }
        serde_json::from_slice(&output.stdout).map_err(|e| format!("outboard {}: {e}", args.join(" ")).into())
    }

    /// Starts the node.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn up(&self, placement: NodePlacement, targets: u32, target_size: &str) -> Result<()> {
        self.run(&up_args(placement, &targets.to_string(), target_size))
    }

    /// Starts the node and prints nothing.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn up_quietly(&self, placement: NodePlacement, targets: u32, target_size: &str) -> Result<()> {
        self.run_quietly(&up_args(placement, &targets.to_string(), target_size))
    }

    /// Stops the node.
    ///
    /// # Errors
    /// If it does not stop.
    pub fn down(&self) -> Result<()> {
        let output = self.command(&["down"]).output()?;
        if output.status.success() { Ok(()) } else { Err("outboard down failed".into()) }
    }

    /// The node's processes.
    ///
    /// # Errors
    /// If the node does not answer.
    pub fn status(&self) -> Result<StatusOutput> {
        self.json(&["status", "--json"])
    }

    /// The process that has a role, waiting up to `patience` for it to be up.
    ///
    /// # Errors
    /// If it is not up by then.
    pub fn process(&self, role: &str, patience: Duration) -> Result<(u32, u64)> {
        let deadline = Instant::now() + patience;
        loop {
            let found = self.status()?.processes.into_iter().find(|p| p.role == role);
            if let Some(NodeProcess { pid: Some(pid), restarts, .. }) = found {
                return Ok((pid, restarts));
            }
            if Instant::now() > deadline {
                return Err(format!("no process has the role {role}").into());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Kills the process of a role with SIGKILL and waits until its successor is up. Returns both pids.
    ///
    /// # Errors
    /// If there is none, or no successor comes up.
    pub fn kill(&self, role: &str) -> Result<(u32, u32)> {
        let (pid, restarts) = self.process(role, Duration::ZERO)?;
        let id = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or("not a process id")?;
        kill_process(id, Signal::KILL)?;
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let (now, count) = self.process(role, Duration::from_secs(30))?;
            if now != pid && count > restarts {
                return Ok((pid, now));
            }
            if Instant::now() > deadline {
                return Err(format!("the {role} did not come back").into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Runs `outboard bench`.
    ///
    /// # Errors
    /// If it fails.
    pub fn bench(&self, pool: &str, workload: BenchSpec<'_>) -> Result<BenchResult> {
        self.bench_with(pool, workload, &[])
    }

    /// Runs `outboard bench` with more options.
    ///
    /// # Errors
    /// If it fails.
    pub fn bench_with(&self, pool: &str, workload: BenchSpec<'_>, more: &[&str]) -> Result<BenchResult> {
        let (in_flight, seconds) = (workload.in_flight.to_string(), workload.seconds.to_string());
        let args = ["bench", workload.mode, "--pool", pool, "--object-size", workload.object_size];
        let timing = ["--in-flight", &in_flight, "--seconds", &seconds, "--json"];
        self.json(&[&args[..], &timing, more].concat())
    }
}

fn up_args<'a>(placement: NodePlacement, targets: &'a str, target_size: &'a str) -> [&'a str; 10] {
    [
        "up",
        "--detach",
        "--listen",
        "127.0.0.1:0",
        "--placement",
        placement.name(),
        "--targets",
        targets,
        "--target-size",
        target_size,
    ]
}

impl Drop for Node {
    fn drop(&mut self) {
        // Already stopped, or the harness is failing and says why itself.
        let _ = self.down();
    }
}
