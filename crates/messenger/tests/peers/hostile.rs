//! Peers that send false data, stall, or guess keys. The attacked side ends the connection of this
//! peer with a typed error. No other connection is affected.

use std::time::Duration;

use crate::raw::{Beginning, PATIENCE, Raw, Victim, bytes, forge, hello, lost, offer, proof};
use base::block::Payload;
use bytes::Bytes;
use identity::{Identity, IdentityError, ProofKey, Trust};
use outboard_messenger::frame::{
    Body, Close, Hello, PullCancel, PullData, PullRequest, Push, Refusal, RejectCode, Resume, Welcome, Window,
};
use outboard_messenger::{
    ConnectOptions, ConnectionConfig, ConnectionEvent, Message, MessengerError, NetworkStack, TcpStack,
};
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use wire::BulkDescriptor;

fn message(text: &str) -> Body {
    Body::Message(Bytes::copy_from_slice(text.as_bytes()))
}

/// The first frames of a client that begins a connection, and of one that resumes a connection.
fn first_frames() -> [Vec<u8>; 2] {
    let resume = Resume { connection: 1, nonce: [7; 16], received: 0, granted: 1 << 20 };
    let begin = Beginning::new(&Trust::default(), hello()).output();
    [begin, bytes(&Body::Resume(resume), 0, 0, &Payload::default())]
}

#[tokio::test]
async fn every_flipped_bit_in_a_first_frame_is_detected() {
    let mut victim = Victim::new().await;
    for (good, bit) in first_frames().iter().flat_map(|good| (0..good.len() * 8).map(move |bit| (good, bit)))
    {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        let mut raw = Raw::connect(&victim.endpoint).await;
        raw.write(&bad).await;
        raw.closed().await;
        let why = victim.refused().await;
        assert!(
            matches!(why, MessengerError::Unreachable { .. } | MessengerError::Protocol(_)),
            "{bit}: {why}"
        );
    }
    victim.is_well().await;
}

#[tokio::test]
async fn a_flipped_bit_of_a_message_breaks_only_the_transport() {
    let mut victim = Victim::new().await;
    let payload = Payload::compute(5, vec![1; 20].into());
    let good = bytes(&message("text"), 1, 0, &payload);
    let (_, begun, mut ends) = victim.attack().await;
    assert!(matches!(ends.1.next().await, ConnectionEvent::Interrupted));
    for bit in (0..good.len() * 8).step_by(5) {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        let (mut raw, _, mut ends) = victim.attack().await;
        raw.write(&bad).await;
        raw.closed().await;
        let event = timeout(PATIENCE, ends.1.next()).await.expect("an event");
        assert!(matches!(event, ConnectionEvent::Interrupted), "bit {bit}: {event:?}");
    }
    drop(begun);
    victim.is_well().await;
}

#[tokio::test]
async fn a_connection_ends_after_many_transports_deliver_damaged_frames() {
    let mut victim = Victim::new().await;
    let (mut raw, begun, mut ends) = victim.attack().await;
    for _ in 0..20 {
        raw.write(b"this is not a frame, and longer than the header of one").await;
        raw.closed().await;
        raw = Raw::connect(&victim.endpoint).await;
        match raw.resume(&begun.key, begun.resume(0)).await {
            Some(Body::Resumed(_)) => {}
            Some(Body::Reject(reject)) => {
                assert_eq!(reject.code, RejectCode::UnknownConnection);
                let why = lost(&mut *ends.1).await;
                assert!(matches!(why, MessengerError::Protocol(_)), "{why}");
                return victim.is_well().await;
            }
            other => panic!("{other:?}"),
        }
    }
    panic!("the connection never ends");
}

#[tokio::test]
async fn a_truncated_frame_is_dropped_and_its_connection_ends_after_the_hold_time() {
    let mut victim = Victim::new().await;
    let frame = bytes(&message("text"), 1, 0, &Payload::compute(0, vec![1; 9000].into()));
    let mut connections = Vec::new();
    for len in [1, 39, 40, 43, 60, 5000, frame.len() - 1] {
        let (mut raw, _, mut ends) = victim.attack().await;
        raw.write(&frame[..len]).await;
        drop(raw);
        assert!(matches!(ends.1.next().await, ConnectionEvent::Interrupted), "{len}");
        connections.push((len, ends));
    }
    for (len, mut ends) in connections {
        let why = lost(&mut *ends.1).await;
        assert!(matches!(why, MessengerError::ConnectionLost(_)), "{len}: {why}");
    }
    victim.is_well().await;
}

