//! Checks of bulk transfers: contents, offers, deadlines.

use std::sync::Arc;
use std::time::Duration;

use base::BoxFuture;
use base::block::{Payload, verify_pieces};
use futures::stream::{FuturesUnordered, StreamExt};
use rand::Rng;
use wire::{BulkDescriptor, BulkDirection, BulkOwner, MemoryKind, RemoteMemory};

use super::rig::{Buffer, Rig, message, next_message, pool, random_bytes};
use crate::{BulkRegion, BulkSource, Ends, Message, MessengerError};

const LONG: Duration = Duration::from_secs(60);

/// Sizes of transfers around the boundaries of pieces and chunks.
const SIZES: [usize; 13] =
    [0, 1, 7, 4095, 4096, 4097, 65_536, 262_143, 262_144, 262_145, 600_001, 2 << 20, (3 << 20) + 5];

/// Pulls and pushes of many sizes and phases deliver the right bytes and checksums. A
/// push arrives before the message that is sent after it.
pub async fn bulk_transfers_deliver_the_right_bytes(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, mut from_server), (server, _from_client)) = rig.pair(&mut *listener).await;
    let (pool, mut random) = (pool(), rig.random());
    for size in SIZES.into_iter().filter(|size| !rig.slow || *size < 1 << 20) {
        for block_offset in [0, 1, 4095, random.random_range(0..4096)] {
            let data = random_bytes(&mut random, size);
            for buffer in [Buffer::new(block_offset, &data), Buffer::in_memory(block_offset, &data)] {
                let source = client.offer_source(buffer).expect("offered");
                let dest = pool.alloc(size).await.expect("a buffer");
                let pulled = server.bulk_read(&source.descriptor, 0, dest, LONG).await;
                let pulled =
                    pulled.unwrap_or_else(|e| panic!("{size} bytes at block_offset {block_offset}: {e}"));
                assert!(pulled.buf[..] == data[..], "{size} bytes at block_offset {block_offset}");
                verify_pieces(block_offset, &data, &pulled.checksums).expect("right checksums");
                source.finish();
            }

            for likely in [size, random.random_range(0..=size)] {
                let room = Buffer::partly_exposed(block_offset, size, likely);
                let sink = client.offer_sink(Arc::clone(&room) as _, block_offset as u16).expect("offered");
                let exposed = sink.descriptor.remote.as_ref().map(|remote| remote.segments[0].len);
                assert!(exposed.is_none_or(|exposed| exposed == likely as u64), "{exposed:?} of {likely}");
                let payload = Payload::compute(block_offset, data.clone());
                server.bulk_write(&sink.descriptor, 0, payload, LONG).await.expect("pushed");
                server.send(message(b"pushed")).await.expect("sent");
                assert_eq!(next_message(&mut *from_server).await.header.as_ref(), b"pushed");
                sink.finish();
                let what = format!("{size} bytes at block_offset {block_offset}, {likely} likely");
                assert!(room.content() == data[..], "{what}");
            }
        }
    }
    ranges_of_one_offer(&(client, from_server), &server, &mut random).await;
}

