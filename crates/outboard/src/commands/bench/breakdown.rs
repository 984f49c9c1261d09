//! What the osd measured during a benchmark: the phases of request times.

use std::fmt;

use client::{NodeStatus, PhaseTimes};
use serde::Serialize;

use super::Workload;

/// The osd's mean time per operation, in µs. The time of an operation is the sum over all its
/// requests. The phases add up to the total.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OpBreakdown {
    /// Requests per operation: one for a write; several for a large read, some of them concurrent.
    pub requests_per_op: f64,
    /// Time from a request's arrival at the osd until its reply was passed to the connection.
    pub total: f64,
    /// Time in which the store worked on the host (wrote or read) and no transfer was in progress.
    pub host_write: f64,
    /// Time in which a transfer between DPU and host was in progress.
    pub dma: f64,
    /// Time in which a transfer was queued, the store did no work and no transfer was in progress.
    pub dma_wait: f64,
    /// The remaining time: network, messenger, the osd's own work.
    pub others: f64,
}

/// The osd's measurements in the window between two status answers.
#[derive(Debug, Clone, PartialEq)]
pub struct OsdMeasurement {
    /// Sums over the requests of the workload's kind.
    times: PhaseTimes,
}

impl OsdMeasurement {
    /// Returns the difference of two status answers. `None` if the osd was restarted in between.
    pub fn between(before: &NodeStatus, after: &NodeStatus, workload: Workload) -> Option<OsdMeasurement> {
        let kind = |status: &NodeStatus| match workload {
            Workload::Write | Workload::Randwrite | Workload::Omap => Some(status.times.write),
            Workload::Read | Workload::Randread => Some(status.times.read),
            Workload::Randrw => combined(&status.times.read, &status.times.write, u64::checked_add),
        };
        let times = combined(&kind(after)?, &kind(before)?, u64::checked_sub)?;
        (before.osd_pid == after.osd_pid).then_some(OsdMeasurement { times })
    }

    /// Returns the mean times per operation, over `ops` operations. `None` if the osd has handled
    /// no requests of the workload's kind.
    pub fn per_op(&self, ops: u64) -> Option<OpBreakdown> {
        let us = |ns: u64| ns as f64 / 1e3 / ops as f64;
        let t = &self.times;
        (ops > 0 && t.count > 0).then(|| OpBreakdown {
            requests_per_op: t.count as f64 / ops as f64,
            total: us(t.total_ns),
            host_write: us(t.host_ns),
            dma: us(t.dma_ns),
            dma_wait: us(t.dma_wait_ns),
            others: us(t.others_ns),
        })
    }
}

/// Combines each time of `one` with the same time of `other`. `None` if a time cannot be combined.
fn combined(
    one: &PhaseTimes,
    other: &PhaseTimes,
    combine: impl Fn(u64, u64) -> Option<u64>,
) -> Option<PhaseTimes> {
    Some(PhaseTimes {
        count: combine(one.count, other.count)?,
        total_ns: combine(one.total_ns, other.total_ns)?,
        host_ns: combine(one.host_ns, other.host_ns)?,
        dma_ns: combine(one.dma_ns, other.dma_ns)?,
        dma_wait_ns: combine(one.dma_wait_ns, other.dma_wait_ns)?,
        others_ns: combine(one.others_ns, other.others_ns)?,
    })
}

impl fmt::Display for OpBreakdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "in the osd {:.0}   host write {:.0}   dma {:.0}   dma wait {:.0}   others {:.0}",
            self.total, self.host_write, self.dma, self.dma_wait, self.others
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(pid: u32, count: u64) -> NodeStatus {
        let times = PhaseTimes {
            count,
            total_ns: 10_000 * count,
            host_ns: 1_000 * count,
            dma_ns: 2_000 * count,
            dma_wait_ns: 3_000 * count,
            others_ns: 4_000 * count,
        };
        NodeStatus {
            health: Vec::new(),
            rebuild: client::RebuildStatus::default(),
            node: uuid::Uuid::nil(),
            placement: wire::Placement::Dpu,
            engine: "shm".into(),
            emulated: true,
            osd_pid: pid,
            uptime_seconds: 1,
            map_epoch: 1,
            accepts_altered_map: false,
            targets: Vec::new(),
            pools: Vec::new(),
            paths: Vec::new(),
            sessions: 1,
            sessions_one_sided: 0,
            connections: client::ConnectionStatus::default(),
            requests: 0,
            offload: None,
            coding: client::CodingStatus::default(),
            staging: client::StagingStatus::default(),
            times: client::RequestTimes { read: times, ..Default::default() },
            thread_ns: client::ThreadTimes::default(),
            shards: Vec::new(),
        }
    }

    #[test]
    fn a_measurement_is_the_difference_between_two_status_answers() {
        let window = OsdMeasurement::between(&status(1, 10), &status(1, 30), Workload::Randread).unwrap();
        let mean = window.per_op(10).unwrap();
        let expected = OpBreakdown {
            requests_per_op: 2.0,
            total: 20.0,
            host_write: 2.0,
            dma: 4.0,
            dma_wait: 6.0,
            others: 8.0,
        };
        assert_eq!(mean, expected);
    }

    #[test]
    fn a_restarted_osd_or_a_window_without_requests_yields_no_breakdown() {
        let before = status(1, 10);
        assert_eq!(
            OsdMeasurement::between(&before, &status(2, 20), Workload::Read),
            None,
            "the osd has another pid"
        );
        assert_eq!(
            OsdMeasurement::between(&before, &status(1, 2), Workload::Read),
            None,
            "a counter has decreased, so the osd was restarted"
        );
        let window = OsdMeasurement::between(&before, &status(1, 20), Workload::Write).unwrap();
        assert_eq!(window.per_op(10), None, "there were no writes");
        let window = OsdMeasurement::between(&before, &status(1, 20), Workload::Randrw).unwrap();
        assert_eq!(window.per_op(10).unwrap().requests_per_op, 1.0, "reads count, too");
    }
}
