//! Kernels: implementations of the multiplication of coefficient matrices with byte vectors. All
//! coding uses this operation.

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod gfni;
#[allow(unsafe_code)]
mod isal;
mod portable;

use std::fmt;
use std::str::FromStr;

use crate::matrix::Matrix;
use crate::{EcError, Result};

/// An implementation of the multiplication over the field GF(2^8). All kernels produce the same
/// bytes.
pub trait Kernel: fmt::Debug + Send + Sync {
    /// Name of the kernel: `gfni`, `isal` or `portable`.
    fn name(&self) -> &'static str;

    /// Prepares the multiplication by `matrix`: builds the tables of its coefficients.
    fn prepare(&self, matrix: &Matrix) -> Box<dyn Transform>;
}

/// A prepared matrix that multiplies byte vectors. Several threads may use it concurrently.
///
/// A transform panics on wrong arguments. Callers with untrusted arguments use
/// [`Code`](crate::Code) instead, which returns errors.
pub trait Transform: fmt::Debug + Send + Sync {
    /// Sets `outputs[r]` to the sum of `matrix[r][c] * sources[c]` over all columns `c`.
    ///
    /// # Panics
    /// If there is not exactly one source per column and one output per row, or if the slices
    /// differ in length.
    fn apply(&self, sources: &[&[u8]], outputs: &mut [&mut [u8]]);

    /// Adds `matrix[r][column] * source` to `outputs[r]`.
    ///
    /// # Panics
    /// If the column does not exist, if there is not exactly one output per row, or if an output is
    /// not as long as the source.
    fn accumulate(&self, column: usize, source: &[u8], outputs: &mut [&mut [u8]]);
}

/// Choice of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KernelChoice {
    /// The first available kernel in the order of the variants below.
    #[default]
    Auto,
    /// Uses the processor's GFNI instructions; needs GFNI and AVX-512.
    Gfni,
    /// Uses Intel's library ISA-L (`libisal.so.2`), which uses the processor's vector instructions.
    Isal,
    /// Plain Rust code.
    Portable,
}

impl KernelChoice {
    /// Returns the kernel. The first call that needs ISA-L loads it.
    ///
    /// # Errors
    /// [`EcError::NoGfni`] or [`EcError::NoIsal`] if a kernel that was requested by name is not
    /// available.
    pub fn load(self) -> Result<&'static dyn Kernel> {
        match self {
            KernelChoice::Auto => Ok(gfni().or_else(|| isal::load().ok()).unwrap_or(&portable::Portable)),
            KernelChoice::Gfni => gfni().ok_or(EcError::NoGfni),
            KernelChoice::Isal => isal::load(),
            KernelChoice::Portable => Ok(&portable::Portable),
        }
    }
}

#[cfg(target_arch = "x86_64")]
use gfni::load as gfni;

#[cfg(not(target_arch = "x86_64"))]
fn gfni() -> Option<&'static dyn Kernel> {
    None
}

impl fmt::Display for KernelChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KernelChoice::Auto => "auto",
            KernelChoice::Gfni => "gfni",
            KernelChoice::Isal => "isal",
            KernelChoice::Portable => "portable",
        })
    }
}

impl FromStr for KernelChoice {
    type Err = EcError;

    fn from_str(name: &str) -> Result<KernelChoice> {
        let all = [KernelChoice::Auto, KernelChoice::Gfni, KernelChoice::Isal, KernelChoice::Portable];
        let found = all.into_iter().find(|choice| choice.to_string() == name);
        found.ok_or_else(|| EcError::NoSuchKernel { name: name.to_owned() })
    }
}

/// Checks the arguments of a [`Transform`].
fn assert_shape(lengths: impl ExactSizeIterator<Item = usize>, count: usize, len: usize, what: &str) {
    assert_eq!(lengths.len(), count, "the number of {what}s must match the matrix");
    lengths.for_each(|found| assert_eq!(found, len, "all {what}s must have the same length"));
}
