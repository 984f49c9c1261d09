//! Repeats the evaluation of the DoCeph paper on this machine. It interleaves runs of the host
//! placement, of the emulated DPU with two profiles of its DMA engine, and of a real Ceph, all on
//! one drive. The report shows the results of the paper, of this project and of Ceph side by side.
//!
//! `settings` determines how much is measured, `plan` lists the steps and their durations, and
//! `order` determines the order of runs. `rig` starts the measured systems, `campaign` measures
//! them, `bars` compares the results with thresholds and `page` draws them. `outboard-report` is
//! the only caller.

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
