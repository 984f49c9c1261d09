//! Keeps one role alive: starts its process, watches the process until it ends, pauses, and starts
//! the next process.

use std::ffi::OsString;
use std::future::pending;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep};
use uuid::Uuid;

use super::announce::{Announcement, MAX_ANNOUNCEMENT, Ready};
use super::config::SuperviseSection;
use super::dir::NodeDir;
use super::logging;
use super::roster::{ExpectedNode, KnownTarget, Roster};
use super::state::{NodeState, Role};
use super::units::ByteSize;
use super::watchdog::{self, Watchdog, awake_for};

/// Maximum number of queued announcements of a role.
const ANNOUNCEMENTS: usize = 16;
/// Environment variable that tells the allocator (mimalloc) how long to keep freed memory, in ms.
const PURGE_DELAY: &str = "MIMALLOC_PURGE_DELAY";

/// Describes how to start a role. Restarts use the addresses and the targets of the role's last
/// `Ready` announcement.
#[derive(Debug, Clone)]
pub struct RoleSpec {
    /// The role.
    pub role: Role,
    /// The program.
    pub program: PathBuf,
    /// Arguments of the program, without the arguments that the fields below determine.
    pub args: Vec<OsString>,
    /// Address for clients, if the role serves clients. If the port is 0, a restarted role gets the
    /// port that the role used before.
    pub listen: Option<String>,
    /// Address for the role's metrics.
    pub metrics: String,
    /// Known paths and UUIDs of the role's targets, if the node's roster does not name them. With
    /// them, a role that cannot mount one target can serve the other targets.
    pub known_targets: Vec<KnownTarget>,
    /// The node's directory, which is also the working directory.
    pub dir: NodeDir,
    /// File for the role's standard error.
    pub log: PathBuf,
    /// Maximum size of the log; see `log.max_size` in the configuration.
    pub log_max: ByteSize,
}

/// An event of a role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RoleEvent {
    /// A process was started.
    Started {
        /// Pid of the process.
        pid: u32,
    },
    /// The process is ready.
    Ready(Ready),
    /// The process hangs, and is being killed.
    Hung {
        /// Reason why the process counts as hung.
        reason: String,
    },
    /// The process ended without a request to stop, or could not be started. The keeper starts the
    /// role again after a pause.
    Died {
        /// How the process ended, or why it could not be started.
        reason: String,
        /// Whether the process announced that it cannot become ready. If so, the process has served
        /// no client.
        is_announced: bool,
        /// The pause before the next start.
        pause: Duration,
    },
    /// The process ended as requested.
    Stopped,
}

/// What the supervisor wants a keeper to do with its role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Keep the role alive.
    Run,
    /// Ask the role to stop, and wait for its end.
    Stop,
    /// Kill the role.
    Kill,
}

/// Keeps one role alive until its goal changes. Must run on the supervisor's main thread, because
/// the kernel signals a role's process when the thread that started it ends.
pub struct Keeper {
    /// How to start the role.
    spec: RoleSpec,
    /// Pauses and timeouts.
    policy: SuperviseSection,
    /// Channel through which the keeper reports the role's events to the supervisor.
    events: mpsc::Sender<(Role, RoleEvent)>,
    /// The current goal.
    goal: watch::Receiver<Goal>,
    /// Address of the metrics of the role's last process, if that process was ready.
    metrics: Option<String>,
    /// Targets of which the operator has accepted the loss, as the role's last process was told.
    forgotten: Vec<Uuid>,
}

/// How a process ended.
enum ProcessEnd {
    Asked,
    Died { reason: String, ready_for: Duration, is_announced: bool },
}

impl Keeper {
    /// Creates a keeper that has not started the role yet. The keeper sends events to `events`
    /// until `goal` asks it to stop.
    pub fn new(
        spec: RoleSpec,
        policy: SuperviseSection,
        events: mpsc::Sender<(Role, RoleEvent)>,
        goal: watch::Receiver<Goal>,
    ) -> Keeper {
        Keeper { spec, policy, events, goal, metrics: None, forgotten: Vec::new() }
    }

