//! Sets up the process of every role (configuration, logs, metrics, connection to the supervisor),
//! runs the role, and handles the signals that stop it.

use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use base::fault::Faults;
use base::thread::ThreadClass;
use clap::Args;
use rustix::process::{Pid, Signal};
use store::DriveCalls;
use tokio::signal::unix::{SignalKind, signal};

use super::announce::{self, Announcement, Ready};
use super::config::Config;
use super::config_file;
use super::state::Role;
use super::watchdog::Heartbeat;
use super::{descriptors, logging, metrics};
use crate::failure::{Doing, Failure, Result};

/// Flags of every role.
#[derive(Debug, Clone, Args)]
pub struct RoleArgs {
    /// Configuration file (TOML); `docs/configuration.md` lists its keys
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address for Prometheus metrics [default: metrics.listen of the configuration]
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<String>,
    /// Pid of the supervisor; the role ends when that process ends
    #[arg(long, value_name = "PID", hide = true)]
    pub supervisor: Option<u32>,
}

/// The environment that [`run`] sets up for a role: configuration, metrics, faults and heartbeat.
#[derive(Debug)]
pub struct RoleProcess {
    /// The configuration of the process.
    pub config: Config,
    /// Address of the process's metrics.
    pub metrics: String,
    /// The faults of the process.
    pub faults: Faults,
    /// Sender of heartbeats for the role's event loops; `None` without a supervisor, or if the
    /// watchdog is switched off.
    pub heartbeat: Option<Heartbeat>,
    /// Whether a supervisor started this process.
    is_supervised: bool,
}

impl RoleProcess {
    /// Reports progress to the supervisor until the returned handle is dropped; `None` without a
    /// supervisor. The role makes progress whenever a call of this thread to a drive returns.
    pub fn report_progress(&self) -> Option<ProgressReport> {
        // The interval is much shorter than `ready_timeout`, because the supervisor kills a role
        // that reports no progress for this time.
        let tick = self.config.supervise.ready_timeout.0 / 8;
        self.is_supervised.then(|| ProgressReport::start(tick, || Announcement::Progress.send_or_drop()))
    }
}

/// A thread that reports progress until this handle is dropped.
#[derive(Debug)]
pub struct ProgressReport {
    _end: mpsc::Sender<()>,
}

impl ProgressReport {
    /// Calls `report` after each `tick` in which a call of this thread to a drive has returned.
    fn start(tick: Duration, report: impl Fn() + Send + 'static) -> ProgressReport {
        let (end, ended) = mpsc::channel();
        let calls = DriveCalls::default();
        calls.count_this_thread();
        let body = move || {
            let mut seen = calls.count();
            while ended.recv_timeout(tick) == Err(RecvTimeoutError::Timeout) {
                let count = calls.count();
                if std::mem::replace(&mut seen, count) != count {
                    report();
                }
            }
        };
        if let Err(e) = base::thread::spawn(ThreadClass::Admin, "start", body) {
            tracing::warn!("cannot report progress to the supervisor: {e}");
        }
        ProgressReport { _end: end }
    }
}

/// Runs a role: sets the process up and calls `body`, which does the role's work until the role
/// should stop. A failure is also announced to the supervisor.
pub fn run<F>(role: Role, args: &RoleArgs, body: impl FnOnce(RoleProcess) -> F) -> Result<()>
where
    F: Future<Output = Result<()>>,
{
    let result = set_up(role, args).and_then(|process| {
        let runtime = base::task::runtime().doing("starting the role")?;
        let result = runtime.block_on(tokio::task::LocalSet::new().run_until(body(process)));
        // The results of remaining tasks are not needed any more.
        runtime.shutdown_background();
        result
    });
    match &result {
        Ok(()) => tracing::info!("stopped"),
        Err(failure) => {
            tracing::error!("{failure}");
            Announcement::Failed(failure.to_string()).send();
        }
    }
    result
}

fn set_up(role: Role, args: &RoleArgs) -> Result<RoleProcess> {
    if let Some(supervisor) = args.supervisor {
        end_with(supervisor)?;
    }
    let config = config_file::load(args.config.as_deref(), |name| std::env::var(name).ok())
        .doing("reading the configuration")?;
    logging::start(&config.log).doing("starting logging")?;
    abort_on_panic();
    raise_descriptor_limit();
    // `ps` and `top` show the main thread's name as the name of the process.
    let name = match role {
        Role::Store => c"store-main",
        Role::Osd | Role::Node => c"osd-main",
        Role::Supervisor => c"admin-up",
        Role::Holder => c"holder-main",
        Role::Gateway => c"gateway-main",
    };
    rustix::thread::set_name(name).doing("naming the main thread")?;
    let listen = args.metrics.as_deref().unwrap_or(&config.metrics.listen);
    let metrics = match metrics::serve(listen) {
        Ok(address) => address,
        Err(e) => return Err(Failure::new(format!("serving metrics at {listen}"), with_remedy(&e))),
    };
    tracing::info!(role = role.as_str(), pid = std::process::id(), metrics, "started");
    let faults = Faults::default();
    for fault in config.faults().doing("reading debug.faults")? {
        faults.arm(fault).doing("arming a fault of debug.faults")?;
    }
    let heartbeat = match args.supervisor {
        Some(_) => {
            announce::do_not_block().doing("preparing the pipe to the supervisor")?;
            Heartbeat::new(config.supervise.hung_after.0)
        }
        None => None,
    };
    let is_supervised = args.supervisor.is_some();
    Ok(RoleProcess { config, metrics, faults, heartbeat, is_supervised })
}

