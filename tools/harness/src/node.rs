//! A node, driven through the `outboard` program.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::Result;

/// The line that `outboard bench --announce` prints when the measurement starts.
const STARTED: &str = "outboard: the measurement has started";

/// Where the roles of a node run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodePlacement {
    /// osd and store are two processes, joined by the host–DPU channel.
    Dpu,
    /// One process of the host runs both osd and store.
    Host,
}

impl NodePlacement {
    /// The placement's name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            NodePlacement::Dpu => "dpu",
            NodePlacement::Host => "host",
        }
    }
}

/// A node in its own directory. Dropping this value stops the node.
#[derive(Debug)]
pub struct Node {
    program: PathBuf,
    dir: PathBuf,
    environment: Vec<(String, String)>,
    /// The beginning of the command line of each command, which runs the command elsewhere.
    within: Vec<String>,
    /// Address to which the node listens.
    listen: String,
}

/// The fields of `outboard status --json` that the harness uses.
#[derive(Debug, Deserialize)]
pub struct StatusOutput {
    /// Every process of the node.
    pub processes: Vec<NodeProcess>,
    /// Address for clients, or `None` while the node is down.
    #[serde(default)]
    pub endpoint: Option<String>,
}

/// One process of a node.
#[derive(Debug, Deserialize)]
pub struct NodeProcess {
    /// Role of the process.
    pub role: String,
    /// Process id, or `None` while the process is down.
    pub pid: Option<u32>,
    /// Number of times that the process was restarted.
    pub restarts: u64,
}

/// The fields of `outboard bench --json` that the harness uses.
#[derive(Debug, Clone, Deserialize)]
pub struct BenchResult {
    /// Number of completed operations.
    pub ops: u64,
    /// Number of failed operations.
    pub errors: u64,
    /// Throughput in 10^6 bytes per second.
    pub mb_per_s: f64,
    /// Operations per second.
    pub iops: f64,
    /// Latency of an operation.
    pub latency_us: BenchLatency,
    /// CPU time per operation, in µs, of the process on the storage host: the store in `dpu`
    /// placement, the node's one process in `host` placement. `None` if the process did not report
    /// its use at the start and at the end, for example because it was restarted.
    pub host_cpu_us_per_op: Option<f64>,
    /// CPU time of all processes per operation, in µs. It includes the client and emulated
    /// hardware. `None` if a process did not report its use.
    pub node_cpu_us_per_op: Option<f64>,
    /// Number of operations that completed in each second.
    #[serde(default)]
    pub per_second: Vec<u64>,
    /// The longest time without a completed operation, in ms.
    #[serde(default)]
    pub longest_pause_ms: u64,
    /// Reads and writes separately, by `read` and `write`.
    #[serde(default)]
    pub by_kind: BTreeMap<String, BenchKind>,
    /// The CPU time of each process, including the client.
    #[serde(default)]
    pub processes: Vec<ProcessUse>,
    /// The phases of an operation's time, if the node reports them.
    #[serde(default)]
    pub breakdown_us: Option<BenchBreakdown>,
}

/// The reads or the writes of a measurement.
#[derive(Debug, Clone, Deserialize)]
pub struct BenchKind {
    /// Operations per second.
    pub iops: f64,
    /// Latency of an operation.
    pub latency_us: BenchLatency,
}

/// The CPU time that a process used during a measurement.
#[derive(Debug, Clone, Deserialize)]
pub struct ProcessUse {
    /// `store`, `osd`, `node`, `supervisor` or `client`.
    pub role: String,
    /// User and system time, in seconds.
    pub cpu_seconds: f64,
    /// User time, in seconds.
    #[serde(default)]
    pub user_seconds: f64,
    /// System time, in seconds.
    #[serde(default)]
    pub system_seconds: f64,
    /// How often a thread slept and was woken.
    #[serde(default)]
    pub wake_ups: f64,
    /// Maximum resident memory since the start of the process, in bytes.
    #[serde(default)]
    pub peak_resident_bytes: u64,
    /// CPU time and context switches by thread class.
    #[serde(default)]
    pub by_class: BTreeMap<String, ClassUsage>,
}

