//! The choice of the coding place for each coding task, and the threads that execute the tasks.
//! Coding tasks are closures, so this module does not depend on what they compute.
//!
//! The [`scheduler`] chooses the coding place of each task. It considers the coding mode, the
//! host's load ([`host_load`]), and the performance of the coding places. On the DPU, tasks run on
//! the emulated [`accelerator`], or in [`software`] on the DPU's cores. Both are implemented by a
//! [`worker`].

pub mod accelerator;
pub mod batch;
pub mod host_load;
pub mod scheduler;
pub mod software;
pub mod worker;
