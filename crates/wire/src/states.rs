//! Configuration choices and states that a node's status shows by name.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where the osd runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// The osd and the store are two processes joined by the host–DPU channel.
    Dpu,
    /// One process contains the osd and the store, and the osd calls the store directly. Benchmarks
    /// use this placement as the baseline.
    Host,
}

impl Placement {
    /// Every placement.
    pub const ALL: [Placement; 2] = [Placement::Dpu, Placement::Host];

    /// Returns the name used in the configuration and on the command line.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Placement::Dpu => "dpu",
            Placement::Host => "host",
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Hardware that computes parity instead of the host's processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodingOffload {
    /// The DPU's cores, in the osd's process.
    Dpu,
    /// The DPU's accelerator, which works on host memory.
    Accelerator,
    /// Both: each task runs on the device that is predicted to finish it sooner.
    Both,
}

impl CodingOffload {
    /// Returns the name used in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            CodingOffload::Dpu => "dpu",
            CodingOffload::Accelerator => "accelerator",
            CodingOffload::Both => "both",
        }
    }

    /// Whether the accelerator computes parity.
    #[must_use]
    pub fn has_accelerator(self) -> bool {
        matches!(self, CodingOffload::Accelerator | CodingOffload::Both)
    }
}

impl fmt::Display for CodingOffload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// State of an offload, which acts as a circuit breaker: after a failure, the offload is not used
/// for a while.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OffloadState {
    /// The offload is not in use, because memory for it or a path to its device is missing.
    #[default]
    #[serde(rename = "not in use")]
    NotInUse,
    /// The offload is used.
    #[serde(rename = "active")]
    Active,
    /// The offload has failed and is not used during its cool-down.
    #[serde(rename = "cooling down")]
    CoolingDown,
    /// One task or transfer tests whether the offload works again.
    #[serde(rename = "probing")]
    Probing,
}

impl fmt::Display for OffloadState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            OffloadState::NotInUse => "not in use",
            OffloadState::Active => "active",
            OffloadState::CoolingDown => "cooling down",
            OffloadState::Probing => "probing",
        })
    }
}