/// Frames with correct checksums that violate the protocol.
#[tokio::test]
async fn violations_of_the_protocol_end_the_connection() {
    let mut victim = Victim::new().await;
    let empty = Payload::default();
    let text = bytes(&message("text"), 1, 0, &empty);
    let window = |granted| bytes(&Body::Window(Window { granted, quiet_ms: 0 }), 0, 0, &empty);
    let data = Payload::compute(0, vec![1; 100].into());
    let mut trailing = bytes(&Body::Window(Window { granted: 1, quiet_ms: 0 }), 0, 0, &empty);
    trailing.push(0);
    let crc = base::block::crc32c(&trailing[40..]).to_le_bytes();
    let len = trailing.len() as u32 - 40;
    let trailing = forge(forge(trailing, 8, &len.to_le_bytes()), 32, &crc);
    let violations: [(&str, Vec<u8>); 14] = [
        ("header of 4 GiB", forge(text.clone(), 8, &u32::MAX.to_le_bytes())),
        ("payload of 4 GiB", forge(text.clone(), 12, &u32::MAX.to_le_bytes())),
        ("unknown kind", forge(text.clone(), 5, &[99])),
        ("block_offset beyond the block", forge(text.clone(), 6, &4096u16.to_le_bytes())),
        ("message without a number", forge(text.clone(), 16, &0u64.to_le_bytes())),
        ("gap in the numbers", forge(text.clone(), 16, &2u64.to_le_bytes())),
        ("last number", forge(text.clone(), 16, &u64::MAX.to_le_bytes())),
        ("acknowledgement of an unsent frame", forge(text.clone(), 24, &1u64.to_le_bytes())),
        ("numbered window", forge(window(1), 16, &1u64.to_le_bytes())),
        ("window with a payload", forge(window(1), 12, &1u32.to_le_bytes())),
        ("absurd credit", window(u64::MAX)),
        ("body too long", trailing),
        ("hello", bytes(&Body::Hello(hello()), 0, 0, &empty)),
        (
            "body of another kind",
            forge(bytes(&Body::Push(Push { offer: 1, offset: 1 }), 1, 0, &data), 5, &[33]),
        ),
    ];
    for (name, frame) in violations {
        let (mut raw, _, mut ends) = victim.attack().await;
        raw.write(&frame).await;
        let why = lost(&mut *ends.1).await;
        assert!(matches!(why, MessengerError::Protocol(_)), "{name}: {why}");
        raw.closed().await;
        let late = ends.0.send(Message::default()).await;
        assert_eq!(late, Err(why), "{name}: later calls return the same error");
    }
    victim.is_well().await;
}

#[tokio::test]
async fn messages_without_credit_end_the_connection() {
    let mut victim = Victim::new().await;
    let (mut raw, begun, mut ends) = victim.attack().await;
    let payload = Payload::compute(0, vec![1; 60_000].into());
    for seq in 1..=3 * begun.welcome.granted / 60_000 {
        raw.write(&bytes(&message(""), seq, 0, &payload)).await;
    }
    raw.closed().await;
    let why = lost(&mut *ends.1).await;
    assert!(matches!(&why, MessengerError::Protocol(why) if why.contains("credit")), "{why}");
    victim.is_well().await;
}

