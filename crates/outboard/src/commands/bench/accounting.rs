//! Accounts for CPU, context switches and memory of a node's processes during a measurement.
//!
//! The osd reports its own use and that of the store over the object protocol, so the node may be on
//! other machines. Only the supervisor's use comes from this machine's `/proc`.

use std::collections::BTreeMap;

use base::process::{OwnUsage, ProcessUsage, Usage};
use base::thread::ThreadClass;
use base::work::{ClassWork, SharedThreads};
use client::Client;
use serde::Serialize;
use wire::{Placement, Role, RoleUsage};

use crate::args::NodeArgs;
use crate::commands::locate;
use node::dir::NodeDir;
use node::state::NodeState;

/// Role of this process in reports.
const CLIENT: &str = "client";

/// The resource use of one process.
#[derive(Debug, Clone, Serialize)]
pub struct ProcessCost {
    /// `store`, `osd`, `node`, `supervisor` or `client`.
    pub role: String,
    /// Process id, on the process's machine.
    pub pid: u32,
    /// User and system CPU time.
    pub cpu_seconds: f64,
    /// User CPU time. The kernel reports it in steps of 10 ms for each thread.
    pub user_seconds: f64,
    /// System CPU time.
    pub system_seconds: f64,
    /// Voluntary and involuntary context switches.
    pub context_switches: u64,
    /// Voluntary context switches: how often a thread slept and was woken.
    pub wake_ups: u64,
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
    /// User CPU time; `None` if `cpu_seconds` is an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_seconds: Option<f64>,
    /// System CPU time; `None` if `cpu_seconds` is an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_seconds: Option<f64>,
    /// Voluntary and involuntary context switches; `None` for a class without its own thread. The
    /// switches of this class count for `osd`, or for `chan` on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_switches: Option<u64>,
    /// How often tasks of this class were polled; `None` if the threads do not count it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub polls: Option<u64>,
    /// How often a task of this class was the first to run after its thread had waited for events;
    /// `None` if the threads do not count it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake_ups: Option<u64>,
    /// Whether the CPU time is an estimate: a share of the CPU time of a thread, in proportion to
    /// the time in the tasks of this class.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub estimated: bool,
}

/// The counters of all processes at one moment.
pub struct UsageReading {
    processes: Vec<(&'static str, OwnUsage)>,
}

/// The supervisor of the node, if it runs on this machine.
#[derive(Debug, Clone, Copy)]
pub struct LocalSupervisor(Option<u32>);

impl LocalSupervisor {
    /// Finds the supervisor of the node that the arguments name.
    pub fn of(node: &NodeArgs) -> LocalSupervisor {
        let local = if node.endpoint.is_some() { None } else { NodeDir::open(&locate::root(node)).ok() };
        let state = local.as_ref().and_then(NodeState::load);
        let supervisor =
            state.into_iter().flat_map(|s| s.processes).find(|p| p.role == Role::Supervisor && p.is_alive());
        LocalSupervisor(supervisor.map(|process| process.pid))
    }
}

impl UsageReading {
    /// Reads the counters of all processes. A process that does not report them is omitted.
    pub async fn take(client: &Client, supervisor: LocalSupervisor) -> UsageReading {
        let mut processes: Vec<_> = OwnUsage::read().ok().map(|own| (CLIENT, own)).into_iter().collect();
        if let LocalSupervisor(Some(pid)) = supervisor
            && let Ok(usage) = ProcessUsage::read(pid)
        {
            processes.push((Role::Supervisor.as_str(), OwnUsage { pid, usage, shared: Vec::new() }));
        }
        // Ignore an error: the memory engine has no processes, and a node that does not answer has no
        // known use.
        let roles = client.usage().await.unwrap_or_default();
        processes.extend(roles.into_iter().map(|RoleUsage { role, usage }| (role.as_str(), usage)));
        UsageReading { processes }
    }

    /// Returns the resource use of each process since an earlier reading. A process that was started
    /// after the earlier reading is omitted.
    pub fn since(&self, earlier: &UsageReading) -> Vec<ProcessCost> {
        let cost = |(role, now): &(&'static str, OwnUsage)| {
            let same = |(other, usage): &&(&'static str, OwnUsage)| other == role && usage.pid == now.pid;
            let (_, before) = earlier.processes.iter().find(same)?;
            Some(ProcessCost::between(role, before, now))
        };
        self.processes.iter().filter_map(cost).collect()
    }
}

impl From<Usage> for ClassUse {
    fn from(used: Usage) -> ClassUse {
        ClassUse {
            cpu_seconds: used.cpu_seconds(),
            user_seconds: Some(used.user_seconds()),
            system_seconds: Some(used.system_seconds()),
            context_switches: Some(used.context_switches),
            polls: None,
            wake_ups: None,
            estimated: false,
        }
    }
}

impl ProcessCost {
    fn between(role: &str, before: &OwnUsage, now: &OwnUsage) -> ProcessCost {
        let used = now.usage.since(&before.usage);
        let mut cost = ProcessCost {
            role: role.to_owned(),
            pid: now.pid,
            cpu_seconds: used.total.cpu_seconds(),
            user_seconds: used.total.user_seconds(),
            system_seconds: used.total.system_seconds(),
            context_switches: used.total.context_switches,
            wake_ups: used.total.wake_ups,
            by_class: used.by_class.into_iter().map(|(class, used)| (class, used.into())).collect(),
            peak_resident_bytes: used.peak_resident_bytes,
        };
        for SharedThreads { threads, work } in &now.shared {
            let earlier = before.shared.iter().find(|shared| shared.threads == *threads);
            let earlier = |class| {
                let work = earlier.and_then(|shared| shared.work.iter().find(|(c, _)| *c == class));
                work.map(|(_, work)| *work).unwrap_or_default()
            };
            let since = |(class, work): &(ThreadClass, ClassWork)| (*class, work.since(earlier(*class)));
            cost.divide(*threads, &work.iter().map(since).collect::<Vec<_>>());
        }
        cost
    }

