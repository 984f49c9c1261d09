//! What `import`, `export` and the benchmark of disks have in common: this process attaches a disk,
//! works on it, and detaches it.

use base::clock::WallClock;
use client::Options;
use node::failure::{Doing, Failure, Result};
use tokio::signal::unix::{SignalKind, signal};
use vdisk::{AttachOptions, AttachedDisk, OpenSession};

use super::names::DiskPath;

/// Exit status after SIGINT or SIGTERM. A shell reports the same status for a command that SIGINT has
/// ended.
const EXIT_INTERRUPTED: i32 = 130;
/// Most bytes of all requests in flight, and the least and the largest number of requests.
const BYTES_IN_FLIGHT: u64 = 64 << 20;
const LEAST_IN_FLIGHT: u64 = 4;
const MOST_IN_FLIGHT: u64 = 32;

/// How the work on an attached disk ended.
pub enum WorkEnd<T> {
    /// It was done.
    Done(T),
    /// A signal ended it early.
    Interrupted,
}

impl<T> WorkEnd<T> {
    /// Returns the result of the work. After a signal, ends the process.
    pub fn or_exit(self) -> T {
        match self {
            WorkEnd::Done(result) => result,
            WorkEnd::Interrupted => std::process::exit(EXIT_INTERRUPTED),
        }
    }
}

/// Returns the client options of commands that copy disks.
pub fn options() -> Options {
    Options { requests_in_flight: 2 * MOST_IN_FLIGHT as usize, ..crate::commands::options() }
}

/// Returns the number of requests in flight, each of which has up to `unit` bytes.
pub fn in_flight(unit: u64) -> usize {
    (BYTES_IN_FLIGHT / unit.max(1)).clamp(LEAST_IN_FLIGHT, MOST_IN_FLIGHT) as usize
}

/// Returns the name of this process as the owner of a disk. It is unique: a second process must not take
/// the disk over from the first one. `command` is the name of the command, for operators.
pub fn name(command: &str) -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{command} (process {} on {host})", std::process::id())
}

/// Attaches a disk to this process under the [`name`] of `command`.
///
/// # Errors
/// As for [`AttachedDisk::attach`]. `force` takes the disk over if it is attached elsewhere.
pub async fn attach(
    disk: &DiskPath,
    command: &str,
    force: bool,
    sessions: OpenSession,
) -> vdisk::Result<AttachedDisk> {
    let options = AttachOptions {
        gateway: name(command),
        takes_over: force,
        open_session: sessions,
        clock: WallClock::default(),
    };
    AttachedDisk::attach(&disk.pool, &disk.disk, options).await
}

/// Works until the end, a failure, SIGINT or SIGTERM. Then detaches `disk`, if there is one.
///
/// # Errors
/// The failure of the work, or else of detaching.
pub async fn until_signal<T>(
    disk: Option<&AttachedDisk>,
    work: impl Future<Output = Result<T>>,
) -> Result<WorkEnd<T>> {
    let prepared = "preparing for signals";
    let mut interrupt = signal(SignalKind::interrupt()).doing(prepared)?;
    let mut terminate = signal(SignalKind::terminate()).doing(prepared)?;
    let done = tokio::select! {
        done = work => done.map(WorkEnd::Done),
        _ = interrupt.recv() => Ok(WorkEnd::Interrupted),
        _ = terminate.recv() => Ok(WorkEnd::Interrupted),
    };
    let Some(disk) = disk else { return done };
    let detached = disk.detach().await.doing(format!("detaching disk {}", disk.name()));
    match done {
        Ok(done) => detached.map(|()| done),
        // The failure of the work is the one that matters.
        Err(failure) => Err(failure),
    }
}

/// Returns a failure of a copy that the same command with `--resume` continues.
pub fn resumable(doing: &str, why: impl std::fmt::Display) -> Failure {
    Failure::new(doing, format!("{why}; to continue, repeat the command with --resume"))
}