/// Prepares the process for libfabric, which it may load later. A program must call this function
/// first in `main`, before the process starts another thread: see [`fabric::Library::prepare`].
pub fn prepare_process() {
    fabric::Library::prepare();
}

fn with_remedy(e: &std::io::Error) -> String {
    format!("{e}; choose another address with --metrics or metrics.listen")
}

/// Makes the kernel ask this process to stop when its parent, the supervisor, dies.
pub fn end_with(supervisor: u32) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))
        .doing("binding the role to its supervisor")?;
    let parent = rustix::process::getppid().map(Pid::as_raw_nonzero).map(|p| p.get() as u32);
    if parent != Some(supervisor) {
        return Err(Failure::new(
            "starting under a supervisor",
            "the supervisor has died; start the node again",
        ));
    }
    Ok(())
}

/// Reverts [`end_with`]: from now on this process continues when its parent dies.
pub fn outlive_caller() -> Result<()> {
    rustix::process::set_parent_process_death_signal(None).doing("detaching from the calling process")
}

/// Makes a panic on any thread end the process. A role without one of its threads would make
/// clients hang, while a restarted role serves them. Panics inside [`base::thread::catch_panic`] do
/// not end the process.
fn abort_on_panic() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if base::thread::is_catching() {
            tracing::warn!("caught a panic: {panic}");
            return;
        }
        let thread = std::thread::current();
        tracing::error!(thread = thread.name().unwrap_or("?"), "panic: {panic}");
        default(panic);
        std::process::abort();
    }));
}

/// Raises the soft limit of open file descriptors to the hard limit. Each transport uses a
/// descriptor, and the usual soft limit of 1,024 protects only programs that use `select`.
pub fn raise_descriptor_limit() {
    let shown = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
    match descriptors::raise_limit() {
        Ok((before, now)) => {
            tracing::info!(before = shown(before), now = shown(now), "limit of open file descriptors");
        }
        Err(e) => {
            tracing::warn!(
                "the limit of open file descriptors cannot be raised: {e}; raise it with `ulimit -n`"
            )
        }
    }
}

/// Announces that the role is ready.
pub fn ready(ready: Ready) {
    tracing::info!(endpoint = ready.endpoint, engine = ready.engine, targets = ready.targets.len(), "ready");
    Announcement::Ready(ready).send();
}

/// Announces that the role stops because a signal asked for it.
pub fn stopping() {
    tracing::info!("stopping");
    Announcement::Stopping.send_or_drop();
}

/// The signals that ask the process to stop: SIGTERM, SIGINT, and SIGHUP (the terminal was closed).
pub struct StopSignals {
    signals: [tokio::signal::unix::Signal; 3],
}

impl StopSignals {
    /// Handles the signals from now on. Needs a tokio runtime.
    pub fn catch() -> Result<StopSignals> {
        let catch = |kind| signal(kind).doing("installing the signal handlers");
        Ok(StopSignals {
            signals: [
                catch(SignalKind::terminate())?,
                catch(SignalKind::interrupt())?,
                catch(SignalKind::hangup())?,
            ],
        })
    }

    /// Waits for the next signal. This method is cancel safe.
    pub async fn next(&mut self) {
        let [term, int, hup] = &mut self.signals;
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
            _ = hup.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn progress_is_reported_only_while_calls_to_drives_return() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("target");
        let (said, heard) = std::sync::mpsc::channel();
        let tick = std::time::Duration::from_millis(1);
        let report = super::ProgressReport::start(tick, move || said.send(()).unwrap_or_default());
        std::thread::sleep(20 * tick);
        assert!(heard.try_recv().is_err(), "no call to a drive has returned");
        let options = store::MkfsOptions { size: Some(16 << 20), ..Default::default() };
        store::BlockStore::mkfs(&path, &options, |_, _| {}).unwrap();
        heard.recv_timeout(std::time::Duration::from_secs(60)).expect("progress is reported");
        drop(report);
        while heard.recv().is_ok() {}
    }

    #[test]
    fn a_panic_on_any_thread_ends_the_process_unless_it_is_caught_on_purpose() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "role::tests::child_process_that_panics", "--nocapture"]);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(6), "{said}");
        assert!(said.contains("not caught"), "{said}");
    }

    /// Not a test: a child process that one of its threads ends by a panic.
    #[test]
    #[ignore = "runs as a child process of another test"]
    fn child_process_that_panics() {
        super::abort_on_panic();
        assert!(base::thread::catch_panic(|| panic!("caught")).is_err());
        std::thread::spawn(|| panic!("not caught")).join().unwrap_err();
    }
}
