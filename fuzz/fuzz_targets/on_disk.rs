//! Superblock, log, index records and allocation pages, as found on a target.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| store::fuzz::decode(data));
