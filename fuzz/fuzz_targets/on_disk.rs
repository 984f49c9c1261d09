//! Fuzzes the decoders of a target's content: superblock, log, index records and allocation pages.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| store::fuzz::decode(data));
