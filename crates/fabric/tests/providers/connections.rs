//! Tests of connections, messages, and the loss of a peer.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fabric::{
    Access, CompletionQueue, Endpoint, EndpointAddress, EndpointQueues, FabricError, FabricEvent,
    GatherBytes, MemoryRegion, Operation, PostError, ProviderQuery, ReceiveQueue, Waitable, wait,
};

use crate::pair::{Pair, Side, Who, anywhere, info, library, provider};

/// The environment variable that tells a child process the address of its server.
const SERVER: &str = "OUTBOARD_TEST_FABRIC_SERVER";

#[test]
fn providers_are_listed_with_their_limits() {
    let library = library();
    assert!(library.version() >= (1, 14));
    let all = library.query(&ProviderQuery::default()).unwrap();
    let tcp =
        all.iter().find(|info| info.provider() == "tcp").expect("libfabric always has the provider tcp");
    assert!(tcp.max_msg_size() > 1 << 20 && tcp.inject_size() > 0 && tcp.transmit_depth() > 0, "{tcp:?}");
    assert!(tcp.receive_depth() > 0);
    eprintln!("{:?}", info(library, anywhere()).unwrap());
    let query = ProviderQuery {
        provider: Some("no-such".to_owned()),
        target: EndpointAddress::Any,
        shared_receive: false,
    };
    let error = library.query(&query).unwrap_err();
    assert!(matches!(error, FabricError::NoProvider { .. }), "{error}");
}

#[test]
fn messages_arrive_in_both_directions() {
    let mut pair = Pair::new();
    let (server, client) = pair.connect();
    let ours = pair.server.region(8192, Access::Local);
    let theirs = pair.client.region(8192, Access::Local);
    for (from, from_region, to, to_region, to_who) in
        [(&client, &theirs, &server, &ours, Who::Server), (&server, &ours, &client, &theirs, Who::Client)]
    {
        assert!(from_region.arena().unwrap().copy_in(0, b"over the fabric"));
        to.receive(to_region.slice(4096, 4096).unwrap(), 7).unwrap();
        from.send(from_region.slice(0, 15).unwrap(), 8).unwrap();
        let received = pair.completion(to_who);
        assert_eq!((received.operation, received.token, received.len), (Operation::Receive, 7, 15));
        assert!(received.result.is_ok());
        let mut text = [0; 15];
        assert!(to_region.arena().unwrap().copy_out(4096, &mut text));
        assert_eq!(&text, b"over the fabric");
        let sender = if to_who == Who::Server { Who::Client } else { Who::Server };
        assert_eq!(pair.completion(sender).operation, Operation::Send);
    }
    server.receive(ours.slice(0, 64).unwrap(), 9).unwrap();
    let small = vec![5; pair.to_server.inject_size().min(64)];
    client.inject(&small).unwrap();
    let received = pair.completion(Who::Server);
    assert_eq!((received.token, received.len), (9, small.len()));
    let long = vec![0; pair.to_server.inject_size() + 1];
    assert!(matches!(client.inject(&long), Err(PostError::Failed(FabricError::TooLong { .. }))));
}

#[test]
fn receives_beyond_the_queue_depth_are_refused() {
    let mut pair = Pair::new();
    let (server, _client) = pair.connect();
    let region = pair.server.region(4096, Access::Local);
    let posted = (0..1000).take_while(|i| match server.receive(region.slice(0, 16).unwrap(), *i) {
        Ok(()) => true,
        Err(PostError::Full) => false,
        Err(e) => panic!("{e}"),
    });
    assert_eq!(posted.count(), 64);
}

