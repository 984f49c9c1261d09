//! Where coding is done, and the places that do it. What is computed is no matter of this module: tasks are closures.
//!
//! [`scheduler`] decides, from the mode, from what [`host_load`] says of the host's processor, and from how the places do. On
//! the DPU, work is done by the [`accelerator`] (emulated) or by [`software`] on its cores; both are a [`worker`].

pub mod accelerator;
pub mod batch;
pub mod host_load;
pub mod scheduler;
pub mod software;
pub mod worker;
