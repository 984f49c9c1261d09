//! Coding places, and the choice among them. Coding tasks are closures, so this module is
//! independent of what they compute.
//!
//! The [`scheduler`] chooses the place of each task. It considers the coding mode, the host's load
//! ([`host_load`]), and the performance of the places. On the DPU, tasks run on the emulated
//! [`accelerator`], or in [`software`] on the DPU's cores. Both are a [`worker`].

pub mod accelerator;
pub mod batch;
pub mod host_load;
pub mod scheduler;
pub mod software;
pub mod worker;
