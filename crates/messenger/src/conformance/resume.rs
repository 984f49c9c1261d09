//! Checks that failures of transports do not affect the users of a connection.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use base::block::Payload;
use rand::Rng;
use tokio::time::{Instant, sleep};

use super::rig::{Buffer, Rig, message, next_message, pool, random_bytes};
use crate::{Connection, ConnectionEvent, Ends, Incoming, Message, MessengerError};

/// Number of messages in each direction in
/// [`messages_arrive_exactly_once_across_broken_transports`].
const COUNT: u32 = 400;

/// Messages in both directions, pulls and pushes continue while transports break repeatedly at
/// random moments. Every message arrives exactly once and in order, and every pull and push
/// completes with the right data.
pub async fn messages_arrive_exactly_once_across_broken_transports(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, mut from_server), (server, mut from_client)) = rig.pair(&mut *listener).await;
    let done = Cell::new(false);
    let interrupted = Cell::new(0);
    let cut = async {
        let mut random = rig.random();
        let (mut cuts, mut pause) = (0, 20);
        while !done.get() {
            sleep(Duration::from_millis(pause)).await;
            cuts += (rig.cut)();
            pause = random.random_range(1..300);
        }
        cuts
    };
    let work = async {
        tokio::join!(
            biased;
            send_numbered(&*client),
            send_numbered(&*server),
            receive_numbered(&mut *from_server, &interrupted),
            receive_numbered(&mut *from_client, &interrupted),
            transfers(rig, &client, &server),
        );
        done.set(true);
    };
    let (cuts, ()) = tokio::join!(biased; cut, work);
    assert!(cuts > 0, "no transport was cut");
    assert!(interrupted.get() > 0, "no side reported an interruption");
}

async fn send_numbered(connection: &dyn Connection) {
    for i in 0..COUNT {
        let data = vec![i as u8; (i as usize * 37) % 9000];
        let payload = if data.is_empty() { Payload::default() } else { Payload::compute(5, data.into()) };
        let header = i.to_le_bytes().to_vec().into();
        connection.send(Message { header, payload }).await.expect("sent");
        if i % 8 == 0 {
            sleep(Duration::from_millis(10)).await;
        }
    }
}

async fn receive_numbered(incoming: &mut dyn Incoming, interrupted: &Cell<u32>) {
    let mut expected = 0;
    while expected < COUNT {
        match incoming.next().await {
            ConnectionEvent::Message(message) => {
                assert_eq!(message.header.as_ref(), expected.to_le_bytes(), "in order, exactly once");
                assert!(message.payload.data().iter().all(|b| *b == expected as u8));
                expected += 1;
            }
            ConnectionEvent::Interrupted => interrupted.set(interrupted.get() + 1),
            ConnectionEvent::Resumed => {}
            ConnectionEvent::Lost(why) => panic!("connection lost after {expected} messages: {why}"),
        }
    }
}

async fn transfers(rig: &Rig, client: &Arc<dyn Connection>, server: &Arc<dyn Connection>) {
    let (pool, mut random) = (pool(), rig.random());
    for _ in 0..12 {
        let data = {
            let len = random.random_range(1..1_500_000);
            random_bytes(&mut random, len)
        };
        let in_memory = random.random_bool(0.5);
        let buffer = if in_memory { Buffer::in_memory(9, &data) } else { Buffer::new(9, &data) };
        let source = client.offer_source(buffer).expect("offered");
        let dest = pool.alloc(data.len()).await.expect("a buffer");
        let pulled = server.bulk_read(&source.descriptor, 0, dest, rig.patience).await.expect("pulled");
        assert!(pulled.buf[..] == data[..], "a pull of {} bytes", data.len());
        let room = Buffer::new(9, &vec![0; data.len()]);
        let sink = server.offer_sink(Arc::clone(&room) as _, 9).expect("offered");
        let payload = Payload::compute(9, data.clone());
        client.bulk_write(&sink.descriptor, 0, payload, rig.patience).await.expect("pushed");
        let begin = Instant::now();
        while room.filled() < data.len() as u64 {
            assert!(begin.elapsed() < rig.patience, "a push of {} bytes does not arrive", data.len());
            sleep(Duration::from_millis(1)).await;
        }
        assert!(room.content() == data[..], "a push of {} bytes", data.len());
    }
}

