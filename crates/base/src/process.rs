//! CPU time, context switches and memory of a process and of its thread classes, read from `/proc`.

use std::collections::BTreeMap;
use std::fs;
use std::io;

use serde::{Deserialize, Serialize};

use crate::work::{SharedThreads, of_shared_threads};

/// CPU time and context switches of a thread, a thread class or a process since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// User and system time, in ns (the kernel's run-time clock).
    pub cpu_ns: u64,
    /// User time, in ns. The kernel reports it in clock ticks (10 ms) for each thread.
    pub user_ns: u64,
    /// Voluntary and involuntary context switches.
    pub context_switches: u64,
    /// Voluntary context switches: how often a thread slept and was woken.
    pub wake_ups: u64,
}

impl Usage {
    /// User and system time, in seconds.
    #[must_use]
    pub fn cpu_seconds(&self) -> f64 {
        self.cpu_ns as f64 / 1e9
    }

    /// User time, in seconds.
    #[must_use]
    pub fn user_seconds(&self) -> f64 {
        self.user_ns as f64 / 1e9
    }

    /// System time, in seconds.
    #[must_use]
    pub fn system_seconds(&self) -> f64 {
        self.cpu_ns.saturating_sub(self.user_ns) as f64 / 1e9
    }

    /// Returns the usage since `earlier`. A thread that ended in the meantime can make a count
    /// smaller; in this case, the result is zero.
    #[must_use]
    pub fn since(&self, earlier: &Usage) -> Usage {
        let cpu_ns = self.cpu_ns.saturating_sub(earlier.cpu_ns);
        Usage {
            cpu_ns,
            user_ns: self.user_ns.saturating_sub(earlier.user_ns).min(cpu_ns),
            context_switches: self.context_switches.saturating_sub(earlier.context_switches),
            wake_ups: self.wake_ups.saturating_sub(earlier.wake_ups),
        }
    }

    fn add(&mut self, other: Usage) {
        self.cpu_ns += other.cpu_ns;
        self.user_ns += other.user_ns;
        self.context_switches += other.context_switches;
        self.wake_ups += other.wake_ups;
    }
}

/// The usage of a process at the time of one reading.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessUsage {
    /// Sum over all threads of the process. The CPU time includes threads that have ended.
    pub total: Usage,
    /// Usage of each thread class. The class is the thread's name up to the first dash. Threads
    /// whose names have no dash belong to the class `main`.
    pub by_class: BTreeMap<String, Usage>,
    /// Peak resident memory of the process (`VmHWM`), in bytes.
    pub peak_resident_bytes: u64,
}

impl ProcessUsage {
    /// Reads the usage of the process `pid`.
    ///
    /// # Errors
    /// If the process does not exist, or this process may not inspect it.
    pub fn read(pid: u32) -> io::Result<ProcessUsage> {
        let mut by_class: BTreeMap<String, Usage> = BTreeMap::new();
        let mut threads = Usage::default();
        for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
            // A thread may end after it was listed and before its usage is read. In this case, only
            // the total CPU time of the process includes the thread.
            let Ok(usage) = entry.and_then(|e| Ok((thread_class(&e.path())?, thread_usage(&e.path())?)))
            else {
                continue;
            };
            threads.add(usage.1);
            by_class.entry(usage.0).or_default().add(usage.1);
        }
        let process = ticks_of_stat(&fs::read_to_string(format!("/proc/{pid}/stat"))?);
        let cpu_ns = threads.cpu_ns.max(process.cpu_ns());
        let user_ns = threads.user_ns.max(process.user_ns);
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let peak_resident_bytes = status_field(&status, "VmHWM:").unwrap_or(0) * 1024;
        let total = Usage { cpu_ns, user_ns, ..threads };
        Ok(ProcessUsage { total, by_class, peak_resident_bytes })
    }

    /// Returns the usage since `earlier`. The peak memory is the value of the later reading.
    #[must_use]
    pub fn since(&self, earlier: &ProcessUsage) -> ProcessUsage {
        let zero = Usage::default();
        ProcessUsage {
            total: self.total.since(&earlier.total),
            by_class: self
                .by_class
                .iter()
                .map(|(class, now)| (class.clone(), now.since(earlier.by_class.get(class).unwrap_or(&zero))))
                .collect(),
            peak_resident_bytes: self.peak_resident_bytes,
        }
    }
}