/// The endpoint could fill a queue of this depth with receives alone.
#[test]
fn a_completion_queue_has_room_for_sends_even_if_receives_could_fill_it() {
    let mut pair = Pair::new();
    let completions = CompletionQueue::open(&pair.client.domain, pair.to_server.receive_depth()).unwrap();
    let queues = EndpointQueues::new(&pair.client.events, &completions);
    let client = Endpoint::connecting(&pair.to_server, queues, 2).unwrap();
    client.establish(b"").unwrap();
    let server = Endpoint::answer(pair.request(), pair.server.queues(), 1).unwrap();
    let (ours, theirs) = (pair.server.region(4096, Access::Local), pair.client.region(4096, Access::Local));
    server.receive(ours.slice(0, 16).unwrap(), 7).unwrap();
    server.establish(b"").unwrap();
    for who in [Who::Server, Who::Client] {
        assert!(matches!(pair.event(who), FabricEvent::Connected { .. }));
    }
    client.send(theirs.slice(0, 16).unwrap(), 8).unwrap();
    assert_eq!(pair.completion(Who::Server).token, 7);
    let sent = pair.until("completion of the send", |_| {
        let mut out = Vec::new();
        completions.poll(&mut out).unwrap();
        out.pop()
    });
    assert!(sent.token == 8 && sent.result.is_ok(), "{sent:?}");
}

/// Queues can be created at every offset of the process's memory map of the device. siw has a
/// defect at one page of the map. So the test opens queues of two kinds, at different offsets in
/// each round.
#[test]
fn queues_can_be_opened_at_any_offset_of_the_device_memory_map() {
    let pair = Pair::with_shared_receives(true);
    let (info, completions) = (pair.server.domain.info(), &pair.server.completions);
    for others in 0..16 {
        let open = |_| CompletionQueue::open(&pair.server.domain, 64);
        let others: Result<Vec<_>, _> = (0..others).map(open).collect();
        let queues: Result<Vec<_>, _> =
            (0..40).map(|token| ReceiveQueue::open(info, completions, token)).collect();
        assert!(others.is_ok() && queues.is_ok(), "{:?} {:?}", others.err(), queues.err());
    }
}

/// Both sides send as many messages as the queues accept before either side polls its completions.
#[test]
fn a_full_queue_refuses_messages_instead_of_overrunning() {
    let mut pair = Pair::new();
    let (server, client) = pair.connect();
    let (ours, theirs) = (pair.server.region(4096, Access::Local), pair.client.region(4096, Access::Local));
    for i in 0..40 {
        server.receive(ours.slice(0, 16).unwrap(), i).unwrap();
        client.receive(theirs.slice(0, 16).unwrap(), i).unwrap();
    }
    let injected = |from: &Endpoint| {
        let posted = (0..40).take_while(|_| match from.inject(b"!") {
            Ok(()) => true,
            Err(PostError::Full) => false,
            Err(e) => panic!("{e}"),
        });
        posted.count()
    };
    assert_eq!((injected(&server), injected(&client)), (24, 24), "the receives occupy 40 of 64 entries");
    std::thread::sleep(Duration::from_millis(100));
    for (from, to) in [(&server, Who::Client), (&client, Who::Server)] {
        for i in 0..40 {
            if i >= 24 {
                pair.until("room", |_| from.inject(b"!").is_ok().then_some(()));
            }
            let received = pair.completion(to);
            assert!(received.result.is_ok() && received.token == i, "{received:?}");
        }
    }
}

#[test]
fn a_refused_peer_receives_the_reason_for_the_refusal() {
    let mut pair = Pair::new();
    let endpoint = pair.client_endpoint(5);
    endpoint.establish(b"").unwrap();
    pair.request().refuse(b"full").unwrap();
    match pair.event(Who::Client) {
        FabricEvent::Failed { endpoint: 5, error, data } => {
            assert!(data.starts_with(b"full"), "{error} {data:?}")
        }
        other => panic!("{other:?} instead of a failure"),
    }
    let dropped = pair.client_endpoint(6);
    dropped.establish(b"").unwrap();
    drop(pair.request());
    assert!(matches!(pair.event(Who::Client), FabricEvent::Failed { endpoint: 6, .. }));
    let too_long = vec![0; endpoint.max_private_data().unwrap() + 1];
    let another = pair.client_endpoint(7);
    assert!(matches!(another.establish(&too_long), Err(FabricError::PrivateData { .. })));
    another.establish(b"").unwrap();
    assert!(matches!(pair.request().refuse(&too_long), Err(FabricError::PrivateData { .. })));
    match pair.event(Who::Client) {
        FabricEvent::Failed { endpoint: 7, .. } => {}
        other => panic!("{other:?} instead of a refusal without data"),
    }
}

