//! Kernels: what multiplies matrices of coefficients with vectors of bytes. All coding is built of that.

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

/// A way to compute products over the field. All kernels give the same bytes.
pub trait Kernel: fmt::Debug + Send + Sync {
    /// What it is called: `gfni`, `isal`, `portable`.
    fn name(&self) -> &'static str;

    /// Makes ready to multiply with `matrix`: tables of its coefficients.
    fn prepare(&self, matrix: &Matrix) -> Box<dyn Transform>;
}

/// A matrix that vectors of bytes can be multiplied with. Calls of several threads do not disturb each other.
///
/// This is the bare computation. Callers with input from outside use [`Code`](crate::Code), which checks it.
pub trait Transform: fmt::Debug + Send + Sync {
    /// Sets `outputs[r]` to the sum of `matrix[r][c] * sources[c]` over all columns `c`.
    ///
    /// # Panics
    /// Unless there is a source per column and an output per row, all of one length.
    fn apply(&self, sources: &[&[u8]], outputs: &mut [&mut [u8]]);

    /// Adds `matrix[r][column] * source` to `outputs[r]`.
    ///
    /// # Panics
    /// Unless there is such a column, and an output per row, all of the source's length.
    fn accumulate(&self, column: usize, source: &[u8], outputs: &mut [&mut [u8]]);
}

/// Which kernel to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KernelChoice {
    /// The first of the others that can be had.
    #[default]
    Auto,
    /// The processor's instructions for this field; needs GFNI and AVX-512.
    Gfni,
    /// Intel's ISA-L, `libisal.so.2`, on the processor's vector instructions.
    Isal,
    /// Plain Rust.
    Portable,
}

impl KernelChoice {
    /// The kernel. ISA-L is loaded by the first call that wants it.
    ///
    /// # Errors
    /// [`EcError::NoGfni`] and [`EcError::NoIsal`] if what is asked for by name cannot be had.
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

/// Checks what a kernel is called with; see [`Transform`].
fn assert_shape(lengths: impl ExactSizeIterator<Item = usize>, count: usize, len: usize, what: &str) {
    assert_eq!(lengths.len(), count, "one {what} per coefficient");
    lengths.for_each(|found| assert_eq!(found, len, "{what}s of one length"));
}
