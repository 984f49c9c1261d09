//! Keeps one role alive: starts its process, waits until it is ready or dead, pauses, starts it again.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout};

use super::announce::{Announcement, MAX_ANNOUNCEMENT, Ready};
use super::config::Supervise;
use super::logging;
use super::state::Role;
use super::units::ByteSize;

/// Setting of the allocator: how long it keeps freed memory, in ms.
const PURGE_DELAY: &str = "MIMALLOC_PURGE_DELAY";

/// How to start a role.
#[derive(Debug, Clone)]
pub struct RoleSpec {
    /// Which one.
    pub role: Role,
    /// The program.
    pub program: PathBuf,
    /// Its arguments, without those below.
    pub args: Vec<OsString>,
    /// Address for clients, if it serves any. A port of 0 is replaced by what the role took, for its restarts.
    pub listen: Option<String>,
    /// Address for its metrics; likewise.
    pub metrics: String,
    /// Working directory.
    pub dir: PathBuf,
    /// Where its standard error goes.
    pub log: PathBuf,
    /// See `log.max_size`.
    pub log_max: ByteSize,
}

/// What happened to a role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RoleEvent {
    /// A process was started.
    Started {
        /// Its pid.
        pid: u32,
    },
    /// It does its work.
    Ready(Ready),
    /// It ended without being asked to, or could not be started. It will be started again after a pause.
    Died {
        /// How.
        reason: String,
        /// The pause.
        pause: Duration,
    },
    /// It ended as asked.
    Stopped,
}

/// What a keeper should do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Keep the role alive.
    Run,
    /// Ask it to stop, and wait.
    Stop,
    /// Kill it.
    Kill,
}

/// Keeps one role alive until its goal changes. Must run on the supervisor's main thread: the kernel binds a child's
/// life to the thread that started it.
pub struct Keeper {
    /// What to start.
    pub spec: RoleSpec,
    /// Pauses and timeouts.
    pub policy: Supervise,
    /// Where to tell what happened.
    pub events: mpsc::Sender<(Role, RoleEvent)>,
    /// What to do.
    pub goal: watch::Receiver<Goal>,
}

/// How a process ended.
enum End {
    Asked,
    Died { reason: String, ready_for: Duration },
}

impl Keeper {
    /// Does it.
    pub async fn run(mut self) {
        let mut pause = self.policy.backoff_min.0;
        while *self.goal.borrow() == Goal::Run {
            let end = match self.start() {
                Ok(child) => self.attend(child).await,
                Err(e) => End::Died { reason: format!("cannot be started: {e}"), ready_for: Duration::ZERO },
            };
            let End::Died { reason, ready_for } = end else { break };
            if ready_for >= self.policy.steady_after.0 {
                pause = self.policy.backoff_min.0;
            }
            self.tell(RoleEvent::Died { reason, pause }).await;
            tokio::select! {
                () = sleep(pause) => {}
                () = no_longer_run(&mut self.goal) => {}
            }
            pause = (pause * 2).min(self.policy.backoff_max.0);
        }
        self.tell(RoleEvent::Stopped).await;
    }

    async fn tell(&self, event: RoleEvent) {
        // The supervisor stops listening only when it ends.
        let _ = self.events.send((self.spec.role, event)).await;
    }

    fn start(&self) -> std::io::Result<Child> {
        let spec = &self.spec;
        let log = logging::open_file(&spec.log, spec.log_max)?;
        let mut command = Command::new(&spec.program);
        command.arg0("outboard").args(&spec.args).args(["--supervisor", &std::process::id().to_string()]);
        command.args(["--debug-socket", &format!("run/{}.debug", spec.role.as_str())]);
        command.args(["--metrics", &spec.metrics]);
        if let Some(listen) = &spec.listen {
            command.args(["--listen", listen]);
        }
        // The allocator keeps freed memory for two seconds: under load it is soon used again.
        if std::env::var_os(PURGE_DELAY).is_none() {
            command.env(PURGE_DELAY, "2000");
        }
        // Its own process group: Ctrl-C on the terminal reaches the supervisor only, which stops roles in order.
        command.process_group(0).kill_on_drop(true).current_dir(&spec.dir);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        command.spawn()
    }

    /// Stays with a process until it ends.
    async fn attend(&mut self, mut child: Child) -> End {
        let pid = child.id().unwrap_or(0);
        self.tell(RoleEvent::Started { pid }).await;
        let mut out = child.stdout.take().map(BufReader::new);
        let deadline = Instant::now() + self.policy.ready_timeout.0;
        let mut said = None;
        let announced = tokio::select! {
            announced = announcement(&mut out) => announced,
            () = tokio::time::sleep_until(deadline) => {
                said = Some(format!("not ready after {}", self.policy.ready_timeout));
                None
            }
            () = no_longer_run(&mut self.goal) => return self.stop(child, pid).await,
        };
        let mut ready_since = None;
        match announced {
            Some(Announcement::Ready(ready)) => {
                self.remember_addresses(&ready);
                ready_since = Some(Instant::now());
                self.tell(RoleEvent::Ready(ready)).await;
            }
            Some(Announcement::Failed(why)) => said = Some(why),
            None => {
                // Silent for too long, or it closed its output: of no use either way.
                if said.is_some() {
                    let _ = child.start_kill();
                }
            }
        }
        tokio::select! {
            status = child.wait() => {
                let reason = said.unwrap_or_else(|| status.map_or_else(|e| e.to_string(), describe));
                let ready_for = ready_since.map_or(Duration::ZERO, |at| at.elapsed());
                End::Died { reason, ready_for }
            }
            () = no_longer_run(&mut self.goal) => self.stop(child, pid).await,
        }
    }

    /// A role keeps its addresses over restarts, so that clients and scrapers find it again.
    fn remember_addresses(&mut self, ready: &Ready) {
        if let (Some(listen), Some(endpoint)) = (&mut self.spec.listen, &ready.endpoint) {
            listen.clone_from(endpoint);
        }
        if let Some(metrics) = &ready.metrics {
            self.spec.metrics.clone_from(metrics);
        }
    }

    /// Asks the process to stop; kills it if it takes too long or the goal is to kill.
    async fn stop(&mut self, mut child: Child, pid: u32) -> End {
        let killed = async {
            let orderly = timeout(self.policy.stop_timeout.0, self.goal.wait_for(|goal| *goal == Goal::Kill));
            if orderly.await.is_err() {
                tracing::warn!(
                    role = self.spec.role.as_str(),
                    "did not stop in {}",
                    self.policy.stop_timeout
                );
            }
        };
        // Until it is waited for, a pid cannot become another process's.
        if let Some(pid) = Pid::from_raw(pid as i32) {
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
        let ended = tokio::select! {
            _ = child.wait() => true,
            () = killed => false,
        };
        if !ended && let Err(e) = child.kill().await {
            tracing::error!(role = self.spec.role.as_str(), "cannot be killed: {e}");
        }
        End::Asked
    }
}

/// Resolves when the role should not run any more, or nobody cares.
async fn no_longer_run(goal: &mut watch::Receiver<Goal>) {
    let _ = goal.wait_for(|goal| *goal != Goal::Run).await;
}

/// The first line of a role's output; `None` if there is none that can be understood.
async fn announcement(out: &mut Option<BufReader<ChildStdout>>) -> Option<Announcement> {
    let mut line = String::new();
    out.as_mut()?.take(MAX_ANNOUNCEMENT).read_line(&mut line).await.ok()?;
    serde_json::from_str(&line).ok()
}

fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => status.to_string(),
    }
}
