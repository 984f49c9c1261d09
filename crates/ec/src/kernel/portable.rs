//! The kernel in plain Rust. It is the reference for the other kernels, and the fallback if they
//! are not available.
//!
//! The kernel uses no tables. The product of a source and a coefficient is a sum over the bits that
//! are set in the coefficient: bit 0 adds the source times 1, bit 1 adds the source times 2, and so
//! on up to 128. The multiples of a block of the source are computed once and used for all rows.
//! The kernel consists of shifts and XORs of whole blocks, which compilers turn into vector
//! instructions on any processor.

use super::{Kernel, Transform, assert_shape};
use crate::gf::double;
use crate::matrix::Matrix;

/// Number of bytes that are processed at a time: four vector registers of 16 bytes, which is the
/// smallest register size of all supported processors.
const BLOCK: usize = 64;

type Block = [u8; BLOCK];

/// The kernel in plain Rust.
#[derive(Debug)]
pub(super) struct Portable;

impl Kernel for Portable {
    fn name(&self) -> &'static str {
        "portable"
    }

    fn prepare(&self, matrix: &Matrix) -> Box<dyn Transform> {
        Box::new(Plain(matrix.clone()))
    }
}

#[derive(Debug)]
struct Plain(Matrix);

impl Transform for Plain {
    fn apply(&self, sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
        let Plain(matrix) = self;
        let Some(len) = outputs.first().map(|out| out.len()) else { return };
        assert_shape(sources.iter().map(|s| s.len()), matrix.columns(), len, "source");
        assert_shape(outputs.iter().map(|o| o.len()), matrix.rows(), len, "output");
        for at in (0..len).step_by(BLOCK) {
            let size = BLOCK.min(len - at);
            outputs.iter_mut().for_each(|out| out[at..at + size].fill(0));
            for (column, source) in sources.iter().enumerate() {
                add_products(matrix, column, &source[at..at + size], outputs, at);
            }
        }
    }

    fn accumulate(&self, column: usize, source: &[u8], outputs: &mut [&mut [u8]]) {
        let Plain(matrix) = self;
        assert!(column < matrix.columns(), "the matrix has no column {column}");
        assert_shape(outputs.iter().map(|o| o.len()), matrix.rows(), source.len(), "output");
        for (index, block) in source.chunks(BLOCK).enumerate() {
            add_products(matrix, column, block, outputs, index * BLOCK);
        }
    }
}

/// Multiplies a block of at most [`BLOCK`] bytes by the coefficients of a column, and adds the
/// products to the outputs at offset `at`.
fn add_products(matrix: &Matrix, column: usize, source: &[u8], outputs: &mut [&mut [u8]], at: usize) {
    let mut block = [0; BLOCK];
    block[..source.len()].copy_from_slice(source);
    let multiples = doublings(block);
    for (row, out) in outputs.iter_mut().enumerate() {
        let out = &mut out[at..at + source.len()];
        let coefficient = matrix.row(row)[column];
        if let Ok(out) = <&mut Block>::try_from(&mut *out) {
            add_product(&multiples, coefficient, out);
            continue;
        }
        let mut last = [0; BLOCK];
        add_product(&multiples, coefficient, &mut last);
        out.iter_mut().zip(last).for_each(|(out, x)| *out ^= x);
    }
}

/// Returns the block times 1, 2, 4 … 128.
fn doublings(block: Block) -> [Block; 8] {
    let mut multiples = [block; 8];
    for bit in 1..8 {
        multiples[bit] = multiples[bit - 1].map(double);
    }
    multiples
}

fn add_product(multiples: &[Block; 8], coefficient: u8, out: &mut Block) {
    let mut sum = *out;
    for (bit, multiple) in multiples.iter().enumerate() {
        if coefficient >> bit & 1 == 1 {
            sum.iter_mut().zip(multiple).for_each(|(sum, x)| *sum ^= x);
        }
    }
    *out = sum;
}
