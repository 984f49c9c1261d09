//! CPU, context switches and memory of a node's processes while it is measured.

use std::collections::BTreeMap;

use base::process::{ProcessUsage, Usage};
use serde::Serialize;

use crate::cli::NodeArgs;
use crate::node::dir::NodeDir;
use crate::node::locate;
use crate::node::state::{NodeState, Role};

/// The processes whose use is booked: those of the node, if it is on this machine, and this one.
#[derive(Debug, Clone)]
pub struct Processes {
    placement: Option<String>,
    known: Vec<(String, u32)>,
}

/// What one process used.
#[derive(Debug, Clone, Serialize)]
pub struct ProcessReport {
    /// `store`, `osd`, `node`, `supervisor` or `client`.
    pub role: String,
    /// Its process id.
    pub pid: u32,
    /// User and system time.
    pub cpu_seconds: f64,
    /// Voluntary and involuntary.
    pub context_switches: u64,
    /// Both, by thread class.
    pub by_class: BTreeMap<String, Usage>,
    /// The most it ever had resident.
    pub peak_resident_bytes: u64,
}

/// Readings of all processes at one moment.
pub struct Reading(Vec<(String, u32, ProcessUsage)>);

impl Processes {
    /// The processes of the node that the arguments name. A node that is known by its address only has none: it may be elsewhere.
    pub fn of(node: &NodeArgs) -> Processes {
        let local = if node.endpoint.is_some() { None } else { NodeDir::open(&locate::root(node)).ok() };
        let state = local.and_then(|dir| NodeState::load(&dir));
        let mut known = vec![("client".to_owned(), std::process::id())];
        let placement = state.as_ref().map(|s| s.placement.as_str().to_owned());
        for process in state.iter().flat_map(|s| &s.processes).filter(|p| p.is_alive()) {
            known.push((process.role.as_str().to_owned(), process.pid));
        }
        Processes { placement, known }
    }

    /// `dpu` or `host`, if known.
    pub fn placement(&self) -> Option<&str> {
        self.placement.as_deref()
    }

    /// Reads them all. One that has gone is left out.
    pub fn read(&self) -> Reading {
        let read = |(role, pid): &(String, u32)| Some((role.clone(), *pid, ProcessUsage::read(*pid).ok()?));
        Reading(self.known.iter().filter_map(read).collect())
    }
}

impl Reading {
    /// What each process used since an earlier reading.
    pub fn since(&self, earlier: &Reading) -> Vec<ProcessReport> {
        let report = |(role, pid, now): &(String, u32, ProcessUsage)| {
            let before = earlier.0.iter().find(|(_, p, _)| p == pid)?;
            let used = now.since(&before.2);
            Some(ProcessReport {
                role: role.clone(),
                pid: *pid,
                cpu_seconds: used.total.cpu_seconds,
                context_switches: used.total.context_switches,
                by_class: used.by_class,
                peak_resident_bytes: used.peak_resident_bytes,
            })
        };
        self.0.iter().filter_map(report).collect()
    }
}

/// Whether a process is the storage host's in its placement.
pub fn is_host(process: &ProcessReport) -> bool {
    [Role::Store, Role::Node].iter().any(|r| r.as_str() == process.role)
}
