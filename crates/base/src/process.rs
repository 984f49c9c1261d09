//! CPU time, context switches and memory of a process and of its thread classes, read from `/proc`.

use std::collections::BTreeMap;
use std::fs;
use std::io;

use serde::{Deserialize, Serialize};

/// CPU time and context switches of a thread, a thread class or a process since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// User and system time, in seconds (the kernel's nanosecond run-time clock).
    pub cpu_seconds: f64,
    /// Voluntary and involuntary context switches.
    pub context_switches: u64,
    /// Voluntary context switches: how often a thread slept and was woken.
    #[serde(default)]
    pub wake_ups: u64,
}

impl Usage {
    /// Returns the usage since `earlier`. A thread that ended in the meantime can make a count
    /// smaller; in this case, the result is zero.
    #[must_use]
    pub fn since(&self, earlier: &Usage) -> Usage {
        Usage {
            cpu_seconds: (self.cpu_seconds - earlier.cpu_seconds).max(0.0),
            context_switches: self.context_switches.saturating_sub(earlier.context_switches),
            wake_ups: self.wake_ups.saturating_sub(earlier.wake_ups),
        }
    }

    fn add(&mut self, other: Usage) {
        self.cpu_seconds += other.cpu_seconds;
        self.context_switches += other.context_switches;
        self.wake_ups += other.wake_ups;
    }
}

/// The usage of a process at the time of one reading.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
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
        let process_cpu = cpu_of_stat(&fs::read_to_string(format!("/proc/{pid}/stat"))?);
        let cpu_seconds = threads.cpu_seconds.max(process_cpu);
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let peak_resident_bytes = status_field(&status, "VmHWM:").unwrap_or(0) * 1024;
        let total = Usage { cpu_seconds, ..threads };
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

fn thread_class(task: &std::path::Path) -> io::Result<String> {
    let name = fs::read_to_string(task.join("comm"))?;
    let name = name.trim_end();
    Ok(name.split_once('-').map_or("main", |(class, _)| class).to_owned())
}

fn thread_usage(task: &std::path::Path) -> io::Result<Usage> {
    let schedstat = fs::read_to_string(task.join("schedstat")).unwrap_or_default();
    let on_cpu_ns = schedstat.split_ascii_whitespace().next().and_then(|v| v.parse::<u64>().ok());
    let cpu_seconds = match on_cpu_ns {
        Some(ns) => ns as f64 / 1e9,
        None => cpu_of_stat(&fs::read_to_string(task.join("stat"))?),
    };
    let status = fs::read_to_string(task.join("status"))?;
    let switches = |key| status_field(&status, key).unwrap_or(0);
    let wake_ups = switches("voluntary_ctxt_switches:");
    let context_switches = wake_ups + switches("nonvoluntary_ctxt_switches:");
    Ok(Usage { cpu_seconds, context_switches, wake_ups })
}

/// Returns `utime + stime` of a `/proc/…/stat` line, in seconds. In proc(5), these are fields 14
/// and 15, in clock ticks.
fn cpu_of_stat(stat: &str) -> f64 {
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: u64 =
        after_name.split_ascii_whitespace().skip(11).take(2).filter_map(|v| v.parse::<u64>().ok()).sum();
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
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
        assert!(used.by_class["dma"].cpu_seconds > 0.0, "{used:?}");
        assert!(used.total.cpu_seconds >= used.by_class["dma"].cpu_seconds);
        assert!(used.peak_resident_bytes > 0);
        drop(hold.0);
        thread.join().unwrap();
    }
}
