//! Tests with invalid requests. The node must refuse each of these requests. At worst, it may end
//! the session of the request.

use base::block::Payload;
use bytes::Bytes;
use identity::Caller;
use messenger::{ConnectOptions, Message};
use wire::limits::{MAX_OBJECT_SIZE, MAX_OPS};
use wire::{
    AdminRequest, BulkDescriptor, BulkDirection, BulkOwner, BulkSegment, MemoryKind, ObjectReply,
    ObjectRequest,
};
use wire::{
    Condition, Data, Error, List, Manifest, Mutate, Mutation, NameError, OpBytes, Read, ReplyBody,
    RequestBody, RequestHead, SessionId, UploadId, WireName,
};

use crate::common::Node;
use crate::raw::{Raw, append, head, mutate, name};

fn descriptor(direction: BulkDirection, block_offset: u16, lens: &[u64]) -> BulkDescriptor {
    let segment = |len: &u64| BulkSegment { address: 0, key: 0xdead_beef, len: *len };
    BulkDescriptor {
        owner: BulkOwner::Peer,
        memory: MemoryKind::Host,
        segments: lens.iter().map(segment).collect(),
        direction,
        block_offset,
        expires_ms: 1000,
        remote: None,
    }
}

fn payload_op() -> Mutation {
    Mutation::WriteFull(OpBytes::Payload)
}

async fn still_works(node: &Node) {
    let mut raw = Raw::connect(&node.endpoint, None).await;
    raw.changed(head(1), append("fine", "x")).await.unwrap();
}

