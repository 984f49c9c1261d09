//! The workloads that both binaries run.

use serde::Serialize;

use crate::node::NodePlacement;

/// Number of requests in flight in each run of `outboard bench`.
pub const IN_FLIGHT: u32 = 16;

/// A set of workloads, and the nodes that they run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompareSuite {
    /// Pools without redundancy, and short-lived clients.
    Basic,
    /// Mirrored and erasure-coded pools: reads, writes, degraded reads and rebuilds.
    Redundancy,
}

/// A node of a suite. Each binary runs one of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeKind {
    /// The osd runs on the emulated DPU.
    Dpu,
    /// The osd runs in the storage host's process.
    Host,
    /// Like `Dpu`, with one target taken out, and no spare target for its fragments.
    Degraded,
    /// Like `Dpu`, with one target more than the erasure code has fragments, for rebuilds.
    Spare,
}

/// The setup of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeSetup {
    /// Number of targets.
    pub targets: u32,
    /// Size of each target in MiB.
    pub target_mib: u64,
    /// Pools: name and redundancy scheme.
    pub pools: &'static [(&'static str, &'static str)],
}

/// A load, and the node that it runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompareCase {
    /// The node that the load runs on.
    pub node: NodeKind,
    /// The load.
    pub load: CompareLoad,
}

/// A repeated operation that is measured on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompareLoad {
    /// `outboard bench MODE --pool POOL --object-size SIZE`, with [`IN_FLIGHT`] requests in flight.
    Bench {
        /// Name of the pool.
        pool: &'static str,
        /// `write`, `read` or `randread`.
        mode: &'static str,
        /// Size of the objects.
        size: &'static str,
        /// Number of the objects.
        objects: &'static str,
    },
    /// Repeated `outboard put` of a small file, one command at a time. This measures the cost of a
    /// short-lived client.
    Put,
    /// Repeated `outboard get` of a small object, one command at a time.
    Get,
    /// Takes the next target out, and waits until all its fragments are rebuilt. One rebuild is one
    /// operation.
    Rebuild,
}

/// The pool of the basic suite.
pub const POOL: &str = "bench";
/// Number of objects in the pool for rebuilds, of 4 MiB each.
pub const REBUILD_OBJECTS: &str = "512";

const BASIC_SETUP: NodeSetup = NodeSetup { targets: 1, target_mib: 2048, pools: &[(POOL, "single")] };
const REDUNDANT_SETUP: NodeSetup =
    NodeSetup { targets: 6, target_mib: 768, pools: &[("mirror", "mirror:2"), ("ec", "ec:4+2")] };
const DEGRADED_SETUP: NodeSetup = NodeSetup { targets: 6, target_mib: 512, pools: &[("ec", "ec:4+2")] };
const SPARE_SETUP: NodeSetup = NodeSetup { targets: 7, target_mib: 768, pools: &[("ec", "ec:4+2")] };

/// Returns a load of `outboard bench`. The targets have space for twice the objects of the load.
const fn bench(pool: &'static str, mode: &'static str, large: bool) -> CompareLoad {
    let (size, objects) = if large { ("4MiB", "128") } else { ("4KiB", "16384") };
    CompareLoad::Bench { pool, mode, size, objects }
}

/// The order matters: reads use the objects that the writes before them have stored.
const BASIC_LOADS: [CompareLoad; 7] = [
    bench(POOL, "write", true),
    bench(POOL, "read", true),
    bench(POOL, "write", false),
    bench(POOL, "read", false),
    bench(POOL, "randread", false),
    CompareLoad::Put,
    CompareLoad::Get,
];
const REDUNDANT_LOADS: [CompareLoad; 8] = [
    bench("mirror", "write", true),
    bench("mirror", "read", true),
    bench("mirror", "write", false),
    bench("mirror", "randread", false),
    bench("ec", "write", true),
    bench("ec", "read", true),
    bench("ec", "write", false),
    bench("ec", "randread", false),
];
const DEGRADED_LOADS: [CompareLoad; 2] = [bench("ec", "read", true), bench("ec", "randread", false)];

impl CompareSuite {
    /// The nodes of the suite, with their setup and loads.
    #[must_use]
    pub fn nodes(self) -> Vec<(NodeKind, NodeSetup, &'static [CompareLoad])> {
        match self {
            CompareSuite::Basic => {
                [NodeKind::Dpu, NodeKind::Host].map(|kind| (kind, BASIC_SETUP, &BASIC_LOADS[..])).to_vec()
            }
            CompareSuite::Redundancy => vec![
                (NodeKind::Dpu, REDUNDANT_SETUP, &REDUNDANT_LOADS[..]),
                (NodeKind::Host, REDUNDANT_SETUP, &REDUNDANT_LOADS[..]),
                (NodeKind::Degraded, DEGRADED_SETUP, &DEGRADED_LOADS[..]),
                (NodeKind::Spare, SPARE_SETUP, &[CompareLoad::Rebuild][..]),
            ],
        }
    }
}

impl NodeKind {
    /// Name of the node, in results and in the work directory.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            NodeKind::Dpu => "dpu",
            NodeKind::Host => "host",
            NodeKind::Degraded => "dpu-degraded",
            NodeKind::Spare => "dpu-spare",
        }
    }

    /// Placement of the node's osd.
    #[must_use]
    pub fn placement(self) -> NodePlacement {
        match self {
            NodeKind::Host => NodePlacement::Host,
            NodeKind::Dpu | NodeKind::Degraded | NodeKind::Spare => NodePlacement::Dpu,
        }
    }
}

impl CompareCase {
    /// Name of the case in results.
    #[must_use]
    pub fn name(&self) -> String {
        let node = self.node.name();
        match self.load {
            CompareLoad::Bench { pool: POOL, mode, size, .. } => {
                format!("{node} {mode} {size}, {IN_FLIGHT} in flight")
            }
            CompareLoad::Bench { pool, mode, size, .. } => {
                format!("{node} {pool} {mode} {size}, {IN_FLIGHT} in flight")
            }
            CompareLoad::Put => format!("{node} outboard put 1KiB"),
            CompareLoad::Get => format!("{node} outboard get 1KiB"),
            CompareLoad::Rebuild => format!("{node} rebuild of a target"),
        }
    }
}

/// The results of one run of one binary.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CompareSample {
    /// Operations per second.
    pub ops_per_s: f64,
    /// CPU time of all processes per operation, in µs. It includes the client and emulated
    /// hardware.
    pub node_cpu_us: f64,
    /// CPU time of the storage host's process (`store`, or `node` in `host` placement) per
    /// operation, in µs.
    pub host_cpu_us: f64,
}

/// A quantity of a sample that is judged.
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

    /// Returns the figure's value in a sample.
    #[must_use]
    pub fn of(self, sample: &CompareSample) -> f64 {
        match self {
            Figure::Throughput => sample.ops_per_s,
            Figure::NodeCpu => sample.node_cpu_us,
            Figure::HostCpu => sample.host_cpu_us,
        }
    }

    /// Name and unit of the figure in tables.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Figure::Throughput => "op/s",
            Figure::NodeCpu => "CPU, us/op",
            Figure::HostCpu => "host CPU, us/op",
        }
    }

    /// Whether a larger value is better.
    #[must_use]
    pub fn is_rate(self) -> bool {
        self == Figure::Throughput
    }
}
