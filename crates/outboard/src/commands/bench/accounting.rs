//! Accounts for CPU, context switches and memory of a node's processes during a measurement.

use std::collections::BTreeMap;
use std::path::PathBuf;

use base::process::{ProcessUsage, Usage};
use base::thread::ThreadClass;
use serde::Serialize;
use wire::Placement;

use crate::args::NodeArgs;
use crate::commands::locate;
use node::debug;
use node::dir::NodeDir;
use node::state::{NodeState, Role};

/// The accounted processes: this process, and the node's processes if the node is on this machine.
#[derive(Debug, Clone)]
pub struct Processes {
    placement: Option<Placement>,
    known: Vec<(String, u32)>,
    /// The store's debug socket, which reports the time in the tasks of the channel's thread, by
    /// class.
    store: Option<PathBuf>,
}

/// The resource use of one process.
#[derive(Debug, Clone, Serialize)]
pub struct ProcessCost {
    /// `store`, `osd`, `node`, `supervisor` or `client`.
    pub role: String,
    /// Process id.
    pub pid: u32,
    /// User and system CPU time.
    pub cpu_seconds: f64,
    /// Voluntary and involuntary context switches.
    pub context_switches: u64,
    /// CPU time and context switches by thread class.
    pub by_class: BTreeMap<String, ClassUse>,
    /// Maximum resident memory since the start of the process.
    pub peak_resident_bytes: u64,
}

/// The resource use of the threads of one class.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ClassUse {
    /// User and system CPU time.
    pub cpu_seconds: f64,
    /// Voluntary and involuntary context switches; `None` for a class without its own thread. The
    /// switches of this class count for `osd`, or for `chan` on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_switches: Option<u64>,
    /// Whether the CPU time is an estimate: a share of the CPU time of a thread, in proportion to
    /// the time in the tasks of this class.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub estimated: bool,
}

/// The counters of all processes at one moment.
pub struct UsageReading {
    processes: Vec<(String, u32, ProcessUsage)>,
    /// Time in the tasks of the store's channel thread, in ns by class.
    chan_ns: Vec<(ThreadClass, u64)>,
}

impl Processes {
    /// Finds the processes of the node that the arguments name. If only the node's address is
    /// known, finds none of them, because the node may be on a different machine.
    pub fn of(node: &NodeArgs) -> Processes {
        let local = if node.endpoint.is_some() { None } else { NodeDir::open(&locate::root(node)).ok() };
        let state = local.as_ref().and_then(NodeState::load);
        let store = local.map(|dir| dir.debug_socket(Role::Store.as_str())).filter(|path| path.exists());
        let mut known = vec![("client".to_owned(), std::process::id())];
        let placement = state.as_ref().map(|s| s.placement);
        for process in state.iter().flat_map(|s| &s.processes).filter(|p| p.is_alive()) {
            known.push((process.role.as_str().to_owned(), process.pid));
        }
        Processes { placement, known, store }
    }

    /// Returns the placement of the osd, if known.
    pub fn placement(&self) -> Option<Placement> {
        self.placement
    }

    /// Reads the counters of all processes. A process that has ended is omitted.
    pub fn read(&self) -> UsageReading {
        let read = |(role, pid): &(String, u32)| Some((role.clone(), *pid, ProcessUsage::read(*pid).ok()?));
        let asked = self.store.as_ref().and_then(|path| debug::ask(path, &debug::DebugRequest::Show).ok());
        let chan_ns = asked.map(|answer| answer.chan_ns).unwrap_or_default();
        UsageReading { processes: self.known.iter().filter_map(read).collect(), chan_ns }
    }
}

