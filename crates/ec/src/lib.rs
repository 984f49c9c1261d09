//! Erasure coding: the code, the kernels that compute it, and the choice of the coding place.
//!
//! `code` implements a systematic Reed–Solomon code: parity, and the update of parity after a
//! change of data. `recovery` reconstructs lost fragments. The kernels in `kernel` do the
//! arithmetic. `fragments` splits files into fragments and restores files from fragments. `offload`
//! chooses where a coding task runs: on the host's processor or on the DPU. This crate does not
//! depend on objects, pools or stores.

#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod code;
mod error;
pub mod fragments;
mod geometry;
mod gf;
mod kernel;
mod matrix;
pub mod offload;
#[allow(unsafe_code)]
mod prefetch;
mod recovery;
mod stripes;

pub use code::Code;
pub use error::{EcError, Result};
pub use geometry::{Geometry, MAX_FRAGMENTS};
pub use kernel::{Kernel, KernelChoice, Transform};
pub use matrix::Matrix;
pub use recovery::Recovery;
pub use stripes::CheckedUnit;
