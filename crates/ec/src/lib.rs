//! Erasure coding: the code, the engines that compute it, and the choice of where it is computed.
//!
//! `code` is the mathematics: a systematic Reed–Solomon code, its parity, its decoding, and the change of parity that a
//! change of data makes. Kernels compute it (`kernel`); `fragments` cuts files into fragments and puts them together again. Where
//! a piece of work is done, on the host's processor or on the DPU, is decided by `offload`. This knows nothing of objects,
//! pools or stores.

#![deny(unsafe_code)]

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