/// The CPU time and context switches of a class of threads during a measurement.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct ClassUsage {
    /// User and system time, in seconds.
    pub cpu_seconds: f64,
    /// Number of voluntary and involuntary context switches. It is 0 for a class that shares its
    /// thread with another class.
    #[serde(default)]
    pub context_switches: f64,
    /// How often tasks of the class were polled; 0 if the threads do not count it.
    #[serde(default)]
    pub polls: f64,
    /// How often a task of the class was the first to run after its thread had waited; 0 if the threads
    /// do not count it.
    #[serde(default)]
    pub wake_ups: f64,
}

/// The mean time of an operation in µs, divided into the phases of table 3 of the DoCeph paper. The
/// phases do not overlap, and their sum is the total.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct BenchBreakdown {
    /// The total time. In the output of `outboard bench`, this is the part of the latency that a
    /// request spends at the osd.
    pub total: f64,
    /// Time of writing to the drive.
    pub host_write: f64,
    /// Time of the operation's DMA transfers.
    pub dma: f64,
    /// Time of waiting for the DMA engine.
    pub dma_wait: f64,
    /// The remaining time.
    pub others: f64,
}

/// Latency in microseconds.
#[derive(Debug, Clone, Deserialize)]
pub struct BenchLatency {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median: half of the operations took no longer than this.
    pub p50: f64,
    /// 99th percentile: 99 % of the operations took no longer than this.
    pub p99: f64,
    /// The longest operation.
    #[serde(default)]
    pub max: f64,
}

/// The arguments of a run of `outboard bench`.
#[derive(Debug, Clone, Copy)]
pub struct BenchSpec<'a> {
    /// `write`, `read`, `randread`, `randwrite` or `randrw`.
    pub mode: &'a str,
    /// Size of the objects in the syntax of the command line, such as `4MiB`.
    pub object_size: &'a str,
    /// Number of operations in flight.
    pub in_flight: u32,
    /// Duration of the run, in seconds.
    pub seconds: u32,
}

/// A process that was killed.
#[derive(Debug)]
pub struct KilledProcess {
    pid: u32,
    /// Number of restarts before the kill.
    restarts: u64,
    /// The moment of the kill.
    pub at: Instant,
}

impl Node {
    /// Creates a node in `dir` that runs the `outboard` program in this program's directory.
    ///
    /// # Errors
    /// If the `outboard` program does not exist.
    pub fn new(dir: &Path) -> Result<Node> {
        let program = std::env::current_exe()?.with_file_name("outboard");
        if !program.exists() {
            return Err(format!(
                "{} does not exist; build it by running this program through make",
                program.display()
            )
            .into());
        }
        Ok(Node::of_program(&program, dir))
    }

    /// Creates a node in `dir` that runs the given `outboard` program.
    #[must_use]
    pub fn of_program(program: &Path, dir: &Path) -> Node {
        Node {
            program: program.to_owned(),
            dir: dir.to_owned(),
            environment: Vec::new(),
            within: Vec::new(),
            listen: "127.0.0.1:0".to_owned(),
        }
    }

    /// Sets an environment variable for all commands on this node.
    #[must_use]
    pub fn with_env(mut self, key: &str, value: &str) -> Node {
        self.environment.push((key.to_owned(), value.to_owned()));
        self
    }

    /// Runs all commands with this beginning of the command line, for example in a network namespace.
    /// The node listens to this IP address.
    #[must_use]
    pub fn within(mut self, command: Vec<String>, address: &str) -> Node {
        (self.within, self.listen) = (command, format!("{address}:0"));
        self
    }

