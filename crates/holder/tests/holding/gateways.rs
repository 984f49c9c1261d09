//! Gateways that come, go, replace each other and lie.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use bytes::Bytes;
use holder::{ClientError, Deposit, Done, Framing, FrontEndReply, HolderClient, HolderLimits, HolderRefusal};

use crate::support::{TestHolder, answer, framed, inode, new_file, shared};

#[tokio::test]
async fn the_newest_gateway_replaces_the_older_one() {
    let holder = TestHolder::start();
    let mut first = holder.gateway_with(&["d"]).await;
    let front_end = holder.front_end("d");
    front_end.send(b"x", &[]);
    let connection = first.connected().await;
    let old = first.message().await;
    let mut second = holder.gateway().await;
    assert_eq!(first.events.next().await.unwrap_err(), ClientError::Replaced);
    assert_eq!(first.events.next().await.unwrap_err(), ClientError::Replaced, "the reason stays");
    assert!(first.client.done(answer(&old, "old", "old")).await.is_err());
    assert_eq!(second.inventory[0].front_end.as_ref().unwrap().connection, connection);
    let message = second.message().await;
    assert_eq!((message.number, &message.bytes), (old.number, &old.bytes));
    second.client.done(answer(&message, "new", "new")).await.unwrap();
    assert_eq!(front_end.receive_text(), "new");
}

#[tokio::test]
async fn state_and_hundreds_of_descriptors_survive_gateways() {
    let holder = TestHolder::with_limits(HolderLimits { devices_max: 1, kept_fds_max: 300 });
    let mut gateway = holder.gateway_with(&["d"]).await;
    let _front_end = holder.front_end("d");
    let connection = gateway.connected().await;
    let file = shared(new_file());
    let last = shared(new_file());
    let state = Bytes::from(vec![3; holder::STATE_BYTES_MAX]);
    let deposit = |keys: std::ops::Range<u64>| Deposit {
        device: "d".into(),
        connection,
        state: Some(state.clone()),
        keep: keys.map(|key| (key, if key == 299 { last.clone() } else { file.clone() })).collect(),
        drop: Vec::new(),
    };
    gateway.client.deposit(deposit(0..150)).await.unwrap();
    gateway.client.deposit(deposit(150..300)).await.unwrap();
    let refused = gateway.client.deposit(deposit(300..301)).await.unwrap_err();
    assert_eq!(refused, ClientError::Refused(HolderRefusal::TooManyKeptFds { count: 301, max: 300 }));
    for _ in 0..3 {
        drop(gateway);
        gateway = holder.gateway().await;
        let held = gateway.inventory[0].front_end.as_ref().unwrap();
        assert_eq!((held.connection, &held.state), (connection, &state));
        assert!(held.kept.iter().map(|(key, _)| *key).eq(0..300));
        let (file, last) = (inode(&*file), inode(&*last));
        assert!(held.kept.iter().all(|(key, fd)| inode(&**fd) == if *key == 299 { last } else { file }));
    }
}

#[tokio::test]
async fn calls_that_cannot_be_executed_are_refused_with_the_reason() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["d"]).await;
    let front_end = holder.front_end("d");
    let connection = gateway.connected().await;
    let client = gateway.client.clone();
    let refusal = |result: Result<(), ClientError>| match result {
        Err(ClientError::Refused(refusal)) => refusal,
        other => panic!("the call is refused, not {other:?}"),
    };
    let unknown = HolderRefusal::UnknownDevice("x".into());
    assert_eq!(refusal(client.remove("x").await), unknown);
    assert_eq!(refusal(client.deposit(Deposit { device: "x".into(), ..Deposit::default() }).await), unknown);
    assert_eq!(refusal(client.done(Done { device: "x".into(), ..Done::default() }).await), unknown);
    let message = || FrontEndReply { bytes: framed(b"x"), fds: Vec::new() };
    assert_eq!(refusal(client.send("x", 1, message()).await), unknown);
    let ended = HolderRefusal::ConnectionEnded { device: "d".into(), connection: 9 };
    assert_eq!(refusal(client.send("d", 9, message()).await), ended);
    let fds = FrontEndReply { fds: vec![shared(new_file()); 9], ..message() };
    let too_many = HolderRefusal::TooManyReplyFds { count: 9, max: 8 };
    assert_eq!(refusal(client.send("d", connection, fds).await), too_many);
    let fds = FrontEndReply { fds: vec![shared(new_file()); 254], ..message() };
    assert_eq!(refusal(client.send("d", connection, fds).await), HolderRefusal::TooManyCallFds(254));
    assert_eq!(
        refusal(client.send("d", connection, Default::default()).await),
        HolderRefusal::BadReplyLength(0)
    );
    let not_pending = HolderRefusal::NotPending { device: "d".into(), number: 1 };
    let done = |number| Done { device: "d".into(), connection, number, ..Done::default() };
    assert_eq!(refusal(client.done(done(1)).await), not_pending);
    front_end.send(b"x", &[]);
    gateway.message().await;
    client.done(done(1)).await.unwrap();
    assert_eq!(refusal(client.done(done(1)).await), not_pending, "it was answered");
    let too_long = Some(Bytes::from(vec![0; holder::STATE_BYTES_MAX + 1]));
    let refused =
        client.deposit(Deposit { device: "d".into(), connection, state: too_long, ..Deposit::default() });
    assert_eq!(refusal(refused.await), HolderRefusal::StateTooLong(holder::STATE_BYTES_MAX + 1));
    let add = |name: &str| client.add(name, &holder.socket(name), Framing::VHOST_USER);
    assert_eq!(refusal(add("d").await), HolderRefusal::DeviceExists("d".into()));
    assert_eq!(refusal(add("").await), HolderRefusal::BadName(String::new()));
    assert_eq!(refusal(add("a\nb").await), HolderRefusal::BadName("a\nb".into()));
    let bad = Framing { header_len: 2, ..Framing::VHOST_USER };
    assert!(matches!(refusal(client.add("e", &holder.socket("e"), bad).await), HolderRefusal::Framing(_)));
    for name in ["e", "f", "g"] {
        add(name).await.unwrap();
    }
    assert_eq!(refusal(add("h").await), HolderRefusal::TooManyDevices { max: 4 });
}

