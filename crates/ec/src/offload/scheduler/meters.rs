//! Metrics of the scheduler.

use metrics::{Counter, Gauge, counter, gauge};

use super::admission::AdmissionView;
use super::{CodingPlace, Level, Reason};

/// Handles of the metrics, so that updating a metric needs no look-up.
pub(super) struct SchedulerMeters {
    /// Counters of started tasks, by coding place and reason.
    sent: [[Counter; Reason::ALL.len()]; 2],
    /// Number of tasks in service, by coding place.
    in_service: [Gauge; 2],
    /// Metrics of a whole node.
    node: Option<NodeMeters>,
}

struct NodeMeters {
    refused: Counter,
    queued: Gauge,
    host_busy: Gauge,
}

impl std::fmt::Debug for SchedulerMeters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meters").finish_non_exhaustive()
    }
}

impl SchedulerMeters {
    pub(super) fn new(level: Level) -> SchedulerMeters {
        let sent = |place: &'static str| {
            let of = |reason: Reason| counter!("outboard_ec_tasks_total", "place" => place, "reason" => reason.name());
            Reason::ALL.map(of)
        };
        SchedulerMeters {
            sent: level.names().map(sent),
            in_service: level.names().map(|place| gauge!("outboard_ec_tasks_in_service", "place" => place)),
            node: (level == Level::Node).then(|| NodeMeters {
                refused: counter!("outboard_ec_refused_total"),
                queued: gauge!("outboard_ec_queued_tasks"),
                host_busy: gauge!("outboard_ec_host_busy"),
            }),
        }
    }

    pub(super) fn sent(&self, place: CodingPlace, reason: Reason) {
        self.sent[place as usize][reason as usize].increment(1);
    }

    pub(super) fn refused(&self) {
        if let Some(node) = &self.node {
            node.refused.increment(1);
        }
    }

    pub(super) fn host_busy(&self, busy: bool) {
        if let Some(node) = &self.node {
            node.host_busy.set(f64::from(u8::from(busy)));
        }
    }

    pub(super) fn show(&self, view: &AdmissionView<'_>) {
        if let Some(node) = &self.node {
            node.queued.set(view.queued as f64);
        }
        for place in CodingPlace::BOTH {
            self.in_service[place as usize].set(view.stations[place as usize].in_service() as f64);
        }
    }
}
