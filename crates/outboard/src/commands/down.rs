//! `outboard down`: stops a node.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::args::NodeArgs;
use crate::commands::locate;
use node::dir::NodeDir;
use node::failure::{Doing, Failure, Result};
use node::units::Period;

/// Stop a node: first the osd, then the store, which unmounts its targets
///
/// The command waits until the node has stopped. It also succeeds if the node was not running.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    outboard down\n  \
    outboard down --dir /srv/node1 --timeout 2m")]
pub struct DownArgs {
    /// Maximum time to wait until the node has stopped
    #[arg(long, default_value = "90s", value_name = "TIME")]
    pub timeout: Period,
}

/// Stops the node.
pub fn run(args: DownArgs, node: &NodeArgs) -> Result<()> {
    let root = locate::root(node);
    let doing = format!("stopping the node in {}", root.display());
    let dir = NodeDir::open(&root).doing(&doing)?;
    let stopped = stop(&dir, args.timeout.0).map_err(|e| Failure::new(&doing, e))?;
    let text = if stopped { "stopped" } else { "was down already" };
    // If standard error is closed, the message is lost.
    let _ = writeln!(std::io::stderr(), "outboard: the node in {} {text}", root.display());
    Ok(())
}

/// Asks the node's supervisor to stop the node, and waits until the supervisor has ended. Returns
/// `false` if no supervisor was running.
fn stop(dir: &NodeDir, patience: Duration) -> Result<bool, String> {
    let Some((pid, supervisor)) = supervisor(dir)? else { return Ok(false) };
    if let Err(e) = rustix::process::pidfd_send_signal(&supervisor, Signal::TERM)
        && e != rustix::io::Errno::SRCH
    {
        return Err(format!(
            "cannot send a signal to the node's supervisor (pid {pid}): {e}; run `outboard down` as the user who started the node"
        ));
    }
    if !ended_within(&supervisor, patience) {
        return Err(format!(
            "the node's supervisor (pid {pid}) still runs after {}; see log/supervisor.log, wait longer with --timeout, \
             or send the supervisor a second SIGTERM, which kills the role that is stopping (no acknowledged change is lost)",
            Period(patience)
        ));
    }
    Ok(true)
}

/// Returns the pid of the supervisor and a handle on its process; `None` if no supervisor runs. The
/// handle cannot refer to a different process with the same pid, because the supervisor still holds
/// the directory's lock after the handle is created.
fn supervisor(dir: &NodeDir) -> Result<Option<(u32, OwnedFd)>, String> {
    let owner = || dir.owner().map_err(|e| e.to_string());
    let Some(pid) = owner()? else { return Ok(None) };
    let id = Pid::from_raw(pid as i32)
        .ok_or("the file run/lock contains no pid; remove it if no node runs in this directory")?;
    match rustix::process::pidfd_open(id, PidfdFlags::empty()) {
        Ok(handle) if owner()? == Some(pid) => Ok(Some((pid, handle))),
        Ok(_) | Err(rustix::io::Errno::SRCH) => Ok(None),
        Err(e) => {
            Err(format!("cannot watch the node's supervisor (pid {pid}): {e}; stop this process by hand"))
        }
    }
}

/// Waits for the end of the process. Returns `false` if the process still runs after `patience`.
fn ended_within(process: &OwnedFd, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let wait = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut ended = [PollFd::new(process, PollFlags::IN)];
        match rustix::event::poll(&mut ended, Some(&wait)) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}