/// Description of an invalid request, the request, and the check of the expected error.
type Refused = (&'static str, RequestBody, fn(&Error) -> bool);

#[tokio::test]
async fn invalid_requests_are_refused_with_a_matching_error() {
    let node = Node::start();
    let _object = node.object().await;
    let mut raw = Raw::connect(&node.endpoint, None).await;
    let wire = |pool: &'static [u8], object: Vec<u8>| WireName {
        pool: Bytes::from_static(pool),
        namespace: Bytes::new(),
        object: object.into(),
    };
    let named =
        |name| Mutate { name, part: None, conditions: vec![], ops: vec![Mutation::Touch], data: Data::None };
    let write =
        |offset, len: usize| Mutation::Write { offset, source: OpBytes::Embedded(vec![0; len].into()) };
    let manifest = |part_size, size| {
        Mutation::SetManifest(Manifest {
            upload: UploadId { session: SessionId(1), number: 1 },
            part_size,
            size,
        })
    };
    let bulk = |d: BulkDescriptor| mutate("x", vec![payload_op()], Data::Bulk(d));
    let group = |group, cursor| {
        RequestBody::Object(ObjectRequest::List(List { group: Some(group), ..list("pool", cursor) }))
    };
    let in_bad_namespace = List { namespace: Some(Bytes::from_static(b"a\0b")), ..list("pool", b"") };
    let requests: Vec<Refused> = vec![
        (
            "missing pool",
            RequestBody::Object(ObjectRequest::Mutate(named(wire(b"nowhere", b"x".to_vec())))),
            |e| matches!(e, Error::NoSuchPool(_)),
        ),
        (
            "long name",
            RequestBody::Object(ObjectRequest::Mutate(named(wire(b"pool", vec![b'x'; 1025])))),
            |e| matches!(e, Error::BadName(NameError::TooLong { .. })),
        ),
        (
            "name that is not UTF-8",
            RequestBody::Object(ObjectRequest::Mutate(named(wire(b"pool", vec![0xff])))),
            |e| matches!(e, Error::BadName(NameError::NotUtf8(_))),
        ),
        ("write whose end overflows", mutate("x", vec![write(u64::MAX, 2)], Data::None), |e| {
            matches!(e, Error::OutOfRange { .. })
        }),
        (
            "write beyond the maximum object size",
            mutate("x", vec![write(MAX_OBJECT_SIZE, 1)], Data::None),
            |e| matches!(e, Error::TooLarge { .. }),
        ),
        (
            "zeroing whose end overflows",
            mutate("x", vec![Mutation::Zero { offset: 5, len: u64::MAX }], Data::None),
            |e| matches!(e, Error::OutOfRange { .. }),
        ),
        ("no ops", mutate("x", vec![], Data::None), |e| matches!(e, Error::BadRequest(_))),
        ("many ops", mutate("x", vec![Mutation::Touch; MAX_OPS + 1], Data::None), |e| {
            matches!(e, Error::TooLarge { .. })
        }),
        ("data that no op uses", mutate("x", vec![Mutation::Touch], Data::Inline), |e| {
            matches!(e, Error::BadRequest(_))
        }),
        ("data that two ops use", mutate("x", vec![payload_op(), payload_op()], Data::Inline), |e| {
            matches!(e, Error::BadRequest(_))
        }),
        ("parts of size zero", mutate("x", vec![manifest(0, 5)], Data::None), |e| {
            matches!(e, Error::OutOfRange { .. })
        }),
        ("too many parts", mutate("x", vec![manifest(4096, u64::MAX)], Data::None), |e| {
            matches!(e, Error::OutOfRange { .. })
        }),
        ("memory never offered", bulk(descriptor(BulkDirection::Read, 0, &[1 << 20])), |e| {
            matches!(e, Error::TransferFailed(_))
        }),
        ("memory whose length overflows", bulk(descriptor(BulkDirection::Read, 0, &[u64::MAX, 2])), |e| {
            matches!(e, Error::OutOfRange { .. })
        }),
        ("too much memory", bulk(descriptor(BulkDirection::Read, 0, &[1 << 40])), |e| {
            matches!(e, Error::TooLarge { .. })
        }),
        ("source of the wrong direction", bulk(descriptor(BulkDirection::Write, 0, &[4096])), |e| {
            matches!(e, Error::BadRequest(_))
        }),
        (
            "block_offset that does not match the offset",
            bulk(descriptor(BulkDirection::Read, 7, &[8192])),
            |e| matches!(e, Error::BadRequest(_)),
        ),
        ("block_offset beyond the block size", bulk(descriptor(BulkDirection::Read, 4096, &[8192])), |e| {
            matches!(e, Error::BadRequest(_) | Error::TransferFailed(_))
        }),
        ("bad cursor", RequestBody::Object(ObjectRequest::List(list("pool", b"x"))), |e| {
            matches!(e, Error::BadRequest(_))
        }),
        (
            "cursor of a group beyond the pool",
            RequestBody::Object(ObjectRequest::List(list("pool", b"\0\0\x10\0x"))),
            |e| matches!(e, Error::BadRequest(_)),
        ),
        ("listing of a group beyond the pool", group(u32::MAX, b""), |e| {
            matches!(e, Error::OutOfRange { .. })
        }),
        ("cursor of a group without a namespace", group(0, b"x"), |e| matches!(e, Error::BadRequest(_))),
        ("cursor of a group with a bad name", group(0, b"a\0\xff"), |e| matches!(e, Error::BadRequest(_))),
        ("listing of a bad namespace", RequestBody::Object(ObjectRequest::List(in_bad_namespace)), |e| {
            matches!(e, Error::BadName(NameError::BadCharacter { .. }))
        }),
        ("listing of a missing pool", RequestBody::Object(ObjectRequest::List(list("nowhere", b""))), |e| {
            matches!(e, Error::NoSuchPool(_))
        }),
        (
            "sink of the wrong direction",
            RequestBody::Object(ObjectRequest::Read(read(Some(descriptor(BulkDirection::Read, 0, &[4096]))))),
            |e| matches!(e, Error::BadRequest(_)),
        ),
        ("reply that is too large", RequestBody::Object(ObjectRequest::Read(read(None))), |e| {
            matches!(e, Error::TooLarge { .. })
        }),
    ];
    for (seq, (what, body, expected)) in (1..).zip(requests) {
        let refused = raw.call(head(seq), body).await.expect_err(what);
        assert!(expected(&refused), "{what}: {refused:?}");
    }
    let administrator = node.osd.as_ref().unwrap().administrator();
    let create = |name: &'static str, pg_count| {
        let (name, redundancy) = (name.into(), wire::Redundancy::Single);
        let request = AdminRequest::PoolCreate { name, pg_count, redundancy, tenant: None };
        administrator.administer(Caller::process(), request, false)
    };
    assert!(matches!(create("a/b", 0).await, Err(Error::BadName(_))));
    assert!(matches!(create("ab", 3).await, Err(Error::OutOfRange { .. })), "no power of two");
    still_works(&node).await;
}

fn list(pool: &str, cursor: &'static [u8]) -> List {
    List {
        pool: Bytes::copy_from_slice(pool.as_bytes()),
        namespace: None,
        prefix: Bytes::new(),
        group: None,
        cursor: Bytes::from_static(cursor),
        limit: u32::MAX,
        skip_unavailable: false,
    }
}

fn read(sink: Option<BulkDescriptor>) -> Read {
    Read { name: name("object"), part: None, offset: 0, len: 1 << 30, if_version: None, sink }
}

