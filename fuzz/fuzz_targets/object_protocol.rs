//! Fuzzes the decoders of requests and replies between client and osd, with the checks that the osd
//! makes before it executes a request, and the decoders of names and rights.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire::{BulkDescriptor, Data, ObjectRequest, RequestBody};

fuzz_target!(|data: &[u8]| {
    if let Ok((head, rest)) = wire::decode_head(data)
        && let Ok(body) = wire::decode_body(rest)
    {
        let encoded = wire::encode_request(&head, &body);
        let (again, rest) = wire::decode_head(&encoded).expect("an encoded head can be decoded");
        assert_eq!((again, wire::decode_body(rest)), (head, Ok(body)));
    }
    if let Ok(body) = wire::decode_body(data) {
        check(&body);
    }
    if let Ok(reply) = wire::decode_reply(data) {
        assert_eq!(wire::decode_reply(&wire::encode_reply(&reply)), Ok(reply));
    }
    if let Some(upload) = wire::UploadId::from_bytes(data) {
        assert_eq!(upload.to_bytes(), data);
    }
    let _ = wire::PoolName::from_wire(data);
    let pool = wire::PoolName::new("p").expect("a valid name");
    if let Ok(name) = wire::ObjectName::from_cursor(pool, data) {
        assert_eq!(name.to_cursor(), data, "a name has one cursor");
    }
    if let Ok(text) = std::str::from_utf8(data) {
        names(text);
    }
});

/// Makes the osd's checks of a request. The request may be refused, but no check may panic.
fn check(body: &RequestBody) {
    match body {
        // The session's id says which osd has made it.
        RequestBody::Open { session: Some(session), .. } => {
            assert_eq!(session.to_string().parse(), Ok(*session));
            let _ = (session.generation(), session.number());
        }
        RequestBody::Open { session: None, .. }
        | RequestBody::Renew { .. }
        | RequestBody::CloseSession
        | RequestBody::Leave => {}
        RequestBody::Object(ObjectRequest::Mutate(mutate)) => {
            let _ = (mutate.check(), mutate.name.check());
            if let Data::Bulk(bulk) = &mutate.data {
                check_bulk(bulk);
            }
        }
        RequestBody::Object(ObjectRequest::Query(query)) => drop((query.check(), query.name.check())),
        RequestBody::Object(ObjectRequest::Read(read)) => {
            let _ = read.name.check();
            read.sink.iter().for_each(check_bulk);
        }
        RequestBody::Object(ObjectRequest::List(list)) => {
            let _ = list.checked_namespace();
            if let Ok(Some(name)) = list.after() {
                assert_eq!(name.to_cursor(), list.cursor, "a name has one cursor");
            }
        }
    }
}

fn check_bulk(bulk: &BulkDescriptor) {
    assert!(!bulk.is_empty() || bulk.len() == Some(0));
    let Some(remote) = &bulk.remote else { return };
    for segment in &remote.segments {
        for (offset, len) in [(0, segment.len), (segment.len, 1), (u64::MAX, segment.len)] {
            if let Some((found, within)) = remote.find(offset, len) {
                assert!(within.checked_add(len).is_some_and(|end| end <= found.len));
            }
        }
        let first = segment.address as usize;
        let found = remote.checksums(first, segment.len as usize);
        assert!(found.is_none_or(|found| found.len() == segment.len as usize));
    }
}

/// Parses names and rights. Each printed name parses to the same name.
fn names(text: &str) {
    if let Ok(name) = text.parse::<wire::ObjectName>() {
        assert_eq!(name.to_string().parse(), Ok(name));
    }
    if let Ok(name) = text.parse::<wire::AccountName>() {
        assert_eq!(name.to_string().parse(), Ok(name));
    }
    if let Ok(verbs) = text.parse::<wire::Verbs>() {
        assert_eq!(verbs.to_string().parse(), Ok(verbs));
    }
    if let Ok(scope) = text.parse::<wire::Scope>() {
        let grant = wire::AccessGrant { scope: scope.clone(), verbs: wire::Verbs::ALL };
        let _ = grant.check();
        assert_eq!(scope.to_string().parse(), Ok(scope));
    }
}