/// The memory of sent data becomes free, even if no later data is sent. The data may be a small part
/// of a large buffer.
pub async fn sent_data_does_not_keep_its_memory(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, mut from_server), (server, _from_client)) = rig.pair(&mut *listener).await;
    let (pool, all) = (pool(), 1 << 20);
    let free = pool.free_bytes().0;
    let payload = async |len| {
        let buf = pool.alloc(all).await.expect("a buffer").freeze();
        Payload::compute(0, buf.slice(all - len..))
    };
    let freed = async |what: &str| {
        let freed = async {
            while pool.free_bytes().0 != free {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        assert!(tokio::time::timeout(LONG, freed).await.is_ok(), "{what}: the memory is kept");
    };
    for len in [1, 600, 5000, 20_000, 300_000] {
        for likely in [0, len] {
            let room = Buffer::partly_exposed(0, len, likely);
            let sink = client.offer_sink(Arc::clone(&room) as _, 0).expect("offered");
            server.bulk_write(&sink.descriptor, 0, payload(len).await, LONG).await.expect("pushed");
            freed(&format!("a push of {len} bytes, {likely} of them likely")).await;
            sink.finish();
        }
    }
    for len in [1, 600, 4000] {
        let header = bytes::Bytes::from_static(b"data");
        server.send(Message { header, payload: payload(len).await }).await.expect("sent");
        assert_eq!(next_message(&mut *from_server).await.payload.len(), len);
        freed(&format!("a message with {len} bytes")).await;
    }
}

async fn ranges_of_one_offer(
    client: &Ends,
    server: &Arc<dyn crate::Connection>,
    random: &mut rand::rngs::StdRng,
) {
    let (size, block_offset) = (1_000_000, 100);
    let data = random_bytes(random, size);
    for buffer in [Buffer::new(block_offset, &data), Buffer::in_memory(block_offset, &data)] {
        ranges_of(client, server, buffer, &data, random).await;
    }
}

async fn ranges_of(
    client: &Ends,
    server: &Arc<dyn crate::Connection>,
    buffer: Arc<Buffer>,
    data: &[u8],
    random: &mut rand::rngs::StdRng,
) {
    let (pool, size, block_offset) = (pool(), data.len(), buffer.block_offset());
    let source = client.0.offer_source(buffer).expect("offered");
    for _ in 0..20 {
        let start = 4096 * random.random_range(1..200) - block_offset as usize;
        let len = random.random_range(1..size - start);
        let dest = pool.alloc(len).await.expect("a buffer");
        let pulled = server.bulk_read(&source.descriptor, start as u64, dest, LONG).await.expect("pulled");
        assert!(pulled.buf[..] == data[start..start + len], "{start}+{len}");
    }
    let dest = pool.alloc(10).await.expect("a buffer");
    let refused = server.bulk_read(&source.descriptor, 1, dest, LONG).await;
    assert!(matches!(refused, Err(MessengerError::BulkRefused(_))), "{refused:?}");
}

/// Many pulls and pushes at a time complete with the right data, and so do the messages between
/// them.
pub async fn concurrent_transfers_and_messages_all_complete(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, mut from_server), (server, _in)) = rig.pair(&mut *listener).await;
    let (pool, mut random) = (pool(), rig.random());
    let data = random_bytes(&mut random, 1_500_000);
    let mut tasks = tokio::task::JoinSet::new();
    let count = if rig.slow { 6 } else { 24 };
    for i in 0..count {
        let buffer = if i % 2 == 0 { Buffer::new(i * 17, &data) } else { Buffer::in_memory(i * 17, &data) };
        let source = client.offer_source(buffer).expect("offered");
        let room = Buffer::new(i, &vec![0; data.len()]);
        let sink = client.offer_sink(Arc::clone(&room) as _, i as u16).expect("offered");
        let (server, pool, data) = (Arc::clone(&server), pool.clone(), data.clone());
        tasks.spawn(async move {
            let dest = pool.alloc(data.len()).await.expect("a buffer");
            let payload = Payload::compute(i, data.clone());
            let (pulled, pushed) = tokio::join!(
                biased;
                server.bulk_read(&source.descriptor, 0, dest, LONG),
                server.bulk_write(&sink.descriptor, 0, payload, LONG)
            );
            pushed.expect("pushed");
            assert!(pulled.expect("pulled").buf[..] == data[..]);
            server.send(message(b"done")).await.expect("sent");
            drop(source);
            (sink, room)
        });
    }
    for _ in 0..count {
        assert_eq!(next_message(&mut *from_server).await.header.as_ref(), b"done");
    }
    while let Some(done) = tasks.join_next().await {
        let (sink, room) = done.expect("the transfers complete");
        sink.finish();
        assert!(room.content() == data[..]);
    }
}

/// A source that returns its first chunk, and never returns another one.
struct Stuck(usize);

impl BulkSource for Stuck {
    fn len(&self) -> u64 {
        self.0 as u64
    }

    fn block_offset(&self) -> u64 {
        0
    }

    fn read(&self, offset: u64, len: usize) -> BoxFuture<'_, Result<Payload, String>> {
        match offset {
            0 => Box::pin(async move { Ok(Payload::compute(0, vec![1; len].into())) }),
            _ => Box::pin(std::future::pending()),
        }
    }
}