#[tokio::test]
async fn pulls_of_ranges_that_are_not_offered_are_refused() {
    let mut victim = Victim::new().await;
    let (mut raw, _, ends) = victim.attack().await;
    let (region, offer) = offer(&ends, 10_000);
    let request = |pull, offer, offset, len| Body::PullRequest(PullRequest { pull, offer, offset, len });
    let bad = [
        request(1, offer ^ 1, 0, 10),
        request(2, 0, 0, 10),
        request(3, offer, 0, 10_001),
        request(4, offer, 10_001, 0),
        request(5, offer, u64::MAX, 2),
        request(6, offer, 8192, u64::MAX),
        request(7, offer, 5, 10),
        request(8, offer, 0, 0),
    ];
    for (number, body) in (1..).zip(&bad) {
        raw.send(body, 0).await;
        match raw.next_answer().await {
            Some(Body::PullRefused(refused)) => {
                assert_eq!((refused.pull, refused.refusal), (number, Refusal::Offer), "{}", refused.reason);
            }
            other => panic!("pull {number}: {other:?}"),
        }
    }
    raw.send(&request(9, offer, 4096, 5904), 0).await;
    assert_eq!(raw.next_answer().await, Some(Body::PullData(PullData { pull: 9, offset: 4096 })));
    drop(region);
    raw.send(&request(10, offer, 0, 10), 0).await;
    assert!(matches!(raw.next_answer().await, Some(Body::PullRefused(_))), "withdrawn");
    let (_other, _, other) = victim.attack().await;
    let (_region, foreign) = crate::raw::offer(&other, 10_000);
    raw.send(&request(11, foreign, 0, 10), 0).await;
    assert!(matches!(raw.next_answer().await, Some(Body::PullRefused(_))), "offered to another client");
    raw.send(&Body::PullCancel(PullCancel { pull: 77 }), 0).await;
    raw.send(&message("still here"), 1).await;
    let (_connection, mut incoming) = ends;
    assert!(matches!(incoming.next().await, ConnectionEvent::Message(_)));
    victim.is_well().await;
}