/// All data that was pushed to a client has arrived when the next message arrives, even while
/// transports break. The pushes continue until at least one transport has been cut: [`Rig::cut`]
/// cuts nothing while a link is not used.
pub async fn pushes_survive_broken_transports(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, mut from_server), (server, _in)) = rig.pair(&mut *listener).await;
    let mut random = rig.random();
    let (done, cuts) = (Cell::new(false), Cell::new(0));
    let (mut round, begin) = (0, Instant::now());
    let cut = async {
        let mut random = rig.random();
        while !done.get() {
            sleep(Duration::from_millis(random.random_range(1..300))).await;
            cuts.set(cuts.get() + (rig.cut)());
        }
    };
    let work = async {
        while round < 20 || begin.elapsed() < Duration::from_secs(1) || cuts.get() == 0 {
            assert!(cuts.get() > 0 || begin.elapsed() < rig.patience, "no transport was cut");
            round += 1;
            let len = random.random_range(1..1_500_000);
            let data = random_bytes(&mut random, len);
            let room = Buffer::new(0, &vec![0; len]);
            let sink = client.offer_sink(Arc::clone(&room) as _, 0).expect("offered");
            let pushed =
                server.bulk_write(&sink.descriptor, 0, Payload::compute(0, data.clone()), rig.patience);
            pushed.await.expect("pushed");
            server.send(message(b"pushed")).await.expect("sent");
            assert_eq!(next_message(&mut *from_server).await.header.as_ref(), b"pushed");
            sink.finish();
            assert!(room.content() == data[..], "a push of {len} bytes");
        }
        done.set(true);
    };
    tokio::join!(biased; cut, work);
}

/// A silent peer is detected, and the connection resumes when the peer is back. [`Rig::freeze`]
/// makes the peer silent.
pub async fn a_silent_peer_is_detected_and_its_connection_resumes(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, mut from_server), (_server, mut from_client)) = rig.pair(&mut *listener).await;
    client.send(message(b"before")).await.expect("sent");
    (rig.freeze)(true);
    assert!(matches!(from_server.next().await, ConnectionEvent::Interrupted), "the silence was not detected");
    client.send(message(b"during")).await.expect("queued");
    (rig.freeze)(false);
    assert!(matches!(from_server.next().await, ConnectionEvent::Resumed), "the connection is not resumed");
    for expected in [b"before".as_slice(), b"during"] {
        assert_eq!(next_message(&mut *from_client).await.header.as_ref(), expected);
    }
}

/// Heartbeats keep an idle connection on its transport, and also a connection that is busy with
/// bulk data.
pub async fn heartbeats_keep_idle_and_busy_connections_on_their_transport(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, mut from_server), (server, _from_client)) = rig.pair(&mut *listener).await;
    let idle = tokio::time::timeout(rig.grace * 3, from_server.next()).await;
    assert!(idle.is_err(), "an idle connection reported {idle:?}");
    let pool = pool();
    let source = client.offer_source(Buffer::new(0, &vec![3; 8 << 20])).expect("offered");
    let began = tokio::time::Instant::now();
    let mut pulls = 0;
    while began.elapsed() < rig.grace * 2 || pulls < 3 {
        let dest = pool.alloc(8 << 20).await.expect("a buffer");
        server.bulk_read(&source.descriptor, 0, dest, rig.patience).await.expect("pulled");
        pulls += 1;
    }
    server.send(message(b"end")).await.expect("sent");
    let event = from_server.next().await;
    assert!(matches!(event, ConnectionEvent::Message(_)), "a busy connection reported {event:?}");
}

/// If a server no longer knows a connection, the connection ends on the client's side.
pub async fn a_server_restart_ends_the_connections_of_its_clients(rig: &Rig) {
    let mut listener = rig.listen().await;
    let endpoint = listener.endpoint();
    let ((client, mut from_server), old_server) = rig.pair(&mut *listener).await;
    drop(listener);
    // The listener's task ends when the runtime polls it again.
    sleep(Duration::from_millis(50)).await;
    let _new = rig.stack.listen(&endpoint).await.expect("the address is free again");
    assert!((rig.cut)() > 0);
    let why = lost(&mut *from_server).await;
    assert!(matches!(why, MessengerError::ConnectionLost(_)), "{why}");
    assert_eq!(client.send(message(b"late")).await, Err(why.clone()));
    let pull = client.offer_source(Buffer::new(0, &[1])).map(|_| ());
    assert_eq!(pull, Err(why), "every call returns the reason of the loss");
    let (_, mut from_client) = old_server;
    lost(&mut *from_client).await;
}