/// Large transfers that begin together finish one after the other: when the first ends, the last
/// has sent one chunk at most. A small transfer passes the large ones. A source that stalls while
/// its transfer is active does not block other transfers.
pub async fn large_transfers_finish_one_after_the_other(rig: &Rig) {
    const LARGE: usize = 8;
    let mut listener = rig.listen().await;
    let ((client, mut from_server), (server, _in)) = rig.pair(&mut *listener).await;
    let pool = pool();
    let data = vec![3; if rig.slow { 5 << 18 } else { 4 << 20 }];
    let stuck = client.offer_source(Arc::new(Stuck(data.len()))).expect("offered");
    let waits = |_| async {
        let dest = pool.alloc(data.len()).await.expect("a buffer");
        server.bulk_read(&stuck.descriptor, 0, dest, LONG * 3).await.map(drop)
    };
    let stuck_ones = futures::future::join_all((0..4).map(waits));
    let (ends, mut ended) = tokio::sync::mpsc::unbounded_channel();
    let buffers: Vec<_> = (0..LARGE).map(|_| Buffer::new(0, &data)).collect();
    let source = |buffer: &Arc<Buffer>| client.offer_source(Arc::clone(buffer) as _).expect("offered");
    let sources: Vec<_> = buffers.iter().map(source).collect();
    let small = source(&Buffer::new(0, &data[..5000]));
    let (ends, server_, pool_, last) = (&ends, &server, &pool, &buffers[LARGE - 1]);
    let pull = |i: usize, from: &BulkDescriptor, len: usize| {
        let from = from.clone();
        async move {
            let dest = pool_.alloc(len).await.expect("a buffer");
            let pulled = server_.bulk_read(&from, 0, dest, LONG).await.expect("pulled");
            assert!(pulled.buf.iter().all(|b| *b == 3));
            ends.send((i, last.taken())).expect("the receiver exists");
        }
    };
    let mut pulls: Vec<_> =
        sources.iter().enumerate().map(|(i, s)| pull(i, &s.descriptor, data.len())).collect();
    pulls.push(pull(LARGE, &small.descriptor, 5000));
    tokio::select! {
        biased;
        _ = stuck_ones => panic!("a pull from a stuck source ended"),
        _ = futures::future::join_all(pulls) => {}
    }
    let order: Vec<(usize, u64)> = std::iter::from_fn(|| ended.try_recv().ok()).collect();
    let small_at = order.iter().position(|(i, _)| *i == LARGE).expect("the small pull ended");
    assert!(small_at < LARGE / 2, "the small pull waited for most large pulls: {order:?}");
    let (_, last_taken) = order.iter().find(|(i, _)| *i < LARGE).expect("a large pull ended");
    assert!(
        *last_taken <= 256 << 10,
        "the last pull got data too early (ended pull, bytes for the last pull): {order:?}"
    );

    let rooms: Vec<_> = (0..LARGE).map(|_| Buffer::new(0, &vec![0; data.len()])).collect();
    let sink = |room: &Arc<Buffer>| client.offer_sink(Arc::clone(room) as _, 0).expect("offered");
    let sinks: Vec<_> = rooms.iter().map(sink).collect();
    let payload = Payload::compute(0, data.clone().into());
    let pushes = sinks.iter().enumerate().map(|(i, sink)| {
        let (payload, server, last) = (payload.clone(), &server, &rooms[LARGE - 1]);
        async move {
            server.bulk_write(&sink.descriptor, 0, payload, LONG).await.expect("pushed");
            server.send(message(b"pushed")).await.expect("sent");
            (i, last.filled())
        }
    });
    let mut pushes: FuturesUnordered<_> = pushes.collect();
    let (first, last_filled) = pushes.next().await.expect("a push ends");
    assert_eq!(last_filled, 0, "the last push had begun when number {first} was sent");
    while pushes.next().await.is_some() {}
    for _ in 0..LARGE {
        assert_eq!(next_message(&mut *from_server).await.header.as_ref(), b"pushed");
    }
    drop(pushes);
    sinks.into_iter().for_each(BulkRegion::finish);
    assert!(rooms.iter().all(|room| room.content() == data), "a sink lacks data");
}

