//! Fuzzes the decoder of entries that a peer wrote to a ring. The fuzz target decodes each input
//! twice: unchanged, and with a correct checksum, so that decoding continues after the check. It
//! also feeds the input to the decoders of the handshakes that precede the ring.
#![no_main]

use base::mem::Arena;
use channel::ring::Ring;
use channel::{EntryHeader, HEADER_LEN};
use libfuzzer_sys::fuzz_target;

const LEN: usize = 8192;

fuzz_target!(|data: &[u8]| {
    channel::fuzz::handshake(data);
    private_data(data);
    let [position, available, rest @ ..] = data else { return };
    let memory = Arena::anonymous(LEN).expect("two pages of memory are available");
    let ring = Ring { offset: 0, len: LEN };
    let (position, available) = (u64::from(*position) * 64, usize::from(*available) * 64);
    let at = position as usize % LEN;
    let put = |bytes: &[u8]| assert!(memory.copy_in(at, &bytes[..bytes.len().min(LEN - at)]));
    put(rest);
    let _ = ring.read(&memory, position, available);
    if let Some(head) = rest.first_chunk::<HEADER_LEN>()
        && let Ok(mut header) = EntryHeader::parse(head)
    {
        header.position = position;
        let end = (HEADER_LEN + header.control_len as usize % 4096).min(rest.len());
        put(&header.seal(&rest[HEADER_LEN..end]));
        let _ = ring.read(&memory, position, available);
    }
});

/// Decodes the private data of a connection request, also with the constant bytes of a valid one.
fn private_data(data: &[u8]) {
    channel::fuzz::private_data(data);
    let mut completed = data.to_vec();
    if let Some(constant) = completed.first_chunk_mut::<8>() {
        let queue = constant[6];
        *constant = *b"OBFI\x02\0\0\x05";
        constant[6] = queue;
        channel::fuzz::private_data(&completed);
    }
}
