//! The kernel for processors with GFNI and AVX-512: one instruction multiplies 64 bytes by a
//! coefficient.
//!
//! Multiplication by a coefficient is linear over bits, so it corresponds to an 8 x 8 bit matrix.
//! `GF2P8AFFINEQB` multiplies every byte of a register by a bit matrix. The sums of up to [`ROWS`]
//! rows over [`WIDE`] registers stay in registers while the kernel reads the sources. Each source
//! is loaded once for all these rows.

use std::arch::x86_64::{
    __m512i, _mm512_gf2p8affine_epi64_epi8, _mm512_loadu_si512, _mm512_set1_epi64, _mm512_setzero_si512,
    _mm512_storeu_si512, _mm512_xor_si512,
};
use std::ops::Range;

use super::{Kernel, Transform, assert_shape};
use crate::gf::mul;
use crate::matrix::Matrix;

/// Size of a register in bytes.
const LANES: usize = 64;
/// Number of registers of each source that are processed together. With 4 registers, coding would
/// be up to a tenth faster for data in the cache. For data in memory, it would be up to a quarter
/// slower, because the cache lines of the next source are requested later.
const WIDE: usize = 2;
/// Maximum number of rows that are computed together, limited by the number of registers.
const ROWS: usize = 6;
/// Number of bytes of each source that all groups of rows process in turn while the bytes are in
/// the cache.
const BLOCK: usize = 2048;

/// The kernel that the [module](self) documentation describes. Only [`load`] returns it, after
/// checking the processor.
#[derive(Debug)]
struct Gfni(());

static KERNEL: Gfni = Gfni(());

/// Returns the kernel if the processor has the instructions.
pub(super) fn load() -> Option<&'static dyn Kernel> {
    let able = is_x86_feature_detected!("gfni") && is_x86_feature_detected!("avx512f");
    able.then_some(&KERNEL)
}

impl Kernel for Gfni {
    fn name(&self) -> &'static str {
        "gfni"
    }

    fn prepare(&self, matrix: &Matrix) -> Box<dyn Transform> {
        let groups = (0..matrix.rows()).step_by(ROWS).map(|first| first..matrix.rows().min(first + ROWS));
        let group = |rows: Range<usize>| {
            let column = |column| rows.clone().map(move |row| bits(matrix.row(row)[column]));
            (0..matrix.columns()).flat_map(column).collect()
        };
        Box::new(Bits { rows: matrix.rows(), columns: matrix.columns(), groups: groups.map(group).collect() })
    }
}

/// Returns the bit matrix for multiplication by `coefficient`. Bit `i` of the product is the sum of
/// those bits of the other factor that byte `7 - i` of the matrix selects.
fn bits(coefficient: u8) -> i64 {
    let row =
        |bit: u32| (0..8).fold(0_u8, |row, from| row | (mul(coefficient, 1 << from) >> bit & 1) << from);
    i64::from_be_bytes(std::array::from_fn(|bit| row(bit as u32)))
}

/// A matrix in the form of bit matrices. Each group of up to [`ROWS`] rows has the bit matrices of
/// its first column, then the bit matrices of its second column, and so on.
#[derive(Debug)]
struct Bits {
    rows: usize,
    columns: usize,
    groups: Vec<Vec<i64>>,
}

impl Transform for Bits {
    fn apply(&self, sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
        let Some(len) = outputs.first().map(|out| out.len()) else { return };
        assert_shape(sources.iter().map(|s| s.len()), self.columns, len, "source");
        assert_shape(outputs.iter().map(|o| o.len()), self.rows, len, "output");
        self.run::<false>(0, sources, outputs, len);
    }

    fn accumulate(&self, column: usize, source: &[u8], outputs: &mut [&mut [u8]]) {
        assert!(column < self.columns, "the matrix has no column {column}");
        assert_shape(outputs.iter().map(|o| o.len()), self.rows, source.len(), "output");
        self.run::<true>(column, &[source], outputs, source.len());
    }
}