    /// Runs the keeper until the goal changes and the role has ended.
    pub async fn run(mut self) {
        let mut pause = self.policy.backoff_min.0;
        while *self.goal.borrow() == Goal::Run {
            let end = match self.start() {
                Ok(child) => self.attend(child).await,
                Err(e) => {
                    let reason = format!("its process cannot be started: {e}");
                    ProcessEnd::Died { reason, ready_for: Duration::ZERO, is_announced: true }
                }
            };
            let ProcessEnd::Died { reason, ready_for, is_announced } = end else { break };
            if ready_for >= self.policy.steady_after.0 {
                pause = self.policy.backoff_min.0;
            }
            if ready_for.is_zero() {
                // Another process may have taken the port that the system chose for the metrics.
                self.metrics = None;
            }
            self.tell(RoleEvent::Died { reason, is_announced, pause }).await;
            tokio::select! {
                () = sleep(pause) => {}
                () = no_longer_run(&mut self.goal) => {}
            }
            pause = (pause * 2).min(self.policy.backoff_max.0);
        }
        self.tell(RoleEvent::Stopped).await;
    }

    async fn tell(&self, event: RoleEvent) {
        // Ignore the error: the channel is closed only when the supervisor ends.
        let _ = self.events.send((self.spec.role, event)).await;
    }

