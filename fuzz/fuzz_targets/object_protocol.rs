//! Fuzzes the decoders of requests and replies between client and osd, and of names.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok((_, rest)) = wire::decode_head(data) {
        let _ = wire::decode_body(rest);
    }
    let _ = wire::decode_body(data);
    let _ = wire::decode_reply(data);
    let _ = wire::PoolName::from_wire(data);
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(name) = text.parse::<wire::ObjectName>()
    {
        assert_eq!(name.to_string().parse(), Ok(name), "a printed name parses to the same name");
    }
});
