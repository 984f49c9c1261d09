//! Detects roles that hang. The event loops of a role send heartbeats, and the watchdog in the
//! supervisor notices when heartbeats are missing.
//!
//! Each event loop that serves requests (`osd-N`, `chan-N`) sends its heartbeat in one of its tasks,
//! so the heartbeat stops when the loop stops. The heartbeat does not depend on drives: a loop
//! whose tasks wait for a drive continues to send heartbeats.
//!
//! A checkpoint of a target does not run in an event loop, but requests wait for the checkpoint
//! when the log is full. Each heartbeat therefore also checks whether requests wait for a
//! checkpoint and whether the checkpoint makes progress ([`Checkpoints`]). A checkpoint that makes
//! progress, even slowly, never counts as hung.
//!
//! The watchdog counts its own ticks and reads no clock. While the supervisor does not run (a
//! paused virtual machine, a suspended laptop, a stopped process group) the watchdog does not
//! count. A pause of the whole node therefore causes no restart.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use store::CheckpointWatch;
use tokio::time::sleep;

use super::announce::Announcement;

/// Number of heartbeats, and of watchdog ticks, within `supervise.hung_after`, the time after which
/// a loop without heartbeats counts as hung.
const TICKS: u32 = 6;

/// Returns the time between two heartbeats, and between two ticks of the watchdog; `None` if the
/// watchdog is switched off.
pub fn tick(hung_after: Duration) -> Option<Duration> {
    (!hung_after.is_zero()).then(|| hung_after / TICKS)
}

/// Sends the heartbeats of the event loop in which it runs.
#[derive(Debug, Clone, Copy)]
pub struct Heartbeat {
    tick: Duration,
}

impl Heartbeat {
    /// Creates the sender of heartbeats for a watchdog with the time limit `hung_after`; `None` if
    /// the watchdog is switched off.
    pub fn new(hung_after: Duration) -> Option<Heartbeat> {
        tick(hung_after).map(|tick| Heartbeat { tick })
    }

    /// Sends heartbeats of the loop `event_loop`, and reports a checkpoint that hangs.
    pub async fn beat(self, event_loop: &str, checkpoints: Checkpoints) {
        let heartbeat = Announcement::Heartbeat(event_loop.to_owned());
        loop {
            heartbeat.send_or_drop();
            if let Some(reason) = checkpoints.tick() {
                Announcement::Hung(reason).send_or_drop();
            }
            sleep(self.tick).await;
        }
    }
}

/// Watches the checkpoints of a role's targets. Clones share their state.
#[derive(Debug, Clone, Default)]
pub struct Checkpoints {
    watched: Arc<Mutex<Vec<(PathBuf, CheckpointWatch, Standstill)>>>,
}

impl Checkpoints {
    /// Watches the checkpoints of a newly mounted target. The watch of an earlier mount of this
    /// target ends.
    pub fn add(&self, target: PathBuf, watch: CheckpointWatch) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|(earlier, ..)| *earlier != target);
        watched.push((target, watch, Standstill::default()));
    }

    /// Returns the checkpoints that the loop with this number watches. Only the first loop watches any,
    /// because every watching loop counts ticks.
    #[must_use]
    pub fn of_loop(self, number: usize) -> Checkpoints {
        if number == 0 { self } else { Checkpoints::default() }
    }

    /// Counts a tick. If a checkpoint hangs and a restart can help, returns a description of the
    /// problem.
    fn tick(&self) -> Option<String> {
        let mut hung = None;
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        for (path, watch, standstill) in watched.iter_mut() {
            if !standstill.tick(watch.awaited()) {
                continue;
            }
            let target = path.display();
            if waits_for_drive(std::process::id(), &watch.thread()) {
                tracing::warn!(%target, "a checkpoint waits for its drive in the kernel");
            } else {
                hung = Some(format!("calls wait for a checkpoint of {target} that makes no progress"));
            }
        }
        hung
    }
}

/// Counts the ticks without progress of an operation for which requests wait.
#[derive(Debug, Default)]
struct Standstill {
    at: Option<u64>,
    ticks: u32,
}

