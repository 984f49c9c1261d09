//! The workloads that both binaries run.

use serde::Serialize;

use crate::node::NodePlacement;

/// Requests in flight of `outboard bench`.
pub const IN_FLIGHT: u32 = 16;

/// A load on a node of a placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompareCase {
    /// Whether the node's OSD runs on the emulated DPU.
    pub placement: NodePlacement,
    /// What is done.
    pub load: CompareLoad,
}

/// What is done with a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompareLoad {
    /// `outboard bench MODE --object-size SIZE`, [`IN_FLIGHT`] at a time.
    Bench {
        /// `write`, `read` or `randread`.
        mode: &'static str,
        /// Size of the objects.
        size: &'static str,
        /// Number of the objects.
        objects: &'static str,
    },
    /// `outboard put` of a small file, one after the other: what a short-lived client costs.
    Put,
    /// `outboard get` of a small object, one after the other.
    Get,
}

/// Small enough that all of them fit a target of [`TARGET_SIZE`](super::rig::TARGET_SIZE) twice.
const LARGE: (&str, &str) = ("4MiB", "128");
const SMALL: (&str, &str) = ("4KiB", "16384");

/// Reads find what the writes before them have left.
pub const LOADS: [CompareLoad; 7] = [
    CompareLoad::Bench { mode: "write", size: LARGE.0, objects: LARGE.1 },
    CompareLoad::Bench { mode: "read", size: LARGE.0, objects: LARGE.1 },
    CompareLoad::Bench { mode: "write", size: SMALL.0, objects: SMALL.1 },
    CompareLoad::Bench { mode: "read", size: SMALL.0, objects: SMALL.1 },
    CompareLoad::Bench { mode: "randread", size: SMALL.0, objects: SMALL.1 },
    CompareLoad::Put,
    CompareLoad::Get,
];

impl CompareCase {
    /// As readers see it.
    #[must_use]
    pub fn name(&self) -> String {
        let placement = self.placement.name();
        match self.load {
            CompareLoad::Bench { mode, size, .. } => {
                format!("{placement} {mode} {size}, {IN_FLIGHT} in flight")
            }
            CompareLoad::Put => format!("{placement} outboard put 1KiB"),
            CompareLoad::Get => format!("{placement} outboard get 1KiB"),
        }
    }
}

/// What one run on one side found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CompareSample {
    /// Operations per second.
    pub ops_per_s: f64,
    /// CPU time of all processes per operation, client and emulated hardware included, in µs.
    pub node_cpu_us: f64,
    /// CPU time of the storage host's process (`store`, or `node` in `host` placement) per operation, in µs.
    pub host_cpu_us: f64,
}

/// A quantity that is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Figure {
    /// [`CompareSample::ops_per_s`]
    Throughput,
    /// [`CompareSample::node_cpu_us`]
    NodeCpu,
    /// [`CompareSample::host_cpu_us`]
    HostCpu,
}

impl Figure {
    /// Every figure, in the order in which they are printed.
    pub const ALL: [Figure; 3] = [Figure::Throughput, Figure::NodeCpu, Figure::HostCpu];

    /// Its value in a sample.
    #[must_use]
    pub fn of(self, sample: &CompareSample) -> f64 {
        match self {
            Figure::Throughput => sample.ops_per_s,
            Figure::NodeCpu => sample.node_cpu_us,
            Figure::HostCpu => sample.host_cpu_us,
        }
    }

    /// Name and unit, as readers see them.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Figure::Throughput => "op/s",
            Figure::NodeCpu => "CPU, us/op",
            Figure::HostCpu => "host CPU, us/op",
        }
    }

    /// Whether more of it is better.
    #[must_use]
    pub fn is_rate(self) -> bool {
        self == Figure::Throughput
    }
}