    /// Divides the CPU time of the threads of class `threads` among the classes of their tasks, in
    /// proportion to the time in these tasks. Adds the polls and wake-ups of the tasks.
    fn divide(&mut self, threads: ThreadClass, work: &[(ThreadClass, ClassWork)]) {
        // The node reports these numbers, so their sum may overflow.
        let sum = work.iter().fold(0, |sum: u64, (_, work)| sum.saturating_add(work.ns));
        let Some(whole) = self.by_class.get_mut(threads.prefix()).filter(|_| sum > 0) else { return };
        let is_shared = work.iter().any(|(class, work)| *class != threads && work.ns > 0);
        let cpu_seconds = std::mem::take(&mut whole.cpu_seconds);
        if is_shared {
            // The split of a part between user and system time is unknown.
            (whole.user_seconds, whole.system_seconds) = (None, None);
        }
        for (class, work) in work.iter().filter(|(_, work)| work.ns > 0) {
            let part = self.by_class.entry(class.prefix().to_owned()).or_default();
            part.cpu_seconds += cpu_seconds * work.ns as f64 / sum as f64;
            if is_shared {
                (part.user_seconds, part.system_seconds, part.estimated) = (None, None, true);
            }
            part.polls = Some(part.polls.unwrap_or_default().saturating_add(work.polls));
            part.wake_ups = Some(part.wake_ups.unwrap_or_default().saturating_add(work.wake_ups));
        }
    }
}

/// Returns the roles whose use is part of the figures of a node.
pub fn roles(placement: Placement) -> &'static [Role] {
    match placement {
        Placement::Dpu => &[Role::Osd, Role::Store],
        Placement::Host => &[Role::Node],
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

    fn work(ns: u64, polls: u64, wake_ups: u64) -> ClassWork {
        ClassWork { ns, polls, wake_ups }
    }

    /// An osd's reading after this many seconds of work.
    fn osd(seconds: u64) -> OwnUsage {
        let used = |share: u64| Usage {
            cpu_ns: share * seconds * 1_000_000_000,
            user_ns: share * seconds * 250_000_000,
            context_switches: 7 * seconds,
            wake_ups: 3 * seconds,
        };
        let by_class = BTreeMap::from([("osd".to_owned(), used(8)), ("dma".to_owned(), used(2))]);
        OwnUsage {
            pid: 1,
            usage: ProcessUsage { total: used(10), by_class, peak_resident_bytes: 0 },
            shared: Vec::new(),
        }
    }

    fn with_work(seconds: u64, work: Vec<(ThreadClass, ClassWork)>) -> OwnUsage {
        OwnUsage { shared: vec![SharedThreads { threads: ThreadClass::Osd, work }], ..osd(seconds) }
    }

    #[test]
    fn the_cpu_time_of_a_shared_thread_is_divided_by_the_time_in_its_tasks() {
        let before = with_work(1, vec![(ThreadClass::Messenger, work(100, 1, 1))]);
        let tasks = [
            (ThreadClass::Messenger, work(400, 31, 11)),
            (ThreadClass::Osd, work(100, 5, 2)),
            (ThreadClass::Channel, work(0, 0, 0)),
        ];
        let cost = ProcessCost::between("osd", &before, &with_work(2, tasks.into()));
        assert_eq!((cost.cpu_seconds, cost.user_seconds, cost.system_seconds), (10.0, 2.5, 7.5));
        let msgr = ClassUse {
            cpu_seconds: 6.0,
            polls: Some(30),
            wake_ups: Some(10),
            estimated: true,
            ..ClassUse::default()
        };
        let osd = ClassUse {
            cpu_seconds: 2.0,
            context_switches: Some(7),
            polls: Some(5),
            wake_ups: Some(2),
            estimated: true,
            ..ClassUse::default()
        };
        let dma = ClassUse {
            cpu_seconds: 2.0,
            user_seconds: Some(0.5),
            system_seconds: Some(1.5),
            context_switches: Some(7),
            ..ClassUse::default()
        };
        let expected = [("dma", dma), ("msgr", msgr), ("osd", osd)];
        assert_eq!(cost.by_class, expected.map(|(class, used)| (class.to_owned(), used)).into());
    }

    #[test]
    fn the_cpu_time_of_a_thread_with_tasks_of_one_class_is_not_an_estimate() {
        let now = with_work(1, vec![(ThreadClass::Osd, work(100, 5, 2))]);
        let cost = ProcessCost::between("osd", &with_work(0, Vec::new()), &now);
        let osd = &cost.by_class["osd"];
        assert_eq!((osd.cpu_seconds, osd.user_seconds, osd.polls), (8.0, Some(2.0), Some(5)));
        assert!(!osd.estimated);
    }

    #[test]
    fn a_process_that_was_restarted_or_does_not_report_is_omitted() {
        let reading = |processes| UsageReading { processes };
        let before = reading(vec![("osd", osd(1)), ("store", OwnUsage { pid: 2, ..osd(1) })]);
        let after = reading(vec![("osd", osd(2)), ("store", OwnUsage { pid: 3, ..osd(2) })]);
        let roles: Vec<_> = after.since(&before).into_iter().map(|cost| cost.role).collect();
        assert_eq!(roles, ["osd"]);
    }
}
