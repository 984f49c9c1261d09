//! Tests of fragment files: files are restored, and damage is detected.

mod common;

use std::io::Cursor;

use common::{kernels, noise};
use ec::fragments::{FileLayout, FragmentError, FragmentSet, FragmentState, UNIT_MAX, encode};
use ec::{Code, EcError, Geometry, KernelChoice};
use proptest::prelude::*;

type Fragment = Cursor<Vec<u8>>;

fn cut(geometry: &str, unit: usize, id: u8, data: &[u8]) -> (FileLayout, Vec<Fragment>) {
    let geometry: Geometry = geometry.parse().unwrap();
    let code = Code::new(geometry, KernelChoice::Auto.load().unwrap());
    let mut fragments = vec![Cursor::new(vec![]); geometry.fragments()];
    let layout = encode(&code, unit, [id; 16], &mut &data[..], &mut fragments).unwrap();
    (layout, fragments)
}

fn open(fragments: Vec<Fragment>) -> Result<FragmentSet<Fragment>, FragmentError> {
    FragmentSet::open(fragments, KernelChoice::Auto.load().unwrap())
}

fn decoded(fragments: Vec<Fragment>) -> Result<Vec<u8>, FragmentError> {
    let mut out = vec![];
    open(fragments)?.decode(&mut out)?;
    Ok(out)
}

/// Returns all fragments except those with the indices `lost`.
fn without(fragments: &[Fragment], lost: &[usize]) -> Vec<Fragment> {
    fragments
        .iter()
        .enumerate()
        .filter(|(n, _)| !lost.contains(n))
        .map(|(_, fragment)| fragment.clone())
        .collect()
}

fn flip(fragment: &mut Fragment, at: usize) {
    fragment.get_mut()[at] ^= 1;
}

#[test]
fn files_of_every_length_are_restored_from_any_k_fragments() {
    let stripe = 4 * 256;
    for len in [0, 1, 63, 64, 65, 255, 256, 257, stripe - 1, stripe, stripe + 1, 2 * stripe, 5 * stripe + 77]
    {
        let data = noise(len as u64, len);
        let (layout, fragments) = cut("4+2", 256, 1, &data);
        assert_eq!(layout.len, len as u64);
        for lost in [&[][..], &[0], &[5], &[0, 3], &[1, 4], &[4, 5]] {
            assert!(decoded(without(&fragments, lost)).unwrap() == data, "{len} bytes without {lost:?}");
        }
        let error = decoded(without(&fragments, &[0, 2, 5]));
        if len == 0 {
            assert_eq!(error.unwrap(), b"");
        } else {
            assert!(matches!(
                error,
                Err(FragmentError::TooFew { stripe: 0, intact: 3, needed: 4, fragments: 6 })
            ));
        }
    }
}

#[test]
fn fragments_match_the_documented_format_and_have_the_expected_length() {
    let data = noise(7, 1000);
    let (_, fragments) = cut("2+1", 256, 9, &data);
    // The file has one stripe of 512 bytes and one of 488 bytes. Units have 256 bytes in both.
    assert!(fragments.iter().all(|fragment| fragment.get_ref().len() == 64 + 2 * (256 + 4)));
    let second = fragments[1].get_ref();
    assert_eq!(second[..8], *b"obshard\0");
    assert_eq!(second[64..64 + 256], data[256..512]);
    assert_eq!(second[320..324], base::block::crc32c(&data[256..512]).to_le_bytes());
    assert_eq!(second[324..324 + 232], data[768..]);
    assert_eq!(second[556..580], [0; 24], "zeros fill the last unit");
    assert_eq!(cut("2+1", 65536, 9, &data[..3]).1[2].get_ref().len(), 64 + 64 + 4);
}

