//! Where coding is done, and the places that do it. What is computed is no matter of this module: tasks are closures.
//!
//! [`scheduler`] decides, from the mode, from how busy the host's processor is, and from how the places do.

pub mod scheduler;
