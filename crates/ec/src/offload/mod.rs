//! Where coding is done, and the places that do it. What is computed is no matter of this module: tasks are closures.
//!
//! [`scheduler`] decides, from the mode, from how busy the host's processor is, and from how the places do. On the DPU, work
//! is done by the [`accelerator`] (emulated) or by [`software`] on its cores; both are a [`worker`].

pub mod accelerator;
pub mod scheduler;
pub mod software;
pub mod worker;