#[tokio::test]
async fn a_connection_ends_if_its_peer_sends_requests_but_reads_no_answers() {
    let mut victim = Victim::new().await;
    let (mut raw, _, mut ends) = victim.attack().await;
    let request = PullRequest { pull: 1, offer: 1, offset: 0, len: 1 };
    let many = bytes(&Body::PullRequest(request), 0, 0, &Payload::default()).repeat(5000);
    let flood = async {
        loop {
            raw.write(&many).await;
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        why = lost(&mut *ends.1) => assert!(matches!(why, MessengerError::Protocol(_)), "{why}"),
        () = flood => {}
    }
    victim.is_well().await;
}

#[tokio::test]
async fn data_for_unknown_transfers_is_rejected_and_misplaced_data_ends_the_connection() {
    let mut victim = Victim::new().await;
    let (mut raw, _, ends) = victim.attack().await;
    let data = Payload::compute(0, vec![1; 5000].into());
    let unknown = Body::PullData(PullData { pull: 1234, offset: 0 });
    raw.write(&bytes(&unknown, 0, 0, &data)).await;
    raw.write(&bytes(&Body::Push(Push { offer: 5, offset: 0 }), 1, 0, &data)).await;
    match raw.next_answer().await {
        Some(Body::PushRefused(refused)) => assert_eq!(refused.offer, 5),
        other => panic!("{other:?}"),
    }
    let (region, _) = offer(&ends, 8192);
    let theirs = BulkDescriptor { ..region.descriptor.clone() };
    let pool = outboard_messenger::conformance::pool();
    let dest = pool.alloc(8192).await.unwrap();
    let pull = ends.0.bulk_read(&theirs, 0, dest, PATIENCE);
    let lie = async {
        let Some(Body::PullRequest(request)) = raw.next_answer().await else { panic!("no pull request") };
        let elsewhere = Body::PullData(PullData { pull: request.pull, offset: 4096 });
        raw.write(&bytes(&elsewhere, 0, 0, &data)).await;
    };
    let (pulled, ()) = tokio::join!(pull, lie);
    assert!(matches!(pulled, Err(MessengerError::Protocol(_))), "{pulled:?}");
    assert_eq!(pool.free_bytes().0, 64 << 20, "the buffer returned to the pool");
    victim.is_well().await;
}

#[tokio::test]
async fn a_pull_that_stalls_inside_a_chunk_returns_its_buffer_at_the_deadline() {
    let mut victim = Victim::new().await;
    let (mut raw, _, ends) = victim.attack().await;
    let (region, _) = offer(&ends, 8192);
    let pool = outboard_messenger::conformance::pool();
    let dest = pool.alloc(8192).await.unwrap();
    let limit = Duration::from_millis(200);
    let pull = ends.0.bulk_read(&region.descriptor, 0, dest, limit);
    let stall = async {
        let Some(Body::PullRequest(request)) = raw.next_answer().await else { panic!("no pull request") };
        let data = Payload::compute(0, vec![1; 8192].into());
        let body = Body::PullData(PullData { pull: request.pull, offset: 0 });
        let frame = bytes(&body, 0, 0, &data);
        raw.write(&frame[..5000]).await;
        frame
    };
    let (pulled, frame) = tokio::join!(pull, stall);
    assert_eq!(pulled.err(), Some(MessengerError::TimedOut(limit)));
    sleep(Duration::from_millis(20)).await;
    assert_eq!(pool.free_bytes().0, 64 << 20, "the buffer returned although its chunk is still arriving");
    raw.write(&frame[5000..]).await;
    raw.send(&message("after"), 1).await;
    let (_connection, mut incoming) = ends;
    assert!(
        matches!(incoming.next().await, ConnectionEvent::Message(_)),
        "the rest of the chunk was dropped"
    );
    victim.is_well().await;
}

#[tokio::test]
async fn slow_handshakes_time_out_and_do_not_delay_other_peers() {
    let mut victim = Victim::new().await;
    let [good, _] = first_frames();
    let mut slow = Vec::new();
    for len in [0, 1, 39, 40, good.len() - 1] {
        let mut raw = Raw::connect(&victim.endpoint).await;
        raw.write(&good[..len]).await;
        slow.push(raw);
    }
    victim.is_well().await;
    let (_quick, _, _ends) = victim.attack().await;
    for mut raw in slow {
        raw.closed().await;
    }
    for _ in 0..5 {
        let why = victim.refused().await;
        assert!(matches!(why, MessengerError::Refused(_)), "{why}");
    }
}

#[tokio::test]
async fn a_connection_is_resumed_only_with_the_right_proof() {
    let mut victim = Victim::new().await;
    let (_first, begun, mut ends) = victim.attack().await;
    let (_other, other, _other_ends) = victim.attack().await;
    let good = begun.resume(0);
    let unknown = Resume { connection: good.connection ^ 1, ..good.clone() };
    // The key of another connection, an unknown connection, and a key that is not one.
    let wrong =
        [(other.key, good.clone()), (begun.key.clone(), unknown), (ProofKey::new(&[0; 32]), good.clone())];
    let mut texts = Vec::new();
    for (key, resume) in wrong {
        match Raw::connect(&victim.endpoint).await.resume(&key, resume).await {
            Some(Body::Reject(reject)) => {
                assert_eq!(reject.code, RejectCode::UnknownConnection);
                texts.push(reject.reason);
            }
            other => panic!("{other:?}"),
        }
        victim.refused().await;
    }
    assert!(texts.iter().all(|text| *text == texts[0]), "the answer does not tell which connections exist");
    let mut raw = Raw::connect(&victim.endpoint).await;
    assert!(matches!(raw.resume(&begun.key, good).await, Some(Body::Resumed(_))));
    assert!(
        matches!(ends.1.next().await, ConnectionEvent::Interrupted),
        "the new transport replaces the old one"
    );
    assert!(matches!(ends.1.next().await, ConnectionEvent::Resumed));
    let mut raw = Raw::connect(&victim.endpoint).await;
    raw.resume(&begun.key, begun.resume(5)).await;
    let why = lost(&mut *ends.1).await;
    assert!(
        matches!(why, MessengerError::Protocol(_)),
        "the client claimed to have received unsent frames: {why}"
    );
    victim.is_well().await;
}

/// An attacker in the network sends the frames with which a client has begun a connection again.
#[tokio::test]
async fn a_recorded_handshake_begins_no_connection() {
    let mut victim = Victim::new().await;
    let mut recorded = Vec::new();
    let mut raw = Raw::connect(&victim.endpoint).await;
    let mut beginning = Beginning::new(&Trust::default(), hello());
    loop {
        let flight = beginning.output();
        raw.write(&flight).await;
        recorded.push(flight);
        if let Some(answer) = beginning.frame(&raw.next().await.expect("an answer").body) {
            assert!(matches!(answer, Body::Welcome(_)), "the recorded frames begin a connection");
            break;
        }
    }
    let mut ends = victim.accepted().await;
    assert!(recorded.iter().filter(|flight| !flight.is_empty()).count() >= 2);
    let mut replay = Raw::connect(&victim.endpoint).await;
    for flight in &recorded {
        replay.write(flight).await;
    }
    let answer = replay.next().await.expect("the server answers the first frame");
    assert!(matches!(answer.body, Body::Handshake(_)), "{answer:?}");
    replay.closed().await;
    let why = victim.refused().await;
    assert!(matches!(why, MessengerError::Identity(_) | MessengerError::Unreachable { .. }), "{why}");
    let quiet = timeout(Duration::from_millis(50), ends.1.next()).await;
    assert!(quiet.is_err(), "the connection is not affected: {quiet:?}");
    victim.is_well().await;
}

/// An attacker in the network sends the frames of an earlier resumption again, or changes a field of
/// the request after the client has made its proof.
#[tokio::test]
async fn recorded_and_changed_proofs_are_refused() {
    let mut victim = Victim::new().await;
    let (_first, begun, mut ends) = victim.attack().await;
    let good = begun.resume(0);
    let mut raw = Raw::connect(&victim.endpoint).await;
    raw.send(&Body::Resume(good.clone()), 0).await;
    let Some(Body::Challenge(challenge)) = raw.next().await.map(|frame| frame.body) else { panic!() };
    let recorded = proof(&begun.key, &good, &challenge);
    raw.send(&recorded, 0).await;
    assert!(matches!(raw.next().await.map(|frame| frame.body), Some(Body::Resumed(_))));
    assert!(matches!(ends.1.next().await, ConnectionEvent::Interrupted));
    assert!(matches!(ends.1.next().await, ConnectionEvent::Resumed));
    let changed = [
        good.clone(),
        Resume { nonce: [8; 16], ..good.clone() },
        Resume { received: 1, ..good.clone() },
        Resume { granted: good.granted + 1, ..good.clone() },
    ];
    for (at, request) in changed.into_iter().enumerate() {
        let mut raw = Raw::connect(&victim.endpoint).await;
        raw.send(&Body::Resume(request), 0).await;
        let Some(Body::Challenge(challenge)) = raw.next().await.map(|frame| frame.body) else { panic!() };
        // The first attempt repeats the recorded proof. The others have a fresh proof of the request
        // that was not changed.
        let proof = if at == 0 { recorded.clone() } else { proof(&begun.key, &good, &challenge) };
        raw.send(&proof, 0).await;
        match raw.next().await.map(|frame| frame.body) {
            Some(Body::Reject(reject)) => assert_eq!(reject.code, RejectCode::UnknownConnection),
            other => panic!("attempt {at}: {other:?}"),
        }
        victim.refused().await;
    }
    let quiet = timeout(Duration::from_millis(50), ends.1.next()).await;
    assert!(quiet.is_err(), "the connection is not affected: {quiet:?}");
    victim.is_well().await;
}

#[tokio::test]
async fn a_client_with_an_unknown_key_learns_only_that_its_key_is_refused() {
    let mut victim = Victim::new().await;
    let stranger = Identity::generate();
    let trust = Trust::client(&stranger, Trust::default().key());
    let mut raw = Raw::connect(&victim.endpoint).await;
    match raw.begin_as(&trust, hello()).await.0 {
        Some(Body::Reject(reject)) => {
            assert_eq!(reject.code, RejectCode::UnknownKey);
            assert!(reject.reason.contains(&stranger.key().to_string()), "{}", reject.reason);
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(victim.refused().await, MessengerError::Refused(_)));
    let config = ConnectionConfig { trust, ..ConnectionConfig::default() };
    let connected = TcpStack::new(config).connect(&victim.endpoint, ConnectOptions::default()).await;
    assert!(matches!(connected, Err(MessengerError::KeyRefused(_))));
    victim.refused().await;
    victim.is_well().await;
}

#[tokio::test]
async fn a_client_refuses_a_server_with_another_key() {
    let mut victim = Victim::new().await;
    let (own, expected) = (Identity::generate(), Identity::generate().key());
    let trust = Trust::client(&own, expected);
    let config = ConnectionConfig { trust, ..ConnectionConfig::default() };
    let connected = TcpStack::new(config).connect(&victim.endpoint, ConnectOptions::default()).await;
    let found = Trust::default().key();
    let Err(MessengerError::Identity(why)) = connected else { panic!("the client connected") };
    assert_eq!(why, IdentityError::OtherServer { expected, found });
    victim.refused().await;
    victim.is_well().await;
}

#[tokio::test]
async fn a_client_that_does_not_prove_its_identity_is_rejected_with_the_reason() {
    let mut victim = Victim::new().await;
    let mut raw = Raw::connect(&victim.endpoint).await;
    // A client of an earlier version sends a `Hello` without encryption.
    raw.send(&Body::Hello(hello()), 0).await;
    match raw.next().await.map(|frame| frame.body) {
        Some(Body::Reject(reject)) => {
            assert_eq!(reject.code, RejectCode::Incompatible);
            assert!(reject.reason.contains("prove its identity"), "{}", reject.reason);
        }
        other => panic!("{other:?}"),
    }
    raw.closed().await;
    victim.refused().await;
    victim.is_well().await;
}

#[tokio::test]
async fn hello_frames_with_unsupported_values_are_rejected() {
    let mut victim = Victim::new().await;
    let bad = [
        Hello { versions: (4, 9), ..hello() },
        Hello { versions: (0, 2), ..hello() },
        Hello { granted: u64::MAX, ..hello() },
    ];
    for hello in bad {
        let mut raw = Raw::connect(&victim.endpoint).await;
        match raw.begin_as(&Trust::default(), hello.clone()).await.0 {
            Some(Body::Reject(reject)) => assert_eq!(reject.code, RejectCode::Incompatible),
            other => panic!("{hello:?}: {other:?}"),
        }
        assert!(matches!(victim.refused().await, MessengerError::Refused(_)));
    }
    victim.is_well().await;
}

#[tokio::test]
async fn a_client_reports_typed_errors_for_invalid_answers_of_a_server() {
    let config =
        ConnectionConfig { handshake_timeout: Duration::from_millis(100), ..ConnectionConfig::default() };
    let stack = TcpStack::new(config);
    let welcome = Body::Welcome(Welcome {
        version: 3,
        connection: 1,
        limits: (1, 1, 1),
        granted: 1,
        paths: Vec::new(),
    });
    let empty = Payload::default();
    let tls = Body::Handshake(Bytes::from_static(b"this is not a record of TLS"));
    let answers: [(&str, Vec<u8>); 7] = [
        ("nothing", Vec::new()),
        ("text", b"HTTP/1.1 400 Bad Request\r\n\r\nthis is not the server that you want".to_vec()),
        ("other frame", bytes(&message("hi"), 1, 0, &empty)),
        ("welcome without encryption", bytes(&welcome, 0, 0, &empty)),
        ("close", bytes(&Body::Close(Close { reason: "no".into() }), 0, 0, &empty)),
        ("handshake", bytes(&tls, 0, 0, &empty)),
        ("long body", forge(bytes(&welcome, 0, 0, &empty), 8, &u32::MAX.to_le_bytes())),
    ];
    for (name, answer) in answers {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let serve = async {
            loop {
                let mut raw = Raw::over(listener.accept().await.unwrap().0);
                raw.next().await;
                raw.write(&answer).await;
            }
        };
        let options = ConnectOptions { timeout: Duration::from_millis(250) };
        tokio::select! {
            result = stack.connect(&endpoint, options) => {
                let why = result.err().unwrap_or_else(|| panic!("{name}: the client connected"));
                let typed = matches!(
                    why,
                    MessengerError::Protocol(_) | MessengerError::Unreachable { .. } | MessengerError::Identity(_)
                );
                assert!(typed, "{name}: {why}");
            }
            () = serve => {}
            () = sleep(PATIENCE) => panic!("{name}: connecting hangs"),
        }
    }
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
    let options = ConnectOptions { timeout: Duration::from_millis(100) };
    assert!(matches!(stack.connect(&nobody, options).await, Err(MessengerError::Unreachable { .. })));
}

#[tokio::test]
async fn the_send_queue_for_a_peer_that_reads_nothing_is_bounded_despite_large_credit() {
    let mut victim = Victim::new().await;
    let (mut raw, _, mut ends) = victim.attack().await;
    raw.write(&bytes(&Body::Window(Window { granted: 1 << 30, quiet_ms: 0 }), 0, 0, &Payload::default()))
        .await;
    let payload = Payload::compute(0, vec![1; 60_000].into());
    let mut sent = 0u64;
    loop {
        let message = Message { header: Bytes::new(), payload: payload.clone() };
        match timeout(Duration::from_millis(200), ends.0.send(message)).await {
            Ok(result) => result.unwrap(),
            Err(_) => break,
        }
        sent += 60_000;
        assert!(sent < 64 << 20, "the queue is not bounded");
    }
    drop(raw);
    lost(&mut *ends.1).await;
    victim.is_well().await;
}