/// What a process reports about its own use of the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnUsage {
    /// Process id.
    pub pid: u32,
    /// CPU time, context switches and memory.
    pub usage: ProcessUsage,
    /// What the threads that run tasks of several classes have done for each class.
    pub shared: Vec<SharedThreads>,
}

impl OwnUsage {
    /// Reads the usage of the calling process.
    ///
    /// # Errors
    /// If `/proc` cannot be read.
    pub fn read() -> io::Result<OwnUsage> {
        let pid = std::process::id();
        Ok(OwnUsage { pid, usage: ProcessUsage::read(pid)?, shared: of_shared_threads() })
    }
}

fn thread_class(task: &std::path::Path) -> io::Result<String> {
    let name = fs::read_to_string(task.join("comm"))?;
    let name = name.trim_end();
    Ok(name.split_once('-').map_or("main", |(class, _)| class).to_owned())
}

fn thread_usage(task: &std::path::Path) -> io::Result<Usage> {
    let schedstat = fs::read_to_string(task.join("schedstat")).unwrap_or_default();
    let on_cpu_ns = schedstat.split_ascii_whitespace().next().and_then(|v| v.parse::<u64>().ok());
    let ticks = ticks_of_stat(&fs::read_to_string(task.join("stat"))?);
    let cpu_ns = on_cpu_ns.unwrap_or_else(|| ticks.cpu_ns());
    let status = fs::read_to_string(task.join("status"))?;
    let switches = |key| status_field(&status, key).unwrap_or(0);
    let wake_ups = switches("voluntary_ctxt_switches:");
    let context_switches = wake_ups + switches("nonvoluntary_ctxt_switches:");
    Ok(Usage { cpu_ns, user_ns: ticks.user_ns.min(cpu_ns), context_switches, wake_ups })
}

/// CPU time in whole clock ticks, in ns.
struct TickTime {
    user_ns: u64,
    system_ns: u64,
}

impl TickTime {
    fn cpu_ns(&self) -> u64 {
        self.user_ns + self.system_ns
    }
}

/// Returns `utime` and `stime` of a `/proc/…/stat` line. In proc(5), these are fields 14 and 15, in
/// clock ticks.
fn ticks_of_stat(stat: &str) -> TickTime {
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = after_name.split_ascii_whitespace().skip(11).map(|v| v.parse::<u64>().unwrap_or(0));
    let tick_ns = 1_000_000_000 / rustix::param::clock_ticks_per_second().max(1);
    let mut next = || fields.next().unwrap_or(0).saturating_mul(tick_ns);
    TickTime { user_ns: next(), system_ns: next() }
}

fn status_field(status: &str, key: &str) -> Option<u64> {
    let line = status.lines().find(|l| l.starts_with(key))?;
    line[key.len()..].split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::thread::{ThreadClass, spawn};

    #[test]
    fn the_cpu_time_of_a_busy_thread_counts_for_its_class() {
        let pid = std::process::id();
        let before = ProcessUsage::read(pid).unwrap();
        let (done, hold) = (std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
        let thread = spawn(ThreadClass::Dma, "7", move || {
            let started = crate::clock::Instant::now();
            let mut x = 1u64;
            while started.elapsed().as_millis() < 50 {
                x = std::hint::black_box(x.wrapping_mul(3));
            }
            done.0.send(()).unwrap();
            let _ = hold.1.recv();
        })
        .unwrap();
        done.1.recv().unwrap();
        let used = ProcessUsage::read(pid).unwrap().since(&before);
        assert!(used.by_class["dma"].cpu_ns > 0, "{used:?}");
        assert!(used.total.cpu_ns >= used.by_class["dma"].cpu_ns);
        assert!(used.total.cpu_ns >= used.total.user_ns);
        assert!(used.peak_resident_bytes > 0);
        drop(hold.0);
        thread.join().unwrap();
    }
}