impl Bits {
    /// Multiplies the matrix's columns, beginning with column `first`, by the sources. With `ADD`,
    /// adds the products to the outputs. The caller has checked the lengths.
    fn run<const ADD: bool>(&self, first: usize, sources: &[&[u8]], outputs: &mut [&mut [u8]], len: usize) {
        for at in (0..len).step_by(BLOCK) {
            let block = at..len.min(at + BLOCK);
            for (bits, out) in self.groups.iter().zip(outputs.chunks_mut(ROWS)) {
                let bits = &bits[first * out.len()..];
                // SAFETY: this kernel exists only if the processor has the instructions.
                unsafe {
                    match out.len() {
                        1 => multiply::<1, ADD>(bits, sources, out, block.clone()),
                        2 => multiply::<2, ADD>(bits, sources, out, block.clone()),
                        3 => multiply::<3, ADD>(bits, sources, out, block.clone()),
                        4 => multiply::<4, ADD>(bits, sources, out, block.clone()),
                        5 => multiply::<5, ADD>(bits, sources, out, block.clone()),
                        _ => multiply::<ROWS, ADD>(bits, sources, out, block.clone()),
                    }
                }
            }
        }
    }
}

/// Computes the bytes `range` of `R` outputs.
#[target_feature(enable = "gfni,avx512f")]
fn multiply<const R: usize, const ADD: bool>(
    bits: &[i64],
    sources: &[&[u8]],
    outputs: &mut [&mut [u8]],
    range: Range<usize>,
) {
    let mut at = range.start;
    while range.end - at >= LANES * WIDE {
        step::<R, WIDE, ADD>(bits, sources, outputs, at);
        at += LANES * WIDE;
    }
    while range.end - at >= LANES {
        step::<R, 1, ADD>(bits, sources, outputs, at);
        at += LANES;
    }
    if at < range.end {
        last::<R, ADD>(bits, sources, outputs, at..range.end);
    }
}

/// Computes `W` registers of each of the `R` outputs, beginning at offset `at`.
#[inline]
#[target_feature(enable = "gfni,avx512f")]
fn step<const R: usize, const W: usize, const ADD: bool>(
    bits: &[i64],
    sources: &[&[u8]],
    outputs: &mut [&mut [u8]],
    at: usize,
) {
    let mut sums = [[_mm512_setzero_si512(); W]; R];
    if ADD {
        for (sums, out) in sums.iter_mut().zip(&*outputs) {
            *sums = registers(&out[at..]);
        }
    }
    for (bits, source) in bits.as_chunks::<R>().0.iter().zip(sources) {
        let source: [__m512i; W] = registers(&source[at..]);
        for (sums, bits) in sums.iter_mut().zip(bits) {
            let bits = _mm512_set1_epi64(*bits);
            for (sum, x) in sums.iter_mut().zip(source) {
                *sum = _mm512_xor_si512(*sum, _mm512_gf2p8affine_epi64_epi8::<0>(x, bits));
            }
        }
    }
    for (sums, out) in sums.into_iter().zip(outputs) {
        let (out, _) = out[at..].as_chunks_mut::<LANES>();
        for (sum, out) in sums.into_iter().zip(&mut out[..W]) {
            // SAFETY: the call writes 64 bytes, and needs no alignment.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), sum) };
        }
    }
}

/// Loads the first `W` registers of `bytes`.
#[inline]
#[target_feature(enable = "gfni,avx512f")]
fn registers<const W: usize>(bytes: &[u8]) -> [__m512i; W] {
    let chunks = &bytes.as_chunks::<LANES>().0[..W];
    // SAFETY: the call reads 64 bytes, and needs no alignment.
    std::array::from_fn(|n| unsafe { _mm512_loadu_si512(chunks[n].as_ptr().cast()) })
}

/// Computes the rest of the outputs, which is shorter than a register. Uses copies of the sources
/// and the outputs that are padded to the size of a register.
#[target_feature(enable = "gfni,avx512f")]
fn last<const R: usize, const ADD: bool>(
    bits: &[i64],
    sources: &[&[u8]],
    outputs: &mut [&mut [u8]],
    range: Range<usize>,
) {
    let copy = |bytes: &[u8]| {
        let mut copy = [0; LANES];
        copy[..range.len()].copy_from_slice(&bytes[range.clone()]);
        copy
    };
    let copies: Vec<[u8; LANES]> = sources.iter().map(|source| copy(source)).collect();
    let sources: Vec<&[u8]> = copies.iter().map(<[u8; LANES]>::as_slice).collect();
    let mut sums: Vec<[u8; LANES]> = outputs.iter().map(|out| copy(out)).collect();
    let mut slices: Vec<&mut [u8]> = sums.iter_mut().map(<[u8; LANES]>::as_mut_slice).collect();
    step::<R, 1, ADD>(bits, &sources, &mut slices, 0);
    for (out, sum) in outputs.iter_mut().zip(&sums) {
        out[range.clone()].copy_from_slice(&sum[..range.len()]);
    }
}