#[test]
fn an_endpoint_without_a_peer_address_is_not_created() {
    let library = library();
    let listen = info(library, anywhere()).unwrap();
    let side = Side::open(info(library, anywhere()).unwrap());
    let endpoint = Endpoint::connecting(&listen, side.queues(), 3);
    assert!(matches!(endpoint.err(), Some(FabricError::NoDestination)));
}

#[test]
fn only_receives_can_be_posted_before_the_connection_is_established() {
    let mut pair = Pair::new();
    let (ours, theirs) = (pair.server.region(4096, Access::Remote), pair.client.region(4096, Access::Local));
    let all_refused = |endpoint: &Endpoint, local: &MemoryRegion, remote: &MemoryRegion| {
        let (slice, there) = (local.slice(0, 16).unwrap(), remote.remote().slice(0, 16).unwrap());
        let parts = || vec![GatherBytes { bytes: Bytes::from_static(b"x"), region: None }];
        let posts = [
            endpoint.inject(b"x"),
            endpoint.send(slice, 1),
            endpoint.read(slice, there, 1),
            endpoint.write(slice, there, 1),
            endpoint.send_parts(&mut parts(), 1, true),
            endpoint.write_parts(&mut parts(), remote.remote().slice(0, 1).unwrap(), 1, true),
        ];
        posts.iter().all(|post| matches!(post, Err(PostError::Failed(FabricError::NotConnected))))
    };
    let client = pair.client_endpoint(2);
    assert!(all_refused(&client, &theirs, &ours));
    client.receive(theirs.slice(0, 16).unwrap(), 1).unwrap();
    client.establish(b"").unwrap();
    assert!(all_refused(&client, &theirs, &ours));
    let server = Endpoint::answer(pair.request(), pair.server.queues(), 1).unwrap();
    assert!(all_refused(&server, &ours, &theirs));
    server.establish(b"").unwrap();
    assert!(matches!(pair.event(Who::Server), FabricEvent::Connected { endpoint: 1, .. }));
    server.inject(b"!").unwrap();
    assert_eq!(pair.completion(Who::Client).token, 1);
}

#[test]
fn memory_registered_in_another_domain_is_refused() {
    let mut pair = Pair::new();
    let (server, _client) = pair.connect();
    let theirs = pair.client.region(4096, Access::Local);
    let posted = server.receive(theirs.slice(0, 16).unwrap(), 1);
    assert!(matches!(posted, Err(PostError::Failed(FabricError::OtherDomain))), "{posted:?}");
    // The refused receive occupies no entry of the queue: 64 receives still fit.
    let ours = pair.server.region(4096, Access::Local);
    assert!((0..64).all(|i| server.receive(ours.slice(0, 16).unwrap(), i).is_ok()));
}

#[test]
fn connecting_to_a_port_without_a_listener_fails() {
    let library = library();
    let port = std::net::TcpListener::bind((provider().1, 0)).unwrap().local_addr().unwrap();
    let to = info(library, EndpointAddress::Connect(port)).unwrap();
    let side = Side::open(info(library, EndpointAddress::Connect(port)).unwrap());
    let endpoint = Endpoint::connecting(&to, side.queues(), 3).unwrap();
    match endpoint.establish(b"") {
        Err(e) => assert!(matches!(e, FabricError::Call { .. }), "{e}"),
        Ok(()) => {
            let event = await_event(&side);
            assert!(
                matches!(event, FabricEvent::Failed { endpoint: 3, .. } | FabricEvent::SomeFailed { .. }),
                "{event:?}"
            );
        }
    }
}

/// Sleeps until the side has a connection event, and returns the event.
fn await_event(side: &Side) -> FabricEvent {
    let deadline = Instant::now() + crate::pair::PATIENCE;
    loop {
        let mut completions = Vec::new();
        side.completions.poll(&mut completions).unwrap();
        if let Some(event) = side.events.read().unwrap() {
            return event;
        }
        assert!(Instant::now() < deadline, "no event; completed: {completions:?}");
        let queues: [&dyn Waitable; 2] = [&side.events, &side.completions];
        wait(side.domain.fabric(), &queues, &[], Some(Duration::from_secs(1))).unwrap();
    }
}

