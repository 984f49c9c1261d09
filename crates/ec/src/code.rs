//! [`Code`]: computes the parity of data, and updates parity after a change of data. For lost
//! fragments, see `recovery`.

use std::sync::Arc;

use crate::kernel::{Kernel, Transform};
use crate::matrix::Matrix;
use crate::{EcError, Geometry, Result};

/// A systematic Reed–Solomon code over GF(2^8), with prepared tables. Clones share the tables.
///
/// The data fragments contain the data unchanged. Parity fragment `i` is the sum of all data
/// fragments, each multiplied by a coefficient from row `i` of [`Matrix::parity`]. Every square
/// submatrix of [`Matrix::parity`] is invertible. Therefore any `k` fragments determine all other
/// fragments.
#[derive(Debug, Clone)]
pub struct Code {
    geometry: Geometry,
    kernel: &'static dyn Kernel,
    matrix: Arc<Matrix>,
    parity: Arc<dyn Transform>,
}

impl Code {
    /// Creates the code with the given geometry. `kernel` does the arithmetic.
    #[must_use]
    pub fn new(geometry: Geometry, kernel: &'static dyn Kernel) -> Code {
        let matrix = Matrix::parity(geometry);
        let parity = kernel.prepare(&matrix).into();
        Code { geometry, kernel, matrix: Arc::new(matrix), parity }
    }

    /// Numbers of data and parity fragments.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The kernel that computes the code.
    #[must_use]
    pub fn kernel(&self) -> &'static dyn Kernel {
        self.kernel
    }

    /// The matrix of parity coefficients.
    pub(crate) fn matrix(&self) -> &Matrix {
        &self.matrix
    }

    /// The prepared multiplication of data by the parity matrix. The caller must check the
    /// arguments.
    pub(crate) fn parity(&self) -> &dyn Transform {
        &*self.parity
    }

    /// Computes all parity fragments from the data fragments. Overwrites `parity`.
    ///
    /// # Errors
    /// [`EcError::Count`] unless there are `k` data slices and `m` parity slices.
    /// [`EcError::Length`] unless all slices have the same length, which may be 0.
    pub fn encode(&self, data: &[&[u8]], parity: &mut [&mut [u8]]) -> Result<()> {
        check_count("data", data.len(), self.geometry.k())?;
        check_count("parity", parity.len(), self.geometry.m())?;
        let len = data[0].len();
        check_lengths("data", data.iter().map(|d| d.len()), len)?;
        check_lengths("parity", parity.iter().map(|p| p.len()), len)?;
        self.parity.apply(data, parity);
        Ok(())
    }

    /// Updates parity after a change of data fragment `column`. `delta` is the XOR of the old and
    /// the new data. `parity` contains some or all parity rows (0 to `m` - 1), in any order. Each
    /// row is paired with the bytes of its parity fragment at the offset of the change. Leave out
    /// rows whose fragments are lost.
    ///
    /// # Errors
    /// [`EcError::NoSuch`] if the column or a row does not exist, [`EcError::Twice`] if a row is
    /// listed twice, and [`EcError::Length`] if the slices differ in length. After an error,
    /// `parity` is unchanged.
    pub fn update(&self, column: usize, delta: &[u8], parity: &mut [(usize, &mut [u8])]) -> Result<()> {
        let (k, m) = (self.geometry.k(), self.geometry.m());
        if column >= k {
            return Err(EcError::NoSuch { what: "data fragment", index: column, k, m });
        }
        check_distinct(parity.iter().map(|(row, _)| *row), m, "parity row", self.geometry)?;
        check_lengths("parity", parity.iter().map(|(_, p)| p.len()), delta.len())?;
        let mut parity: Vec<(usize, &mut [u8])> =
            parity.iter_mut().map(|(row, p)| (*row, &mut **p)).collect();
        parity.sort_unstable_by_key(|(row, _)| *row);
        let (rows, mut outputs): (Vec<usize>, Vec<&mut [u8]>) = parity.into_iter().unzip();
        if rows.len() == m {
            self.parity.accumulate(column, delta, &mut outputs);
        } else {
            // Preparing the tables of one column takes less time than updating a block of parity.
            let rest = Matrix::from_fn(rows.len(), 1, |row, _| self.matrix.row(rows[row])[column]);
            self.kernel.prepare(&rest).accumulate(0, delta, &mut outputs);
        }
        Ok(())
    }
}

pub(crate) fn check_count(what: &'static str, found: usize, expected: usize) -> Result<()> {
    if found == expected { Ok(()) } else { Err(EcError::Count { what, expected, found }) }
}

pub(crate) fn check_lengths(
    what: &'static str,
    lengths: impl Iterator<Item = usize>,
    expected: usize,
) -> Result<()> {
    match lengths.enumerate().find(|(_, len)| *len != expected) {
        Some((index, found)) => Err(EcError::Length { what, index, expected, found }),
        None => Ok(()),
    }
}

/// Fails if an index is not below `count`, or if an index occurs twice.
pub(crate) fn check_distinct(
    numbers: impl Iterator<Item = usize>,
    count: usize,
    what: &'static str,
    geometry: Geometry,
) -> Result<()> {
    let mut seen = vec![false; count];
    for index in numbers {
        match seen.get_mut(index) {
            None => {
                let (k, m) = (geometry.k(), geometry.m());
                return Err(EcError::NoSuch { what, index, k, m });
            }
            Some(true) => return Err(EcError::Twice { what, index }),
            Some(seen) => *seen = true,
        }
    }
    Ok(())
}
