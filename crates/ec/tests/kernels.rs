//! Tests that all kernels compute the same, correct bytes.

mod common;

use common::{codes, kernels, noise, slices, slices_mut};
use ec::{Code, Geometry, KernelChoice, Matrix};
use proptest::prelude::*;

/// Schoolbook multiplication in the field, which shares no code with the crate.
fn multiply(mut a: u16, mut b: u16) -> u16 {
    let mut product = 0;
    while b != 0 {
        if b & 1 == 1 {
            product ^= a;
        }
        a <<= 1;
        if a & 0x100 != 0 {
            a ^= 0x11d;
        }
        b >>= 1;
    }
    product
}

/// Computes parity byte by byte, without code of the crate.
fn parity_by_hand(k: usize, m: usize, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let coefficient = |row: usize, column: usize| {
        let x = ((k + row) ^ column) as u16;
        (1..=255).find(|y| multiply(x, *y) == 1).unwrap()
    };
    let byte = |row: usize, at: usize| {
        (0..k).fold(0, |sum, c| sum ^ multiply(coefficient(row, c), u16::from(data[c][at])) as u8)
    };
    (0..m).map(|row| (0..data[0].len()).map(|at| byte(row, at)).collect()).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}

#[test]
fn encoding_returns_the_parity_of_the_test_vectors() {
    let mut count = 0;
    let lines = include_str!("vectors/parity.txt").lines();
    for line in lines.filter(|line| !line.starts_with('#')) {
        let [geometry, data, parity] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let geometry: Geometry = geometry.parse().unwrap();
        let [data, parity] = [data, parity].map(|s| s.split(',').map(unhex).collect::<Vec<_>>());
        for kernel in kernels() {
            let mut out = vec![vec![0xee; data[0].len()]; geometry.m()];
            Code::new(geometry, kernel).encode(&slices(&data), &mut slices_mut(&mut out)).unwrap();
            assert_eq!(out, parity, "{geometry} by {}", kernel.name());
        }
        count += 1;
    }
    assert_eq!(count, 10);
}

/// Lengths of 0, 1 and around the sizes of vector registers and blocks, or random lengths.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        proptest::sample::select(vec![
            0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097
        ]),
        0..600_usize,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_parity_of_small_codes_equals_an_independent_computation(k in 1..6_usize, m in 1..5_usize, len in 0..200_usize, seed: u64) {
        let data: Vec<Vec<u8>> = (0..k as u64).map(|n| noise(seed ^ n << 32, len)).collect();
        for code in codes(k, m) {
            let mut parity = vec![vec![0xee; len]; m];
            code.encode(&slices(&data), &mut slices_mut(&mut parity)).unwrap();
            prop_assert_eq!(&parity, &parity_by_hand(k, m, &data), "{}", code.kernel().name());
        }
    }

    #[test]
    fn all_kernels_compute_the_same_bytes(k in 1..40_usize, m in 1..20_usize, len in length(), column: prop::sample::Index, seed: u64) {
        let geometry = Geometry::new(k, m).unwrap();
        let matrix = Matrix::parity(geometry);
        let data: Vec<Vec<u8>> = (0..k as u64).map(|n| noise(seed ^ n << 32, len)).collect();
        let results = kernels().into_iter().map(|kernel| {
            let transform = kernel.prepare(&matrix);
            let mut applied = vec![vec![0xee; len]; m];
            transform.apply(&slices(&data), &mut slices_mut(&mut applied));
            let mut changed = applied.clone();
            transform.accumulate(column.index(k), &data[0], &mut slices_mut(&mut changed));
            (applied, changed)
        });
        let results: Vec<_> = results.collect();
        prop_assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    }

    #[test]
    fn kernels_write_no_byte_outside_the_given_slices(k in 1..12_usize, m in 1..7_usize, len in length(), seed: u64) {
        let data: Vec<Vec<u8>> = (0..k as u64).map(|n| noise(seed ^ n << 32, len)).collect();
        for code in codes(k, m) {
            let mut parity = vec![vec![0xee; len + 128]; m];
            let mut inner: Vec<&mut [u8]> = parity.iter_mut().map(|p| &mut p[64..64 + len]).collect();
            code.encode(&slices(&data), &mut inner).unwrap();
            let mut rows: Vec<(usize, &mut [u8])> = inner.into_iter().enumerate().collect();
            code.update(k - 1, &data[0], &mut rows).unwrap();
            for parity in parity {
                prop_assert!(parity[..64].iter().chain(&parity[64 + len..]).all(|byte| *byte == 0xee));
            }
        }
    }
}

#[test]
fn kernel_choices_are_parsed_by_name_and_auto_loads_the_best_kernel() {
    for name in ["auto", "gfni", "isal", "portable"] {
        assert_eq!(name.parse::<KernelChoice>().unwrap().to_string(), name);
    }
    assert!("fast".parse::<KernelChoice>().unwrap_err().to_string().contains("portable"));
    assert_eq!(KernelChoice::Portable.load().unwrap().name(), "portable");
    let here: Vec<&str> = kernels().iter().map(|kernel| kernel.name()).collect();
    let best = ["gfni", "isal", "portable"].into_iter().find(|name| here.contains(name)).unwrap();
    assert_eq!(KernelChoice::Auto.load().unwrap().name(), best);
}