#[test]
fn closing_an_endpoint_closes_the_connection_at_the_peer() {
    let mut pair = Pair::new();
    let (server, client) = pair.connect();
    let region = pair.client.region(4096, Access::Local);
    client.receive(region.slice(0, 16).unwrap(), 1).unwrap();
    drop(server);
    assert!(matches!(pair.event(Who::Client), FabricEvent::Closed { endpoint: 2 }));
    // An operation that is posted now may take long to fail. Closing the endpoint ends it.
    let posted = client.send(region.slice(0, 16).unwrap(), 2);
    drop(client);
    pair.drive_until_idle();
    drop(posted);
    pair.connect();
}

#[test]
fn killing_a_peer_closes_only_its_own_connection() {
    let mut pair = Pair::new();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "connections::child_process_to_be_killed", "--nocapture"])
        .env(SERVER, pair.listener.address().to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let request = pair.request();
    let endpoint = Endpoint::answer(request, pair.server.queues(), 9).unwrap();
    endpoint.establish(b"").unwrap();
    assert!(matches!(pair.event(Who::Server), FabricEvent::Connected { endpoint: 9, .. }));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(matches!(pair.event(Who::Server), FabricEvent::Closed { endpoint: 9 }));
    pair.connect();
}

/// Not a test: the process that [`killing_a_peer_closes_only_its_own_connection`] kills.
#[test]
#[ignore = "runs as a child process of another test"]
fn child_process_to_be_killed() {
    let address = std::env::var(SERVER).expect("the parent sets the address");
    let target = EndpointAddress::Connect(address.parse().unwrap());
    let library = library();
    let to = info(library, target).unwrap();
    let side = Side::open(info(library, target).unwrap());
    let endpoint = Endpoint::connecting(&to, side.queues(), 0).unwrap();
    endpoint.establish(b"").unwrap();
    assert!(matches!(await_event(&side), FabricEvent::Connected { .. }));
    std::thread::sleep(2 * crate::pair::PATIENCE);
}

#[test]
fn two_hundred_connections_leak_no_descriptors() {
    let mut pair = Pair::new();
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    // Concurrent tests of this process open at most a hundred descriptors of their own.
    drop(pair.connect());
    let before = open();
    for _ in 0..200 {
        let (server, client) = pair.connect();
        drop(client);
        assert!(matches!(pair.event(Who::Server), FabricEvent::Closed { endpoint: 1 }));
        drop(server);
        pair.happened.clear();
    }
    let after = open();
    assert!(after < before + 150, "{before} descriptors before, {after} after");
}

#[test]
fn an_idle_side_sleeps_until_a_message_arrives() {
    let mut pair = Pair::new();
    let (server, client) = pair.connect();
    let region = pair.server.region(4096, Access::Local);
    server.receive(region.slice(0, 16).unwrap(), 1).unwrap();
    pair.drive_until_idle();
    let side = &pair.server;
    let queues: [&dyn Waitable; 2] = [&side.events, &side.completions];
    let fabric = side.domain.fabric();
    assert!(fabric.may_sleep(&queues).unwrap());
    let asleep = |limit: Duration| {
        let started = Instant::now();
        wait(fabric, &queues, &[], Some(limit)).unwrap();
        started.elapsed()
    };
    let limit = Duration::from_millis(100);
    assert!(asleep(limit) >= limit, "without events, the side sleeps for the whole limit");
    let sender = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        client.inject(b"!").unwrap();
        client
    });
    let mut done = Vec::new();
    let deadline = Instant::now() + crate::pair::PATIENCE;
    while done.is_empty() && Instant::now() < deadline {
        asleep(crate::pair::PATIENCE);
        side.completions.poll(&mut done).unwrap();
    }
    assert_eq!(done.len(), 1);
    drop(sender.join().unwrap());
}
