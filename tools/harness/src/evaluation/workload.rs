//! The workloads of the evaluation. A workload combines a tested system, an object size and an
//! operation.

use serde::Serialize;

/// One MiB.
pub const MIB: u64 = 1 << 20;

/// The object sizes of the DoCeph paper's evaluation (section 5.1), in bytes.
pub const PAPER_SIZES: [u64; 4] = [MIB, 4 * MIB, 8 * MIB, 16 * MIB];

/// Number of requests in flight, as in the DoCeph paper (section 5.1: "16 concurrent clients").
pub const IN_FLIGHT: u32 = 16;

/// A system under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TestedSystem {
    /// A node whose osd and store are one process on the host.
    Host,
    /// A node whose osd is on the emulated DPU. The DMA engine copies as fast as memory allows.
    DpuMemcpy,
    /// A node whose OSD is on the emulated DPU. The DMA engine takes the time that the DoCeph paper
    /// measured on a BlueField-3.
    DpuBf3,
    /// Like `DpuBf3`, but each request takes the engine's fixed time, even if several requests are in
    /// flight.
    DpuBf3Serial,
    /// A node whose osd is on the emulated DPU. The engine `ofi` moves payload by one-sided transfers of
    /// libfabric, over TCP.
    DpuOfi,
    /// A real Ceph with one OSD.
    Ceph,
}

impl TestedSystem {
    /// Returns the system's name in the report.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            TestedSystem::Host => "host",
            TestedSystem::DpuMemcpy => "dpu, memcpy",
            TestedSystem::DpuBf3 => "dpu, bf3-paper",
            TestedSystem::DpuBf3Serial => "dpu, bf3-serial",
            TestedSystem::DpuOfi => "dpu, ofi:tcp",
            TestedSystem::Ceph => "Ceph",
        }
    }
}

/// The operation of a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessMode {
    /// Write whole objects.
    Write,
    /// Read whole objects, one after the other.
    Read,
    /// Read whole objects in random order.
    Randread,
    /// Write blocks at random offsets of large objects.
    Randwrite,
}

impl AccessMode {
    /// The modes of the main series, in the order of the runs: reads use the objects that the writes have
    /// stored.
    pub const ALL: [AccessMode; 3] = [AccessMode::Write, AccessMode::Read, AccessMode::Randread];

    /// Returns the mode's name in `outboard bench`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            AccessMode::Write => "write",
            AccessMode::Read => "read",
            AccessMode::Randread => "randread",
            AccessMode::Randwrite => "randwrite",
        }
    }

    /// Returns the mode's name in `rados bench`, which writes only whole objects.
    #[must_use]
    pub fn rados_name(self) -> &'static str {
        match self {
            AccessMode::Write | AccessMode::Randwrite => "write",
            AccessMode::Read => "seq",
            AccessMode::Randread => "rand",
        }
    }
}

/// The set of objects that a workload reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Set {
    /// Objects of half a GiB in total, which may fit into caches.
    Usual,
    /// Objects whose total size is several times the size of all caches.
    Large,
}

/// A network stack over which clients connect to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Network {
    /// TCP.
    #[serde(rename = "tcp")]
    Tcp,
    /// libfabric with its provider `tcp`: the code path for RDMA, over TCP.
    #[serde(rename = "ofi:tcp")]
    OfiTcp,
}

impl Network {
    /// All compared network stacks.
    pub const ALL: [Network; 2] = [Network::Tcp, Network::OfiTcp];

    /// Returns the value for `outboard --network`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Network::Tcp => "tcp",
            Network::OfiTcp => "ofi:tcp",
        }
    }
}

/// Numbers of requests in flight at which network stacks are compared.
pub const IN_FLIGHT_SWEEP: [u32; 6] = [1, 2, 4, 8, 16, 32];

/// A kind of run, which is repeated in the rounds. The report shows the median of the rounds.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Case {
    /// The measured system.
    pub config: TestedSystem,
    /// The operation.
    pub mode: AccessMode,
    /// Bytes per operation. Except for [`AccessMode::Randwrite`], this is the size of the objects.
    pub size: u64,
    /// Number of requests in flight.
    pub in_flight: u32,
    /// The set of objects.
    pub set: Set,
    /// The options of `outboard debug tune` that switch a part of the design off during the run;
    /// `None` in the main series.
    pub ablation: Option<String>,
    /// The ablation with which this run of the whole design is compared; `None` in the main series.
    pub control_of: Option<String>,
    /// The compared network stack; `None` in the main series, which uses TCP.
    pub network: Option<Network>,
    /// The link between node and client; `None` if both are on the same machine.
    pub link: Option<EmulatedLink>,
}

/// The link between the network namespaces of a node and its client. It is emulated: a pair of virtual
/// Ethernet devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EmulatedLink {
    /// Shaped to 1 Gbit/s by a token bucket.
    Gigabit,
    /// As fast as this machine can move packets.
    Unlimited,
}

impl EmulatedLink {
    /// Both links.
    pub const ALL: [EmulatedLink; 2] = [EmulatedLink::Gigabit, EmulatedLink::Unlimited];

    /// Rate in bits per second; `None` without a limit.
    #[must_use]
    pub fn bits_per_second(self) -> Option<u64> {
        match self {
            EmulatedLink::Gigabit => Some(1_000_000_000),
            EmulatedLink::Unlimited => None,
        }
    }

    /// Returns the link's name in the report.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            EmulatedLink::Gigabit => "1 Gbit/s (shaped)",
            EmulatedLink::Unlimited => "unlimited",
        }
    }
}

