//! Matrices over GF(2^8).

use crate::Geometry;
use crate::gf::{inverse, mul};

/// A matrix of coefficients in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matrix {
    rows: usize,
    columns: usize,
    coefficients: Vec<u8>,
}

impl Matrix {
    /// Creates the matrix whose coefficient at (row, column) is the result of `coefficient(row,
    /// column)`.
    pub(crate) fn from_fn(rows: usize, columns: usize, coefficient: impl Fn(usize, usize) -> u8) -> Matrix {
        let cell = |at| coefficient(at / columns, at % columns);
        Matrix { rows, columns, coefficients: (0..rows * columns).map(cell).collect() }
    }

    /// The matrix that computes parity from data: a Cauchy matrix of `m` rows and `k` columns. The
    /// coefficient of parity row `i` and data fragment `j` is the inverse of `(k + i) XOR j`.
    /// ISA-L's `gf_gen_cauchy1_matrix` creates the same coefficients below its unit matrix.
    #[must_use]
    pub fn parity(geometry: Geometry) -> Matrix {
        Matrix::from_fn(geometry.m(), geometry.k(), |row, column| {
            inverse(((geometry.k() + row) ^ column) as u8)
        })
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// All coefficients in row-major order.
    #[must_use]
    pub fn coefficients(&self) -> &[u8] {
        &self.coefficients
    }

    /// The coefficients of a row.
    ///
    /// # Panics
    /// If the row does not exist.
    #[must_use]
    pub fn row(&self, row: usize) -> &[u8] {
        &self.coefficients[row * self.columns..][..self.columns]
    }

    /// Multiplies this matrix by `other`.
    pub(crate) fn times(&self, other: &Matrix) -> Matrix {
        debug_assert_eq!(self.columns, other.rows);
        let mut product = Matrix::from_fn(self.rows, other.columns, |_, _| 0);
        for row in 0..self.rows {
            let sum = &mut product.coefficients[row * other.columns..][..other.columns];
            for (inner, factor) in self.row(row).iter().enumerate() {
                add_multiple(sum, *factor, other.row(inner));
            }
        }
        product
    }

    /// Inverts a square matrix by Gauss–Jordan elimination. Returns `None` if the matrix is
    /// singular.
    pub(crate) fn inverted(&self) -> Option<Matrix> {
        let n = self.rows;
        debug_assert_eq!(n, self.columns);
        let mut left: Vec<Vec<u8>> = (0..n).map(|row| self.row(row).to_vec()).collect();
        let mut right: Vec<Vec<u8>> =
            (0..n).map(|row| (0..n).map(|c| u8::from(c == row)).collect()).collect();
        for column in 0..n {
            let pivot = (column..n).find(|row| left[*row][column] != 0)?;
            left.swap(column, pivot);
            right.swap(column, pivot);
            let factor = inverse(left[column][column]);
            for side in [&mut left, &mut right] {
                side[column].iter_mut().for_each(|x| *x = mul(*x, factor));
            }
            let (left_pivot, right_pivot) = (left[column].clone(), right[column].clone());
            for row in (0..n).filter(|row| *row != column) {
                let factor = left[row][column];
                add_multiple(&mut left[row], factor, &left_pivot);
                add_multiple(&mut right[row], factor, &right_pivot);
            }
        }
        Some(Matrix { rows: n, columns: n, coefficients: right.concat() })
    }
}

fn add_multiple(sum: &mut [u8], factor: u8, row: &[u8]) {
    if factor != 0 {
        sum.iter_mut().zip(row).for_each(|(sum, x)| *sum ^= mul(factor, *x));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_times_its_inverse_is_the_unit_matrix() {
        for size in [1, 2, 7, 40] {
            let matrix = Matrix::parity(Geometry::new(size, size).unwrap());
            let unit = Matrix::from_fn(size, size, |row, column| u8::from(row == column));
            assert_eq!(matrix.times(&matrix.inverted().unwrap()), unit);
        }
    }

    #[test]
    fn a_matrix_with_equal_rows_has_no_inverse() {
        assert_eq!(Matrix::from_fn(3, 3, |row, column| (row.min(1) * 3 + column + 1) as u8).inverted(), None);
    }
}
