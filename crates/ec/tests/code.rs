//! Tests of the erasure code: it reconstructs lost fragments, updates parity after a change, and
//! refuses wrong arguments.

mod common;

use base::block::{BLOCK_SIZE, crc32c};
use common::{codes, fragments, lose_and_recover, noise, slices, slices_mut};
use ec::{CheckedUnit, Code, EcError};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::seq::index;
use rand::{Rng, SeedableRng};

/// Returns every set of up to `m` lost fragments.
fn every_loss(fragments: usize, m: usize) -> Vec<Vec<usize>> {
    let subset = |bits: u32| (0..fragments).filter(|fragment| bits >> fragment & 1 == 1).collect::<Vec<_>>();
    (0..1 << fragments).map(subset).filter(|lost| lost.len() <= m).collect()
}

#[test]
fn every_set_of_up_to_m_lost_fragments_is_reconstructed() {
    for (k, m, patterns) in [(2, 1, 4), (4, 2, 22), (6, 3, 130)] {
        let losses = every_loss(k + m, m);
        assert_eq!(losses.len(), patterns);
        for code in codes(k, m) {
            let fragments = fragments(&code, 1, 97);
            losses.iter().for_each(|lost| lose_and_recover(&code, &fragments, lost));
        }
    }
}

#[test]
fn random_sets_of_lost_fragments_of_wide_codes_are_reconstructed() {
    for (k, m, len, rounds) in [(10, 4, 130, 1000), (128, 32, 64, 12), (223, 32, 17, 2), (1, 254, 9, 3)] {
        for code in codes(k, m) {
            let fragments = fragments(&code, 2, len);
            let mut random = SmallRng::seed_from_u64(3);
            for round in 0..rounds {
                // The first round loses the maximum number of fragments.
                let count = if round == 0 { m } else { random.random_range(0..=m) };
                lose_and_recover(&code, &fragments, &index::sample(&mut random, k + m, count).into_vec());
            }
        }
    }
}

#[test]
fn a_recovery_from_fewer_than_k_fragments_is_an_error() {
    for (k, m) in [(2, 1), (4, 2), (10, 4), (128, 32)] {
        for code in codes(k, m) {
            let present: Vec<usize> = (m + 1..k + m).collect();
            let error = code.recovery(&present, &[0]).unwrap_err();
            assert_eq!(error, EcError::TooFew { present: k - 1, needed: k });
            assert!(
                error.to_string().contains(&format!("{} fragments are present, but {k} are needed", k - 1))
            );
        }
    }
}

#[test]
fn a_recovery_reads_the_fragments_that_are_listed_first() {
    let code = &codes(4, 2)[0];
    assert_eq!(code.recovery(&[5, 3, 0, 4, 2], &[1]).unwrap().sources(), [5, 3, 0, 4]);
}

#[test]
fn encoding_stripes_returns_the_parity_of_their_units_and_its_checksums() {
    for (k, m, unit, stripes) in
        [(4, 2, 4096, 3), (10, 4, 65536, 2), (2, 1, 3 * 65536, 1), (128, 32, 8192, 1), (3, 2, 4096, 0)]
    {
        for code in codes(k, m) {
            let data = noise(5, k * unit * stripes);
            let mut parity = vec![vec![0xee; unit * stripes]; m];
            let mut sums = vec![vec![]; m];
            code.encode_stripes(unit, &data, &mut slices_mut(&mut parity), &mut sums).unwrap();
            // Units that are not contiguous must produce the same parity and checksums.
            let units: Vec<Vec<u8>> = data.chunks(unit).map(<[u8]>::to_vec).collect();
            let units: Vec<&[u8]> = units.iter().map(|unit| &unit[..]).collect();
            let (mut apart, mut apart_sums) = (vec![vec![0xdd; unit * stripes]; m], vec![vec![]; m]);
            code.encode_units(&units, &mut slices_mut(&mut apart), &mut apart_sums).unwrap();
            assert!(
                apart == parity && apart_sums == sums,
                "{k}+{m}: units that are not contiguous have another parity or other checksums"
            );
            for (index, stripe) in data.chunks(k * unit).enumerate() {
                let mut expected = vec![vec![0; unit]; m];
                code.encode(&stripe.chunks(unit).collect::<Vec<_>>(), &mut slices_mut(&mut expected))
                    .unwrap();
                for (parity, expected) in parity.iter().zip(&expected) {
                    assert!(parity[index * unit..][..unit] == expected[..], "stripe {index} of {k}+{m}");
                }
            }
            for (parity, sums) in parity.iter().zip(&sums) {
                assert_eq!(*sums, parity.chunks(BLOCK_SIZE).map(crc32c).collect::<Vec<_>>());
            }
        }
    }
}

/// Checksums of the blocks of `bytes`.
fn sums_of(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(BLOCK_SIZE).map(crc32c).collect()
}

