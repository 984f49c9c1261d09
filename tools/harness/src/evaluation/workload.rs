//! The workloads: configurations, sizes and modes.

use serde::Serialize;

/// One MiB.
pub const MIB: u64 = 1 << 20;

/// The sizes of the paper's evaluation (section 5.1).
pub const PAPER_SIZES: [u64; 4] = [MIB, 4 * MIB, 8 * MIB, 16 * MIB];

/// Requests in flight (section 5.1: "16 concurrent clients").
pub const IN_FLIGHT: u32 = 16;

/// A system under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TestedSystem {
    /// Everything in one process on the host.
    Host,
    /// OSD on the emulated DPU; its DMA engine copies as fast as memory allows.
    DpuMemcpy,
    /// OSD on the emulated DPU; its DMA engine takes the time that the paper measured on a BlueField-3.
    DpuBf3,
    /// A real Ceph with one OSD.
    Ceph,
}

impl TestedSystem {
    /// Returns the name for readers.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            TestedSystem::Host => "host",
            TestedSystem::DpuMemcpy => "dpu, memcpy",
            TestedSystem::DpuBf3 => "dpu, bf3-paper",
            TestedSystem::Ceph => "Ceph",
        }
    }
}

/// The operation on the objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessMode {
    /// Write whole objects.
    Write,
    /// Read whole objects, one after the other.
    Read,
    /// Read whole objects in random order.
    Randread,
}

impl AccessMode {
    /// Every mode, in the order in which they are run: reads find what was written.
    pub const ALL: [AccessMode; 3] = [AccessMode::Write, AccessMode::Read, AccessMode::Randread];

    /// Returns the name in `outboard bench`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            AccessMode::Write => "write",
            AccessMode::Read => "read",
            AccessMode::Randread => "randread",
        }
    }

    /// Returns the name in `rados bench`.
    #[must_use]
    pub fn rados_name(self) -> &'static str {
        match self {
            AccessMode::Write => "write",
            AccessMode::Read => "seq",
            AccessMode::Randread => "rand",
        }
    }
}

/// The objects that are read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Set {
    /// Objects of half a GiB in total.
    Usual,
    /// Objects of several times the size of all caches.
    Large,
}

/// A network stack that clients reach a node over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Network {
    /// TCP.
    #[serde(rename = "tcp")]
    Tcp,
    /// libfabric's provider of the same name: the RDMA code path, over TCP.
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

/// Requests in flight at which network stacks are compared.
pub const IN_FLIGHT_SWEEP: [u32; 6] = [1, 2, 4, 8, 16, 32];

/// One kind of run. All its rounds yield one value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Case {
    /// The system.
    pub config: TestedSystem,
    /// The operation.
    pub mode: AccessMode,
    /// Bytes per object.
    pub size: u64,
    /// Requests in flight.
    pub in_flight: u32,
    /// The objects.
    pub set: Set,
    /// The options of `outboard debug tune` that switch a part of the design off during the run;
    /// `None` in the main series.
    pub ablation: Option<String>,
    /// The ablation for which this run of the whole design is the control; `None` in the main
    /// series.
    pub control_of: Option<String>,
    /// The compared network stack; `None` in the main series, which uses TCP.
    pub network: Option<Network>,
}

/// A part of the design that can be switched off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ablation {
    /// The option of `outboard debug tune` that switches the part off, with its value if it has one.
    pub option: &'static str,
    /// Bytes per object at which the part has an effect.
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
    /// A case of the main series.
    #[must_use]
    pub fn new(config: TestedSystem, mode: AccessMode, size: u64) -> Case {
        let (in_flight, set) = (IN_FLIGHT, Set::Usual);
        Case { config, mode, size, in_flight, set, ablation: None, control_of: None, network: None }
    }

    /// One request at a time.
    #[must_use]
    pub fn one_at_a_time(self) -> Case {
        Case { in_flight: 1, ..self }
    }

    /// 4 KiB random reads from the large set.
    #[must_use]
    pub fn large_set(config: TestedSystem) -> Case {
        Case { set: Set::Large, ..Case::new(config, AccessMode::Randread, 4096) }
    }

    /// Writes with a part of the design switched off.
    #[must_use]
    pub fn without(config: TestedSystem, ablation: &Ablation) -> Case {
        Case {
            ablation: Some(ablation.option.to_owned()),
            ..Case::new(config, AccessMode::Write, ablation.size)
        }
    }

    /// 4 KiB writes over a network stack.
    #[must_use]
    pub fn over(network: Network, in_flight: u32) -> Case {
        Case {
            in_flight,
            network: Some(network),
            ..Case::new(TestedSystem::DpuMemcpy, AccessMode::Write, 4096)
        }
    }

    /// Returns the control of an ablation: the same run with the whole design, right before or
    /// after it.
    #[must_use]
    pub fn control(&self) -> Case {
        Case { ablation: None, control_of: self.ablation.clone(), ..self.clone() }
    }

    /// Whether no threshold and no figure of the paper depends on this run.
    #[must_use]
    pub fn is_secondary(&self) -> bool {
        let of_a_bar = match self.mode {
            AccessMode::Write => self.size == 4096 || PAPER_SIZES.contains(&self.size),
            AccessMode::Read => PAPER_SIZES.contains(&self.size),
            AccessMode::Randread => [4096, 4 * MIB].contains(&self.size),
        };
        self.ablation.is_some() || self.control_of.is_some() || self.network.is_some() || !of_a_bar
    }

    /// Number of objects of the usual set for `outboard bench`: half a GiB, at most 16384, and at
    /// least twice as many as requests in flight, so that requests rarely meet on one object.
    #[must_use]
    pub fn objects(&self) -> u64 {
        (512 * MIB / self.size).clamp(2 * u64::from(IN_FLIGHT), 16_384)
    }
}

/// `4 KiB`, `16 MiB`.
#[must_use]
pub fn size_label(bytes: u64) -> String {
    if bytes >= MIB { format!("{} MiB", bytes / MIB) } else { format!("{} KiB", bytes >> 10) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_in_flight_never_meet_on_an_object() {
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
    fn a_run_that_compares_networks_is_none_of_the_main_series() {
        let main = Case::new(TestedSystem::DpuMemcpy, AccessMode::Write, 4096);
        for case in Network::ALL.map(|network| Case::over(network, IN_FLIGHT)) {
            assert!(case.is_secondary() && !main.is_secondary());
            assert_ne!(case, main);
        }
    }
}
