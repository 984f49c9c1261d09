//! Fuzzes the decoders of calls and replies between osd and store, and of encoded transactions.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    proxy::fuzz::control(data);
    if let [low, high, rest @ ..] = data {
        proxy::fuzz::transaction(rest, u16::from_le_bytes([*low, *high]));
    }
});
