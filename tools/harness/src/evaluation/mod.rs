//! The evaluation of the paper, run here: host placement, the emulated DPU under two profiles of its DMA engine, and a real Ceph, all
//! interleaved on one drive; and the report that sets what the paper found, what this project does and what Ceph does side by side.
//!
//! `settings` says how much, `plan` what and when, `order` who goes first, `rig` starts what is measured, `campaign` measures it, `bars` judges, `page` draws.
//! `outboard-report` is its only caller.

pub mod bars;
pub mod campaign;
pub mod ceph;
pub mod environment;
pub mod order;
pub mod page;
pub mod paper;
pub mod plan;
pub mod processes;
pub mod progress;
pub mod rig;
pub mod sample;
pub mod settings;
pub mod stats;
pub mod workload;