#[test]
fn all_kernels_write_the_same_fragments() {
    let (geometry, data) = (Geometry::new(5, 3).unwrap(), noise(3, 50_000));
    let cut = |kernel| {
        let mut fragments = vec![Cursor::new(vec![]); geometry.fragments()];
        encode(&Code::new(geometry, kernel), 1024, [4; 16], &mut &data[..], &mut fragments).unwrap();
        fragments
    };
    let all: Vec<Vec<Fragment>> = kernels().into_iter().map(cut).collect();
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn damage_to_a_fragment_affects_only_its_stripe() {
    let data = noise(1, 3 * 4 * 128);
    let (_, mut fragments) = cut("4+2", 128, 1, &data);
    // Two fragments are damaged in each stripe, but not the same two.
    for (fragment, stripe) in [(0, 0), (1, 0), (2, 1), (3, 1), (0, 2), (5, 2)] {
        flip(&mut fragments[fragment], 64 + stripe * 132 + 17);
    }
    let (mut set, mut out) = (open(without(&fragments, &[4])).unwrap(), vec![]);
    assert_eq!(set.lost(), [4]);
    assert!(matches!(set.decode(&mut out), Err(FragmentError::TooFew { stripe: 0, .. })));
    let (mut set, mut out) = (open(fragments.clone()).unwrap(), vec![]);
    set.decode(&mut out).unwrap();
    assert!(out == data);
    assert_eq!(set.lost(), [0, 1, 2, 3], "the damaged record of fragment 5 has not been read");
    let damaged = |stripes| FragmentState::Damaged { stripes };
    let mut checked = 0;
    let states = open(fragments.clone()).unwrap().check(|bytes| checked += bytes);
    assert_eq!(states, [damaged(2), damaged(1), damaged(1), damaged(1), FragmentState::Intact, damaged(1)]);
    assert_eq!(checked, data.len() as u64);
    flip(&mut fragments[4], 64 + 132);
    let error = decoded(fragments).unwrap_err();
    assert!(matches!(error, FragmentError::TooFew { stripe: 1, intact: 3, needed: 4, fragments: 6 }));
    assert!(error.to_string().contains("bring back at least 1"), "{error}");
}

#[test]
fn lost_fragments_are_rebuilt_byte_for_byte() {
    let data = noise(2, 10_000);
    let (_, fragments) = cut("6+3", 320, 1, &data);
    for lost in [vec![0, 4, 7], vec![6, 7, 8], vec![8]] {
        let mut given = without(&fragments, &lost);
        let mut anew: Vec<(usize, Fragment)> = lost.iter().map(|n| (*n, Cursor::new(vec![]))).collect();
        let last = given[0].get_ref().len();
        // The rebuild must not use the damaged part of a fragment.
        if lost.len() < 3 {
            flip(&mut given[0], last - 1);
        }
        let mut set = open(given).unwrap();
        assert_eq!(set.check(|_| ())[lost[0]], FragmentState::Missing);
        set.rebuild(&mut anew, |_| ()).unwrap();
        assert!(
            anew.iter().all(|(n, fragment)| fragment.get_ref() == fragments[*n].get_ref()),
            "without {lost:?}"
        );
    }
    let mut set = open(fragments).unwrap();
    let mut twice = [(1, Cursor::new(vec![])), (1, Cursor::new(vec![]))];
    assert!(matches!(set.rebuild(&mut twice, |_| ()), Err(FragmentError::Code(EcError::Twice { .. }))));
    let mut beyond = [(9, Cursor::new(vec![]))];
    assert!(matches!(set.rebuild(&mut beyond, |_| ()), Err(FragmentError::Code(EcError::NoSuch { .. }))));
}

#[test]
fn fragments_of_different_encodings_are_never_mixed() {
    let (_, a) = cut("2+1", 64, 1, b"one state of a file");
    let (_, b) = cut("2+1", 64, 2, b"one state of a file");
    let mixed = open(vec![a[0].clone(), b[1].clone(), a[2].clone()]);
    assert!(matches!(mixed, Err(FragmentError::Mixed { first: 0, second: 1 })));
    let twice = open(vec![a[0].clone(), a[2].clone(), a[0].clone()]);
    assert!(matches!(twice, Err(FragmentError::Twice { index: 0, first: 0, second: 2 })));
    assert!(matches!(open(vec![]), Err(FragmentError::NoFragments { given: 0 })));
    let nothing = Cursor::new(vec![0; 100]);
    assert!(matches!(open(vec![nothing.clone()]), Err(FragmentError::NoFragments { given: 1 })));
    let set = open(vec![nothing, a[2].clone(), a[1].clone()]).unwrap();
    assert_eq!([set.position(0), set.position(1), set.position(2)], [None, Some(2), Some(1)]);
}

#[test]
fn an_unfinished_fragment_is_not_accepted() {
    struct Breaks(usize);
    impl std::io::Read for Breaks {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            if self.0 == 0 {
                return Err(std::io::Error::other("the cable is out"));
            }
            self.0 -= 1;
            buffer.fill(1);
            Ok(buffer.len())
        }
    }
    let code = Code::new(Geometry::new(2, 1).unwrap(), KernelChoice::Portable.load().unwrap());
    let mut fragments = vec![Cursor::new(vec![]); 3];
    let error = encode(&code, 64, [0; 16], &mut Breaks(2), &mut fragments).unwrap_err();
    assert!(error.to_string().contains("the cable is out"));
    assert!(fragments[0].get_ref().len() > 64);
    assert!(matches!(open(fragments), Err(FragmentError::NoFragments { given: 3 })));
}

#[test]
fn impossible_stripe_units_and_numbers_of_fragments_are_refused() {
    let code = Code::new(Geometry::new(2, 1).unwrap(), KernelChoice::Portable.load().unwrap());
    let attempt = |unit, fragments| {
        encode(&code, unit, [0; 16], &mut &b""[..], &mut vec![Cursor::new(vec![]); fragments]).unwrap_err()
    };
    for unit in [0, 63, 65, UNIT_MAX + 64] {
        assert!(matches!(attempt(unit, 3), FragmentError::Code(EcError::Unit { .. })), "{unit}");
    }
    assert!(matches!(attempt(64, 2), FragmentError::Code(EcError::Count { expected: 3, found: 2, .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// Decoding damaged fragments returns either the original file or an error.
    #[test]
    fn decoding_damaged_fragments_never_returns_wrong_data(
        len in 0..3000_usize,
        damage in proptest::collection::vec((0..6_usize, any::<prop::sample::Index>(), any::<u8>()), 0..12),
        cuts in proptest::collection::vec((0..6_usize, any::<prop::sample::Index>()), 0..3),
    ) {
        let data = noise(len as u64, len);
        let (_, mut fragments) = cut("4+2", 64, 1, &data);
        for (fragment, at, value) in damage {
            let bytes = fragments[fragment].get_mut();
            let at = at.index(bytes.len());
            bytes[at] ^= value;
        }
        for (fragment, at) in cuts {
            let bytes = fragments[fragment].get_mut();
            bytes.truncate(at.index(bytes.len() + 1));
            bytes.push(0);
        }
        if let Ok(out) = decoded(fragments) {
            prop_assert!(out == data);
        }
    }
}
