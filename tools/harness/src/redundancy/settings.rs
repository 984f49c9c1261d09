//! The settings of the measurement, read from the environment.

use crate::rounds::settings::RoundSettings;

/// What the measurements measure, and their extent.
#[derive(Debug, Clone)]
pub struct RedundancySettings {
    /// The extent of the measurements.
    pub run: RoundSettings,
    /// `OUTBOARD_REDUNDANCY_OFFLOAD`: the part of the DPU that computes parity, `dpu` (its cores)
    /// or `accelerator`.
    pub offload: String,
    /// The only experiment of the part to run. `None` runs all experiments.
    pub only: Option<String>,
}

impl RedundancySettings {
    /// Reads the settings from the environment.
    #[must_use]
    pub fn from_env() -> RedundancySettings {
        RedundancySettings {
            run: RoundSettings::from_env("redundancy", 3),
            offload: std::env::var("OUTBOARD_REDUNDANCY_OFFLOAD").unwrap_or_else(|_| "dpu".to_owned()),
            only: None,
        }
    }

    /// Size of each target, in the syntax of the command line.
    #[must_use]
    pub fn target_size(&self) -> &'static str {
        if self.run.quick { "768MiB" } else { "1536MiB" }
    }

    /// Total size of the objects of one size in one pool, in bytes.
    #[must_use]
    pub fn set_bytes(&self) -> u64 {
        if self.run.quick { 128 << 20 } else { 512 << 20 }
    }

    /// Number of 4 MiB objects that a node stores for the measurement of rebuilds.
    #[must_use]
    pub fn rebuild_objects(&self) -> u64 {
        if self.run.quick { 256 } else { 768 }
    }

    /// Size of the file that fio reads and writes, in MiB.
    #[must_use]
    pub fn fio_mib(&self) -> u32 {
        if self.run.quick { 768 } else { 2048 }
    }
}
