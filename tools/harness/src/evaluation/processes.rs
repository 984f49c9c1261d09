//! CPU time and context switches of processes, read from `/proc`, for programs without their own
//! accounting.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::node::ClassUsage;

/// The resource use of every thread of a process since its start, by thread id and name.
#[derive(Debug, Clone, Default)]
pub struct Threads(BTreeMap<(String, String), ClassUsage>);

impl Threads {
    /// Reads the threads of process `pid`. The result is empty if the process has ended.
    #[must_use]
    pub fn of(pid: u32) -> Threads {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let read = |task: fs::DirEntry| {
            let name = fs::read_to_string(task.path().join("comm")).ok()?.trim_end().to_owned();
            Some(((task.file_name().to_string_lossy().into_owned(), name), thread_use(&task.path())?))
        };
        Threads(tasks.filter_map(read).collect())
    }

    /// Returns the use of each thread since an earlier reading, by name. Threads that ended in
    /// between are missing.
    pub fn since(&self, earlier: &Threads) -> impl Iterator<Item = (&str, ClassUsage)> {
        self.0.iter().map(|(thread, now)| {
            let before = earlier.0.get(thread).copied().unwrap_or_default();
            let used = ClassUsage {
                cpu_seconds: now.cpu_seconds - before.cpu_seconds,
                context_switches: now.context_switches - before.context_switches,
                ..ClassUsage::default()
            };
            (thread.1.as_str(), used)
        })
    }

    /// Returns the CPU time of all threads since an earlier reading, in s.
    #[must_use]
    pub fn cpu_seconds_since(&self, earlier: &Threads) -> f64 {
        self.since(earlier).map(|(_, used)| used.cpu_seconds).sum()
    }
}

/// Reads the use of one thread: the scheduler's run time (first field of `schedstat`, in ns), and
/// voluntary and involuntary context switches.
fn thread_use(task: &Path) -> Option<ClassUsage> {
    let schedstat = fs::read_to_string(task.join("schedstat")).ok()?;
    let status = fs::read_to_string(task.join("status")).ok()?;
    let on_cpu_ns: f64 = schedstat.split_ascii_whitespace().next()?.parse().ok()?;
    let switches = |key| status.lines().find_map(|l| l.strip_prefix(key)?.trim().parse::<f64>().ok());
    let context_switches = switches("voluntary_ctxt_switches:")? + switches("nonvoluntary_ctxt_switches:")?;
    Some(ClassUsage { cpu_seconds: on_cpu_ns / 1e9, context_switches, ..ClassUsage::default() })
}

/// Returns the number of bytes that a process has written to drives since its start. Returns 0 if
/// the count cannot be read.
#[must_use]
pub fn written_bytes(pid: u32) -> u64 {
    let io = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    io.lines().find_map(|l| l.strip_prefix("write_bytes:")?.trim().parse().ok()).unwrap_or(0)
}

/// Returns the CPU time, in s, of the ended child processes that this process has waited for,
/// including their own children (proc(5), `cutime` and `cstime`).
#[must_use]
pub fn children_cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: u64 =
        after_name.split_ascii_whitespace().skip(13).take(2).filter_map(|v| v.parse::<u64>().ok()).sum();
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_counted_under_the_name_of_its_thread() {
        let me = std::process::id();
        let before = Threads::of(me);
        let worker = std::thread::Builder::new().name("book-me".to_owned());
        let (done, after) = std::sync::mpsc::channel();
        let spin = move || {
            let start = std::time::Instant::now();
            while start.elapsed().as_millis() < 20 {
                std::hint::spin_loop();
            }
            done.send(Threads::of(me)).unwrap();
        };
        let handle = worker.spawn(spin).unwrap();
        let after = after.recv().unwrap();
        handle.join().unwrap();
        let used: f64 =
            after.since(&before).filter(|(n, _)| *n == "book-me").map(|(_, u)| u.cpu_seconds).sum();
        assert!(used > 0.0, "{used}");
    }

    #[test]
    fn an_ended_process_counts_with_zero_bytes_and_zero_cpu_time() {
        assert_eq!(written_bytes(u32::MAX), 0);
        assert_eq!(Threads::of(u32::MAX).cpu_seconds_since(&Threads::default()), 0.0);
    }
}