fn checked<'a>(units: &'a [&'a [u8]], sums: &'a [Vec<u32>]) -> Vec<CheckedUnit<'a>> {
    let unit = |(bytes, sums): (&&'a [u8], &'a Vec<u32>)| CheckedUnit { bytes, checksums: sums };
    units.iter().zip(sums).map(unit).collect()
}

#[test]
fn coding_detects_a_flipped_bit_in_any_source_and_otherwise_computes_the_same_bytes() {
    for (k, m, unit, stripes) in [(4, 2, 4096, 3), (10, 4, 65536, 2), (2, 1, 3 * 65536, 1), (1, 1, 8192, 2)] {
        for code in codes(k, m) {
            let mut data = noise(6, k * unit * stripes);
            let sums: Vec<Vec<u32>> = data.chunks(unit).map(sums_of).collect();
            let mut parity = vec![vec![0xee; unit * stripes]; m];
            let mut parity_sums = vec![vec![]; m];
            code.encode_stripes(unit, &data, &mut slices_mut(&mut parity), &mut parity_sums).unwrap();
            let encode = |data: &[u8]| {
                let units: Vec<&[u8]> = data.chunks(unit).collect();
                let (mut out, mut out_sums) = (vec![vec![0xdd; unit * stripes]; m], vec![vec![]; m]);
                code.encode_checked(&checked(&units, &sums), &mut slices_mut(&mut out), &mut out_sums)
                    .map(|()| (out, out_sums))
            };
            // The first fragment is lost, and the first parity fragment takes its place.
            let present: Vec<usize> = (1..=k).collect();
            let recovery = code.recovery(&present, &[0]).unwrap();
            let recover = |data: &[u8]| {
                let mut sources: Vec<&[u8]> = data[unit..k * unit].chunks(unit).collect();
                sources.push(&parity[0][..unit]);
                let mut of_sources = sums[1..k].to_vec();
                of_sources.push(parity_sums[0][..unit / BLOCK_SIZE].to_vec());
                let (mut out, mut out_sums) = (vec![0; unit], vec![vec![]]);
                recovery
                    .run_checked(&checked(&sources, &of_sources), &mut [&mut out], &mut out_sums)
                    .map(|()| (out, out_sums.remove(0)))
            };
            assert!(encode(&data).unwrap() == (parity.clone(), parity_sums.clone()), "{k}+{m}");
            assert!(recover(&data).unwrap() == (data[..unit].to_vec(), sums[0].clone()), "{k}+{m}");
            for number in 0..k * stripes {
                let at = number * unit + (number * 7919) % unit;
                data[at] ^= 1 << (number % 8);
                let offset = at % unit / BLOCK_SIZE * BLOCK_SIZE;
                let damaged = |error, number| matches!(error, EcError::Damaged { index, offset: found, .. } if (index, found) == (number, offset));
                assert!(damaged(encode(&data).unwrap_err(), number), "unit {number} of {k}+{m}");
                if (1..k).contains(&number) {
                    assert!(damaged(recover(&data).unwrap_err(), number - 1), "source {number} of {k}+{m}");
                }
                data[at] ^= 1 << (number % 8);
            }
        }
    }
}

fn refused(code: &Code, unit: usize, data: usize, parity: &[usize], sums: usize) -> EcError {
    let mut parity: Vec<Vec<u8>> = parity.iter().map(|len| vec![0; *len]).collect();
    code.encode_stripes(unit, &vec![0; data], &mut slices_mut(&mut parity), &mut vec![vec![]; sums])
        .unwrap_err()
}