#[tokio::test]
async fn a_device_reserves_its_descriptors() {
    let holder = TestHolder::with_limits(HolderLimits { devices_max: 4, kept_fds_max: 1 << 40 });
    let gateway = holder.gateway().await;
    let refused = gateway.client.add("d", &holder.socket("d"), Framing::VHOST_USER).await;
    assert!(
        matches!(refused, Err(ClientError::Refused(HolderRefusal::TooFewDescriptors { .. }))),
        "{refused:?}"
    );
}

#[tokio::test]
async fn calls_are_executed_in_their_order_whether_their_answers_are_awaited_or_not() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["d"]).await;
    let front_end = holder.front_end("d");
    let connection = gateway.connected().await;
    let mut answers = Vec::new();
    for number in 0..1000u32 {
        let state = Some(Bytes::from(number.to_string()));
        let deposit = Deposit { device: "d".into(), connection, state, ..Deposit::default() };
        answers.push(gateway.client.deposit(deposit));
    }
    let last = answers.pop().unwrap();
    drop(answers);
    last.await.unwrap();
    drop(gateway);
    let gateway = holder.gateway().await;
    assert_eq!(gateway.inventory[0].front_end.as_ref().unwrap().state, "999");
    drop(front_end);
}

#[tokio::test]
async fn garbage_at_the_control_socket_disturbs_no_gateway() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["d"]).await;
    let front_end = holder.front_end("d");
    gateway.connected().await;
    let frame = |body: &[u8]| [&(body.len() as u32).to_le_bytes()[..], &[0; 4], body].concat();
    let hello = |min: u32, max: u32| {
        frame(&[&b"outboard-holder\0"[..], &min.to_le_bytes(), &max.to_le_bytes()].concat())
    };
    let _silent = UnixStream::connect(holder.control()).unwrap();
    for garbage in [&[0xff; 64][..], &frame(b"GET / HTTP/1.1"), &frame(&[]), &hello(2, 9)] {
        let mut stream = UnixStream::connect(holder.control()).unwrap();
        stream.write_all(garbage).unwrap();
        let mut answer = Vec::new();
        // The holder may end the connection before it has read everything.
        let _ = stream.read_to_end(&mut answer);
        if garbage == hello(2, 9) {
            assert_eq!(answer[24..], [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], "it is told the versions");
        } else {
            assert!(answer.is_empty());
        }
    }
    front_end.send(b"x", &[]);
    let message = gateway.message().await;
    gateway.client.done(answer(&message, "s", "r")).await.unwrap();
    // A gateway of the right version that sends garbage then loses its connection.
    for garbage in [frame(&[0xff; 30]), frame(&[]), [&[1, 0, 0, 0, 9, 0, 0, 0][..], &[0]].concat()] {
        let mut stream = UnixStream::connect(holder.control()).unwrap();
        stream.write_all(&hello(0, 1)).unwrap();
        stream.write_all(&garbage).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() >= 36, "it was welcome first");
    }
    assert_eq!(gateway.events.next().await.unwrap_err(), ClientError::Replaced);
    let mut gateway = holder.gateway().await;
    front_end.send(b"y", &[]);
    assert_eq!(gateway.message().await.bytes, framed(b"y"));
}

#[tokio::test]
async fn a_holder_that_does_not_exist_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control");
    let missing = HolderClient::connect(&path).await.unwrap_err();
    assert!(matches!(missing, ClientError::NotRunning { .. }), "{missing}");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let dead = HolderClient::connect(&path).await.unwrap_err();
    assert!(matches!(dead, ClientError::NotRunning { .. }), "{dead}");
}

#[tokio::test]
async fn a_gateway_can_stop_the_holder() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["d"]).await;
    let front_end = holder.front_end("d");
    gateway.connected().await;
    gateway.client.stop().await.unwrap();
    front_end.expect_end();
    assert!(matches!(gateway.events.next().await, Err(ClientError::Lost(_))));
    let dir = holder.stopped_by_gateway();
    assert!(!dir.path().join("d").exists() && !dir.path().join("holder/control").exists());
}