#[tokio::test]
async fn requests_with_numbers_at_their_limits_do_not_harm_the_node() {
    let node = Node::start();
    let _object = node.object().await;
    let mut raw = Raw::connect(&node.endpoint, None).await;
    let wild = RequestHead {
        strand: 0,
        seq: u64::MAX,
        acked_through: u64::MAX,
        retry: false,
        deadline_ms: u32::MAX,
    };
    raw.changed(wild, append("object", "x")).await.unwrap();
    let far = Read { offset: u64::MAX, len: u64::MAX, ..read(None) };
    assert!(matches!(
        raw.call(head(1), RequestBody::Object(ObjectRequest::Read(far))).await,
        Ok(ReplyBody::Object(ObjectReply::Read { sent: 0, .. })) | Err(Error::TooLarge { .. })
    ));
    let bytes = Mutate {
        name: name("object"),
        part: None,
        conditions: vec![Condition::Bytes(u64::MAX, "x".into())],
        ops: vec![Mutation::Touch],
        data: Data::None,
    };
    assert!(matches!(
        raw.call(head(2), RequestBody::Object(ObjectRequest::Mutate(bytes))).await,
        Err(Error::OutOfRange { .. })
    ));
    still_works(&node).await;
}

#[tokio::test]
async fn an_invalid_body_gets_an_error_reply_and_an_invalid_head_ends_the_connection() {
    let node = Node::start();
    let _object = node.object().await;
    let mut raw = Raw::connect(&node.endpoint, None).await;
    let good = wire::encode_request(&head(1), &append("object", "x"));
    raw.send(good.slice(..good.len() - 1), Payload::default()).await;
    let reply = raw.reply().await.unwrap();
    assert!(matches!((reply.seq, reply.result), (1, Err(Error::BadRequest(_)))), "truncated");
    raw.send([&good[..], b"more"].concat().into(), Payload::default()).await;
    assert!(matches!(raw.reply().await.unwrap().result, Err(Error::BadRequest(_))), "too long");
    raw.send(Bytes::from_static(&[0xff; 5]), Payload::default()).await;
    assert_eq!(raw.reply().await, None, "the node closed the connection");
    still_works(&node).await;
}

#[tokio::test]
async fn requests_need_a_session_with_a_common_protocol_version() {
    let node = Node::start();
    let _object = node.object().await;
    let capability = crate::common::capability(&node.endpoint).await;
    let open = |oldest, newest, session| {
        let capability = capability.clone();
        RequestBody::Open { oldest, newest, session, capability }
    };
    let unopened = async |body: RequestBody| {
        let stack = crate::common::stack(messenger::UseAs::Client);
        let (connection, mut incoming) =
            stack.connect(&node.endpoint, ConnectOptions::default()).await.unwrap();
        let header = wire::encode_request(&head(1), &body);
        connection.send(Message { header, payload: Payload::default() }).await.unwrap();
        loop {
            if let messenger::ConnectionEvent::Message(message) = incoming.next().await {
                return wire::decode_reply(&message.header).unwrap().result.unwrap_err();
            }
        }
    };
    assert!(matches!(unopened(append("object", "x")).await, Error::NoSession(_)));
    let (oldest, newest) = (wire::VERSION_OLDEST, wire::VERSION);
    let too_new = unopened(open(newest + 1, newest + 3, None)).await;
    assert_eq!(too_new, Error::WrongVersion { oldest, newest });
    let never_made = [SessionId(u128::MAX), SessionId::new(SessionId::FIRST_GENERATION, 50_000, 5)];
    for session in never_made {
        let refused = unopened(open(oldest, newest, Some(session))).await;
        assert!(matches!(refused, Error::SessionRefused { .. }), "{refused:?}");
    }
    still_works(&node).await;
}

/// Opens more sessions on one connection, one after the other, than the osd keeps at a time.
#[tokio::test]
async fn a_connection_that_opens_many_sessions_occupies_only_one_slot() {
    let node = Node::start_with(osd::OsdConfig { sessions: 8, ..Default::default() });
    let _object = node.object().await;
    let mut raw = Raw::connect(&node.endpoint, None).await;
    for seq in 1..=20 {
        let open = raw.opening(None);
        raw.call(head(seq), open).await.unwrap();
    }
    let mut others = Vec::new();
    for _ in 0..3 {
        others.push(Raw::connect(&node.endpoint, None).await);
    }
    others[0].changed(head(1), append("fine", "x")).await.unwrap();
}