impl UsageReading {
    /// Returns the resource use of each process since an earlier reading.
    pub fn since(&self, earlier: &UsageReading) -> Vec<ProcessCost> {
        let report = |(role, pid, now): &(String, u32, ProcessUsage)| {
            let before = earlier.processes.iter().find(|(_, p, _)| p == pid)?;
            let used = now.since(&before.2);
            let mut report = ProcessCost {
                role: role.clone(),
                pid: *pid,
                cpu_seconds: used.total.cpu_seconds,
                context_switches: used.total.context_switches,
                by_class: used.by_class.into_iter().map(|(class, used)| (class, used.into())).collect(),
                peak_resident_bytes: used.peak_resident_bytes,
            };
            if role == Role::Store.as_str() {
                report.divide(ThreadClass::Channel, &self.chan_ns_since(earlier));
            }
            Some(report)
        };
        self.processes.iter().filter_map(report).collect()
    }

    /// Returns the time in the tasks of the store's channel thread since `earlier`, in ns by class.
    /// Returns an empty list if one of the readings lacks this time.
    fn chan_ns_since(&self, earlier: &UsageReading) -> Vec<(ThreadClass, u64)> {
        let spent = |(class, ns): &(ThreadClass, u64)| {
            let (_, before) = earlier.chan_ns.iter().find(|(c, _)| c == class)?;
            Some((*class, ns.checked_sub(*before)?))
        };
        self.chan_ns.iter().map(spent).collect::<Option<_>>().unwrap_or_default()
    }
}

impl From<Usage> for ClassUse {
    fn from(used: Usage) -> ClassUse {
        let Usage { cpu_seconds, context_switches, .. } = used;
        ClassUse { cpu_seconds, context_switches: Some(context_switches), estimated: false }
    }
}

impl ProcessCost {
    /// Divides the CPU time of the threads of class `threads` among the classes of their tasks, in
    /// proportion to the time in these tasks (`thread_ns`, in ns).
    pub fn divide(&mut self, threads: ThreadClass, thread_ns: &[(ThreadClass, u64)]) {
        let sum: u64 = thread_ns.iter().map(|(_, ns)| ns).sum();
        let Some(whole) = self.by_class.get_mut(threads.prefix()).filter(|_| sum > 0) else { return };
        let cpu_seconds = std::mem::take(&mut whole.cpu_seconds);
        for (class, ns) in thread_ns.iter().filter(|(_, ns)| *ns > 0) {
            let part = self.by_class.entry(class.prefix().to_owned()).or_default();
            part.cpu_seconds += cpu_seconds * *ns as f64 / sum as f64;
            part.estimated = true;
        }
    }
}

/// Returns true if the process runs on the storage host: the store, or the only process of a node
/// in `host` placement.
pub fn is_host(process: &ProcessCost) -> bool {
    [Role::Store, Role::Node].iter().any(|r| r.as_str() == process.role)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn osd() -> ProcessCost {
        let used = |cpu_seconds| ClassUse { cpu_seconds, context_switches: Some(7), estimated: false };
        ProcessCost {
            role: "osd".into(),
            pid: 1,
            cpu_seconds: 10.0,
            context_switches: 14,
            by_class: BTreeMap::from([("osd".to_owned(), used(8.0)), ("dma".to_owned(), used(2.0))]),
            peak_resident_bytes: 0,
        }
    }

    #[test]
    fn the_cpu_time_of_a_shared_thread_is_divided_by_the_time_in_its_tasks() {
        let mut process = osd();
        let times = [(ThreadClass::Messenger, 300), (ThreadClass::Osd, 100), (ThreadClass::Channel, 0)];
        process.divide(ThreadClass::Osd, &times);
        let msgr = ClassUse { cpu_seconds: 6.0, context_switches: None, estimated: true };
        let osd = ClassUse { cpu_seconds: 2.0, context_switches: Some(7), estimated: true };
        let dma = ClassUse { cpu_seconds: 2.0, context_switches: Some(7), estimated: false };
        let expected = [("dma", dma), ("msgr", msgr), ("osd", osd)];
        assert_eq!(process.by_class, expected.map(|(class, used)| (class.to_owned(), used)).into());
    }

    #[test]
    fn without_task_times_the_cpu_time_of_a_thread_is_not_divided() {
        let mut process = osd();
        process.divide(ThreadClass::Osd, &[(ThreadClass::Messenger, 0)]);
        process.divide(ThreadClass::Osd, &[]);
        assert_eq!(process.by_class, osd().by_class);
    }
}