    /// The node's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns a command of `outboard` on this node, for the caller to start.
    #[must_use]
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = match &self.within[..] {
            [] => Command::new(&self.program),
            [first, rest @ ..] => {
                let mut command = Command::new(first);
                command.args(rest).arg(&self.program);
                command
            }
        };
        command.args(args).env("OUTBOARD_DIR", &self.dir).env_remove("OUTBOARD_ENDPOINT");
        command.envs(self.environment.iter().map(|(k, v)| (k, v)));
        command
    }

    /// Runs a command of `outboard`, which inherits standard output and standard error.
    ///
    /// # Errors
    /// If the command fails.
    pub fn run(&self, args: &[&str]) -> Result<()> {
        let status = self.command(args).status()?;
        if !status.success() {
            return Err(format!("outboard {} failed: {status}", args.join(" ")).into());
        }
        Ok(())
    }

    /// Runs a command of `outboard` without showing its output.
    ///
    /// # Errors
    /// If the command fails. The error contains the command's message.
    pub fn run_quietly(&self, args: &[&str]) -> Result<()> {
        let output = self.command(args).stdout(Stdio::null()).output()?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(format!("outboard {} failed ({}): {why}", args.join(" "), output.status).into());
        }
        Ok(())
    }

    /// Starts a command of `outboard` and does not wait for it.
    ///
    /// # Errors
    /// If the command cannot be started.
    pub fn start(&self, args: &[&str]) -> Result<Child> {
        Ok(self.command(args).spawn()?)
    }

    /// Runs a command of `outboard` that prints JSON, and returns the parsed output.
    ///
    /// # Errors
    /// If the command fails, or its output is not the expected JSON.
    pub fn json<T: serde::de::DeserializeOwned>(&self, args: &[&str]) -> Result<T> {
        parsed(args, &self.command(args).stderr(Stdio::inherit()).output()?)
    }

    /// Starts the node.
    ///
    /// # Errors
    /// If the node does not start.
    pub fn up(&self, placement: NodePlacement, targets: u32, target_size: &str) -> Result<()> {
        self.run(&up_args(&self.listen, placement, &targets.to_string(), target_size))
    }

    /// Starts the node and prints nothing.
    ///
    /// # Errors
    /// If the node does not start.
    pub fn up_quietly(&self, placement: NodePlacement, targets: u32, target_size: &str) -> Result<()> {
        self.run_quietly(&up_args(&self.listen, placement, &targets.to_string(), target_size))
    }

    /// Stops the node.
    ///
    /// # Errors
    /// If the node does not stop.
    pub fn down(&self) -> Result<()> {
        let output = self.command(&["down"]).output()?;
        if output.status.success() { Ok(()) } else { Err("outboard down failed; see the node's logs".into()) }
    }

    /// Returns the node's processes.
    ///
    /// # Errors
    /// If the node does not answer.
    pub fn status(&self) -> Result<StatusOutput> {
        self.json(&["status", "--json"])
    }

    /// Returns the process id and the number of restarts of the process with the role `role`. Waits
    /// up to `patience` until the process is up.
    ///
    /// # Errors
    /// If the process is not up in time.
    pub fn process(&self, role: &str, patience: Duration) -> Result<(u32, u64)> {
        let deadline = Instant::now() + patience;
        loop {
            let found = self.status()?.processes.into_iter().find(|p| p.role == role);
            if let Some(NodeProcess { pid: Some(pid), restarts, .. }) = found {
                return Ok((pid, restarts));
            }
            if Instant::now() > deadline {
                return Err(format!("no running process has the role {role}").into());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Kills the process with the role `role` by SIGKILL and waits until the supervisor has
    /// restarted it. Returns the old and the new process id.
    ///
    /// # Errors
    /// As for [`Node::kill_now`] and [`Node::await_restart`].
    pub fn kill(&self, role: &str) -> Result<(u32, u32)> {
        let killed = self.kill_now(role)?;
        Ok((killed.pid, self.await_restart(role, &killed)?))
    }

    /// Kills the process with the role `role` by SIGKILL.
    ///
    /// # Errors
    /// If no process with this role is running.
    pub fn kill_now(&self, role: &str) -> Result<KilledProcess> {
        let (pid, restarts) = self.process(role, Duration::ZERO)?;
        let id = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or("the status contains an invalid process id")?;
        let at = Instant::now();
        kill_process(id, Signal::KILL)?;
        Ok(KilledProcess { pid, restarts, at })
    }

    /// Waits until the supervisor has restarted a killed process with the role `role`. Returns the new
    /// process id.
    ///
    /// # Errors
    /// If the supervisor does not restart the process within 30 seconds.
    pub fn await_restart(&self, role: &str, killed: &KilledProcess) -> Result<u32> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let (now, count) = self.process(role, Duration::from_secs(30))?;
            if now != killed.pid && count > killed.restarts {
                return Ok(now);
            }
            if Instant::now() > deadline {
                return Err(format!("the {role} was not restarted within 30 s").into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Runs `outboard bench`.
    ///
    /// # Errors
    /// If the command fails.
    pub fn bench(&self, pool: &str, workload: BenchSpec<'_>) -> Result<BenchResult> {
        self.bench_with(pool, workload, &[])
    }

    /// Runs `outboard bench` with the additional options `more`.
    ///
    /// # Errors
    /// If the command fails.
    pub fn bench_with(&self, pool: &str, workload: BenchSpec<'_>, more: &[&str]) -> Result<BenchResult> {
        self.json(&bench_args(pool, workload, more).iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Like [`Node::bench_with`], but the program runs with another beginning of the command line, for
    /// example in the network namespace of a client, and finds the node by its address `endpoint`.
    ///
    /// # Errors
    /// If the command fails.
    pub fn bench_from(
        &self,
        within: &[String],
        endpoint: &str,
        pool: &str,
        workload: BenchSpec<'_>,
        more: &[&str],
    ) -> Result<BenchResult> {
        let [first, rest @ ..] = within else { return Err("no command was given".into()) };
        let args = bench_args(pool, workload, more);
        let args: Vec<&str> =
            ["--endpoint", endpoint].into_iter().chain(args.iter().map(String::as_str)).collect();
        let mut command = Command::new(first);
        command.args(rest).arg(&self.program).args(&args).env("OUTBOARD_DIR", &self.dir);
        command.envs(self.environment.iter().map(|(k, v)| (k, v)));
        parsed(&args, &command.stderr(Stdio::inherit()).output()?)
    }

    /// Like [`Node::bench_with`]. Calls `started` on another thread when the objects are prepared and
    /// the measurement starts.
    ///
    /// # Errors
    /// If the command fails.
    pub fn bench_announced(
        &self,
        pool: &str,
        workload: BenchSpec<'_>,
        more: &[&str],
        started: impl FnOnce() + Send,
    ) -> Result<BenchResult> {
        let args = bench_args(pool, workload, &[more, &["--announce"]].concat());
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let mut bench = self.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let notes = BufReader::new(bench.stderr.take().ok_or("the command has no standard error")?);
        let output = std::thread::scope(|scope| {
            // Ignore an error: if standard error is closed, the note is lost.
            let forward = |note: &str| drop(writeln!(std::io::stderr(), "{note}"));
            scope.spawn(move || watch_start(notes, started, forward));
            bench.wait_with_output()
        })?;
        parsed(&args, &output)
    }
}

/// Calls `started` when `notes` announce the start of a measurement, and `forward` with every other
/// line.
fn watch_start(notes: impl BufRead, started: impl FnOnce(), forward: impl Fn(&str)) {
    let mut started = Some(started);
    // An error of reading ends the notes.
    for note in notes.lines().map_while(std::result::Result::ok) {
        match started.take_if(|_| note == STARTED) {
            Some(started) => started(),
            None => forward(&note),
        }
    }
}

/// Parses the JSON output of a command of `outboard`.
fn parsed<T: serde::de::DeserializeOwned>(args: &[&str], output: &Output) -> Result<T> {
    if !output.status.success() {
        return Err(format!("outboard {} failed: {}", args.join(" "), output.status).into());
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|e| format!("cannot parse the output of outboard {}: {e}", args.join(" ")).into())
}

fn bench_args(pool: &str, workload: BenchSpec<'_>, more: &[&str]) -> Vec<String> {
    let (in_flight, seconds) = (workload.in_flight.to_string(), workload.seconds.to_string());
    let args = ["bench", workload.mode, "--pool", pool, "--object-size", workload.object_size];
    let timing = ["--in-flight", &in_flight, "--seconds", &seconds, "--json"];
    [&args[..], &timing, more].concat().into_iter().map(str::to_owned).collect()
}

fn up_args<'a>(
    listen: &'a str,
    placement: NodePlacement,
    targets: &'a str,
    target_size: &'a str,
) -> [&'a str; 10] {
    [
        "up",
        "--detach",
        "--listen",
        listen,
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
        // Ignore an error: either the node has already stopped, or the harness reports an earlier
        // error.
        let _ = self.down();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn the_start_is_announced_once_and_other_lines_are_forwarded() {
        let notes = format!("retrying\n{STARTED}\n3 operations failed\n{STARTED}\n");
        let seen = RefCell::new(Vec::new());
        let started = || seen.borrow_mut().push("START".to_owned());
        watch_start(notes.as_bytes(), started, |note| seen.borrow_mut().push(note.to_owned()));
        assert_eq!(seen.into_inner(), ["retrying", "START", "3 operations failed", STARTED]);
    }
}