/// A part of the design that can be switched off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ablation {
    /// The option of `outboard debug tune` that switches the part off, with its value if it has
    /// one.
    pub option: &'static str,
    /// Object size in bytes at which the part has an effect.
    pub size: u64,
}

/// All ablations. The channel moves up to 2 MiB of a request in one piece, so the pipeline and the
/// number of queues matter only for larger requests. Requests of 4 KiB travel in rings, where
/// polling is a large part of the cost.
pub const ABLATIONS: [Ablation; 5] = [
    Ablation { option: "--no-pipeline", size: 8 * MIB },
    Ablation { option: "--no-region-cache", size: MIB },
    Ablation { option: "--max-transfer 256KiB", size: 4 * MIB },
    Ablation { option: "--dma-queues 1", size: 8 * MIB },
    Ablation { option: "--poll 0", size: 4096 },
];

impl Ablation {
    /// The option without its value.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.option.split(' ').next().unwrap_or_default()
    }
}

impl Case {
    /// Creates a case of the main series.
    #[must_use]
    pub fn new(config: TestedSystem, mode: AccessMode, size: u64) -> Case {
        let (in_flight, set) = (IN_FLIGHT, Set::Usual);
        Case {
            config,
            mode,
            size,
            in_flight,
            set,
            ablation: None,
            control_of: None,
            network: None,
            link: None,
        }
    }

    /// Returns this case with one request in flight.
    #[must_use]
    pub fn one_at_a_time(self) -> Case {
        Case { in_flight: 1, ..self }
    }

    /// Creates the case of 4 KiB random reads from the large set.
    #[must_use]
    pub fn large_set(config: TestedSystem) -> Case {
        Case { set: Set::Large, ..Case::new(config, AccessMode::Randread, 4096) }
    }

    /// Creates the case of writes with one part of the design switched off.
    #[must_use]
    pub fn without(config: TestedSystem, ablation: &Ablation) -> Case {
        Case {
            ablation: Some(ablation.option.to_owned()),
            ..Case::new(config, AccessMode::Write, ablation.size)
        }
    }

    /// Creates the case of 4 MiB writes over a link between two network namespaces.
    #[must_use]
    pub fn across(config: TestedSystem, link: EmulatedLink) -> Case {
        Case { link: Some(link), ..Case::new(config, AccessMode::Write, 4 * MIB) }
    }

    /// Creates the case of 4 KiB writes at random offsets of large objects, over a network stack.
    #[must_use]
    pub fn over(network: Network, in_flight: u32) -> Case {
        Case {
            in_flight,
            network: Some(network),
            ..Case::new(TestedSystem::DpuMemcpy, AccessMode::Randwrite, 4096)
        }
    }

    /// Returns the control of an ablation: the same case with the whole design, which runs directly
    /// before or after the ablation.
    #[must_use]
    pub fn control(&self) -> Case {
        Case { ablation: None, control_of: self.ablation.clone(), ..self.clone() }
    }

    /// Whether this run is secondary: no threshold uses its result, and the report does not compare
    /// the result with a result of the DoCeph paper.
    #[must_use]
    pub fn is_secondary(&self) -> bool {
        let of_a_bar = match self.mode {
            AccessMode::Write => self.size == 4096 || PAPER_SIZES.contains(&self.size),
            AccessMode::Read => PAPER_SIZES.contains(&self.size),
            AccessMode::Randread => [4096, 4 * MIB].contains(&self.size),
            AccessMode::Randwrite => false,
        };
        let is_special = self.ablation.is_some() || self.control_of.is_some();
        is_special || self.network.is_some() || self.link.is_some() || !of_a_bar
    }

    /// Number of objects of the usual set for `outboard bench`: objects of half a GiB in total, but
    /// at most 16384 objects. The number is at least twice the number of requests in flight, so
    /// that two requests rarely use the same object at the same time.
    #[must_use]
    pub fn objects(&self) -> u64 {
        (512 * MIB / self.object_size()).clamp(2 * u64::from(IN_FLIGHT), 16_384)
    }

    /// Size of the objects in bytes.
    #[must_use]
    pub fn object_size(&self) -> u64 {
        match self.mode {
            AccessMode::Randwrite => 4 * MIB,
            _ => self.size,
        }
    }
}

/// Formats a size, such as `4 KiB` or `16 MiB`.
#[must_use]
pub fn size_label(bytes: u64) -> String {
    if bytes >= MIB { format!("{} MiB", bytes / MIB) } else { format!("{} KiB", bytes >> 10) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_at_least_twice_as_many_objects_as_requests_in_flight() {
        for size in [4096, 64 << 10, MIB, 16 * MIB, 64 * MIB] {
            let case = Case::new(TestedSystem::Host, AccessMode::Write, size);
            assert!(case.objects() >= 2 * u64::from(case.in_flight), "{size}");
        }
        for in_flight in IN_FLIGHT_SWEEP {
            let case = Case::over(Network::Tcp, in_flight);
            assert!(case.objects() >= 2 * u64::from(in_flight), "{in_flight}");
        }
    }

    #[test]
    fn a_run_that_compares_network_stacks_does_not_belong_to_the_main_series() {
        let main = Case::new(TestedSystem::DpuMemcpy, AccessMode::Write, 4096);
        for case in Network::ALL.map(|network| Case::over(network, IN_FLIGHT)) {
            assert!(case.is_secondary() && !main.is_secondary());
            assert_ne!(case, main);
        }
    }
}
