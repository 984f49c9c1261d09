//! Finds roles that hang: the heartbeats of a role's event loops, and the watchdog in the
//! supervisor that misses them.
//!
//! A heartbeat is sent by the event loop that serves (`osd-0`, `chan-0`), as one of its tasks, so
//! it stops when that loop does. It says nothing about drives: a loop that waits for them without
//! blocking goes on sending heartbeats.
//!
//! A checkpoint of a target is no event loop, and a log that is full waits for it. Each heartbeat
//! looks whether calls wait for one and whether it gets on ([`Checkpoints`]); a slow one is never
//! taken for one that hangs.
//!
//! The watchdog counts its own ticks and reads no clock. While the supervisor does not run (a
//! paused virtual machine, a suspended laptop, a stopped process group) it counts nothing, so a
//! pause of the whole node restarts no role.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use store::CheckpointWatch;
use tokio::time::sleep;

use super::announce::Announcement;

/// Heartbeats, and ticks of the watchdog, in the time after which a silent loop counts as hung.
const TICKS: u32 = 6;

/// Time between two heartbeats, and between two ticks of the watchdog; `None` if the watchdog is
/// switched off.
pub fn tick(hung_after: Duration) -> Option<Duration> {
    (!hung_after.is_zero()).then(|| hung_after / TICKS)
}

/// Sends the heartbeats of the event loop that runs it, for ever.
#[derive(Debug, Clone, Copy)]
pub struct Heartbeat {
    tick: Duration,
}

impl Heartbeat {
    /// Heartbeats for a watchdog that has this limit; `None` if the watchdog is switched off.
    pub fn new(hung_after: Duration) -> Option<Heartbeat> {
        tick(hung_after).map(|tick| Heartbeat { tick })
    }

    /// Sends heartbeats of the loop with that name, and says if one of the checkpoints hangs.
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

/// Watches the checkpoints of a role's targets. Clones watch the same.
#[derive(Debug, Clone, Default)]
pub struct Checkpoints {
    watched: Arc<Mutex<Vec<(PathBuf, CheckpointWatch, Standstill)>>>,
}

impl Checkpoints {
    /// Watches a target's checkpoints, instead of those of its earlier mount.
    pub fn add(&self, target: PathBuf, watch: CheckpointWatch) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|(earlier, ..)| *earlier != target);
        watched.push((target, watch, Standstill::default()));
    }

    /// Another tick has passed. Returns what hangs, if a checkpoint does and a restart can help.
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

/// Counts the ticks since something that is waited for has got on.
#[derive(Debug, Default)]
struct Standstill {
    at: Option<u64>,
    ticks: u32,
}

impl Standstill {
    /// Whether it has stood still for all ticks. `now` is how far it is; `None` if nothing waits.
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
    /// Ticks since its last heartbeat.
    silent: u32,
}

impl Watchdog {
    /// Watches these loops from now on.
    pub fn new(loops: &[String]) -> Watchdog {
        let watched = |name: &String| Watched { name: name.clone(), silent: 0 };
        Watchdog { loops: loops.iter().map(watched).collect() }
    }

    /// A loop has given a sign of life. Loops that are not watched are ignored.
    pub fn heard(&mut self, event_loop: &str) {
        if let Some(watched) = self.loops.iter_mut().find(|watched| watched.name == event_loop) {
            watched.silent = 0;
        }
    }

    /// The supervisor has run for another tick. Returns a loop that hangs, if one does.
    pub fn tick(&mut self) -> Option<String> {
        for watched in &mut self.loops {
            watched.silent = watched.silent.saturating_add(1);
        }
        // The first tick may come at once after a heartbeat.
        self.loops.iter().find(|watched| watched.silent > TICKS).map(|watched| watched.name.clone())
    }
}

/// Sleeps until this process has run for about `time`. A pause of the process counts for an eighth
/// of it at most.
pub async fn awake_for(time: Duration) {
    const SLICES: u32 = 8;
    for _ in 0..SLICES {
        sleep(time / SLICES).await;
    }
}

/// Whether a thread of process `pid` waits in the kernel for a drive (state D of proc_pid_stat(5)).
/// The kernel delivers SIGKILL to that thread only after the wait, so that killing the process
/// helps nobody.
pub fn waits_for_drive(pid: u32, thread: &str) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    tasks.flatten().any(|task| {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let is_waiting =
            |stat: &str| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('D'));
        read("comm").trim_end() == thread && is_waiting(&read("stat"))
    })
}

/// Whether a debugger traces process `pid`, and may have stopped it (TracerPid of
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
    fn a_loop_hangs_only_after_all_ticks_without_its_own_heartbeat() {
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
    fn a_checkpoint_hangs_only_if_it_is_waited_for_and_gets_nowhere_for_all_ticks() {
        let mut standstill = Standstill::default();
        assert!((0..100).all(|n| !standstill.tick(Some(n))), "slow is not hung");
        assert!((0..100).all(|_| !standstill.tick(None)), "nothing waits");
        assert!((0..TICKS).all(|_| !standstill.tick(Some(100))));
        assert!(standstill.tick(Some(100)));
        assert!(!standstill.tick(Some(101)), "it has got on");
    }

    #[test]
    fn a_role_without_loops_never_hangs() {
        let mut watchdog = Watchdog::new(&[]);
        assert!((0..100).all(|_| watchdog.tick().is_none()));
    }

    #[test]
    fn a_thread_that_sleeps_does_not_wait_for_a_drive() {
        let (hold, held) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("osd-0".into());
        let thread = thread.spawn(move || held.recv().is_ok()).unwrap();
        assert!(!waits_for_drive(std::process::id(), "osd-0"));
        drop(hold);
        thread.join().unwrap();
    }
}