/// Transfers are refused if their offer was withdrawn or never existed, if they exceed the offer,
/// or if the descriptor was altered. The connection continues.
pub async fn invalid_uses_of_offers_are_refused(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, mut from_server), (server, _in)) = rig.pair(&mut *listener).await;
    let pool = pool();
    let source = client.offer_source(Buffer::new(0, &[1; 10_000])).expect("offered");
    let good = source.descriptor.clone();
    let in_memory = client.offer_source(Buffer::in_memory(0, &[1; 10_000])).expect("offered");
    let stale = in_memory.descriptor.clone();
    let dest = pool.alloc(10_000).await.expect("a buffer");
    server.bulk_read(&stale, 0, dest, LONG).await.expect("the offer is still valid");
    in_memory.finish();
    let dest = pool.alloc(10_000).await.expect("a buffer");
    let refused = server.bulk_read(&stale, 0, dest, LONG).await;
    assert!(matches!(refused, Err(MessengerError::BulkRefused(_))), "stale: {refused:?}");
    let altered = |change: &dyn Fn(&mut BulkDescriptor)| {
        let mut descriptor = good.clone();
        change(&mut descriptor);
        descriptor
    };
    let lies = [
        ("guessed", altered(&|d| d.segments[0].key ^= 1)),
        ("longer", altered(&|d| d.segments[0].len = 1 << 40)),
        ("elsewhere", altered(&|d| d.segments[0].address = 1 << 20)),
        ("overflowing", altered(&|d| d.segments[0].address = u64::MAX)),
        ("third party's", altered(&|d| d.owner = BulkOwner::Fabric(vec![1]))),
        ("an accelerator's", altered(&|d| d.memory = MemoryKind::Device(0))),
        ("no block_offset", altered(&|d| d.block_offset = 5000)),
    ];
    for (name, lie) in lies {
        // Only the lie about the length requests more bytes than were offered. The other lies must
        // be detected with a valid length.
        let len = if name == "longer" { 20_000 } else { 10_000 };
        let dest = pool.alloc(len).await.expect("a buffer");
        let refused = server.bulk_read(&lie, 0, dest, LONG).await;
        assert!(matches!(refused, Err(MessengerError::BulkRefused(_))), "{name}: {refused:?}");
    }
    let as_sink = altered(&|d| d.direction = BulkDirection::Write);
    let payload = Payload::compute(0, vec![9; 10].into());
    server.bulk_write(&as_sink, 0, payload.clone(), LONG).await.expect("queued; the peer refuses it later");
    server.send(message(b"1")).await.expect("sent");
    next_message(&mut *from_server).await;
    client.send(message(b"2")).await.expect("sent");
    let dest = pool.alloc(10_000).await.expect("a buffer");
    let pulled = server.bulk_read(&good, 0, dest, LONG).await.expect("the connection still works");
    assert!(pulled.buf.iter().all(|b| *b == 1));
    drop(pulled);
    let refused = server.bulk_write(&as_sink, 0, payload, LONG).await;
    assert!(matches!(refused, Err(MessengerError::BulkRefused(_))), "{refused:?}");
    drop(source);
    let dest = pool.alloc(10_000).await.expect("a buffer");
    let refused = server.bulk_read(&good, 0, dest, LONG).await;
    assert!(matches!(refused, Err(MessengerError::BulkRefused(_))), "withdrawn: {refused:?}");
    assert_eq!(pool.free_bytes().0, 64 << 20, "every buffer returned to the pool");
}

/// A descriptor with wrong addresses, keys or checksums of remote memory ends at most the transport
/// of its connection. The offered data still arrives, no buffer is lost, and other connections
/// continue.
pub async fn wrong_addresses_or_keys_in_a_descriptor_lose_no_data(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, mut from_server), (server, mut from_client)) = rig.pair(&mut *listener).await;
    let ((other, _in), (other_server, mut from_other)) = rig.pair(&mut *listener).await;
    let pool = pool();
    let data = vec![6; 300_000];
    let lies: [fn(&mut RemoteMemory); 7] = [
        |r| r.segments[0].key ^= 1,
        |r| r.segments[0].key = 0,
        |r| r.segments[0].address = r.segments[0].address.wrapping_add(1 << 30),
        |r| r.segments[0].address = r.segments[0].address.wrapping_sub(4096),
        |r| r.segments[0].len = u64::MAX,
        |r| r.segments.clear(),
        |r| r.checksums.truncate(5),
    ];
    for (i, lie) in lies.into_iter().enumerate() {
        let source = client.offer_source(Buffer::in_memory(0, &data)).expect("offered");
        let room = Buffer::new(0, &vec![0; data.len()]);
        let sink = client.offer_sink(Arc::clone(&room) as _, 0).expect("offered");
        let [from, to] = [&source, &sink].map(|region| {
            let mut descriptor = region.descriptor.clone();
            if let Some(remote) = &mut descriptor.remote {
                lie(remote);
            }
            descriptor
        });
        let dest = pool.alloc(data.len()).await.expect("a buffer");
        let pulled = server.bulk_read(&from, 0, dest, LONG).await.expect("the data arrives in frames");
        assert!(pulled.buf[..] == data[..], "lie {i}");
        drop(pulled);
        let payload = Payload::compute(0, data.clone().into());
        server.bulk_write(&to, 0, payload, LONG).await.expect("queued");
        server.send(message(b"pushed")).await.expect("sent");
        assert_eq!(next_message(&mut *from_server).await.header.as_ref(), b"pushed");
        sink.finish();
        assert!(room.content() == data, "lie {i}");
        client.send(message(b"well")).await.expect("sent");
        assert_eq!(next_message(&mut *from_client).await.header.as_ref(), b"well");
        source.finish();
    }
    let source = other.offer_source(Buffer::in_memory(0, &data)).expect("offered");
    let dest = pool.alloc(data.len()).await.expect("a buffer");
    let pulled = other_server.bulk_read(&source.descriptor, 0, dest, LONG).await.expect("pulled");
    assert!(pulled.buf[..] == data[..]);
    drop(pulled);
    other.send(message(b"well")).await.expect("sent");
    next_message(&mut *from_other).await;
    assert_eq!(pool.free_bytes().0, 64 << 20, "every buffer returned to the pool");
}

