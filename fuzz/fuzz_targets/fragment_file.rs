//! Fuzzes the decoder of fragment files, which may come from an untrusted source. The fuzz target
//! also decodes each input with a correct magic number, version and checksum in every header, so
//! that decoding continues after these checks.
#![no_main]

use std::io::Cursor;

use base::block::crc32c;
use ec::KernelChoice;
use ec::fragments::{FragmentSet, FragmentState};
use libfuzzer_sys::fuzz_target;

const HEADER: usize = 64;
/// Maximum length of a file to decode, in bytes. A header may claim a length that would take too
/// long to decode.
const LEN_MAX: u64 = 16 << 10;

/// Returns a copy of `fragment` whose header has the correct magic number, version and checksum.
fn sealed(fragment: &[u8]) -> Vec<u8> {
    let mut fragment = fragment.to_vec();
    if let Some(header) = fragment.first_chunk_mut::<HEADER>() {
        header[..10].copy_from_slice(b"obshard\0\x01\0");
        let crc = crc32c(&header[..60]);
        header[60..].copy_from_slice(&crc.to_le_bytes());
    }
    fragment
}

fn put_together(fragments: Vec<Vec<u8>>) {
    let kernel = KernelChoice::Portable.load().expect("the portable kernel exists on every machine");
    let Ok(mut set) = FragmentSet::open(fragments.into_iter().map(Cursor::new).collect(), kernel) else {
        return;
    };
    let layout = set.layout();
    assert!(layout.geometry.k() > 0 && layout.unit > 0, "{layout:?}");
    if layout.len > LEN_MAX {
        return;
    }
    let missing = set.check(|_| ()).iter().filter(|state| **state == FragmentState::Missing).count();
    assert!(missing < layout.geometry.fragments(), "at least one fragment exists");
    let mut file = Vec::new();
    if set.decode(&mut file).is_ok() {
        assert_eq!(file.len() as u64, layout.len);
    }
    let mut made: Vec<(usize, Cursor<Vec<u8>>)> =
        set.lost().into_iter().map(|index| (index, Cursor::default())).collect();
    if set.rebuild(&mut made, |_| ()).is_ok() {
        assert!(made.iter().all(|(_, fragment)| fragment.get_ref().starts_with(b"obshard\0")));
    }
}

fuzz_target!(|data: &[u8]| {
    let [count, rest @ ..] = data else { return };
    let len = rest.len().div_ceil(1 + usize::from(*count % 8)).max(1);
    let fragments: Vec<Vec<u8>> = rest.chunks(len).map(<[u8]>::to_vec).collect();
    put_together(fragments.iter().map(|fragment| sealed(fragment)).collect());
    // Give all fragments the header of the first fragment, with their own index, so that they
    // belong to one file.
    let mut alike = fragments.clone();
    for (index, fragment) in alike.iter_mut().enumerate() {
        let common = HEADER.min(fragment.len());
        if fragments[0].len() >= common {
            fragment[..common].copy_from_slice(&fragments[0][..common]);
        }
        if let Some(number) = fragment.get_mut(12) {
            *number = index as u8;
        }
    }
    put_together(alike.iter().map(|fragment| sealed(fragment)).collect());
    put_together(fragments);
});
