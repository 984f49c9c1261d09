//! Choices and states that a node's status shows by name.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Processes that handle requests and hold targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// The OSD and the store are two processes joined by the host–DPU channel.
    Dpu,
    /// One process runs both, and the OSD calls the store directly: the baseline.
    Host,
}

impl Placement {
    /// Every placement.
    pub const ALL: [Placement; 2] = [Placement::Dpu, Placement::Host];

    /// Name in the configuration and on the command line.
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

/// Hardware that computes parity in place of the host's processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodingOffload {
    /// The DPU's cores, in the OSD's process.
    Dpu,
    /// The DPU's accelerator, which works on host memory.
    Accelerator,
}

impl CodingOffload {
    /// Name in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            CodingOffload::Dpu => "dpu",
            CodingOffload::Accelerator => "accelerator",
        }
    }
}

impl fmt::Display for CodingOffload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// State of an offload's circuit breaker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OffloadState {
    /// Nothing is offloaded, for want of memory or of a path to the device.
    #[default]
    #[serde(rename = "not in use")]
    NotInUse,
    /// The offload is used.
    #[serde(rename = "active")]
    Active,
    /// The offload has failed and is left alone for a while.
    #[serde(rename = "cooling down")]
    CoolingDown,
    /// One piece of work tries the offload out.
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