impl Standstill {
    /// Counts a tick. Returns whether the operation made no progress for [`TICKS`] ticks. `now` is
    /// the progress of the operation; `None` if no request waits for it.
    fn tick(&mut self, now: Option<u64>) -> bool {
        let stands = now.is_some() && now == self.at;
        self.at = now;
        self.ticks = if stands { self.ticks.saturating_add(1) } else { 0 };
        self.ticks >= TICKS
    }
}

/// Counts the ticks since the last heartbeat of each event loop of a role.
#[derive(Debug)]
pub struct Watchdog {
    loops: Vec<Watched>,
}

#[derive(Debug)]
struct Watched {
    name: String,
    /// Ticks since the loop's last heartbeat.
    silent: u32,
}

impl Watchdog {
    /// Creates a watchdog for these loops.
    pub fn new(loops: &[String]) -> Watchdog {
        let watched = |name: &String| Watched { name: name.clone(), silent: 0 };
        Watchdog { loops: loops.iter().map(watched).collect() }
    }

    /// Records a heartbeat of a loop. Unknown loops are ignored.
    pub fn heard(&mut self, event_loop: &str) {
        if let Some(watched) = self.loops.iter_mut().find(|watched| watched.name == event_loop) {
            watched.silent = 0;
        }
    }

    /// Counts a tick of the supervisor. Returns the name of a loop that hangs, if there is one.
    pub fn tick(&mut self) -> Option<String> {
        for watched in &mut self.loops {
            watched.silent = watched.silent.saturating_add(1);
        }
        // The first tick may follow a heartbeat immediately, so it does not count.
        self.loops.iter().find(|watched| watched.silent > TICKS).map(|watched| watched.name.clone())
    }
}

/// Sleeps until this process has run for about `time`. A pause of the process counts for at most an
/// eighth of `time`.
pub async fn awake_for(time: Duration) {
    const SLICES: u32 = 8;
    for _ in 0..SLICES {
        sleep(time / SLICES).await;
    }
}

/// Returns whether the thread named `thread` of process `pid` waits in the kernel for a drive
/// (state D of proc_pid_stat(5)). The kernel delivers SIGKILL to that thread only after the wait,
/// so killing the process would not help.
pub fn waits_for_drive(pid: u32, thread: &str) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    tasks.flatten().any(|task| {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let is_waiting =
            |stat: &str| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('D'));
        read("comm").trim_end() == thread && is_waiting(&read("stat"))
    })
}

/// Returns whether a debugger traces process `pid` and may have stopped it (TracerPid of
/// proc_pid_status(5)).
pub fn is_traced(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    tracer.is_some_and(|tracer| tracer.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_loop_counts_as_hung_only_after_all_ticks_without_its_own_heartbeat() {
        let mut watchdog = Watchdog::new(&["osd-0".to_owned(), "osd-1".to_owned()]);
        for _ in 0..100 {
            watchdog.heard("osd-0");
            watchdog.heard("osd-1");
            assert_eq!(watchdog.tick(), None);
        }
        for _ in 1..TICKS {
            watchdog.heard("osd-0");
            watchdog.heard("unknown");
            assert_eq!(watchdog.tick(), None);
        }
        assert_eq!(watchdog.tick().as_deref(), Some("osd-1"));
        watchdog.heard("osd-1");
        assert_eq!(watchdog.tick(), None);
    }

    #[test]
    fn a_checkpoint_counts_as_hung_only_if_requests_wait_and_it_makes_no_progress() {
        let mut standstill = Standstill::default();
        assert!((0..100).all(|n| !standstill.tick(Some(n))), "a slow checkpoint does not hang");
        assert!((0..100).all(|_| !standstill.tick(None)), "no request waits");
        assert!((0..TICKS).all(|_| !standstill.tick(Some(100))));
        assert!(standstill.tick(Some(100)));
        assert!(!standstill.tick(Some(101)), "the checkpoint has made progress");
    }

    #[test]
    fn a_role_without_event_loops_never_counts_as_hung() {
        let mut watchdog = Watchdog::new(&[]);
        assert!((0..100).all(|_| watchdog.tick().is_none()));
    }

    #[test]
    fn a_sleeping_thread_does_not_count_as_waiting_for_a_drive() {
        let (hold, held) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("osd-0".into());
        let thread = thread.spawn(move || held.recv().is_ok()).unwrap();
        assert!(!waits_for_drive(std::process::id(), "osd-0"));
        drop(hold);
        thread.join().unwrap();
    }
}
