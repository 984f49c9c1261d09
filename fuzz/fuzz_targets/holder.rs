//! Fuzzes what a front end sends to the holder, and the decoders of the holder's control protocol. The
//! first byte of the input chooses.

#![no_main]

use holder::Framing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| match data {
    [0, read_bytes_max, stream @ ..] => cut(Framing::VHOST_USER, stream, *read_bytes_max),
    [1, read_bytes_max, header_len, length_at, flags, low, high, fds, stream @ ..] => {
        let framing = Framing {
            header_len: u32::from(*header_len),
            length_at: u32::from(*length_at),
            length_counts_header: flags & 1 != 0,
            message_bytes_max: u32::from(u16::from_le_bytes([*low, *high])),
            message_fds_max: u32::from(*fds),
        };
        cut(framing, stream, *read_bytes_max);
    }
    [_, body @ ..] => holder::fuzz::control(body),
    [] => {}
});

/// The messages are the start of the stream, and do not depend on the lengths of reads.
fn cut(framing: Framing, stream: &[u8], read_bytes_max: u8) {
    let messages = holder::fuzz::cut(framing, stream, usize::from(read_bytes_max));
    assert_eq!(messages, holder::fuzz::cut(framing, stream, usize::MAX));
    let cut: Vec<u8> = messages.concat();
    assert_eq!(cut, stream[..cut.len()]);
}