    fn start(&mut self) -> std::io::Result<Child> {
        let expected = self.expected_node();
        let spec = &self.spec;
        let log = logging::open_file(&spec.log, spec.log_max)?;
        let mut command = Command::new(&spec.program);
        command.arg0("outboard").args(&spec.args).args(["--supervisor", &std::process::id().to_string()]);
        command.args(["--metrics", self.metrics.as_ref().unwrap_or(&spec.metrics)]);
        if let Some(listen) = &spec.listen {
            command.args(["--listen", listen]);
        }
        for known in self.known_targets() {
            command.args(["--known-target".into(), known.to_argument()]);
        }
        if let Some(endpoint) = self.node_endpoint() {
            command.args(["--endpoint", &endpoint]);
        }
        if let Some(node) = expected.node {
            command.args(["--expected-node", &node.to_string()]);
        }
        for uuid in &expected.forgotten {
            command.args(["--forgotten-target", &uuid.to_string()]);
        }
        self.forgotten = expected.forgotten;
        // The allocator keeps freed memory for two seconds, because a role under load soon needs
        // this memory again.
        if std::env::var_os(PURGE_DELAY).is_none() {
            command.env(PURGE_DELAY, "2000");
        }
        // The role has its own process group, so Ctrl-C on the terminal reaches only the
        // supervisor, which stops the roles one after the other.
        command.process_group(0).kill_on_drop(true).current_dir(spec.dir.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        command.spawn()
    }

    /// Returns the targets for the command line of a role that owns targets. The node's roster is
    /// read at each start, because `target replace` may have changed it.
    fn known_targets(&self) -> Vec<KnownTarget> {
        match (self.spec.role, Roster::load(&self.spec.dir)) {
            (Role::Supervisor | Role::Osd | Role::Holder | Role::Gateway, _) => Vec::new(),
            (Role::Store | Role::Node, Ok(Some(roster))) => roster.targets().to_vec(),
            (Role::Store | Role::Node, Ok(None) | Err(_)) => self.spec.known_targets.clone(),
        }
    }

    /// Returns what the role must know of the node's roster, for its command line.
    fn expected_node(&self) -> ExpectedNode {
        match (self.spec.role, Roster::load(&self.spec.dir)) {
            (Role::Osd | Role::Node, Ok(Some(roster))) => roster.expected(),
            _ => ExpectedNode::default(),
        }
    }

    /// Returns the address at which the osd serves clients, for the command line of the gateway. The osd
    /// may have chosen its port.
    fn node_endpoint(&self) -> Option<String> {
        match self.spec.role {
            Role::Gateway => NodeState::load(&self.spec.dir).and_then(|state| state.endpoint),
            _ => None,
        }
    }

    /// Watches a process until the process ends.
    async fn attend(&mut self, mut child: Child) -> ProcessEnd {
        let pid = child.id().unwrap_or(0);
        self.tell(RoleEvent::Started { pid }).await;
        let mut said = listen(child.stdout.take());
        let ready_timeout = self.policy.ready_timeout;
        let first = tokio::select! {
            first = first(&mut said, ready_timeout.0) => first,
            () = no_longer_run(&mut self.goal) => return self.stop(child, pid).await,
        };
        let (mut why, mut is_announced) = (None, false);
        let mut ready_since = None;
        let mut loops = Vec::new();
        match first {
            First::Ready(ready) => {
                self.remember(&ready);
                loops.clone_from(&ready.loops);
                ready_since = Some(Instant::now());
                self.tell(RoleEvent::Ready(ready)).await;
            }
            First::Failed(reason) => (why, is_announced) = (Some(reason), true),
            First::Nothing => {
                why = Some(format!("not ready after {ready_timeout} without progress"));
                let _ = child.start_kill();
            }
            // The process has closed its output: it is ending, or cannot be supervised. Wait for
            // its end.
            First::Closed => {}
        }
        let policy = self.policy;
        tokio::select! {
            status = child.wait() => {
                let reason = why.unwrap_or_else(|| status.map_or_else(|e| e.to_string(), describe));
                let ready_for = ready_since.map_or(Duration::ZERO, |at| at.elapsed());
                ProcessEnd::Died { reason, ready_for, is_announced }
            }
            reason = hang(&mut said, &loops, &policy, pid), if ready_since.is_some() => {
                let ready_for = ready_since.map_or(Duration::ZERO, |at| at.elapsed());
                // Do not count the time for which the process hung.
                let ready_for = ready_for.saturating_sub(policy.hung_after.0);
                self.kill_hung(child, reason, ready_for).await
            }
            () = no_longer_run(&mut self.goal) => self.stop(child, pid).await,
        }
    }

    /// Kills a process that hangs, and waits for its end.
    async fn kill_hung(&mut self, mut child: Child, reason: String, ready_for: Duration) -> ProcessEnd {
        self.tell(RoleEvent::Hung { reason: reason.clone() }).await;
        if let Err(e) = child.start_kill() {
            tracing::error!(role = self.spec.role.as_str(), "the role's process cannot be killed: {e}");
        }
        tokio::select! {
            _ = child.wait() => ProcessEnd::Died { reason, ready_for, is_announced: false },
            () = no_longer_run(&mut self.goal) => {
                // The process was killed already. It cannot react to the goal, so wait for the
                // kernel to end it.
                let _ = child.wait().await;
                ProcessEnd::Asked
            }
        }
    }

    /// Remembers the addresses and targets that a role announces, for the role's next start.
    /// Clients and scrapers then find the restarted role at its old addresses. If a target fails
    /// later, its UUID is known, even in the node's first run.
    fn remember(&mut self, ready: &Ready) {
        if let (Some(listen), Some(endpoint)) = (&mut self.spec.listen, &ready.endpoint) {
            listen.clone_from(endpoint);
        }
        self.metrics.clone_from(&ready.metrics);
        // The operator may have given a word after the osd was started, which was not needed then.
        // It must not apply to a later start.
        let given = self.expected_node().forgotten;
        if given.iter().any(|uuid| !self.forgotten.contains(uuid)) {
            tracing::warn!(targets = ?given, "the osd has started without the latest `target forget`; repeat the command if groups still wait");
        }
        if !given.is_empty()
            && let Err(e) = Roster::osd_knows(&self.spec.dir, &given)
        {
            tracing::error!("cannot record that the osd knows the forgotten targets: {e}");
        }
        let known: Vec<KnownTarget> = ready.targets.iter().map(KnownTarget::of).collect();
        if !known.is_empty() {
            self.spec.known_targets = known;
        }
    }

    /// Asks the process to stop. Kills the process if it still runs after `stop_timeout`, or if the
    /// goal becomes [`Goal::Kill`].
    async fn stop(&mut self, mut child: Child, pid: u32) -> ProcessEnd {
        let killed = async {
            tokio::select! {
                _ = self.goal.wait_for(|goal| *goal == Goal::Kill) => {}
                () = awake_for(self.policy.stop_timeout.0) => {
                    let (role, limit) = (self.spec.role.as_str(), self.policy.stop_timeout);
                    tracing::warn!(role, "the role did not stop within {limit}; killing it");
                }
            }
        };
        // The kernel does not reuse the pid before this process was waited for.
        if let Some(pid) = Pid::from_raw(pid as i32) {
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
        let ended = tokio::select! {
            _ = child.wait() => true,
            () = killed => false,
        };
        if !ended && let Err(e) = child.kill().await {
            tracing::error!(role = self.spec.role.as_str(), "the role's process cannot be killed: {e}");
        }
        ProcessEnd::Asked
    }
}

/// Returns when the role should no longer run, or when the goal's sender is dropped.
async fn no_longer_run(goal: &mut watch::Receiver<Goal>) {
    let _ = goal.wait_for(|goal| *goal != Goal::Run).await;
}

/// The event that ends the wait for the readiness of a role's process.
enum First {
    Ready(Ready),
    Failed(String),
    /// The process has closed its output.
    Closed,
    /// The process has reported no progress for the timeout.
    Nothing,
}

/// Waits until the role is ready, announces a failure, closes its output, or reports no progress
/// for `timeout`. Heartbeats do not count as progress.
async fn first(said: &mut mpsc::Receiver<Announcement>, timeout: Duration) -> First {
    let mut patience = std::pin::pin!(awake_for(timeout));
    loop {
        let announcement = tokio::select! {
            announcement = said.recv() => announcement,
            () = &mut patience => return First::Nothing,
        };
        match announcement {
            Some(Announcement::Ready(ready)) => return First::Ready(ready),
            Some(Announcement::Failed(why)) => return First::Failed(why),
            Some(Announcement::Progress) => patience.set(awake_for(timeout)),
            Some(Announcement::Heartbeat(_) | Announcement::Hung(_) | Announcement::Stopping) => {}
            None => return First::Closed,
        }
    }
}

/// Receives a role's announcements until its output is closed. Invalid lines are ignored.
fn listen(out: Option<ChildStdout>) -> mpsc::Receiver<Announcement> {
    let (sender, said) = mpsc::channel(ANNOUNCEMENTS);
    if let Some(out) = out {
        tokio::spawn(async move {
            let mut out = BufReader::new(out);
            let mut line = Vec::new();
            loop {
                line.clear();
                match (&mut out).take(MAX_ANNOUNCEMENT).read_until(b'\n', &mut line).await {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
                let Ok(announcement) = serde_json::from_slice(&line) else { continue };
                if sender.send(announcement).await.is_err() {
                    return;
                }
            }
        });
    }
    said
}

/// Waits until a ready role, with the process `pid`, hangs. Returns the reason.
async fn hang(
    said: &mut mpsc::Receiver<Announcement>,
    loops: &[String],
    policy: &SuperviseSection,
    pid: u32,
) -> String {
    let Some(tick) = watchdog::tick(policy.hung_after.0) else { return pending().await };
    let mut watchdog = Watchdog::new(loops);
    let mut ticks = interval_at(Instant::now() + tick, tick);
    // After a pause of this process, all missed ticks count as one tick.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut open = true;
    loop {
        tokio::select! {
            biased;
            announcement = said.recv(), if open => match announcement {
                Some(Announcement::Heartbeat(event_loop)) => watchdog.heard(&event_loop),
                Some(Announcement::Stopping) => {
                    awake_for(policy.stop_timeout.0).await;
                    return format!("hung: a signal asked the role to stop, but it has not ended after {}", policy.stop_timeout);
                }
                Some(Announcement::Hung(reason)) if !watchdog::is_traced(pid) => return format!("hung: {reason}"),
                Some(_) => {}
                None => open = false,
            },
            _ = ticks.tick() => {
                let Some(event_loop) = watchdog.tick() else { continue };
                let excuse = if watchdog::waits_for_drive(pid, &event_loop) {
                    Some("the thread of the event loop waits for a drive in the kernel")
                } else {
                    watchdog::is_traced(pid).then_some("a debugger traces the process")
                };
                if let Some(excuse) = excuse {
                    tracing::warn!(pid, event_loop, "a heartbeat is missing, but the process is not killed, because {excuse}");
                    watchdog.heard(&event_loop);
                    continue;
                }
                return format!("hung: no heartbeat of {event_loop} for {}", policy.hung_after);
            }
        }
    }
}

fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => status.to_string(),
    }
}