/// Pulls may be cancelled at any moment. Their buffers are reused at once, and no late data is
/// written to the buffers.
pub async fn cancelled_pulls_never_write_to_reused_buffers(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, _in), (server, _in2)) = rig.pair(&mut *listener).await;
    let mut random = rig.random();
    // The pool has room for only three buffers, so each buffer is reused at once.
    let arena = base::mem::Arena::anonymous(3 << 20).expect("3 MiB of memory");
    let pool = base::pool::BufferPool::new(arena, 0, 1 << 20);
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..6u8 {
        let data = vec![task; 1 << 20];
        let buffer = if task % 2 == 0 { Buffer::new(0, &data) } else { Buffer::in_memory(0, &data) };
        let source = client.offer_source(buffer).expect("offered");
        let (server, pool) = (Arc::clone(&server), pool.clone());
        let patience: Vec<u64> = (0..40).map(|_| random.random_range(0..6_000)).collect();
        tasks.spawn(async move {
            let (mut whole, mut given_up) = (0, 0);
            for micros in patience {
                let mut dest = pool.alloc(1 << 20).await.expect("a buffer");
                dest.fill(0xff);
                let limit = if micros < 3_000 { Duration::from_micros(micros) } else { LONG };
                match server.bulk_read(&source.descriptor, 0, dest, limit).await {
                    Ok(pulled) => {
                        whole += 1;
                        assert!(pulled.buf.iter().all(|b| *b == task), "another pull's data");
                        tokio::time::sleep(Duration::from_micros(300)).await;
                        assert!(pulled.buf.iter().all(|b| *b == task), "late data of another pull");
                    }
                    Err(MessengerError::TimedOut(_)) => given_up += 1,
                    Err(why) => panic!("{why}"),
                }
            }
            drop(source);
            (whole, given_up)
        });
    }
    let (mut whole, mut given_up) = (0, 0);
    while let Some(done) = tasks.join_next().await {
        let done = done.expect("the pulls end without a panic");
        (whole, given_up) = (whole + done.0, given_up + done.1);
    }
    assert!(whole > 0 && given_up > 0, "{whole} pulls completed, {given_up} were cancelled");
    assert_eq!(pool.free_bytes().0, 3 << 20, "every buffer returned to the pool");
}

/// A pull from a slow source ends at its deadline, and its buffer returns to the pool.
pub async fn a_pull_from_a_slow_source_times_out(rig: &Rig) {
    let mut listener = rig.listen().await;
    let ((client, _in), (server, _in2)) = rig.pair(&mut *listener).await;
    let pool = pool();
    let slow = Arc::new(Buffer::slow(0, &[1; 10_000], Duration::from_secs(3600)));
    let source = client.offer_source(slow).expect("offered");
    let dest = pool.alloc(10_000).await.expect("a buffer");
    let limit = Duration::from_millis(50);
    let late = server.bulk_read(&source.descriptor, 0, dest, limit).await;
    assert_eq!(late.err(), Some(MessengerError::TimedOut(limit)));
    assert_eq!(pool.free_bytes().0, 64 << 20, "the buffer returned to the pool");
    let quick = client.offer_source(Buffer::new(0, &[2; 10])).expect("offered");
    let dest = pool.alloc(10).await.expect("a buffer");
    server.bulk_read(&quick.descriptor, 0, dest, LONG).await.expect("the connection still works");
}