/// A closing connection first sends its queued messages. The peer receives these messages, and then
/// the end of the connection. Later calls fail.
pub async fn closing_a_connection_first_sends_its_queued_messages(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, mut from_server), (server, mut from_client)) = rig.pair(&mut *listener).await;
    for i in 0..50u8 {
        client.send(message(&[i])).await.expect("sent");
    }
    client.close().await;
    for i in 0..50u8 {
        assert_eq!(next_message(&mut *from_client).await.header.as_ref(), [i]);
    }
    lost(&mut *from_client).await;
    lost(&mut *from_server).await;
    assert!(client.send(message(b"late")).await.is_err());
    assert!(server.send(message(b"late")).await.is_err());
    let ((client, from_server), (_server, mut from_client)) = rig.pair(&mut *listener).await;
    client.send(message(b"last")).await.expect("sent");
    drop((client, from_server));
    assert_eq!(next_message(&mut *from_client).await.header.as_ref(), b"last");
    lost(&mut *from_client).await;
}

/// If a connection is lost during transfers, the transfers fail at once, and all buffers return to
/// their pool.
pub async fn a_lost_connection_fails_its_transfers(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, from_server), (server, mut from_client)) = rig.pair(&mut *listener).await;
    let pool = pool();
    // Each pull has received a chunk when the connection is closed, and no other chunk is ready to
    // be sent.
    let slow = Arc::new(Buffer::slow(0, &vec![1; 4 << 20], Duration::from_millis(500)));
    let source = client.offer_source(slow).expect("offered");
    let pulls = (0..4).map(|_| async {
        let dest = pool.alloc(4 << 20).await.expect("a buffer");
        server.bulk_read(&source.descriptor, 0, dest, rig.patience).await.map(|_| ())
    });
    let pulls = futures_of(pulls);
    let end = async {
        sleep(Duration::from_millis(750)).await;
        drop((client, from_server));
    };
    let (results, ()) = tokio::join!(biased; pulls, end);
    for result in results {
        assert!(matches!(result, Err(MessengerError::ConnectionLost(_))), "{result:?}");
    }
    lost(&mut *from_client).await;
    assert_eq!(pool.free_bytes().0, 64 << 20, "every buffer returned to the pool");
}

/// Waits for all `futures`. Returns their results in order.
async fn futures_of<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.map(Box::pin).collect();
    let mut results: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    std::future::poll_fn(|cx| {
        for (future, result) in futures.iter_mut().zip(&mut results) {
            if result.is_none()
                && let std::task::Poll::Ready(done) = future.as_mut().poll(cx)
            {
                *result = Some(done);
            }
        }
        if results.iter().all(Option::is_some) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    results.into_iter().flatten().collect()
}

/// A thousand connections (150 on a slow rig), of which ten exist at a time, leave no task in the
/// runtime.
pub async fn a_thousand_closed_connections_leave_no_task_behind(rig: &Rig) {
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let mut listener = rig.listen().await;
    let before = tasks();
    for _ in 0..if rig.slow { 15 } else { 100 } {
        let mut ends: Vec<(Ends, Ends)> = Vec::new();
        for i in 0..10u8 {
            let pair = rig.pair(&mut *listener).await;
            if i % 2 == 0 {
                pair.0.0.send(message(&[i])).await.expect("sent");
            }
            ends.push(pair);
        }
        for (i, (client, server)) in ends.into_iter().enumerate() {
            match i % 3 {
                0 => client.0.close().await,
                1 => server.0.close().await,
                _ => {}
            }
        }
    }
    for _ in 0..200 {
        if tasks() <= before {
            return;
        }
        sleep(Duration::from_millis(20)).await;
    }
    panic!("the number of tasks grew from {} to {}", before, tasks());
}

async fn lost(incoming: &mut dyn Incoming) -> MessengerError {
    loop {
        if let ConnectionEvent::Lost(why) = incoming.next().await {
            return why;
        }
    }
}