#[test]
fn calls_with_wrong_arguments_are_refused() {
    let code = &codes(2, 2)[0];
    let geometry = code.geometry();
    let (a, b) = (&[1_u8, 2, 3][..], &[4_u8, 5][..]);
    let (mut x, mut y) = ([0; 3], [0; 2]);
    let parity_length = EcError::Length { what: "parity", index: 1, expected: 3, found: 2 };
    let count = |what, expected, found| EcError::Count { what, expected, found };
    assert_eq!(code.encode(&[a], &mut [&mut x, &mut y]), Err(count("data", 2, 1)));
    assert_eq!(code.encode(&[a, a], &mut [&mut x]), Err(count("parity", 2, 1)));
    assert_eq!(code.encode(&[a, b], &mut []), Err(count("parity", 2, 0)));
    assert_eq!(code.encode(&[a, a], &mut [&mut x, &mut y]), Err(parity_length.clone()));

    assert_eq!(code.update(0, a, &mut [(0, &mut x), (1, &mut y)]), Err(parity_length));
    assert_eq!(x, [0; 3], "the parity is unchanged");
    let (k, m) = (geometry.k(), geometry.m());
    let no_such = |what, index| EcError::NoSuch { what, index, k, m };
    assert_eq!(code.update(2, a, &mut []), Err(no_such("data fragment", 2)));
    assert_eq!(code.update(0, b, &mut [(2, &mut y)]), Err(no_such("parity row", 2)));
    let twice = EcError::Twice { what: "parity row", index: 1 };
    assert_eq!(code.update(0, b, &mut [(1, &mut y), (1, &mut [0; 2])]), Err(twice));

    assert_eq!(code.recovery(&[0, 4], &[1]).unwrap_err(), no_such("fragment", 4));
    assert_eq!(code.recovery(&[0, 0], &[1]).unwrap_err(), EcError::Twice { what: "fragment", index: 0 });
    let recovery = code.recovery(&[0, 2], &[1]).unwrap();
    assert_eq!(recovery.run(&[a], &mut [&mut x]), Err(count("sources", 2, 1)));
    assert_eq!(recovery.run(&[a, a], &mut []), Err(count("fragments to compute", 1, 0)));
    assert!(matches!(recovery.run(&[a, b], &mut [&mut x]), Err(EcError::Length { index: 1, .. })));

    assert!(matches!(refused(code, 0, 0, &[0, 0], 2), EcError::Unit { unit: 0, .. }));
    assert!(matches!(refused(code, 100, 200, &[100, 100], 2), EcError::Unit { unit: 100, .. }));
    assert!(matches!(refused(code, usize::MAX & !4095, 0, &[0, 0], 2), EcError::Unit { .. }));
    assert_eq!(
        refused(code, 4096, 4096, &[4096, 4096], 2),
        EcError::PartialStripe { len: 4096, stripe: 8192 }
    );
    assert_eq!(refused(code, 4096, 8192, &[4096, 4096], 1), count("checksums", 2, 1));
    assert!(matches!(refused(code, 4096, 8192, &[4096, 8192], 2), EcError::Length { index: 1, .. }));

    let (one, two) = (&[1; 4096][..], &[2; 8192][..]);
    let units_refused = |units: &[&[u8]]| {
        let mut parity = vec![vec![0; 4096]; 2];
        code.encode_units(units, &mut slices_mut(&mut parity), &mut vec![vec![]; 2]).unwrap_err()
    };
    assert_eq!(units_refused(&[one]), EcError::PartialStripe { len: 4096, stripe: 8192 });
    assert!(matches!(units_refused(&[one, two]), EcError::Length { what: "data", index: 1, .. }));
    assert!(matches!(units_refused(&[&one[1..], &one[1..]]), EcError::Unit { unit: 4095, .. }));
    assert!(matches!(units_refused(&[one; 4]), EcError::Length { what: "parity", expected: 8192, .. }));

    let without = CheckedUnit { bytes: one, checksums: &[] };
    let mut parity = vec![vec![0; 4096]; 2];
    let refused = code.encode_checked(&[without; 2], &mut slices_mut(&mut parity), &mut vec![vec![]; 2]);
    assert_eq!(refused, Err(count("checksums of a unit", 1, 0)));
    let run = |bytes: &[u8], out: &mut [u8], sums: usize| {
        let source = CheckedUnit { bytes, checksums: &[0] };
        recovery.run_checked(&[source; 2], &mut [out], &mut vec![vec![]; sums])
    };
    assert_eq!(run(one, &mut [0; 4096], 2), Err(count("checksums", 1, 2)));
    assert!(matches!(run(&one[1..], &mut [0; 4095], 1), Err(EcError::Unit { unit: 4095, .. })));
    assert!(matches!(run(one, &mut [0; 8192], 1), Err(EcError::Length { index: 0, expected: 4096, .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_sets_of_lost_fragments_of_random_codes_are_reconstructed(k in 1..20_usize, m in 1..8_usize, len in 0..300_usize, seed: u64) {
        for code in codes(k, m) {
            let fragments = fragments(&code, seed, len);
            let mut random = SmallRng::seed_from_u64(seed);
            let count = random.random_range(0..=m);
            lose_and_recover(&code, &fragments, &index::sample(&mut random, k + m, count).into_vec());
        }
    }

    #[test]
    fn an_update_of_parity_equals_encoding_the_new_data(k in 1..20_usize, m in 1..8_usize, len in 0..300_usize, seed: u64, rows: u8) {
        for code in codes(k, m) {
            let mut fragments = fragments(&code, seed, len);
            let column = seed as usize % k;
            let new = noise(!seed, len);
            let delta: Vec<u8> = new.iter().zip(&fragments[column]).map(|(a, b)| a ^ b).collect();
            let (data, parity) = fragments.split_at_mut(k);
            let untouched = parity.to_vec();
            // Update only some rows, in reverse order. The fragments of the other rows are lost.
            let chosen = |row: &usize| rows >> row & 1 == 1;
            let mut some: Vec<(usize, &mut [u8])> =
                parity.iter_mut().map(Vec::as_mut_slice).enumerate().rev().filter(|(row, _)| chosen(row)).collect();
            code.update(column, &delta, &mut some).unwrap();
            data[column] = new;
            let mut anew = vec![vec![0; len]; m];
            code.encode(&slices(data), &mut slices_mut(&mut anew)).unwrap();
            for row in 0..m {
                let expected = if chosen(&row) { &anew[row] } else { &untouched[row] };
                prop_assert_eq!(&parity[row], expected, "row {} by {}", row, code.kernel().name());
            }
        }
    }
}
